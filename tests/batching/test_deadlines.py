"""Deadlines: which waiting request expires next."""

from __future__ import annotations

import gc
import weakref

from hypothesis import given
from hypothesis import strategies as st

from penstock.batching.request import InferRequest
from penstock.batching.scheduling.deadlines import MAX_STALE, Deadlines
from tests.fakes import fake_model, fake_request

MODEL = fake_model()


def waiting(deadline_ns: int) -> InferRequest:
    request = fake_request(MODEL)
    request.deadline_ns, request.waiting = deadline_ns, True
    return request


@given(st.lists(st.tuples(st.integers(1, 50), st.sampled_from(("add", "leave", "look"))), max_size=60))
def test_expired_requests_still_waiting_are_popped_in_deadline_order(
    steps: list[tuple[int, str]],
) -> None:
    deadlines = Deadlines()
    live: list[InferRequest] = []
    for number, step in steps:
        if step == "add":
            live.append(waiting(number))
            deadlines.add(live[-1], len(live))
        elif step == "leave" and live:
            live.pop(number % len(live)).waiting = False
        elif step == "look":
            passed = deadlines.pop_expired(number)
            late = [request for request in live if request.deadline_ns <= number]
            assert passed == sorted(late, key=lambda request: request.deadline_ns)
            live = [request for request in live if request not in late]
        nearest_ns = min((request.deadline_ns for request in live), default=0)
        assert not nearest_ns or 0 < deadlines.nearest_ns <= nearest_ns


def test_requests_with_the_same_deadline_expire_in_the_order_of_their_arrival() -> None:
    deadlines = Deadlines()
    requests = [waiting(5) for _ in range(3)]
    for count, request in enumerate(requests, start=1):
        deadlines.add(request, count)

    assert deadlines.pop_expired(5) == requests


def test_tensors_of_requests_that_left_the_queue_are_freed_before_their_deadline() -> None:
    deadlines = Deadlines()
    refs = []
    for _ in range(20 * MAX_STALE):
        request = waiting(1 << 60)
        refs.append(weakref.ref(request.inputs[0]))
        deadlines.add(request, 1)
        request.waiting = False
    del request
    gc.collect()

    assert sum(reference() is not None for reference in refs) <= MAX_STALE + 3


def test_clearing_deadlines_frees_every_request() -> None:
    deadlines = Deadlines()
    request = waiting(99)
    tensor = weakref.ref(request.inputs[0])
    deadlines.add(request, 1)
    deadlines.clear()
    del request
    gc.collect()

    assert tensor() is None
    assert deadlines.nearest_ns == 0
