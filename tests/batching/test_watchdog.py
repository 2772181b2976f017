"""The watchdog: runs beyond their limit are ended, and no others."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.backends.backend import Array, Binding
from penstock.backends.errors import Code, InferError
from penstock.backends.loading import LOADERS
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.engine import Engine
from penstock.batching.request import InferRequest
from penstock.batching.running import watchdog as watchdog_module
from penstock.batching.running.watchdog import RESTOP_NS, Runs, Watchdog
from penstock.batching.spec import BatchPolicy, ModelSpec
from tests.backends.contract import ENDLESS
from tests.backends.onnx_models import contract_model
from tests.fakes import PATIENCE_S, FakeBackend, ListSink, fake_loader, no_more_threads

pytestmark = pytest.mark.anyio

X = Signature((TensorSpec("x", "FP32", (-1, 4)),), (TensorSpec("y", "FP32", (-1, 4)),))
GUILTY = -1.0
LIMIT_US = 150_000
"""Long enough for a run that is let alone, on a busy machine too."""
LONG_NS = 1 << 60


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Puppet:
    """A Binding that can only be stopped."""

    def __init__(self) -> None:
        self.stopped = threading.Event()

    def stop(self) -> None:
        self.stopped.set()


def puppet() -> Any:
    return cast(Binding, Puppet())


class TestRuns:
    def test_no_run_is_overdue_while_none_is_active(self) -> None:
        runs = Runs()

        assert runs.next_deadline_ns() == 0
        assert runs.overdue(LONG_NS) == []

    def test_an_overdue_run_is_stopped_and_stopped_again_if_it_continues(self) -> None:
        runs, slow, quick = Runs(), puppet(), puppet()
        runs.begin(slow, 100)
        runs.begin(quick, 200)

        assert runs.next_deadline_ns() == 100
        assert runs.overdue(99) == []
        assert runs.overdue(100) == [slow]
        assert runs.overdue(150) == []
        assert runs.next_deadline_ns() == 200
        assert runs.overdue(100 + RESTOP_NS) == [slow, quick]

    def test_a_finished_run_is_not_stopped(self) -> None:
        runs, binding = Runs(), puppet()
        runs.begin(binding, 100)
        runs.end(binding)

        assert runs.overdue(100) == []
        assert runs.next_deadline_ns() == 0

    def test_time_in_which_the_process_stalled_does_not_count_toward_a_run(self) -> None:
        runs, binding = Runs(), puppet()
        later = puppet()
        runs.begin(binding, 100, 0)
        runs.begin(later, 1050, 950)
        runs.extend(1000, 10)

        assert runs.overdue(1099) == [later]
        assert runs.overdue(1100) == [binding]

    @given(st.lists(st.integers(1, 1000), min_size=1, max_size=20), st.integers(0, 1100))
    def test_the_next_deadline_is_never_later_than_that_of_the_next_overdue_run(
        self, limits: list[int], now_ns: int
    ) -> None:
        runs = Runs()
        bindings = [puppet() for _ in limits]
        for binding, over_ns in zip(bindings, limits, strict=True):
            runs.begin(binding, over_ns)

        assert runs.overdue(now_ns) == [
            each for each, over_ns in zip(bindings, limits, strict=True) if over_ns <= now_ns
        ]
        assert runs.next_deadline_ns() > now_ns


class TestWatchdog:
    def test_the_watchdog_stops_only_overdue_runs(self) -> None:
        watchdog = Watchdog()
        ended, patient, overdue = puppet(), puppet(), puppet()
        watchdog.begin(ended, 0, LONG_NS)
        watchdog.end(ended)
        watchdog.begin(patient, LONG_NS, 0)
        watchdog.begin(overdue, 1, 0)

        assert overdue.stopped.wait(PATIENCE_S)
        assert not ended.stopped.is_set()
        assert not patient.stopped.is_set()
        watchdog.stop()

    def test_the_watchdog_notices_a_shorter_limit_while_it_waits_for_a_longer_one(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(watchdog_module, "RESTOP_NS", 3_600_000_000_000)
        watchdog = Watchdog()
        first, second = puppet(), puppet()
        watchdog.begin(first, 1, 0)
        assert first.stopped.wait(PATIENCE_S)
        watchdog.begin(second, 1, 0)  # its lock is free while it sleeps until the first one must be stopped again

        assert second.stopped.wait(PATIENCE_S)
        watchdog.stop()

    @pytest.mark.parametrize("used_ns", [0, 15_000_000_000])
    def test_a_run_is_not_stopped_for_time_in_which_the_whole_process_stalled(
        self, monkeypatch: pytest.MonkeyPatch, used_ns: int
    ) -> None:
        now, used, looked, overdue = [1], [0], threading.Semaphore(0), Runs.overdue

        def look(runs: Runs, now_ns: int) -> list[Binding]:
            looked.release()
            return overdue(runs, now_ns)

        monkeypatch.setattr(Runs, "overdue", look)
        clocks = SimpleNamespace(monotonic_ns=lambda: now[0], process_time_ns=lambda: used[0])
        monkeypatch.setattr(watchdog_module, "time", clocks)
        monkeypatch.setattr(watchdog_module, "POLL_NS", 1_000_000)
        watchdog, binding = Watchdog(), puppet()
        watchdog.begin(binding, 10_000_000_000, now[0])
        assert looked.acquire(timeout=PATIENCE_S)
        with watchdog._changed:
            now[0] += 20_000_000_000
            used[0] += used_ns
        for _ in range(2):
            assert looked.acquire(timeout=PATIENCE_S)
        with watchdog._changed:
            assert watchdog._runs.next_deadline_ns() > now[0]

        assert binding.stopped.is_set() == (used_ns > 0)
        watchdog.stop()

    def test_a_run_that_cannot_be_stopped_does_not_prevent_others_from_being_stopped(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Broken(Puppet):
            def stop(self) -> None:
                super().stop()
                raise OSError("its process is gone")

        watchdog = Watchdog()
        broken, second = Broken(), puppet()
        watchdog.begin(cast(Binding, broken), 1, 0)
        assert broken.stopped.wait(PATIENCE_S)
        watchdog.begin(second, 1, 0)

        assert second.stopped.wait(PATIENCE_S)
        assert "its process is gone" in caplog.text
        watchdog.stop()

    def test_a_run_that_cannot_be_stopped_is_logged_once(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        stops = threading.Semaphore(0)

        class Broken(Puppet):
            def stop(self) -> None:
                stops.release()
                raise OSError("its process is gone")

        monkeypatch.setattr(watchdog_module, "RESTOP_NS", 1_000_000)
        watchdog, broken = Watchdog(), cast(Binding, Broken())
        for run in (1, 2):
            watchdog.begin(broken, 1, 0)
            assert all(stops.acquire(timeout=PATIENCE_S) for _ in range(3))
            watchdog.end(broken)
            while stops.acquire(blocking=False):
                pass
            assert len(caplog.records) == run
        watchdog.stop()

    def test_the_watchdog_retries_starting_its_thread_and_stops_without_one(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        watchdog, first, second = Watchdog(), puppet(), puppet()
        with monkeypatch.context() as patch:
            no_more_threads(patch)
            watchdog.begin(first, 1, 0)
            watchdog.stop()
        watchdog = Watchdog()
        with monkeypatch.context() as patch:
            no_more_threads(patch)
            watchdog.begin(first, 1, 0)
        watchdog.begin(second, 1, 0)

        assert first.stopped.wait(PATIENCE_S)
        watchdog.stop()

    def test_the_watchdog_starts_no_thread_before_a_run_has_a_limit(self) -> None:
        before = threading.active_count()
        watchdog = Watchdog()
        watchdog.stop()

        assert threading.active_count() == before


def request(model: Any, inputs: list[Array | None], sink: ListSink) -> InferRequest:
    first = inputs[0]
    assert first is not None
    key = tuple(None if array is None else array.shape[1:] for array in inputs)
    return InferRequest(model, inputs, len(first), key, model.all_outputs, sink)


async def answers(engine: Engine, spec: ModelSpec, inputs: list[list[Array | None]]) -> list[InferRequest]:
    """Load a model and submit requests in one loop turn. Returns: the answered requests."""
    model = await engine.load(spec)
    sink = ListSink()
    requests = [request(model, each, sink) for each in inputs]
    for each in requests:
        engine.submit(each)
    await sink.holds(len(requests))
    await engine.stop(PATIENCE_S)
    return requests


def refusals(requests: list[InferRequest]) -> list[InferError | None]:
    return [each.error for each in requests]


async def test_a_run_beyond_its_limit_is_stopped_and_other_requests_of_its_batch_are_served() -> None:
    backend = FakeBackend(X, list)

    def wait(inputs: list[Array | None]) -> list[Any]:
        if inputs[0] is not None and (inputs[0] == GUILTY).any():
            backend.stopped.wait(PATIENCE_S)
        return list(inputs)

    backend.function = wait
    spec = ModelSpec("m", 1, Path("m"), "fake", policy=BatchPolicy(max_batch_rows=8, run_limit_us=LIMIT_US))
    engine = Engine(asyncio.get_running_loop(), {"fake": fake_loader(backend)})
    inputs: list[list[Array | None]] = [[np.full((1, 4), value, np.float32)] for value in (1, GUILTY, 2, 3)]

    requests = await answers(engine, spec, inputs)

    assert [each is None for each in refusals(requests)] == [True, False, True, True]
    error = requests[1].error
    assert error is not None
    assert (error.code, error.message) == (Code.EXPIRED, "model 'm': run exceeded its limit of 150 ms")
    assert requests[1].model.event_counts["runs_stopped"] >= 1


async def test_an_endless_loop_in_an_onnx_model_is_stopped(tmp_path: Path) -> None:
    spec = ModelSpec(
        "m", 1, contract_model("turns", tmp_path / "model.onnx"), policy=BatchPolicy(run_limit_us=LIMIT_US)
    )
    engine = Engine(asyncio.get_running_loop(), LOADERS)
    one = np.ones(1, np.float32)
    inputs: list[list[Array | None]] = [[one, np.array([turns])] for turns in (1, 2, ENDLESS, 3)]

    requests = await answers(engine, spec, inputs)

    assert [None if each.outputs is None else each.outputs[0].tolist() for each in requests] == [[1], [1], None, [1]]
    error = requests[2].error
    assert error is not None
    assert error.message == "model 'm': run exceeded its limit of 150 ms"


@pytest.mark.parametrize("executor", ["auto", "loop"])
async def test_a_model_with_a_run_limit_does_not_run_on_the_loop(executor: str) -> None:
    ran_on: set[int] = set()

    def function(inputs: list[Array | None]) -> list[Any]:
        ran_on.add(threading.get_ident())
        return list(inputs)

    backend = FakeBackend(X, function)
    policy = BatchPolicy(max_batch_rows=8, run_limit_us=1_000_000_000, executor=executor)
    engine = Engine(asyncio.get_running_loop(), {"fake": fake_loader(backend)})
    await answers(engine, ModelSpec("m", 1, Path("m"), "fake", policy=policy), [[np.zeros((1, 4), np.float32)]])

    assert threading.get_ident() not in ran_on
