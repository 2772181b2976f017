"""One run of one Batch: rows up to an allowed size, and wrong outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.backends.errors import Code, InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.model import Model
from penstock.batching.request import InferRequest
from penstock.batching.running.batch import MAX_HANDLING_NS, Batch
from penstock.batching.running.execution import device_ns, run_batch
from penstock.batching.shapes.padding import smallest_fit
from penstock.batching.spec import BatchPolicy, ModelSpec
from tests.fakes import FakeBackend, Function, fake_request

X = TensorSpec("x", "FP32", (-1, 4))
ROWS = Signature((X,), (TensorSpec("same", "FP32", (-1, 4)), TensorSpec("sum", "FP32", (-1,))), batched=True)


def same_and_sum(inputs: list[Any]) -> list[Any]:
    return [inputs[0], inputs[0].sum(axis=1)]


def too_few(inputs: list[Any]) -> list[Any]:
    return [inputs[0], inputs[0][:3, 0]]


def model_of(
    function: Function = same_and_sum, signature: Signature = ROWS, **policy: Any
) -> tuple[Model, FakeBackend]:
    backend = FakeBackend(signature, function)
    policy = {"max_batch_rows": 16, "executor": "thread", **policy}
    spec = ModelSpec("m", 1, Path("model"), policy=BatchPolicy(**policy), signature=signature)
    return Model(spec, [backend], lambda *_: None), backend


def run(model: Model, backend: FakeBackend, *requests: InferRequest) -> None:
    rows = sum(request.rows for request in requests)
    run_batch(model, backend.bind(model.signature, 16), Batch(list(requests), rows, requests[0].key, 1))


def test_the_smallest_allowed_size_that_fits_is_chosen() -> None:
    assert [smallest_fit(rows, (1, 4, 16)) for rows in (0, 1, 2, 4, 5, 16, 17)] == [1, 1, 4, 4, 16, 16, 17]


class TestAllowedSizes:
    def test_padding_rows_are_copies_of_the_last_row_and_are_not_returned(self) -> None:
        model, backend = model_of(allowed_rows=(4, 16))
        requests = [fake_request(model, rows, value=rows) for rows in (2, 3)]

        run(model, backend, *requests)

        inputs = backend.runs[0].inputs[0]
        assert inputs is not None
        assert (backend.runs[0].rows, inputs[:, 0].tolist()) == (16, [2, 2] + [3] * 14)
        assert [request.outputs[1].tolist() for request in requests if request.outputs] == [[8, 8], [12, 12, 12]]
        assert model.event_counts == {"rows_padded": 11}

    def test_a_batch_of_an_allowed_size_runs_without_padding(self) -> None:
        model, backend = model_of(allowed_rows=(4, 16))

        run(model, backend, fake_request(model, 4))

        assert backend.runs[0].rows == 4
        assert model.event_counts == {}

    @pytest.mark.parametrize(("datatype", "zero"), [("FP32", 0.0), ("BYTES", b"")])
    def test_padding_rows_are_zeros_if_there_is_no_row_to_copy(self, datatype: str, zero: object) -> None:
        signature = Signature(
            (TensorSpec("x", datatype, (-1, 2)),), (TensorSpec("y", datatype, (-1, 2)),), batched=True
        )
        model, backend = model_of(list, signature, allowed_rows=(2,))
        request = fake_request(model, 0, ((2,),))
        if datatype == "BYTES":
            request.inputs = [np.empty((0, 2), object)]

        run(model, backend, request)

        inputs = backend.runs[0].inputs[0]
        assert inputs is not None
        assert inputs.tolist() == [[zero, zero]] * 2
        assert [output.shape for output in request.outputs or []] == [(0, 2)]

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.sets(st.integers(1, 16), max_size=4))
    def test_every_request_gets_its_own_rows_whatever_size_runs(self, rows: list[int], allowed: set[int]) -> None:
        model, backend = model_of(allowed_rows=tuple(sorted(allowed | {16})) if sum(rows) <= 16 else ())
        requests = [fake_request(model, count, value=number) for number, count in enumerate(rows)]
        binding = backend.bind(model.signature, 20)

        run_batch(model, binding, Batch(requests, sum(rows), requests[0].key, 1))

        for number, (request, count) in enumerate(zip(requests, rows, strict=True)):
            assert request.outputs is not None
            assert request.outputs[0].tolist() == [[number] * 4] * count


class TestWrongOutputs:
    @pytest.mark.parametrize(
        ("output", "has"),
        [
            (np.zeros((3, 4), np.float32), "3 rows"),
            (np.zeros((0, 4), np.float32), "0 rows"),
            (np.zeros((), np.float32), "no batch axis"),
            (np.float32(1), "no batch axis"),
            (7, "no batch axis"),
            ([{0: 1.0}], "1 rows"),
        ],
    )
    @pytest.mark.parametrize("allowed", [(), (2, 16)])
    def test_a_wrong_row_count_is_an_internal_error_and_no_request_gets_a_slice(
        self, output: Any, has: str, allowed: tuple[int, ...]
    ) -> None:
        model, backend = model_of(lambda inputs: [inputs[0], output], allowed_rows=allowed)
        requests = [fake_request(model), fake_request(model)]
        with pytest.raises(InferError) as caught:
            run(model, backend, *requests)

        text = f"model 'm': output 'sum' has {has} for a batch of 2"
        text += "; set max_batch_size to 0 if its first axis is not the batch"
        assert (caught.value.code, caught.value.message) == (Code.INTERNAL, text)
        assert [request.outputs for request in requests] == [None, None]

    def test_an_output_with_the_batchs_rows_but_fewer_than_the_padded_run_is_an_error(self) -> None:
        model, backend = model_of(too_few, allowed_rows=(4,))
        with pytest.raises(InferError) as caught:
            run(model, backend, fake_request(model, 3))

        assert caught.value.message.startswith("model 'm': output 'sum' has 3 rows for a batch of 4; ")

    def test_an_output_that_no_request_wants_may_have_any_shape(self) -> None:
        model, backend = model_of(lambda inputs: [inputs[0], np.float32(1)])
        request = fake_request(model, 2)
        request.output_positions = (0,)

        run(model, backend, request)

        assert [output.shape for output in request.outputs or []] == [(2, 4)]


class TestDeviceTime:
    class TimedBinding:
        device_ns = 5

    @staticmethod
    def ran(*spans: tuple[int, int, int], error: bool = False) -> list[Batch]:
        """Batches with their start and end, and the time at which the device became free."""
        model, _ = model_of()
        batches = []
        for start_ns, end_ns, free_ns in spans:
            batch = Batch([fake_request(model)], 1, ((4,),), start_ns)
            batch.compute_start_ns, batch.compute_end_ns, batch.device_free_ns = start_ns, end_ns, free_ns
            batch.requests[0].error = InferError(Code.INTERNAL, "failed") if error else None
            batches.append(batch)
        return batches

    @pytest.mark.parametrize(
        ("batches", "is_timed", "expected"),
        [
            (ran((10, 30, 0)), True, 5),
            (ran((10, 30, 0)), False, 20),
            (ran((10, 30, 25)), False, 5),  # the rest of the time belongs to another batch
            (ran((10, 30, 0), (30, 34, 0)), True, 24),  # the Binding reports only the last run
            (ran((10, 30, 0), error=True), True, 20),
            (ran((10, 9, 0)), False, 0),
        ],
        ids=["told", "not told", "behind another", "in parts", "failed", "never begun"],
    )
    def test_device_time_is_reported_by_the_binding_or_estimated_from_the_run(
        self, batches: list[Batch], is_timed: bool, expected: int
    ) -> None:
        binding: Any = self.TimedBinding() if is_timed else object()

        assert device_ns(batches, binding) == expected


@pytest.mark.parametrize(
    ("requests", "before_ns", "after_ns", "handling_ns"),
    [(1, 1_000, 2_000, 3_000), (1, 1_000_000, 2_000_000, MAX_HANDLING_NS), (9, 1_000_000, 0, 9 * MAX_HANDLING_NS)],
    ids=["both sides of the run", "large tensors are none of it", "for each request"],
)
def test_handling_time_per_request_excludes_the_run_and_is_capped(
    requests: int, before_ns: int, after_ns: int, handling_ns: int
) -> None:
    model, _ = model_of()
    batch = Batch([fake_request(model) for _ in range(requests)], requests, ((4,),), 7)
    batch.compute_start_ns = 7 + before_ns
    batch.compute_end_ns = batch.compute_start_ns + 5_000_000
    batch.exec_end_ns = batch.compute_end_ns + after_ns

    assert batch.handling_ns == handling_ns
