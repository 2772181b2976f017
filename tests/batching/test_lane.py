from __future__ import annotations

import gc
import weakref

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.batching.request import InferRequest
from penstock.batching.scheduling.lane import MAX_SKIPPED, PATIENCE_NS, Lane
from tests.fakes import fake_model, fake_request

KEY = ((4,),)
MODEL = fake_model()


def lane_of(*rows: int) -> tuple[Lane, list[InferRequest]]:
    lane = Lane(KEY)
    requests = [fake_request(MODEL, each) for each in rows]
    for request in requests:
        lane.add(request)
    return lane, requests


def rows_of(requests: list[InferRequest]) -> list[int]:
    return [request.rows for request in requests]


def test_all_requests_that_fit_are_taken_in_order() -> None:
    lane, requests = lane_of(1, 2, 3)

    assert lane.take(6) == (requests, 6)
    assert lane.head() is None


def test_a_request_that_does_not_fit_is_skipped_and_goes_next() -> None:
    lane, _ = lane_of(2, 7, 1)

    assert rows_of(lane.take(8)[0]) == [2, 1]
    assert rows_of(lane.take(8)[0]) == [7]


def test_the_head_is_taken_even_if_it_is_bigger_than_the_limit() -> None:
    lane, _ = lane_of(9, 1)

    assert rows_of(lane.take(4)[0]) == [9]
    assert rows_of(lane.take(4)[0]) == [1]


def test_a_row_limit_of_zero_takes_one_request_at_a_time() -> None:
    lane, _ = lane_of(1, 1, 1)

    assert [rows_of(lane.take(0)[0]) for _ in range(3)] == [[1], [1], [1]]


def test_take_stops_looking_after_a_maximum_number_of_skipped_requests() -> None:
    lane, _ = lane_of(2, *[3] * MAX_SKIPPED, 1)

    assert rows_of(lane.take(4)[0]) == [2]
    assert lane.request_count == MAX_SKIPPED + 1


def test_requests_without_rows_are_taken_with_any_batch() -> None:
    lane, requests = lane_of(0, 4, 0)

    assert lane.take(4) == (requests, 4)


def test_a_full_batch_takes_no_further_request_even_without_rows() -> None:
    lane, _ = lane_of(4, 0, 1)

    assert rows_of(lane.take(4)[0]) == [4]
    assert rows_of(lane.take(4)[0]) == [0, 1]


def test_the_next_request_becomes_the_head_when_the_head_is_removed() -> None:
    lane, requests = lane_of(1, 2)
    lane.remove(requests[0])

    assert lane.head() is requests[1]
    assert lane.take(8) == ([requests[1]], 2)


def test_only_requests_in_the_lane_are_marked_as_waiting() -> None:
    lane, requests = lane_of(1, 1, 1)
    lane.remove(requests[0])
    lane.take(1)

    assert [request.waiting for request in requests] == [False, False, True]
    assert lane.waiting_requests() == requests[2:]


def test_tensors_of_removed_requests_are_freed_while_the_head_stays() -> None:
    lane, _ = lane_of(1)
    refs: list[weakref.ref[object]] = []
    for _ in range(10 * MAX_SKIPPED):
        request = fake_request(MODEL)
        request.inputs = [np.zeros((1, 4), np.float32)]
        refs.append(weakref.ref(request.inputs[0]))
        lane.add(request)
        lane.remove(request)
    del request
    gc.collect()

    assert sum(reference() is not None for reference in refs) <= MAX_SKIPPED + 3


def test_removing_the_last_request_leaves_none_in_the_lane() -> None:
    lane, requests = lane_of(2, 1)
    tensors = [weakref.ref(request.inputs[0]) for request in requests]
    for request in reversed(requests):
        lane.remove(request)
    del request, requests
    gc.collect()

    assert [tensor() is None for tensor in tensors] == [True, True]


def test_a_late_request_beyond_the_batch_does_not_step_aside_yet() -> None:
    lane, requests = lane_of(2, 1)
    requests[1].target_ns = 10
    lane.take(2, end_ns=20)

    assert lane.urgency_ns() == 10


def test_the_last_take_leaves_no_removed_request_in_the_lane() -> None:
    lane, requests = lane_of(2, 1)
    tensor = weakref.ref(requests[1].inputs[0])
    lane.remove(requests[1])
    lane.take(2)
    del requests
    gc.collect()

    assert tensor() is None


def lane_with_targets(*targets_ns: int) -> tuple[Lane, list[InferRequest]]:
    lane, requests = lane_of(*[1] * len(targets_ns))
    for request, target_ns in zip(requests, targets_ns, strict=True):
        request.enqueued_ns, request.target_ns = 1, target_ns
    return lane, requests


def test_a_request_that_will_miss_its_target_is_deferred_until_there_is_room() -> None:
    lane, (late, first, also_late, second) = lane_with_targets(50, 500, 60, 500)

    assert lane.take(2, 100, 10)[0] == [first, second]
    assert lane.waiting_requests() == [late, also_late]
    assert lane.head() is late
    assert lane.take(2, 100, 10) == ([late, also_late], 2)


def test_no_request_is_deferred_if_all_requests_fit() -> None:
    lane, requests = lane_with_targets(50, 500)

    assert lane.take(2, 100, 10)[0] == requests


def test_a_request_that_has_waited_for_the_patience_limit_is_not_deferred() -> None:
    lane, (late, _, _) = lane_with_targets(50, 1 << 60, 1 << 60)

    assert lane.take(1, 100 + PATIENCE_NS, 1 + PATIENCE_NS)[0] == [late]


def test_a_deferred_request_is_not_lost_when_another_is_canceled() -> None:
    lane, (late, first, second, third) = lane_with_targets(50, 500, 500, 500)
    assert lane.take(1, 100, 10)[0] == [first]

    lane.remove(third)

    assert lane.take(2, 100, 10) == ([second, late], 2)
    assert (lane.request_count, lane.rows) == (0, 0)


def test_a_lane_is_as_urgent_as_its_head_or_its_deferred_requests() -> None:
    lane, (late, first, second) = lane_with_targets(50, 500, 2 * PATIENCE_NS)
    urgencies = [lane.urgency_ns()]
    lane.take(1, 100, 10)
    late.enqueued_ns = 1 - PATIENCE_NS // 2
    urgencies.append(lane.urgency_ns())
    lane.remove(late)
    urgencies.append(lane.urgency_ns())

    assert not first.waiting
    assert second.waiting
    assert urgencies == [50, 1 + PATIENCE_NS // 2, 1 + PATIENCE_NS]


REMOVE, TAKE, ADD = st.tuples(st.just("remove"), st.integers(0, 50)), st.integers(0, 12), st.integers(0, 12)
STEPS = st.lists(REMOVE | st.tuples(st.just("take"), TAKE) | st.tuples(st.just("add"), ADD), max_size=60)


@settings(max_examples=100, deadline=None)
@given(STEPS)
def test_requests_are_never_lost_or_duplicated_and_keep_their_order(steps: list[tuple[str, int]]) -> None:
    lane = Lane(KEY)
    waiting: list[InferRequest] = []
    for step, number in steps:
        if step == "add":
            waiting.append(fake_request(MODEL, number))
            lane.add(waiting[-1])
        elif step == "remove" and waiting:
            lane.remove(waiting.pop(number % len(waiting)))
        elif step == "take" and waiting:
            batch, rows = lane.take(number)
            assert batch[0] is waiting[0]
            assert batch == [request for request in waiting if request in batch]
            assert rows == sum(rows_of(batch))
            assert rows <= number or len(batch) == 1
            _assert_only_what_did_not_fit_was_passed(waiting, batch, number)
            waiting = [request for request in waiting if request not in batch]

        assert lane.waiting_requests() == waiting
        assert (lane.request_count, lane.rows) == (len(waiting), sum(rows_of(waiting)))
        assert lane.head() is (waiting[0] if waiting else None)


ROUNDS = st.lists(st.tuples(st.lists(st.booleans(), max_size=4), st.integers(0, 2), st.integers(1, 4)), max_size=12)


@settings(max_examples=200, deadline=None)
@given(ROUNDS)
def test_no_deferred_request_is_lost_or_duplicated(rounds: list[tuple[list[bool], int, int]]) -> None:
    """In each round some requests arrive, late or not, some of the last are canceled, and a batch is taken."""
    lane = Lane(KEY)
    waiting: list[InferRequest] = []
    for now_ns, (lates, removed, limit) in enumerate(rounds, start=1):
        for late in lates:
            request = fake_request(MODEL)
            request.enqueued_ns, request.target_ns = now_ns, now_ns if late else now_ns + 100
            waiting.append(request)
            lane.add(request)
        for request in waiting[len(waiting) - removed :]:
            waiting.remove(request)
            lane.remove(request)
        if waiting:
            batch, rows = lane.take(limit, now_ns + 20, now_ns)
            assert rows == len(batch) > 0
            assert set(batch) <= set(waiting)
            waiting = [request for request in waiting if request not in batch]

        assert set(lane.waiting_requests()) == set(waiting)
        assert (lane.request_count, lane.rows) == (len(waiting), len(waiting))


def _assert_only_what_did_not_fit_was_passed(
    waiting: list[InferRequest], batch: list[InferRequest], limit: int
) -> None:
    rows = passed = 0
    for request in waiting:
        if request in batch:
            assert passed < MAX_SKIPPED
            rows += request.rows
        else:
            assert rows >= limit or rows + request.rows > limit or passed >= MAX_SKIPPED
            passed += 1
