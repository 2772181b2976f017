"""Hints: the request that an error message points at runs alone, and the other requests run without it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.backends.errors import Code, DeviceLost, InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.request import InferRequest
from penstock.batching.running.batch import Batch
from penstock.batching.running.isolation import LostBatch, execute
from penstock.batching.running.suspects import MAX_HINTS, MAX_VALUES, named_in_error
from tests.batching.test_isolation import model_of, outputs_of, rows_run
from tests.fakes import fake_request

PLACES = 1000
ONNX = (
    "onnx runtime error 1: Non-zero status code returned while running Gather node. Name:'gather_7' Status Message: "
    "indices element out of data bounds, idx={} must be within the inclusive range [-1000,999]"
)
TENSORFLOW = "indices[{row},2] = {} is not in [0, 1000)\n\t [[{{node GatherV2}}]]"
TABLE = Signature((TensorSpec("x", "FP32", (-1, 4)),), (TensorSpec("y", "FP32", (-1, 4)),), batched=True)


def look_up(inputs: list[Any]) -> list[Any]:
    beyond = inputs[0][inputs[0] >= PLACES]
    if beyond.size:
        raise InferError(Code.INTERNAL, ONNX.format(int(beyond[0])))
    return [inputs[0]]


def requests_of(model: Any, *values: float) -> list[InferRequest]:
    return [fake_request(model, value=value) for value in values]


def batch_of(requests: list[InferRequest]) -> Batch:
    return Batch(requests, sum(request.rows for request in requests), requests[0].key, 1)


class TestRunWithHints:
    def run(self, *values: float) -> tuple[list[InferRequest], list[int], int]:
        model, backend = model_of(look_up, TABLE)
        requests = requests_of(model, *values)
        execute(model, backend.bind(model.signature, 64), batch_of(requests))
        return requests, rows_run(backend), model.event_counts.get("batch_retries", 0)

    def test_a_request_whose_value_the_error_names_runs_alone_and_the_rest_in_one_batch(self) -> None:
        requests, rows, retries = self.run(*range(10), 4711, *range(20, 25))

        assert rows == [16, 1, 15]
        assert retries == 2
        assert [request.error is None for request in requests] == [True] * 10 + [False] + [True] * 5

    def test_each_of_several_invalid_requests_is_found_by_its_own_value(self) -> None:
        requests, rows, _ = self.run(*range(10), 4711, *range(20, 25), 4712)

        assert rows == [17, 1, 16, 1, 15]
        assert sum(request.error is not None for request in requests) == 2

    def test_error_messages_are_no_longer_consulted_after_several_hints(self) -> None:
        requests, rows, _ = self.run(*range(PLACES, PLACES + 30))

        assert rows[: 2 * MAX_HINTS + 1] == [30, 1, 29, 1, 28, 1, 27]
        assert len(rows) < 2 * 30
        assert all(request.error is not None for request in requests)

    @settings(max_examples=50, deadline=None)
    @given(st.lists(st.tuples(st.sampled_from([0, 1, 7, 999, 1000, 4711, 4712]), st.integers(1, 3)), min_size=1))
    def test_only_invalid_requests_fail_whichever_ones_the_error_points_at(self, each: list[tuple[int, int]]) -> None:
        model, backend = model_of(look_up, TABLE)
        requests = [fake_request(model, rows, value=value) for value, rows in each]

        ran = execute(model, backend.bind(model.signature, 400), batch_of(requests))

        assert sorted(id(request) for part in ran for request in part.requests) == sorted(map(id, requests))
        for request, (value, rows) in zip(requests, each, strict=True):
            assert (request.error is None) == (value < PLACES)
            assert request.error is not None or outputs_of(request) == [[[value] * 4] * rows]

    def test_a_device_lost_by_a_hinted_request_leaves_the_other_requests_unanswered(self) -> None:
        def break_down(inputs: list[Any]) -> list[Any]:
            if (inputs[0] >= PLACES).all():
                raise DeviceLost(Code.NOT_READY, "CUDA failure 700")
            return look_up(inputs)

        model, backend = model_of(break_down, TABLE)
        requests = requests_of(model, 1, 4711, 2)

        with pytest.raises(LostBatch) as lost:
            execute(model, backend.bind(model.signature, 64), batch_of(requests))

        assert not lost.value.finished
        assert lost.value.remaining.requests == [requests[1], requests[0], requests[2]]


class TestErrorMessages:
    def pointed(self, words: str, *inputs: Any) -> list[int]:
        model, _ = model_of(look_up, TABLE)
        requests = requests_of(model, *[0] * len(inputs))
        for request, values in zip(requests, inputs, strict=True):
            request.inputs = [np.asarray(values)]
        return [requests.index(each) for each in named_in_error(words, requests)]

    @pytest.mark.parametrize("words", [ONNX.format(1000), TENSORFLOW.format(1000, row=3)])
    def test_error_messages_of_onnx_runtime_and_tensorflow_point_at_a_request(self, words: str) -> None:
        rows = [[[number, 17, 23, 5]] for number in range(40, 60)]
        rows[11][0][2] = 1000

        assert 11 in self.pointed(words, *rows)
        assert len(self.pointed(words, *rows)) <= 2

    def test_a_number_that_many_requests_have_points_at_no_request(self) -> None:
        assert self.pointed(ONNX.format(1000), *[[[999, number]] for number in range(10, 30)]) == []

    def test_an_error_that_points_at_every_request_gives_no_hint(self) -> None:
        assert self.pointed("5 is wrong, and 6", [[5]], [[6]]) == []

    def test_numbers_in_names_and_fractions_give_no_hint(self) -> None:
        assert self.pointed("node gather_7 of v1.5", [[7]], [[1]], [[5]]) == []

    @pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64, np.float16, np.float64])
    def test_numbers_are_found_in_inputs_of_any_type(self, dtype: Any) -> None:
        rows = [np.array([[number]], dtype) for number in (1, 2, 3)]

        assert self.pointed("3 or 1000000 or -7", *rows) == [2]

    def test_a_number_in_one_of_a_requests_rows_points_at_that_request(self) -> None:
        assert self.pointed("9", [[1], [2]], [[3]], [[4], [5], [9]], [[6]]) == [2]

    def test_strings_and_very_large_inputs_are_not_searched(self) -> None:
        words = [np.array([[word]], object) for word in (b"9", b"8")]
        large = [np.zeros((1, MAX_VALUES)), np.full((1, MAX_VALUES), 9.0)]

        assert self.pointed("9", *words) == []
        assert self.pointed("9", *large) == []
