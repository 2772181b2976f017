"""The gate: what it reads, what it says of what was measured, and how it ends."""

from __future__ import annotations

import contextlib
import datetime as dt
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.perf.gate import command as gate
from penstock.perf.gate import measures as gate_measures
from penstock.perf.gate.budgets import Budget, BudgetError, Verdict, read, report, updated, written

DAY = dt.date(2026, 11, 23)
MEASURES = ("http_cpu", "grpc_cpu")
GOOD = """\
[http-cpu]
what = "CPU of an HTTP request"
measure = "http_cpu"
budget = 0.5
tolerance = 0.1
date = 2026-11-23
machine = "a machine, 2 cores"
"""


def budget(value: float = 1.0, tolerance: float = 0.1, better: str = "lower") -> Budget:
    return Budget("CPU of it", "http_cpu", value, tolerance, DAY, "m", better)


def test_a_budget_is_read() -> None:
    assert read(GOOD, MEASURES) == {
        "http-cpu": Budget("CPU of an HTTP request", "http_cpu", 0.5, 0.1, DAY, "a machine, 2 cores", "lower")
    }


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (GOOD + "tolerence = 0.1\n", r"\[http-cpu\]: unknown key 'tolerence'; did you mean 'tolerance'"),
        (GOOD + "zzz = 0.1\n", "unknown key 'zzz'; there are better, budget"),
        (GOOD.replace("http_cpu", "htp_cpu"), "unknown measure 'htp_cpu'; did you mean 'http_cpu'"),
        (GOOD + 'better = "highest"\n', "better is 'highest'; did you mean 'higher'"),
        (GOOD.replace("budget = 0.5\n", ""), "budget missing"),
        (GOOD.replace("0.5", '"0.5"'), "budget = '0.5' is no int or float"),
        (GOOD.replace("0.5", "true"), "budget = True is no int"),
        (GOOD.replace("2026-11-23", '"today"'), "date = 'today' is no date"),
        (GOOD.replace("0.5", "0"), "above 0"),
        (GOOD.replace("0.5", "nan"), "above 0"),
        (GOOD.replace("0.1", "1.0"), "between 0 and 1"),
        ("http-cpu = 1\n", "http-cpu: this is to be a table"),
        ("[http-cpu\n", "at line 1"),
    ],
)
def test_an_invalid_file_is_rejected_with_a_suggestion(text: str, why: str) -> None:
    with pytest.raises(BudgetError, match=why):
        read(text, MEASURES)


def test_the_budgets_of_the_tree_are_readable_and_every_measure_has_one() -> None:
    budgets = read(gate.BUDGETS.read_text("utf-8"), gate_measures.MEASURES)

    assert {each.measure for each in budgets.values()} == gate_measures.MEASURES.keys()
    assert written(budgets) == gate.BUDGETS.read_text("utf-8")


@pytest.mark.parametrize(
    ("value", "better", "word"),
    [
        (1.11, "lower", "WORSE"), (1.1, "lower", "within"), (1.0, "lower", "within"), (0.9, "lower", "within"),
        (0.89, "lower", "better"), (0.89, "higher", "WORSE"), (1.05, "higher", "within"), (1.11, "higher", "better"),
    ],
)  # fmt: skip
def test_the_verdict_uses_the_median_and_the_direction_of_the_measure(value: float, better: str, word: str) -> None:
    assert Verdict("it", budget(tolerance=0.1001, better=better), (99.0, value, 0.01)).label == word


def test_the_report_has_one_table_and_lists_regressions_with_their_size() -> None:
    verdicts = [
        Verdict("a", budget(0.5), (0.6, 0.7)),
        Verdict("b", budget(), (1.0,)),
        Verdict("c", budget(better="higher"), (2.0,)),
    ]

    lines = list(report(verdicts, {"d": "RuntimeError: no"}))

    assert [line.split()[0] for line in lines] == ["measured", "a", "b", "c", "d", "WORSE", "better", "FAILED"]
    assert lines[1].split() == ["a", "0.65", "0.6", "to", "0.7", "0.5", "+30%", "WORSE"]
    assert lines[5] == "WORSE a: CPU of it: 0.65, 30% more than 0.5 (2026-11-23, m); 10% are allowed"
    assert lines[6] == "better c: CPU of it: 2, 100% more than 1 (2026-11-23, m); `--update --only c` tightens it"
    assert lines[7] == "FAILED d: RuntimeError: no"


def test_an_update_changes_only_the_measured_budgets() -> None:
    before = {"a": budget(1.0, 0.2), "b": budget(2.0)}

    result = updated([Verdict("a", before["a"], (0.51234,))], before, dt.date(2027, 1, 2), "another")

    assert result["b"] == before["b"]
    assert result["a"] == Budget("CPU of it", "http_cpu", 0.512, 0.2, dt.date(2027, 1, 2), "another", "lower")


texts = st.text(st.characters(exclude_categories=["C"]))


@given(
    st.builds(
        Budget, texts, st.sampled_from(MEASURES), st.floats(1e-6, 1e6), st.floats(0.001, 0.999), st.dates(), texts,
        st.sampled_from(["lower", "higher"]),
    )
)  # fmt: skip
def test_budgets_are_read_back_as_they_were_written(each: Budget) -> None:
    assert read(written({"it": each}), MEASURES) == {"it": each}


def test_measures_take_turns_and_a_failing_one_does_not_affect_the_others() -> None:
    calls: list[str] = []
    output: list[str] = []

    def measure(each: Budget) -> float:
        calls.append(each.what)
        if each.what == "bad":
            raise RuntimeError("no server")
        return float(len(calls))

    budgets = {name: Budget(name, "http_cpu", 1, 0.1, DAY, "") for name in ("x", "bad", "y")}
    values, failed = gate.measured(budgets, measure, 2, output.append)

    assert calls == ["x", "bad", "y", "x", "y"]
    assert values == {"x": [1, 4], "y": [3, 5]}
    assert failed == {"bad": "RuntimeError: no server"}
    assert output == ["round 1 of 2 done", "round 2 of 2 done"]


class Gate:
    """The command on a file of its own, with measures that give what they are told."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.path = path
        self.gives = {"http_cpu": 0.5, "grpc_cpu": 0.05}
        self._capsys = capsys
        path.write_text(GOOD + GOOD.replace("http", "grpc").replace("0.5", "0.05"))
        measures = {name: (lambda _world, name=name: self.gives[name]) for name in self.gives}
        monkeypatch.setattr(gate, "MEASURES", measures)
        monkeypatch.setattr(gate, "testbed", nothing)

    def __call__(self, *words: str) -> tuple[int, str]:
        status = gate.main(["--budgets", str(self.path), *words])
        return status, self._capsys.readouterr().out


@contextlib.contextmanager
def nothing() -> Iterator[None]:
    yield None


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Gate:
    return Gate(tmp_path / "budgets.toml", monkeypatch, capsys)


def test_the_status_is_0_if_all_are_within_their_budgets(command: Gate) -> None:
    status, output = command("--rounds", "1")

    assert status == 0
    assert "WORSE" not in output


def test_the_status_is_1_if_a_measure_is_worse(command: Gate) -> None:
    command.gives["grpc_cpu"] = 0.06

    status, output = command()

    assert status == 1
    assert "WORSE grpc-cpu: CPU of an HTTP request" in output
    assert "20% more than 0.05" in output


def test_only_selected_measures_run(command: Gate) -> None:
    command.gives["grpc_cpu"] = 9.0

    assert command("--only", "http-cpu")[0] == 0
    assert command("--only", "http-cpu", "--only", "grpc-cpu")[0] == 1


def test_an_unknown_measure_is_wrong_usage(command: Gate) -> None:
    status, output = command("--only", "htp-cpu")

    assert status == 2
    assert "no budget 'htp-cpu'" in output


def test_an_unreadable_file_is_wrong_usage(command: Gate) -> None:
    command.path.write_text(GOOD + "nonsense = 1\n")

    assert command()[0] == 2
    command.path.unlink()
    assert command()[0] == 2


def test_update_writes_the_measured_values(command: Gate) -> None:
    command.gives["http_cpu"] = 0.75

    status, output = command("--update", "--only", "http-cpu")

    result = read(command.path.read_text(), MEASURES)
    assert status == 0
    assert "budgets.toml was written" in output
    assert (result["http-cpu"].budget, result["grpc-cpu"].budget) == (0.75, 0.05)
    assert result["grpc-cpu"].machine == "a machine, 2 cores"
    assert "cores" in result["http-cpu"].machine


def test_a_measure_that_fails_is_status_1_and_keeps_its_budget(command: Gate) -> None:
    del command.gives["grpc_cpu"]

    status, output = command("--update")

    assert status == 1
    assert "FAILED grpc-cpu: KeyError" in output
    assert read(command.path.read_text(), MEASURES)["grpc-cpu"].budget == 0.05


def test_the_simulation_of_the_batcher_is_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_measures, "_SIMULATED", 50)
    result: list[Any] = [gate_measures._simulated() for _ in range(2)]

    assert result[0] == result[1] > 0
