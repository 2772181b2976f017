"""A turn's figures, the check of an answer, and how long all of it takes."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.perf.generator.fleet import FleetError
from penstock.perf.generator.orders import Load, Window
from penstock.perf.peers import reference_answers, rounds
from penstock.perf.peers.environments import Environment
from penstock.perf.peers.results import Results
from penstock.perf.peers.roster import PEERS
from penstock.perf.peers.rounds import Plan
from penstock.perf.peers.serving import CallError, Model, Server, StartError
from penstock.perf.peers.wires import V2_JSON, Array, Wire

MS = 1_000_000
PLAN = Plan(("iris",), ("json", "binary"), (1, 8), rounds=3, seconds=2.0)


def window(*took_ms: float, **more: Any) -> Window:
    ends = np.full(len(took_ms), 2_000 * MS, np.int64)
    return Window(0, 2_000 * MS, ends - (np.array(took_ms) * MS).astype(np.int64), ends, cpu_s=0.5, **more)


def test_a_window_gives_rate_latency_and_cost() -> None:
    results_found, error = rounds.sample(window(*range(1, 102)), cpu_s=0.002, background_cores=0.01)

    assert error == ""
    assert results_found is not None
    assert (results_found.requests, results_found.requests_per_s, results_found.p50_ms, results_found.p99_ms) == (
        101,
        50.5,
        51,
        100,
    )
    assert results_found.cpu_us == pytest.approx(2000 / 101)
    assert (results_found.generator_cores, results_found.others) == (0.25, 0.01)


def test_any_failed_request_makes_the_cell_an_error() -> None:
    results_found, error = rounds.sample(window(1, 2, errors=Counter({"500: no": 2, "lost": 1})), 0.1, 0)

    assert (results_found, error) == (None, "3 of 5 requests failed: 500: no")


def test_a_window_without_an_answer_is_an_error() -> None:
    assert rounds.sample(window(), 0.1, 0) == (None, "no answer within 2.0 s")
    assert rounds.sample(window(1, failure="the server closed the connection"), 0.1, 0)[1].startswith(
        "the server closed"
    )


class Answering:
    """A server that answers with what it is given."""

    def __init__(self, answer: Callable[[], Array]) -> None:
        self._answer = answer

    def ask(self, wire: Wire, model: str, row: Array) -> Array:
        return self._answer()


def refuse() -> Array:
    raise CallError("500: no")


@pytest.mark.parametrize(
    ("answer", "error_text"),
    [
        (lambda: np.array([0.25, 100.00001], np.float32), ""),
        (lambda: np.array([0.25, 101], np.float32), "the answer is 0.01 apart from the offline one"),
        (lambda: np.array([0.25], np.float32), "the answer has 1 numbers instead of 2"),
        (lambda: np.array([np.nan, 100], np.float32), "the answer is nan apart from the offline one"),
        (refuse, "500: no"),
    ],
)
def test_an_answer_is_compared_with_the_offline_answer(answer: Callable[[], Array], error_text: str) -> None:
    row = np.zeros((1, 4), np.float32)
    model = Model("iris", Path("model.onnx"), (row,), (np.array([[0.25, 100]], np.float32),))

    assert rounds.verify_answer(cast("Server", Answering(answer)), V2_JSON, model) == error_text


def test_a_plan_uses_the_wires_that_a_peer_has() -> None:
    assert [wire.says for wire in PLAN.wires(PEERS["mosec"])] == ["own JSON", "raw bytes"]
    assert [wire.says for wire in PLAN.wires(PEERS["litserve"])] == ["own JSON"]


def test_the_official_run_takes_at_most_twenty_minutes() -> None:
    plan = Plan(reference_answers.MODELS, ("json", "binary", "grpc"), (1, 8, 32), rounds=3, seconds=1.2)

    assert plan.estimate_s(list(PEERS.values())) < 20 * 60


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3))
def test_rows_to_send_are_few_and_short_as_json(shape: list[int]) -> None:
    rows = reference_answers.questions((1, *shape))

    assert 2 <= len(rows) <= 8
    assert rows[0].dtype == np.float32
    assert not np.array_equal(rows[0], rows[1]) or rows[0].size < 3
    assert np.array_equal(rows[0], np.round(rows[0], 4))


class StandInRound:
    """All servers and the generator of a run, that only write down what is done with them."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.dies: set[str] = set()
        self._name = ""

    @contextlib.contextmanager
    def served(self, peer: Any, environment: Any, model: Any, *, keep: bool) -> Iterator[Any]:
        if peer.name in self.dies:
            raise StartError("it ended")
        self.calls.append(f"start {peer.name}")
        yield StandInServer(peer, self.calls)
        self.calls.append(f"end {peer.name}")

    @contextlib.contextmanager
    def fleet(self, target: str, payloads: Any) -> Iterator[Any]:
        if target in self.dies:
            raise FleetError("connection refused")
        self._name = target
        yield self

    def start_load(self, load: Load) -> None:
        self.calls.append(f"{self._name} {load.concurrency}")

    def take(self) -> Window:
        return window(1, 2)

    def wait(self, seconds: float, requests: int = 0) -> bool:
        return False

    def count(self) -> int:
        return 1000

    def halt(self) -> None:
        """Nothing is under way."""


class StandInServer:
    """A server that is only looked at."""

    port = pid = 0

    def __init__(self, peer: Any, calls: list[str]) -> None:
        self.peer = peer
        self.tree = self
        self._calls = calls

    def target(self, wire: Wire) -> str:
        return f"{self.peer.name}"

    def ask(self, wire: Wire, model: str, row: Array) -> Array:
        return row.ravel()

    def suspend(self) -> None:
        self._calls.append(f"{self.peer.name} sleeps")

    def resume(self) -> None:
        self._calls.append(f"{self.peer.name} wakes")

    def cpu_s(self) -> float:
        return 0.0

    def memory(self) -> None:
        """Nothing is known of it."""

    def end(self) -> None:
        """It has no processes."""

    def is_alive(self) -> bool:
        return True

    def terminate(self) -> None:
        self._calls.append(f"{self.peer.name} leaves")


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> StandInRound:
    new_stage = StandInRound()
    monkeypatch.setattr(rounds, "served", new_stage.served)
    monkeypatch.setattr(rounds, "fleet", new_stage.fleet)
    return new_stage


def measured(*names: str, **more: Any) -> Results:
    row = np.zeros((1, 4), np.float32)
    results_found = Results("", "", 2, 1.0)
    peers = {name: (replace(PEERS[name], wires=PEERS[name].wires[:1]), Environment(Path(), {})) for name in names}
    models = {"iris": Model("iris", Path("model.onnx"), (row,), (row,))}
    rounds.measure(replace(PLAN, rounds=2, **more), peers, models, results_found, lambda text: None)
    return results_found


def test_peers_take_turns_and_are_suspended_in_between(stage: StandInRound) -> None:
    results_found = measured("penstock", "mosec")

    assert [line for line in stage.calls if "8" in line or "1" in line] == [
        "penstock 8", "mosec 8",  # the warm-up
        "mosec 1", "mosec 8", "penstock 1", "penstock 8",
        "penstock 1", "penstock 8", "mosec 1", "mosec 8",
    ]  # fmt: skip
    assert stage.calls[:4] == ["start penstock", "penstock sleeps", "start mosec", "mosec sleeps"]
    assert stage.calls[4:7] == ["penstock wakes", "penstock 8", "penstock sleeps"]
    assert stage.calls[-4:] == ["penstock leaves", "mosec leaves", "end mosec", "end penstock"]
    assert [(cell.peer, cell.concurrency, len(cell.samples)) for cell in results_found.cells] == [
        ("penstock", 1, 2), ("penstock", 8, 2), ("mosec", 1, 2), ("mosec", 8, 2),
    ]  # fmt: skip


def test_cpu_time_is_counted_from_the_beginning_of_the_window(
    stage: StandInRound, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = itertools.count(100)  # one second more each time
    monkeypatch.setattr(StandInServer, "cpu_s", lambda self: float(next(looks)))

    samples = [sample for cell in measured("penstock").cells for sample in cell.samples]

    # before, once for what others use, and after
    assert [sample.cpu_us * sample.requests for sample in samples] == pytest.approx([2e6] * 4)


def test_a_peer_that_learns_is_restarted_for_each_turn(stage: StandInRound) -> None:
    measured("bentoml")

    turn = ["start bentoml", "bentoml 1", "bentoml 1", "bentoml 8", "end bentoml"]
    assert stage.calls == ["start bentoml", "bentoml sleeps", "end bentoml", *turn, *turn]


def test_a_peer_that_does_not_start_is_reported_and_the_others_are_measured(stage: StandInRound) -> None:
    stage.dies.add("mosec")
    results_found = measured("mosec", "penstock")

    assert results_found.failed == {"mosec, iris": "it ended"}
    assert all(cell.measured for cell in results_found.cells)


def test_a_peer_that_dies_during_a_round_has_an_error_and_no_average(stage: StandInRound) -> None:
    real = stage.start_load

    def go(load: Load) -> None:
        if len(stage.calls) > 8:
            raise FleetError("the server closed the connection")
        real(load)

    stage.start_load = go  # type: ignore[method-assign]
    results_found = measured("penstock")

    assert {(cell.error, cell.measured) for cell in results_found.cells} == {
        ("the server closed the connection", False)
    }


def test_a_peer_whose_first_process_ended_is_an_error_even_if_others_answer(
    stage: StandInRound, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StandInServer, "is_alive", lambda self: False)

    assert {cell.error for cell in measured("penstock").cells} == {"its first process has ended"}


def test_a_wire_with_a_wrong_answer_is_not_loaded(stage: StandInRound, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StandInServer, "ask", lambda self, wire, model, row: row.ravel() + 1)
    results_found = measured("penstock")

    assert {cell.error for cell in results_found.cells} == {"the answer is 1 apart from the offline one"}
    assert not [line for line in stage.calls if line == "penstock wakes"]
