"""Runs side by side: what differs, whether it matters, and by how much."""

from __future__ import annotations

import pytest

from penstock.perf.reports import comparison, console
from penstock.perf.reports.comparison import Difference
from penstock.perf.reports.document import Document
from tests.perf.reports.sample_documents import run


def two(second: Document) -> list[comparison.Run]:
    return comparison.runs([("a", run()), ("b", second)])


def test_the_same_run_twice_has_no_differences_and_ratios_of_one() -> None:
    compared = two(run())

    assert comparison.differences(compared) == []
    assert comparison.warnings(compared) == [
        "a ended before its time: the server closed all connections.",
        "b ended before its time: the server closed all connections.",
    ]
    assert {pair.ratio(of) for pair in comparison.pairs(compared) for of in ("throughput", "p99", "cpu", "energy")} == {
        1.0
    }


def test_differences_are_named_with_both_values() -> None:
    other = run()
    other.versions["penstock"] = "0.2.0"
    other.machine["gpus"][0]["driver"] = "590"
    other.options["new"] = True
    other.model.fingerprint = "77"

    assert comparison.differences(two(other)) == [
        Difference("configuration", "fingerprint", ("9f4c1d22b7", "77")),
        Difference("machine", "gpus 1, driver", ("580.65", "590")),
        Difference("versions", "penstock", ("0.1.0", "0.2.0")),
        Difference("options", "new", ("–", "yes")),  # noqa: RUF001
    ]


def test_the_output_paths_of_a_run_are_not_differences() -> None:
    other = run()
    other.options |= {"json": "b.json", "html": "b.html"}

    assert comparison.differences(two(other)) == []


def _another_model(document: Document) -> None:
    document.model.name = "bert"


def _another_batch(document: Document) -> None:
    document.batch = 8


def _another_protocol(document: Document) -> None:
    document.protocol = "http"


def _another_machine(document: Document) -> None:
    document.machine["cpu"] = "other"


@pytest.mark.parametrize(
    ("change", "warning"),
    [
        (_another_model, "different models (name)"),
        (_another_batch, "different client batches"),
        (_another_protocol, "different protocols"),
        (_another_machine, "different machines (cpu)"),
    ],
)
def test_runs_that_cannot_be_compared_cause_warnings(change: object, warning: str) -> None:
    other = run()
    assert callable(change)
    change(other)

    assert warning in " ".join(comparison.warnings(two(other)))


def test_runs_without_a_common_load_have_no_ratio() -> None:
    other = run()
    other.levels = other.levels[:1]
    other.levels[0].offered.value = 3

    assert comparison.pairs(two(other)) == []
    assert "No load is in the first run and in another: there is no ratio to give." in comparison.warnings(two(other))


def test_equal_numbers_of_different_kinds_of_load_are_different_loads() -> None:
    other = run()
    for level in other.levels:
        level.offered.kind = "rate"

    assert comparison.pairs(two(other)) == []


def test_ratios_are_relative_to_the_first_run_at_the_same_load() -> None:
    compared = comparison.runs([("a", run()), ("b", run(0, 2.0)), ("c", run())])
    sound_pairs = [pair for pair in comparison.pairs(compared) if not pair.doubt]

    assert [(pair.run.name, pair.level.offered.value) for pair in sound_pairs[:4]] == [
        ("b", 1),
        ("c", 1),
        ("b", 2),
        ("c", 2),
    ]
    throughput, tail = sound_pairs[0].ratio("throughput"), sound_pairs[0].ratio("p99")
    assert throughput
    assert tail
    assert throughput > 1.3
    assert tail < 0.8


def test_a_figure_missing_in_one_run_has_no_ratio() -> None:
    pair = comparison.pairs(two(run(server=False)))[0]

    assert pair.ratio("cpu") is None
    assert pair.ratio("p12") is None


def test_a_pair_with_an_unsound_level_is_marked() -> None:
    other = run()
    other.levels[0].stable = False
    pair = comparison.pairs(two(other))[0]

    assert pair.doubt == "not stable"


def test_runs_from_files_of_the_same_name_get_unique_names() -> None:
    names = [each.name for each in comparison.runs([("a", run()), ("a", run()), ("b", run()), ("a", run())])]

    assert names == ["a", "a (2)", "b", "a (3)"]


def test_the_terminal_shows_differences_before_figures() -> None:
    other = run(3, 1.3)
    other.versions["penstock"] = "0.2.0"
    warning = console.describe_comparison(two(other))

    assert warning.index("What differs:") < warning.index("versions, penstock") < warning.index("Ratios to a:")
    assert "1.30×" in warning  # noqa: RUF001


def test_text_from_a_server_cannot_control_the_terminal() -> None:
    document = run(name="\x1b[2J\ud800")

    assert "\x1b" not in console.describe_run(document)
    console.describe_run(document).encode("utf-8")
    assert "\x1b" not in console.describe_comparison(two(document))


def test_the_terminal_marks_the_knee_and_levels_outside_the_curve() -> None:
    lines = console.describe_run(run()).splitlines()

    assert [line.split()[0] for line in lines if line.endswith("knee")] == ["8"]
    assert [line.split()[0] for line in lines if line.endswith("not part of the curve")] == ["96", "128", "192"]
    assert any(line.startswith("Goodput in ") for line in lines)
