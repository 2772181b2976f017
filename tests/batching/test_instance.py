"""Instances: what `execute` makes of a Batch, and when a thread runs one."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.backends.errors import Code, InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.batch import Batch
from penstock.batching.isolation import execute
from penstock.batching.model import Model
from penstock.batching.request import InferRequest
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


def run(model: Model, backend: FakeBackend, *requests: InferRequest) -> list[Batch]:
    """Execute the requests as one Batch."""
    batch = Batch(list(requests), sum(request.rows for request in requests), requests[0].key, 1)
    return execute(model, backend.bind(model.signature, 64), batch)


def total(inputs: list[Any]) -> list[Any]:
    return [inputs[0].sum().reshape(1)]


def zipmap(inputs: list[Any]) -> list[Any]:
    return [[{0: float(row[0])} for row in inputs[0]]]


def outputs_of(request: InferRequest) -> list[Any]:
    assert request.error is None
    assert request.outputs is not None
    return [np.asarray(output).tolist() for output in request.outputs]


def error_of(request: InferRequest) -> tuple[Code, str]:
    assert request.outputs is None
    assert request.error is not None
    return request.error.code, request.error.message


class TestExecute:
    def test_each_request_gets_its_own_rows(self) -> None:
        model, backend = model_of()
        requests = [fake_request(model, rows, value=rows) for rows in (1, 2, 3)]

        ran = run(model, backend, *requests)

        assert len(ran) == len(backend.runs) == 1
        assert [outputs_of(request) for request in requests] == [
            [[[rows] * 4] * rows, [4 * rows] * rows] for rows in (1, 2, 3)
        ]

    @settings(max_examples=50, deadline=None)
    @given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=10))
    def test_whatever_shares_a_batch_rows_are_not_crossed_and_only_the_guilty_fail(
        self, rows_and_guilt: list[tuple[int, bool]]
    ) -> None:
        model, backend = model_of()
        requests = [
            fake_request(model, rows, value=GUILTY if guilty else value)
            for value, (rows, guilty) in enumerate(rows_and_guilt, 1)
        ]

        ran = run(model, backend, *requests)

        assert [request for batch in ran for request in batch.requests] == requests
        for value, (request, (rows, guilty)) in enumerate(zip(requests, rows_and_guilt, strict=True), 1):
            if guilty and rows:
                assert error_of(request) == (Code.INVALID, "a guilty row")
            else:
                assert outputs_of(request) == [[[value] * 4] * rows, [4 * value] * rows]

    def test_only_what_is_wanted_is_asked_of_the_model(self) -> None:
        model, backend = model_of()
        request = fake_request(model)
        request.wanted = (1,)

        run(model, backend, request)

        assert backend.runs[0].wanted == (1,)
        assert outputs_of(request) == [[0]]

    def test_requests_that_want_different_outputs_share_a_run_and_each_gets_its_own_in_its_order(self) -> None:
        model, backend = model_of()
        wants = [(1,), (0, 1), (1, 0), (0,), (), (1, 1)]
        requests = [fake_request(model, value=value) for value in range(len(wants))]
        for request, wanted in zip(requests, wants, strict=True):
            request.wanted = wanted

        run(model, backend, *requests)

        assert [each.wanted for each in backend.runs] == [(0, 1)]
        whole = [[[[value] * 4], [4 * value]] for value in range(len(wants))]
        assert [outputs_of(request) for request in requests] == [
            [whole[value][position] for position in wanted] for value, wanted in enumerate(wants)
        ]

    def test_stamps_are_in_order(self) -> None:
        model, backend = model_of()

        (batch,) = run(model, backend, fake_request(model))

        stamps = [batch.exec_start_ns, batch.compute_start_ns, batch.compute_end_ns, batch.exec_end_ns]
        assert stamps == sorted(stamps)
        assert batch.exec_end_ns > batch.exec_start_ns

    def test_an_absent_input_stays_absent(self) -> None:
        optional = Signature((X, TensorSpec("o", "FP32", (-1, 4), optional=True)), (X,), batched=True)
        model, backend = model_of(lambda inputs: [inputs[0]], optional)
        requests = [fake_request(model, key=((4,), None)) for _ in range(2)]

        run(model, backend, *requests)

        assert backend.runs[0].inputs[1] is None
        assert outputs_of(requests[1]) == [[[0] * 4]]

    def test_bytes_are_gathered_like_any_rows(self) -> None:
        strings = Signature((TensorSpec("s", "BYTES", (-1,)),), (TensorSpec("t", "BYTES", (-1,)),), batched=True)
        model, backend = model_of(list, strings)
        requests = [fake_request(model, key=((),)) for _ in range(2)]
        for request, word in zip(requests, (b"a", b"long" * 9), strict=True):
            request.inputs = [np.array([word], object)]

        run(model, backend, *requests)

        assert [outputs_of(request) for request in requests] == [[[b"a"]], [[b"long" * 9]]]

    def test_outputs_that_are_no_tensors_are_cut_by_rows_too(self) -> None:
        graph = Signature((X,), (TensorSpec("p", "seq(map(int64,tensor(float)))", ()),), batched=True)
        model, backend = model_of(zipmap, graph)
        requests = [fake_request(model, value=value) for value in (1, 2)]
        for request in requests:
            request.wanted = (0,)

        run(model, backend, *requests)

        assert [request.outputs for request in requests] == [[[{0: 1.0}]], [[{0: 2.0}]]]

    def test_a_model_without_rows_gets_and_gives_whole_tensors(self) -> None:
        whole = Signature((TensorSpec("x", "FP32", (2, -1)),), (TensorSpec("y", "FP32", (1,)),))
        model, backend = model_of(total, whole)
        request = fake_request(model, key=())
        request.key, request.inputs = ((2, 3),), [np.ones((2, 3), np.float32)]

        run(model, backend, request)

        assert outputs_of(request) == [[6]]


class TestABatchThatFails:
    def test_is_halved_until_the_guilty_request_is_alone(self) -> None:
        model, backend = model_of()
        requests = [fake_request(model, value=GUILTY if position == 5 else position) for position in range(8)]

        run(model, backend, *requests)

        assert [each.rows for each in backend.runs] == [8, 4, 4, 2, 1, 1, 2]
        assert error_of(requests[5]) == (Code.INVALID, "a guilty row")
        assert all(request.error is None for request in requests if request is not requests[5])

    def test_what_a_runtime_lets_slip_is_internal_and_stays_in_the_log(self, caplog: pytest.LogCaptureFixture) -> None:
        def function(inputs: list[Any]) -> list[Any]:
            raise ZeroDivisionError("/secret/path")

        model, backend = model_of(function)
        request = fake_request(model)
        request.id = "r1"
        with caplog.at_level(logging.ERROR):
            run(model, backend, request)

        assert error_of(request) == (Code.INTERNAL, "inference failed in 'm': ZeroDivisionError")
        assert [getattr(record, "request_id", "") for record in caplog.records] == ["r1"]
        assert "/secret/path" in caplog.text

    @pytest.mark.parametrize("rows", [0, 1, 3])
    def test_a_wrong_number_of_output_rows_is_the_models_error(self, rows: int) -> None:
        model, backend = model_of(lambda inputs: [inputs[0], np.zeros(rows, np.float32)])
        request = fake_request(model, 2)

        run(model, backend, request)

        text = f"model 'm': output 'sum' has {rows} rows for a batch of 2"
        assert error_of(request) == (Code.INTERNAL, text)

    def test_an_output_without_rows_is_an_error_of_each_request(self, caplog: pytest.LogCaptureFixture) -> None:
        model, backend = model_of(lambda inputs: [inputs[0], np.float32(1)])
        requests = [fake_request(model) for _ in range(2)]

        run(model, backend, *requests)

        assert [error_of(request)[0] for request in requests] == [Code.INTERNAL] * 2

    def test_an_error_of_one_request_is_not_shared_with_another(self) -> None:
        model, backend = model_of()
        requests = [fake_request(model, value=GUILTY) for _ in range(2)]

        run(model, backend, *requests)

        assert requests[0].error is not requests[1].error


@contextmanager
def opened(function: Function, **wanted: Any) -> Iterator[tuple[Model, FakeBackend, queue.Queue[Batch]]]:
    """A Model with its Instances running, and the queue where what ran arrives."""
    finished: queue.Queue[Batch] = queue.Queue()

    def finish(model: Model, ran: list[Batch]) -> None:
        for batch in ran:
            finished.put(batch)

    model, backend = model_of(function, finished=finish, **wanted)
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
    def test_it_takes_nothing_before_it_is_woken(self) -> None:
        with opened(same_and_sum) as (model, _, finished):
            (request,) = add(model)
            assert request.waiting
            model.dispatch(1)

            assert finished.get(timeout=PATIENCE_S).requests == [request]

    def test_it_runs_off_the_thread_that_dispatches(self) -> None:
        ran_on: list[int] = []

        def function(inputs: list[Any]) -> list[Any]:
            ran_on.append(threading.get_ident())
            return same_and_sum(inputs)

        with opened(function) as (model, _, finished):
            add(model)
            assert model.dispatch(1) == ([], False)
            finished.get(timeout=PATIENCE_S)

        assert threading.get_ident() not in ran_on

    def test_it_goes_on_while_anything_waits(self) -> None:
        with opened(same_and_sum, cap_rows=1, max_batch_rows=1) as (model, _, finished):
            requests = add(model, 5)
            model.dispatch(1)

            assert [finished.get(timeout=PATIENCE_S).requests for _ in requests] == [[each] for each in requests]

    def test_what_one_leaves_wakes_another(self) -> None:
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

    def test_closing_ends_what_runs_and_frees_the_model(self) -> None:
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


class TestTheLoopAsAnInstance:
    def test_a_batch_runs_where_it_is_dispatched(self) -> None:
        with opened(same_and_sum, executor="loop", cap_rows=2) as (model, _, finished):
            requests = add(model, 3)
            first, more = model.dispatch(1)
            second, rest = model.dispatch(1)

            assert [[batch.requests for batch in ran] for ran in (first, second)] == [[requests[:2]], [requests[2:]]]
            assert (more, rest) == (True, False)
            assert finished.empty()

    def test_what_is_fast_does_not_stand_behind_what_waits_for_a_thread(self) -> None:
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

    def test_a_failed_run_teaches_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with opened(same_and_sum, executor="loop", cap_rows=8) as (model, _, _):
            taught: list[int] = []
            monkeypatch.setattr(model.scheduler, "learn", lambda key, rows, ns, now_ns: taught.append(rows))
            with model.lock:
                for value in (GUILTY, 1, 2):
                    model.scheduler.add(fake_request(model, value=value))
            model.dispatch(1)

        assert taught == [2]
