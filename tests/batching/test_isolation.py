"""Isolation: how `execute` runs a Batch, and how each request is answered when it fails."""

from __future__ import annotations

import gc
import logging
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.backends.backend import Array, Binding
from penstock.backends.errors import Code, DeviceLost, InferError, OutOfMemory, RunStopped
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.model import Model
from penstock.batching.request import InferRequest
from penstock.batching.running.batch import Batch
from penstock.batching.running.isolation import LostBatch, execute, execute_singly, fail_requests, slice_batch
from penstock.batching.spec import BatchPolicy, ModelSpec
from tests.fakes import FakeBackend, Function, fake_request

X = TensorSpec("x", "FP32", (-1, 4))
ROWS = Signature((X,), (TensorSpec("same", "FP32", (-1, 4)), TensorSpec("sum", "FP32", (-1,))), batched=True)
GUILTY = -1.0
BROKEN = -2.0


def same_and_sum(inputs: list[Any]) -> list[Any]:
    if (inputs[0] == GUILTY).any():
        raise InferError(Code.INVALID, "a guilty row")
    if (inputs[0] == BROKEN).any():
        raise DeviceLost(Code.NOT_READY, "CUDA failure 700")
    return [inputs[0], inputs[0].sum(axis=1)]


def model_of(
    function: Function = same_and_sum, signature: Signature = ROWS, **policy: Any
) -> tuple[Model, FakeBackend]:
    backend = FakeBackend(signature, function)
    policy = {"max_batch_rows": 64 if signature.batched else 0, "executor": "thread", **policy}
    spec = ModelSpec("m", 1, Path("model"), policy=BatchPolicy(**policy), signature=signature)
    return Model(spec, [backend], lambda *_: None), backend


def run(model: Model, backend: FakeBackend, *requests: InferRequest) -> list[Batch]:
    """Execute the requests as one Batch."""
    batch = Batch(list(requests), sum(request.rows for request in requests), requests[0].key, 1)
    return execute(model, backend.bind(model.signature, 64), batch)


def requests_for(model: Model, *values: float) -> list[InferRequest]:
    return [fake_request(model, value=value) for value in values]


def rows_run(backend: FakeBackend) -> list[int]:
    return [each.rows for each in backend.runs]


def served(requests: list[InferRequest]) -> list[bool]:
    return [request.error is None and request.outputs is not None for request in requests]


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


class TestErrorReferences:
    def test_the_error_of_an_answered_request_keeps_no_tensors_of_its_batch_alive(self) -> None:
        model, backend = model_of()
        guilty, innocent = requests_for(model, GUILTY, 1)
        inputs = [weakref.ref(request.inputs[0]) for request in (guilty, innocent)]
        error: Any = None
        gc.disable()
        try:
            run(model, backend, guilty, innocent)
            error = guilty.error
            del guilty, innocent
            backend.runs.clear()
            held = [each() is not None for each in inputs]
        finally:
            gc.enable()

        assert error.message == "a guilty row"
        assert held == [False, False]


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
    def test_rows_stay_with_their_requests_and_only_invalid_requests_fail(
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

    def test_a_batch_that_fails_ends_when_its_run_has_failed(self) -> None:
        failed_ns: list[int] = []

        def fail(_: list[Any]) -> list[Any]:
            failed_ns.append(time.monotonic_ns())
            raise InferError(Code.INVALID, "a guilty row")

        model, backend = model_of(fail)
        (batch,) = run(model, backend, *requests_for(model, 1))

        assert batch.exec_end_ns >= failed_ns[-1]

    def test_only_requested_outputs_are_requested_from_the_model(self) -> None:
        model, backend = model_of()
        request = fake_request(model)
        request.output_positions = (1,)

        run(model, backend, request)

        assert backend.runs[0].positions == (1,)
        assert outputs_of(request) == [[0]]

    def test_requests_for_different_outputs_share_a_run_and_get_them_in_their_own_order(self) -> None:
        model, backend = model_of()
        wants = [(1,), (0, 1), (1, 0), (0,), (), (1, 1)]
        requests = [fake_request(model, value=value) for value in range(len(wants))]
        for request, positions in zip(requests, wants, strict=True):
            request.output_positions = positions

        run(model, backend, *requests)

        assert [each.positions for each in backend.runs] == [(0, 1)]
        all_outputs = [[[[value] * 4], [4 * value]] for value in range(len(wants))]
        assert [outputs_of(request) for request in requests] == [
            [all_outputs[value][position] for position in positions] for value, positions in enumerate(wants)
        ]

    def test_time_stamps_of_a_batch_are_in_order(self) -> None:
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

    def test_string_inputs_are_gathered_by_rows(self) -> None:
        strings = Signature((TensorSpec("s", "BYTES", (-1,)),), (TensorSpec("t", "BYTES", (-1,)),), batched=True)
        model, backend = model_of(list, strings)
        requests = [fake_request(model, key=((),)) for _ in range(2)]
        for request, word in zip(requests, (b"a", b"long" * 9), strict=True):
            request.inputs = [np.array([word], object)]

        run(model, backend, *requests)

        assert [outputs_of(request) for request in requests] == [[[b"a"]], [[b"long" * 9]]]

    def test_outputs_that_are_not_tensors_are_split_by_rows(self) -> None:
        graph = Signature((X,), (TensorSpec("p", "seq(map(int64,tensor(float)))", ()),), batched=True)
        model, backend = model_of(zipmap, graph)
        requests = [fake_request(model, value=value) for value in (1, 2)]
        for request in requests:
            request.output_positions = (0,)

        run(model, backend, *requests)

        assert [request.outputs for request in requests] == [[[{0: 1.0}]], [[{0: 2.0}]]]

    def test_a_model_without_rows_receives_and_returns_whole_tensors(self) -> None:
        signature = Signature((TensorSpec("x", "FP32", (2, -1)),), (TensorSpec("y", "FP32", (1,)),))
        model, backend = model_of(total, signature)
        request = fake_request(model, key=())
        request.key, request.inputs = ((2, 3),), [np.ones((2, 3), np.float32)]

        run(model, backend, request)

        assert outputs_of(request) == [[6]]


class TestFailedBatch:
    def test_a_failed_batch_is_run_in_parts_until_the_invalid_request_is_alone(self) -> None:
        model, backend = model_of()
        requests = requests_for(model, *(GUILTY if position == 5 else position for position in range(18)))

        ran = run(model, backend, *requests)

        assert rows_run(backend) == [18, 6, 2, 1, 1, 1, 1, 12]
        assert [batch.rows for batch in ran] == [2, 1, 1, 1, 1, 12]
        assert model.event_counts == {"batch_retries": 7}
        assert error_of(requests[5]) == (Code.INVALID, "a guilty row")
        assert all(request.error is None for request in requests if request is not requests[5])

    def test_a_batch_that_fails_at_once_is_run_in_larger_parts(self) -> None:
        model, backend = model_of()
        requests = requests_for(model, *(GUILTY if position == 5 else position for position in range(18)))
        batch = Batch(requests, 18, requests[0].key, time.monotonic_ns())
        batch.cost_ns = 1e18

        execute(model, backend.bind(model.signature, 64), batch)

        assert rows_run(backend) == [18, 12, 8, 5, 2, 1, 12]

    def test_an_unexpected_exception_is_an_internal_error_whose_text_appears_only_in_the_log(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
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

    @pytest.mark.parametrize(("code", "logged"), [(Code.INTERNAL, ["model m failed: onnx runtime error 6"]),
                                                (Code.INVALID, [])])  # fmt: skip
    def test_internal_errors_of_the_runtime_are_logged_and_invalid_requests_are_not(
        self, caplog: pytest.LogCaptureFixture, code: Code, logged: list[str]
    ) -> None:
        def function(inputs: list[Any]) -> list[Any]:
            raise InferError(code, "onnx runtime error 6")

        model, backend = model_of(function)
        request = fake_request(model)
        request.id = "r1"
        run(model, backend, request)

        assert error_of(request) == (code, "onnx runtime error 6")
        assert caplog.messages == logged
        about = [(record.levelname, vars(record)["request_id"], vars(record)["model"]) for record in caplog.records]
        assert about == [("ERROR", "r1", "m")] * len(logged)

    @pytest.mark.parametrize("rows", [0, 1, 3])
    def test_a_wrong_number_of_output_rows_is_an_internal_error(self, rows: int) -> None:
        model, backend = model_of(lambda inputs: [inputs[0], np.zeros(rows, np.float32)])
        request = fake_request(model, 2)

        run(model, backend, request)

        text = f"model 'm': output 'sum' has {rows} rows for a batch of 2"
        text += "; set max_batch_size to 0 if its first axis is not the batch"
        assert error_of(request) == (Code.INTERNAL, text)

    def test_an_output_without_rows_is_an_internal_error_of_each_request(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        model, backend = model_of(lambda inputs: [inputs[0], np.float32(1)])
        requests = [fake_request(model) for _ in range(2)]

        run(model, backend, *requests)

        assert [error_of(request)[0] for request in requests] == [Code.INTERNAL] * 2

    def test_each_failed_request_gets_its_own_error_object(self) -> None:
        model, backend = model_of()
        requests = [fake_request(model, value=GUILTY) for _ in range(2)]

        run(model, backend, *requests)

        assert requests[0].error is not requests[1].error


def no_more_than(rows: int) -> Function:
    """A model that has memory for this number of rows."""

    def function(inputs: list[Any]) -> list[Any]:
        if len(inputs[0]) > rows:
            raise OutOfMemory(Code.OVERLOADED, "Failed to allocate memory", 1)
        return same_and_sum(inputs)

    return function


class TestOutOfMemory:
    def test_a_batch_that_does_not_fit_in_memory_is_halved_and_every_request_succeeds(self) -> None:
        model, backend = model_of(no_more_than(3))
        requests = requests_for(model, *range(10))

        ran = run(model, backend, *requests)

        assert all(served(requests))
        assert rows_run(backend) == [10, 5, 2, 2, 2, 2, 2]
        assert [request for batch in ran for request in batch.requests] == requests
        assert model.event_counts == {"batch_retries": 6, "out_of_memory": 2}

    def test_a_batch_that_does_not_fit_in_memory_reduces_later_batch_sizes(self) -> None:
        model, backend = model_of(no_more_than(3), cap_rows=8)
        run(model, backend, *requests_for(model, *range(8)))
        for request in requests_for(model, *range(8)):
            model.scheduler.add(request)
        batch = model.scheduler.take(1)

        assert batch is not None
        assert batch.rows == 2

    def test_an_invalid_request_in_a_batch_that_does_not_fit_in_memory_fails_alone(self) -> None:
        model, backend = model_of(no_more_than(3))
        requests = requests_for(model, 0, 1, 2, 3, GUILTY, 5, 6, 7)

        run(model, backend, *requests)

        assert served(requests) == [True] * 4 + [False] + [True] * 3

    def test_one_request_that_exhausts_memory_alone_does_not_reduce_later_batch_sizes(self) -> None:
        def function(inputs: list[Any]) -> list[Any]:
            if GUILTY in inputs[0]:
                raise OutOfMemory(Code.OVERLOADED, "Failed to allocate memory", 1)
            return same_and_sum(inputs)

        model, backend = model_of(function)
        requests = requests_for(model, 0, 1, GUILTY, 3, 4, 5, 6, 7)
        run(model, backend, *requests)

        assert served(requests) == [True] * 2 + [False] + [True] * 5
        assert rows_run(backend) == [8, 4, 2, 2, 1, 1, 5]
        assert model.scheduler.memory_cap.rows == 0

    def test_later_batch_sizes_are_reduced_if_both_a_request_and_its_batch_exhaust_memory(self) -> None:
        def function(inputs: list[Any]) -> list[Any]:
            if GUILTY in inputs[0] or len(inputs[0]) > 3:
                raise OutOfMemory(Code.OVERLOADED, "Failed to allocate memory", 1)
            return same_and_sum(inputs)

        model, backend = model_of(function)
        requests = requests_for(model, GUILTY, *range(1, 8))
        run(model, backend, *requests)

        assert served(requests) == [False] + [True] * 7
        assert model.scheduler.memory_cap.rows == 3

    def test_a_single_request_that_does_not_fit_in_memory_is_retried_once(self) -> None:
        attempts: list[int] = []

        def function(inputs: list[Any]) -> list[Any]:
            attempts.append(len(inputs[0]))
            if len(attempts) == 1:
                raise OutOfMemory(Code.OVERLOADED, "Failed to allocate memory", 1)
            return same_and_sum(inputs)

        model, backend = model_of(function)
        (request,) = requests_for(model, 1)
        run(model, backend, request)

        assert served([request]) == [True]
        assert attempts == [1, 1]

    def test_a_single_request_that_never_fits_in_memory_is_rejected_with_a_retry_delay(self) -> None:
        model, backend = model_of(no_more_than(0))
        (request,) = requests_for(model, 1)

        run(model, backend, request)

        assert error_of(request) == (Code.OVERLOADED, "Failed to allocate memory")
        assert request.error is not None
        assert request.error.retry_after_ns == 1
        assert rows_run(backend) == [1, 1]
        assert model.event_counts == {"batch_retries": 1, "out_of_memory": 2}
        assert model.scheduler.memory_cap.rows == 0

    def test_a_python_memory_error_is_handled_as_out_of_memory(self) -> None:
        def function(inputs: list[Any]) -> list[Any]:
            if len(inputs[0]) > 1:
                raise MemoryError
            return same_and_sum(inputs)

        model, backend = model_of(function)
        requests = requests_for(model, 1, 2)
        run(model, backend, *requests)

        assert all(served(requests))
        assert model.event_counts["out_of_memory"] == 1


class TestLostDevice:
    def test_a_lost_device_ends_the_batch_and_leaves_its_requests_unanswered(self) -> None:
        model, backend = model_of()
        requests = requests_for(model, 0, BROKEN, 2)

        with pytest.raises(LostBatch) as caught:
            run(model, backend, *requests)

        assert caught.value.finished == []
        assert caught.value.remaining.requests == requests
        assert caught.value.remaining.rows == 3
        assert [(request.error, request.outputs) for request in requests] == [(None, None)] * 3

    def test_a_lost_batch_records_whether_its_run_had_started(self) -> None:
        class LostBefore(FakeBackend):
            def bind(self, signature: Signature, capacity_rows: int) -> Binding:
                binding = super().bind(signature, capacity_rows)
                binding.acquire_buffers = lost  # type: ignore[assignment,method-assign]
                return binding

        def lost(*_: Any) -> list[Array | None]:
            raise DeviceLost(Code.NOT_READY, "gone before")

        begun = []
        for kind in (FakeBackend, LostBefore):
            model, backend = model_of()
            with pytest.raises(LostBatch) as caught:
                run(model, kind(ROWS, backend.function), *requests_for(model, 0, BROKEN))
            begun.append(caught.value.started)

        assert begun == [True, False]

    def test_a_device_lost_while_requests_run_alone_leaves_the_remaining_requests(self) -> None:
        model, backend = model_of()
        requests = requests_for(model, 0, GUILTY, BROKEN, 3, 4)
        batch = Batch(list(requests), len(requests), requests[0].key, 1)
        batch.row_positions = [0, 2, 3, 5, 6]
        with pytest.raises(LostBatch) as caught:
            execute_singly(model, backend.bind(model.signature, 64), batch)

        assert [each.requests for each in caught.value.finished] == [requests[:1], requests[1:2]]
        assert served(requests[:2]) == [True, False]
        assert caught.value.remaining.requests == requests[2:]
        assert caught.value.remaining.row_positions == [3, 5, 6]
        assert caught.value.started
        assert slice_batch(batch, 1, 3).row_positions == [2, 3]
        assert slice_batch(batch, 1, 3).span_rows == 4

    def test_requests_settled_before_a_device_is_lost_keep_their_results(self) -> None:
        attempts: list[int] = []

        def function(inputs: list[Any]) -> list[Any]:
            attempts.append(len(inputs[0]))
            if len(attempts) == 4:
                raise DeviceLost(Code.NOT_READY, "CUDA failure 700")
            return same_and_sum(inputs)

        model, backend = model_of(function)
        requests = requests_for(model, 0, GUILTY, 2, 3, 4)
        with pytest.raises(LostBatch) as caught:
            run(model, backend, *requests)

        assert [batch.requests for batch in caught.value.finished] == [requests[:1], requests[1:2]]
        assert served(requests[:2]) == [True, False]
        assert caught.value.remaining.requests == requests[2:]
        assert caught.value.error.message == "CUDA failure 700"

    def test_remaining_requests_fail_with_the_device_error_if_there_is_no_other_device(self) -> None:
        model, backend = model_of()
        requests = requests_for(model, 0, BROKEN)
        with pytest.raises(LostBatch) as caught:
            run(model, backend, *requests)

        ran = fail_requests(caught.value.remaining, caught.value.error)

        assert [batch.requests for batch in ran] == [[request] for request in requests]
        assert [error_of(request) for request in requests] == [(Code.NOT_READY, "CUDA failure 700")] * 2
        assert requests[0].error is not requests[1].error
        assert all(isinstance(request.error, DeviceLost) for request in requests)


def stopped(inputs: list[Array | None]) -> list[Any]:
    assert inputs[0] is not None
    if (inputs[0] == GUILTY).any():
        raise RunStopped(Code.EXPIRED, "Exiting due to terminate flag being set to true")
    return same_and_sum(inputs)


class TestStoppedBatch:
    def test_every_request_is_served_except_the_one_whose_run_never_ends(self) -> None:
        model, backend = model_of(stopped, run_limit_us=500_000)
        requests = requests_for(model, *(GUILTY if position == 11 else position for position in range(32)))

        run(model, backend, *requests)

        assert served(requests) == [position != 11 for position in range(32)]
        assert error_of(requests[11]) == (Code.EXPIRED, "model 'm': run exceeded its limit of 500 ms")
        assert model.event_counts["runs_stopped"] == 4

    def test_only_the_request_that_exceeded_the_limit_is_marked_as_not_retryable(self) -> None:
        model, backend = model_of(stopped, run_limit_us=1000)
        requests = requests_for(model, GUILTY, GUILTY, 1, 1)
        run(model, backend, *requests)

        after_ns = [request.error and request.error.retry_after_ns for request in requests]
        assert after_ns == [-1, -1, 0, 0]

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.booleans(), min_size=1, max_size=40))
    def test_isolating_one_endless_request_stops_a_logarithmic_number_of_runs(self, guilt: list[bool]) -> None:
        model, backend = model_of(stopped, run_limit_us=1000)
        requests = requests_for(model, *(GUILTY if guilty else 1 for guilty in guilt))

        ran = run(model, backend, *requests)

        assert [request for batch in ran for request in batch.requests] == requests
        assert model.event_counts.get("runs_stopped", 0) <= (len(guilt) - 1).bit_length() + 2
        assert all((request.error is None) != (request.outputs is None) for request in requests)
        if sum(guilt) <= 1:
            assert served(requests) == [not guilty for guilty in guilt]

    def test_a_run_stopped_by_the_backends_own_limit_reports_the_backends_message(self) -> None:
        model, backend = model_of(stopped)
        requests = requests_for(model, 1, GUILTY, 3)
        run(model, backend, *requests)

        assert served(requests) == [True, False, True]
        assert error_of(requests[1]) == (Code.EXPIRED, "Exiting due to terminate flag being set to true")

    def test_a_batch_stopped_because_of_its_size_is_served_in_parts(self) -> None:
        def function(inputs: list[Any]) -> list[Any]:
            if len(inputs[0]) > 8:
                raise RunStopped(Code.EXPIRED, "Exiting due to terminate flag being set to true")
            return same_and_sum(inputs)

        model, backend = model_of(function, run_limit_us=1000)
        requests = requests_for(model, *range(32))
        run(model, backend, *requests)

        assert all(served(requests))


class TestInterruptions:
    @pytest.mark.parametrize("leaving", [KeyboardInterrupt, SystemExit])
    def test_keyboard_interrupt_and_system_exit_propagate(self, leaving: type[BaseException]) -> None:
        def function(inputs: list[Any]) -> list[Any]:
            raise leaving

        model, backend = model_of(function)
        with pytest.raises(leaving):
            run(model, backend, *requests_for(model, 1, 2))


def test_a_model_that_always_returns_one_row_serves_each_request_alone() -> None:
    """It always returns one row: wrong for a batch, and correct for each request alone."""

    def function(inputs: list[Any]) -> list[Any]:
        first = inputs[0][:1]
        return [first, first.sum(axis=1)]

    model, backend = model_of(function)
    requests = requests_for(model, *range(64))

    run(model, backend, *requests)

    assert [outputs_of(request)[1] for request in requests] == [[4.0 * value] for value in range(64)]
    assert len(backend.runs) < 2 * 64
