"""Quarantine: a request that fails alone repeatedly is run separately and harms no batch."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.backends.backend import Array
from penstock.backends.device_array import DeviceArray
from penstock.backends.errors import Code, DeviceLost, InferError, RunStopped
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.model import Model
from penstock.batching.request import InferRequest
from penstock.batching.running.batch import Batch
from penstock.batching.running.isolation import LostBatch, execute
from penstock.batching.running.quarantine import MAX_FINGERPRINTS, RETENTION_NS, SAMPLED_VALUES, fingerprint
from tests.batching.overlapping_device import Stream, opened
from tests.batching.test_isolation import BROKEN, GUILTY, model_of, outputs_of, requests_for, rows_run, same_and_sum
from tests.fakes import FakeBackend, fake_request

OTHER = GUILTY - 10
NARROW = Signature((TensorSpec("x", "FP32", (-1, 4)),), (TensorSpec("y", "FP32", (-1, 4)),), batched=True)


class Clock:
    """The monotonic clock, which the test may advance."""

    def __init__(self) -> None:
        self.ahead_ns = 0
        self._now_ns = time.monotonic_ns

    def __call__(self) -> int:
        return self._now_ns() + self.ahead_ns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic_ns", clock)
    return clock


def run(model: Model, backend: FakeBackend, *requests: InferRequest) -> list[Batch]:
    batch = Batch(list(requests), sum(request.rows for request in requests), requests[0].key, time.monotonic_ns())
    return execute(model, backend.bind(model.signature, 64), batch)


def runs_of(model: Model, backend: FakeBackend, *values: float) -> list[int]:
    """Return the rows of each run of a Batch of one-row requests with these values."""
    backend.runs.clear()
    run(model, backend, *requests_for(model, *values))
    return rows_run(backend)


def guilty_of(model: Model, backend: FakeBackend, *values: float) -> None:
    """Have requests fail alone twice."""
    for value in 2 * values:
        run(model, backend, *requests_for(model, value))


def sum_unless_guilty(inputs: list[Any]) -> list[Any]:
    if (inputs[0] <= GUILTY).any():
        raise InferError(Code.INVALID, "a guilty row")
    return [inputs[0].sum(axis=1)]


class TestRepeatedFailures:
    def test_a_failing_request_is_searched_for_twice_and_then_run_separately(self) -> None:
        model, backend = model_of()

        first, second, third = (runs_of(model, backend, 1, GUILTY, 2, 3) for _ in range(3))

        assert len(first) == len(second) > 2
        assert third == [3, 1]
        assert model.event_counts["quarantined"] == 1
        assert model.event_counts["batch_retries"] == len(first) + len(second) - 2

    def test_every_request_of_a_batch_with_a_quarantined_one_is_answered(self) -> None:
        model, backend = model_of()
        guilty_of(model, backend, GUILTY)
        requests = requests_for(model, 1, GUILTY, 2)

        ran = run(model, backend, *requests)

        assert [[*batch.requests] for batch in ran] == [[requests[0], requests[2]], [requests[1]]]
        assert outputs_of(requests[2]) == [[[2] * 4], [8]]
        assert requests[1].error is not None
        assert requests[1].error.message == "a guilty row"

    def test_each_of_several_quarantined_requests_runs_by_itself(self) -> None:
        model, backend = model_of(lambda inputs: [inputs[0], *sum_unless_guilty(inputs)])
        guilty_of(model, backend, GUILTY, OTHER)

        assert runs_of(model, backend, GUILTY, 1, OTHER, GUILTY, 2) == [2, 1, 1, 1]
        assert runs_of(model, backend, OTHER, GUILTY) == [1, 1]

    def test_a_newly_failing_request_is_found_beside_a_quarantined_one(self) -> None:
        model, backend = model_of(lambda inputs: [inputs[0], *sum_unless_guilty(inputs)])
        guilty_of(model, backend, GUILTY)
        requests = requests_for(model, 1, OTHER, GUILTY, 2)

        run(model, backend, *requests)

        assert [request.error is None for request in requests] == [True, False, False, True]

    def test_a_quarantined_request_that_succeeds_leaves_quarantine(self) -> None:
        faulty = [True]

        def now_and_then(inputs: list[Any]) -> list[Any]:
            return same_and_sum(inputs) if faulty[0] else [inputs[0], inputs[0].sum(axis=1)]

        model, backend = model_of(now_and_then)
        guilty_of(model, backend, GUILTY)
        faulty[0] = False

        assert runs_of(model, backend, 1, GUILTY) == [1, 1]
        assert runs_of(model, backend, 1, GUILTY) == [2]

    def test_a_request_leaves_quarantine_a_minute_after_its_last_failure(self, clock: Clock) -> None:
        model, backend = model_of()
        guilty_of(model, backend, GUILTY)
        clock.ahead_ns += RETENTION_NS - 1_000_000_000
        assert runs_of(model, backend, 1, GUILTY) == [1, 1]
        clock.ahead_ns += RETENTION_NS - 1_000_000_000
        assert runs_of(model, backend, 1, GUILTY) == [1, 1]
        clock.ahead_ns += RETENTION_NS

        assert runs_of(model, backend, 1, GUILTY)[0] == 2
        assert not model.quarantine.known

    def test_two_failures_more_than_a_minute_apart_do_not_quarantine_a_request(self, clock: Clock) -> None:
        model, backend = model_of()
        run(model, backend, *requests_for(model, GUILTY))
        clock.ahead_ns += RETENTION_NS
        run(model, backend, *requests_for(model, GUILTY))

        assert not model.quarantine.known

    def test_requests_that_fail_once_are_not_quarantined(self) -> None:
        model, backend = model_of(lambda inputs: [inputs[0], *sum_unless_guilty(inputs)])
        for value in range(10 * MAX_FINGERPRINTS):
            run(model, backend, *requests_for(model, OTHER - value))

        assert not model.quarantine.known
        assert len(model.quarantine._failed_once) == MAX_FINGERPRINTS

    def test_the_oldest_quarantined_requests_are_forgotten_first(self) -> None:
        model, backend = model_of(lambda inputs: [inputs[0], *sum_unless_guilty(inputs)])
        guilty = [OTHER - value for value in range(MAX_FINGERPRINTS + 1)]
        for value in guilty:
            guilty_of(model, backend, value)

        assert len(model.quarantine.known) == MAX_FINGERPRINTS
        assert runs_of(model, backend, 1, guilty[1]) == [1, 1]
        assert runs_of(model, backend, 1, guilty[0])[0] == 2

    def test_a_lost_device_leaves_requests_that_have_not_run_unanswered(self) -> None:
        model, backend = model_of()
        guilty_of(model, backend, GUILTY)
        requests = requests_for(model, 1, GUILTY, BROKEN, GUILTY, 2)

        with pytest.raises(LostBatch) as lost:
            run(model, backend, *requests)

        assert isinstance(lost.value.error, DeviceLost)
        assert not lost.value.finished
        assert lost.value.remaining.requests == [requests[0], requests[2], requests[4], requests[1], requests[3]]

    def test_stopped_requests_are_searched_for_each_time_to_limit_the_number_of_stopped_runs(self) -> None:
        def hang(inputs: list[Any]) -> list[Any]:
            if (inputs[0] == GUILTY).any():
                raise RunStopped(Code.EXPIRED, "stopped")
            return same_and_sum(inputs)

        model, backend = model_of(hang, run_limit_us=1)
        for _ in range(3):
            requests = requests_for(model, *[GUILTY] * 32)
            model.event_counts.clear()
            run(model, backend, *requests)

            assert all(request.error is not None for request in requests)
            assert model.event_counts["runs_stopped"] <= 8

    @settings(max_examples=50, deadline=None)
    @given(st.lists(st.lists(st.tuples(st.sampled_from([GUILTY, OTHER, 1, 2, 3]), st.integers(1, 3)), min_size=1)))
    def test_every_request_ends_exactly_once_with_its_own_result(self, batches: list[list[tuple[float, int]]]) -> None:
        model, backend = model_of(lambda inputs: [inputs[0], *sum_unless_guilty(inputs)])
        for batch in batches:
            requests = [fake_request(model, rows, value=value) for value, rows in batch]

            ran = run(model, backend, *requests)

            assert sorted(id(request) for part in ran for request in part.requests) == sorted(map(id, requests))
            for request, (value, rows) in zip(requests, batch, strict=True):
                assert (request.error is None) == (value > 0)
                assert request.error is not None or outputs_of(request) == [[[value] * 4] * rows, [4 * value] * rows]


class TestTwoBatchesInFlight:
    def test_a_batch_with_a_quarantined_request_runs_in_parts_after_the_current_batch_ends(self) -> None:
        def faulty(inputs: list[Any]) -> list[Any]:
            sum_unless_guilty(inputs)
            return [inputs[0]]

        with opened(Stream(NARROW, faulty)) as house:
            for _ in range(2):
                house.ended(house.put(GUILTY))
            house.stream.events.clear()
            first, second = house.put_two([1], [2, GUILTY, 3])
            house.ended(first, second)

            assert [request.error is None for request in [*first, *second]] == [True, True, False, True]
            assert [rows for what, _, rows in house.stream.events if what == "begin"] == [1, 2, 1]


class TestFingerprints:
    def looks(self, *arrays: Array | None) -> list[int | None]:
        model, _ = model_of()
        looks = []
        for array in arrays:
            request = fake_request(model)
            request.inputs = [array]
            looks.append(fingerprint(request))
        return looks

    def test_requests_with_equal_inputs_have_equal_fingerprints(self) -> None:
        values = np.arange(8, dtype=np.float32).reshape(2, 4)
        same, strided = values.copy(), np.repeat(values, 2, axis=1)[:, ::2]

        assert len(set(self.looks(values, same, strided))) == 1

    def test_requests_with_different_inputs_have_different_fingerprints(self) -> None:
        words = [np.array([word], object) for word in (b"a", b"b", b"")]
        numbers = [np.array([number], np.int64) for number in (1, 2)]

        assert len(set(self.looks(*words, *numbers, None))) == 6

    def test_requests_with_different_shapes_have_different_fingerprints(self) -> None:
        model, _ = model_of()
        requests = [fake_request(model, key=key) for key in (((4,),), ((2, 2),))]

        assert len(set(map(fingerprint, requests))) == 2

    def test_a_large_input_is_sampled_from_its_start_to_its_end(self) -> None:
        values = np.zeros((100, 3 * SAMPLED_VALUES), np.float32)
        ends = values.copy()
        ends[-1] = 1

        assert len(set(self.looks(values, values.copy(), ends))) == 2

    def test_an_input_on_a_device_has_no_fingerprint(self) -> None:
        request = fake_request(model_of()[0])
        request.inputs = [DeviceArray.__new__(DeviceArray)]  # type: ignore[list-item]

        assert fingerprint(request) is None
