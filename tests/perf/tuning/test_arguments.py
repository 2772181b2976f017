from __future__ import annotations

from pathlib import Path

import pytest

from penstock.perf.profiling.flags import UsageError
from penstock.perf.tuning.arguments import parse_arguments
from penstock.perf.tuning.knobs import KNOBS

BARE = ["-m", "iris", "--out", "found"]


def test_omitted_flags_have_defaults() -> None:
    options = parse_arguments(BARE)

    assert (options.options.model, options.output_folder, options.knobs, options.budget_s) == (
        "iris",
        Path("found"),
        KNOBS,
        600,
    )
    assert (options.target_ms, options.percentile, options.memory_bytes, options.window_ms) == (None, 99, None, 2000)
    assert (options.closed_loop, options.has_range, options.options.poisson, options.apply) == (
        True,
        False,
        True,
        False,
    )


def test_own_flags_and_those_of_perf_may_be_in_any_order() -> None:
    words = "--latency-target 5 -b 4 --over instance_count,max_queue_delay -i grpc --memory-budget 512 -p 100 --apply"
    options = parse_arguments([*words.split(), *BARE, "--percentile", "95", "--budget-minutes", "0.5", "-u", "here:1"])

    assert (options.target_ms, options.percentile, options.memory_bytes) == (5, 95, 512 * 2**20)
    assert (options.knobs, options.budget_s, options.window_ms) == (("instance_count", "max_queue_delay"), 30, 100)
    assert (options.options.input.batch, options.options.grpc, options.options.url) == (4, True, "here:1")
    assert options.apply


@pytest.mark.parametrize(
    ("words", "closed", "ranged"),
    [
        ("", True, False),
        ("--latency-target 5", False, False),  # the greatest rate, wherever it is
        ("--target-ms 5", False, False),
        ("--latency-target 5 --concurrency-range 1:8", True, True),
        ("--concurrency-range 8", True, True),
        ("--request-rate-range 100", False, True),
        ("--latency-target 5 --request-rate-range 100:900", False, True),
    ],
)
def test_the_load_is_a_rate_or_a_concurrency(words: str, closed: bool, ranged: bool) -> None:
    options = parse_arguments([*BARE, *words.split()])

    assert (options.closed_loop, options.has_range) == (closed, ranged)


@pytest.mark.parametrize("words", ["--request-count 5", "--latency-threshold 5", "-l 5", "--request-distribution even"])
def test_flags_that_select_the_load_in_other_ways_are_rejected(words: str) -> None:
    with pytest.raises(UsageError):
        parse_arguments([*BARE, *words.split()])


@pytest.mark.parametrize("words", ["--over speed", "--over ,", "--latency-target 0", "--memory-budget nan"])
def test_an_invalid_value_of_an_own_flag_is_reported(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_arguments([*BARE, *words.split()])

    assert words.split(maxsplit=1)[0] in capsys.readouterr().err


def test_a_folder_is_required() -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_arguments(["-m", "iris"])


def test_the_recorded_command_contains_no_secrets() -> None:
    command = parse_arguments([*BARE, "-H", "Authorization:Bearer 123", "-H", "X-Team:blue"]).options.command

    assert command == ("penstock", "perf", "tune", *BARE, "-H", "Authorization:...", "-H", "X-Team:blue")
