"""Instances: when a thread runs a Batch, and when the event loop does."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.backends.errors import Code, InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.model import Model
from penstock.batching.request import InferRequest
from penstock.batching.running.batch import Batch
from penstock.batching.running.loop_guard import MAX_DEBT_NS, MAX_HOLD_NS
from penstock.batching.spec import BatchPolicy, InstanceGroup, ModelSpec
from tests.fakes import PATIENCE_S, FakeBackend, Function, fake_request

KEY = ((4,),)
X = TensorSpec("x", "FP32", (-1, 4))
ROWS = Signature((X,), (TensorSpec("same", "FP32", (-1, 4)), TensorSpec("sum", "FP32", (-1,))), batched=True)
FREE = Signature((TensorSpec("x", "FP32", (-1, -1)),), (TensorSpec("y", "FP32", (-1, -1)),), batched=True)
GUILTY = -1.0


def same_and_sum(inputs: list[Any]) -> list[Any]:
    if (inputs[0] == GUILTY).any():
        raise InferError(Code.INVALID, "a guilty row")
    return [inputs[0], inputs[0].sum(axis=1)]


def model_of(
    function: Function = same_and_sum, signature: Signature = ROWS, count: int = 1, finished: Any = None, **policy: Any
) -> tuple[Model, FakeBackend]:
    backend = FakeBackend(signature, function)
    policy = {"max_batch_rows": 64 if signature.batched else 0, "executor": "thread", **policy}
    spec = ModelSpec(
        "m",
        1,
        Path("model"),
        policy=BatchPolicy(**policy),
        instances=(InstanceGroup(count),),
        signature=signature,
    )
    return Model(spec, [backend], finished or (lambda *_: None)), backend


@contextmanager
def opened(function: Function, **options: Any) -> Iterator[tuple[Model, FakeBackend, queue.Queue[Batch]]]:
    """A Model with its Instances running, and the queue of its finished batches."""
    finished: queue.Queue[Batch] = queue.Queue()

    def finish(model: Model, ran: list[Batch]) -> None:
        for batch in ran:
            finished.put(batch)

    model, backend = model_of(function, finished=finish, **options)
    model.open()
    try:
        yield model, backend, finished
    finally:
        model.close()


def add(model: Model, count: int = 1) -> list[InferRequest]:
    requests = [fake_request(model) for _ in range(count)]
    with model.lock:
        for request in requests:
            model.scheduler.add(request)
    return requests


class TestThreadInstance:
    def test_an_instance_takes_no_batch_before_it_is_woken(self) -> None:
        with opened(same_and_sum) as (model, _, finished):
            (request,) = add(model)
            assert request.waiting
            model.dispatch(1)

            assert finished.get(timeout=PATIENCE_S).requests == [request]

    def test_a_thread_instance_does_not_run_on_the_dispatching_thread(self) -> None:
        ran_on: list[int] = []

        def function(inputs: list[Any]) -> list[Any]:
            ran_on.append(threading.get_ident())
            return same_and_sum(inputs)

        with opened(function) as (model, _, finished):
            add(model)
            assert model.dispatch(1) == ([], False)
            finished.get(timeout=PATIENCE_S)

        assert threading.get_ident() not in ran_on

    def test_an_instance_continues_while_requests_wait(self) -> None:
        with opened(same_and_sum, cap_rows=1, max_batch_rows=1) as (model, _, finished):
            requests = add(model, 5)
            model.dispatch(1)

            assert [finished.get(timeout=PATIENCE_S).requests for _ in requests] == [[each] for each in requests]

    def test_requests_left_by_one_instance_wake_another(self) -> None:
        together = threading.Barrier(3)

        def function(inputs: list[Any]) -> list[Any]:
            together.wait(PATIENCE_S)
            return same_and_sum(inputs)

        with opened(function, count=3, max_batch_rows=1) as (model, _, finished):
            requests = add(model, 3)
            model.dispatch(1)
            for _ in requests:
                finished.get(timeout=PATIENCE_S)

        assert [request.error for request in requests] == [None] * 3

    def test_closing_a_model_waits_for_its_run_and_frees_the_backend(self) -> None:
        entered, leave = threading.Event(), threading.Event()

        def function(inputs: list[Any]) -> list[Any]:
            entered.set()
            leave.wait(PATIENCE_S)
            return same_and_sum(inputs)

        with opened(function) as (model, backend, finished):
            (request,) = add(model)
            model.dispatch(1)
            entered.wait(PATIENCE_S)
            closing = threading.Thread(target=model.close)
            closing.start()
            before = backend.closed
            leave.set()
            closing.join(PATIENCE_S)

            assert (before, backend.closed) == (False, True)
            assert finished.get_nowait().requests == [request]


class TestLoopInstance:
    def test_a_batch_runs_on_the_dispatching_thread(self) -> None:
        with opened(same_and_sum, executor="loop", cap_rows=2) as (model, _, finished):
            requests = add(model, 3)
            first, more = model.dispatch(1)
            second, rest = model.dispatch(1)

            assert [[batch.requests for batch in ran] for ran in (first, second)] == [[requests[:2]], [requests[2:]]]
            assert (more, rest) == (True, False)
            assert finished.empty()

    def test_a_fast_batch_is_not_queued_behind_a_slow_one_that_runs_on_a_thread(self) -> None:
        with opened(list, signature=FREE, executor="auto") as (model, _, finished):
            slow, fast = (fake_request(model, key=((width,),)) for width in (9, 4))
            with model.lock:
                model.scheduler.learn(slow.key, 1, 1_000_000_000, 1)
                model.scheduler.learn(fast.key, 1, 1, 1)
                model.scheduler.add(slow)
                model.scheduler.add(fast)
            ran, _ = model.dispatch(1)

            assert [batch.requests for batch in ran] == [[fast]]
            assert finished.get(timeout=PATIENCE_S).requests == [slow]

    @pytest.mark.parametrize(("used_ns", "stays"), [(MAX_HOLD_NS + 1, False), (40_000, True)])
    def test_a_model_that_holds_the_loop_too_long_moves_to_threads_unless_the_machine_stalled(
        self, monkeypatch: pytest.MonkeyPatch, used_ns: int, stays: bool
    ) -> None:
        cpu = iter(range(1, 1 << 60, used_ns))
        monkeypatch.setattr("penstock.batching.model.time", SimpleNamespace(thread_time_ns=lambda: next(cpu)))
        with opened(same_and_sum, executor="auto") as (model, _, finished):
            with model.lock:
                model.scheduler.learn(KEY, 1, 1_000, 1)
            (first,) = add(model, 1)

            def slow(model: Model, binding: Any, batch: Batch) -> list[Batch]:
                batch.exec_end_ns = batch.exec_start_ns + MAX_HOLD_NS + 1
                return [batch]

            with monkeypatch.context() as patched:
                patched.setattr("penstock.batching.model.execute", slow)
                assert [batch.requests for batch in model.dispatch(1)[0]] == [[first]]
            with model.lock:
                model.scheduler.learn(KEY, 1, 1_000, 1)
            (second,) = add(model, 1)

            ran = [batch.requests for batch in model.dispatch(1)[0]]
            assert ran == ([[second]] if stays else [])
            assert stays or finished.get(timeout=PATIENCE_S).requests == [second]

    def test_a_model_that_often_holds_the_loop_with_long_batches_moves_to_threads(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        held_ns = MAX_DEBT_NS * 3 // 5
        cpu = iter(range(1, 1 << 60, held_ns))
        # each reading, before and after a batch, finds that this much time has passed
        monkeypatch.setattr("penstock.batching.model.time", SimpleNamespace(thread_time_ns=lambda: next(cpu)))
        with opened(same_and_sum, executor="auto") as (model, _, finished):

            def slow(model: Model, binding: Any, batch: Batch) -> list[Batch]:
                batch.exec_end_ns = batch.exec_start_ns + held_ns
                return [batch]

            ran = []
            for now_ns in range(1, 2 * held_ns + 2, held_ns):
                with monkeypatch.context() as patched:
                    patched.setattr("penstock.batching.model.execute", slow)
                    with model.lock:
                        for _ in range(99):
                            model.scheduler.learn(KEY, 1, 1_000, 1)
                    requests = add(model, 1)
                    ran.append([batch.requests for batch in model.dispatch(now_ns)[0]] == [requests])
            assert ran == [True, True, False]
            assert finished.get(timeout=PATIENCE_S).requests == requests
            requests = add(model, 1)
            assert [batch.requests for batch in model.dispatch(model.loop_guard.off_loop_until_ns)[0]] == [requests]

    def test_the_cost_model_learns_nothing_from_a_failed_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with opened(same_and_sum, executor="loop", cap_rows=8) as (model, _, _):
            taught: list[int] = []
            monkeypatch.setattr(model.scheduler, "learn", lambda key, rows, ns, now_ns, _: taught.append(rows))
            with model.lock:
                for value in (GUILTY, 1, 2):
                    model.scheduler.add(fake_request(model, value=value))
            model.dispatch(1)

        assert taught == [2]
