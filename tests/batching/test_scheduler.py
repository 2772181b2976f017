"""Scheduler: told the time and what has been measured, asked for Batches."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.backends.errors import Code, InferError
from penstock.batching.costs import CostModel
from penstock.batching.lane import LOOK_AHEAD, Lane
from penstock.batching.request import InferRequest, Key
from penstock.batching.scheduler import KEPT_LANES, LOOK_AGAIN, Scheduler
from penstock.batching.spec import BatchPolicy
from tests.fakes import fake_model, fake_request

A, B, C = ((4,),), ((5,),), ((6,),)
MODEL = fake_model()
US = 1_000


def scheduler_of(**policy: Any) -> Scheduler:
    return Scheduler(replace(BatchPolicy(max_batch_rows=8), **policy), CostModel())


def add(scheduler: Scheduler, rows: int = 1, key: Key = A, now_ns: int = 1, deadline_ns: int = 0) -> InferRequest:
    request = fake_request(MODEL, rows, key)
    request.queue_ns, request.deadline_ns = now_ns, deadline_ns
    scheduler.add(request)
    return request


def take_rows(scheduler: Scheduler, now_ns: int = 1) -> int | None:
    batch = scheduler.take(now_ns)
    return None if batch is None else batch.rows


def learn(scheduler: Scheduler, knee: int, *keys: Key) -> None:
    """Teach it that up to `knee` rows take no longer than one, and more take as much longer as they are."""
    for key in keys or (A,):
        for bits in range(knee.bit_length()):
            scheduler.learn(key, 1 << bits, 1000, 1)
        scheduler.learn(key, 2 * knee, 2000, 1)


def counters(scheduler: Scheduler) -> tuple[int, int, int]:
    return scheduler.rows, scheduler.live, scheduler.nbytes


class TestTaking:
    def test_nothing_comes_of_nothing(self) -> None:
        assert scheduler_of().take(1) is None

    def test_a_batch_holds_all_that_fits_and_says_when_it_was_taken(self) -> None:
        scheduler = scheduler_of()
        requests = [add(scheduler, rows) for rows in (1, 2, 5)]

        batch = scheduler.take(77)

        assert batch is not None
        assert (batch.requests, batch.rows, batch.key, batch.exec_start_ns) == (requests, 8, A, 77)

    def test_keys_do_not_mix(self) -> None:
        scheduler = scheduler_of()
        for now_ns, key in enumerate((A, B, A, B), 1):
            add(scheduler, 1, key, now_ns)

        batches = [scheduler.take(9), scheduler.take(9)]

        assert [(batch.key, batch.rows) for batch in batches if batch] == [(A, 2), (B, 2)]

    def test_the_lane_whose_head_has_waited_longest_goes_first(self) -> None:
        scheduler = scheduler_of(max_batch_rows=1)
        for now_ns, key in ((5, A), (3, B), (4, C), (6, B)):
            add(scheduler, 1, key, now_ns)

        assert [batch.key for _ in range(4) if (batch := scheduler.take(9))] == [B, C, A, B]

    def test_a_busy_key_does_not_starve_another(self) -> None:
        scheduler = scheduler_of(max_batch_rows=1)
        for now_ns in range(1, 11):
            add(scheduler, 1, A, now_ns)
        rare = add(scheduler, 1, B, 11)
        takes = 0
        while rare.waiting:
            scheduler.take(20 + takes)
            add(scheduler, 1, A, 20 + takes)
            takes += 1

        assert takes == 11

    def test_a_model_without_rows_runs_one_request_at_a_time(self) -> None:
        scheduler = scheduler_of(max_batch_rows=0)
        for _ in range(3):
            add(scheduler)

        assert [take_rows(scheduler) for _ in range(4)] == [1, 1, 1, None]


class TestBatchSize:
    def test_a_cap_leaves_the_rest_for_the_next_batch(self) -> None:
        scheduler = scheduler_of(cap_rows=4)
        for _ in range(6):
            add(scheduler)

        assert [take_rows(scheduler), take_rows(scheduler)] == [4, 2]

    def test_a_stated_cap_is_never_passed(self) -> None:
        scheduler = scheduler_of(cap_rows=2)
        for _ in range(20):
            add(scheduler)

        assert take_rows(scheduler) == 2

    def test_a_learned_cap_is_where_time_per_row_stops_falling(self) -> None:
        scheduler = scheduler_of(max_batch_rows=64)
        learn(scheduler, 4)
        for _ in range(8):
            add(scheduler)

        assert [take_rows(scheduler), take_rows(scheduler)] == [4, 4]

    def test_half_goes_when_more_waits_than_two_batches_of_a_learned_cap(self) -> None:
        scheduler = scheduler_of(max_batch_rows=64)
        learn(scheduler, 2)
        for _ in range(20):
            add(scheduler)

        assert [take_rows(scheduler) for _ in range(5)] == [10, 5, 3, 2, None]

    def test_half_is_half_of_all_that_waits_whatever_its_key(self) -> None:
        scheduler = scheduler_of(max_batch_rows=64)
        learn(scheduler, 2)
        for key in (A, B):
            for _ in range(10):
                add(scheduler, key=key)

        assert [take_rows(scheduler), take_rows(scheduler)] == [10, 10]

    def test_half_of_very_much_is_still_no_more_than_the_model_takes(self) -> None:
        scheduler = scheduler_of(max_batch_rows=8)
        learn(scheduler, 2)
        for _ in range(100):
            add(scheduler)

        assert take_rows(scheduler) == 8

    def test_a_batch_does_not_grow_to_where_its_rows_take_longer_but_for_a_look_now_and_then(self) -> None:
        scheduler = scheduler_of(max_batch_rows=64, max_queue_rows=100_000)
        learn(scheduler, 8)
        scheduler.learn(A, 32, 10_000, 1)
        for _ in range(20_000):
            add(scheduler)

        taken = [take_rows(scheduler) for _ in range(2 * LOOK_AGAIN)]

        assert taken == [*[16] * (LOOK_AGAIN - 1), 64] * 2

    def test_a_stated_cap_is_not_unlearned(self) -> None:
        scheduler = scheduler_of(cap_rows=8, max_batch_rows=64)
        scheduler.learn(A, 1, 100, 1)
        for _ in range(8):
            add(scheduler)

        assert take_rows(scheduler) == 8

    def test_the_largest_preferred_size_that_can_be_filled_is_taken(self) -> None:
        scheduler = scheduler_of(preferred_rows=(4, 2))
        for _ in range(7):
            add(scheduler)

        assert [take_rows(scheduler) for _ in range(4)] == [4, 2, 1, None]


class TestHoldingOpen:
    def test_a_batch_that_is_not_full_is_held_for_the_delay(self) -> None:
        scheduler = scheduler_of(max_queue_delay_us=100)
        add(scheduler, now_ns=1_000)

        assert scheduler.take(1_000 + 100 * US - 1) is None
        assert take_rows(scheduler, 1_000 + 100 * US) == 1

    def test_a_full_batch_is_not_held(self) -> None:
        scheduler = scheduler_of(max_queue_delay_us=100)
        for _ in range(8):
            add(scheduler, now_ns=1_000)

        assert take_rows(scheduler, 1_000) == 8

    @pytest.mark.parametrize(("waiting", "taken"), [(1, None), (2, 2), (3, None), (4, 4), (5, 4)])
    def test_a_preferred_size_is_not_held(self, waiting: int, taken: int | None) -> None:
        scheduler = scheduler_of(max_queue_delay_us=100, preferred_rows=(2, 4))
        for _ in range(waiting):
            add(scheduler, now_ns=1_000)

        assert take_rows(scheduler, 1_000) == taken

    def test_one_that_is_due_goes_before_an_older_one_that_is_held(self) -> None:
        scheduler = scheduler_of(max_queue_delay_us=100)
        add(scheduler, 1, A, now_ns=1_000)
        add(scheduler, 8, B, now_ns=2_000)

        batch = scheduler.take(3_000)

        assert batch is not None
        assert batch.key == B

    def test_it_says_when_the_next_is_due(self) -> None:
        scheduler = scheduler_of(max_queue_delay_us=100)
        assert scheduler.due_ns(1) == 0
        add(scheduler, 1, A, now_ns=2_000)
        add(scheduler, 1, B, now_ns=1_000)

        assert scheduler.due_ns(3_000) == 1_000 + 100 * US
        assert scheduler.due_ns(1_000 + 100 * US) == 2_000 + 100 * US
        assert scheduler.due_ns(2_000 + 100 * US) == 0

    def test_the_delay_begins_anew_with_the_head_that_is_left(self) -> None:
        scheduler = scheduler_of(max_queue_delay_us=100)
        first = add(scheduler, now_ns=1_000)
        add(scheduler, now_ns=9_000)
        scheduler.remove(first)

        assert scheduler.due_ns(10_000) == 9_000 + 100 * US

    def test_without_a_delay_nothing_is_held(self) -> None:
        scheduler = scheduler_of()
        add(scheduler, now_ns=1_000)

        assert scheduler.due_ns(1) == 0


class TestTheQueueIsBounded:
    @pytest.mark.parametrize(
        ("policy", "rows", "accepted"),
        [
            ({"max_queue_rows": 5}, 2, 2),
            ({"max_queue_rows": 6}, 2, 3),
            ({"max_queue_bytes": 3 * 16}, 1, 3),
            ({"max_queue_bytes": 3 * 16 - 1}, 1, 2),
            ({"max_queue_requests": 4}, 1, 4),
        ],
    )
    def test_in_rows_and_bytes_and_requests(self, policy: dict[str, int], rows: int, accepted: int) -> None:
        scheduler = scheduler_of(**policy)
        for _ in range(accepted):
            add(scheduler, rows)

        with pytest.raises(InferError, match="Exceeds maximum queue size") as caught:
            add(scheduler, rows)

        assert caught.value.code is Code.OVERLOADED
        assert counters(scheduler) == (accepted * rows, accepted, accepted * rows * 16)

    def test_over_all_keys_together(self) -> None:
        scheduler = scheduler_of(max_queue_rows=2)
        add(scheduler, 1, A)
        add(scheduler, 1, B)

        with pytest.raises(InferError):
            add(scheduler, 1, C)

    def test_requests_without_rows_are_bounded_too(self) -> None:
        scheduler = scheduler_of(max_queue_rows=3)
        for _ in range(3):
            add(scheduler, 0)

        assert scheduler.full()
        with pytest.raises(InferError):
            add(scheduler, 0)

    def test_a_request_bigger_than_the_queue_is_served_when_it_is_alone(self) -> None:
        scheduler = scheduler_of(max_queue_rows=2, max_queue_bytes=16)

        assert add(scheduler, 8).waiting

    def test_a_refused_request_does_not_wait(self) -> None:
        scheduler = scheduler_of(max_queue_rows=1)
        add(scheduler)
        refused = fake_request(MODEL)
        with pytest.raises(InferError):
            scheduler.add(refused)

        assert not refused.waiting

    @pytest.mark.parametrize("policy", [{"max_queue_rows": 2}, {"max_queue_bytes": 32}, {"max_queue_requests": 2}])
    def test_it_is_full_when_nothing_more_would_be_taken_in(self, policy: dict[str, int]) -> None:
        scheduler = scheduler_of(**policy)
        seen = [scheduler.full()]
        for _ in range(2):
            add(scheduler)
            seen.append(scheduler.full())
        scheduler.take(1)
        seen.append(scheduler.full())

        assert seen == [False, False, True, False]


class TestLeaving:
    def test_one_that_has_expired_is_not_taken(self) -> None:
        scheduler = scheduler_of()
        late = add(scheduler, deadline_ns=10)
        other = add(scheduler, deadline_ns=11)

        batch = scheduler.take(10)

        assert batch is not None
        assert batch.requests == [other]
        assert scheduler.expired == [late]
        assert counters(scheduler) == (0, 0, 0)

    @pytest.mark.parametrize(("instances", "wait_ns"), [(1, 10_000), (2, 5_000)])
    def test_one_that_would_expire_in_the_queue_is_refused_at_the_door(self, instances: int, wait_ns: int) -> None:
        scheduler = Scheduler(BatchPolicy(max_batch_rows=8), CostModel(), 0, instances)
        learn(scheduler, 4)
        for _ in range(40):
            add(scheduler)

        with pytest.raises(InferError) as caught:
            add(scheduler, now_ns=100, deadline_ns=100 + wait_ns - 1)
        add(scheduler, now_ns=100, deadline_ns=100 + wait_ns)

        assert (caught.value.code, caught.value.message) == (Code.EXPIRED, "Request timeout expired")
        assert counters(scheduler)[:2] == (41, 41)

    def test_one_that_finds_nothing_waiting_is_taken_in_however_long_a_run_is(self) -> None:
        scheduler = scheduler_of()
        scheduler.learn(A, 1, 1_000_000, 1)

        add(scheduler, now_ns=100, deadline_ns=101)

    def test_nothing_is_known_of_a_key_that_has_never_run(self) -> None:
        scheduler = scheduler_of()
        scheduler.learn(A, 1, 1_000_000, 1)
        add(scheduler)

        add(scheduler, key=B, now_ns=100, deadline_ns=101)

    def test_the_nearest_deadline_is_known(self) -> None:
        scheduler = scheduler_of()
        assert scheduler.nearest_deadline_ns() == 0
        for deadline_ns in (30, 10, 20, 0):
            add(scheduler, deadline_ns=deadline_ns)

        nearest = [scheduler.nearest_deadline_ns()]
        for now_ns in (10, 20, 30):
            scheduler.expire(now_ns)
            nearest.append(scheduler.nearest_deadline_ns())

        assert nearest == [10, 20, 30, 0]

    def test_draining_takes_out_all_that_waits(self) -> None:
        scheduler = scheduler_of()
        requests = [add(scheduler, key=key) for key in (A, B, A)]
        scheduler.remove(requests[0])

        assert set(scheduler.drain()) == set(requests[1:])
        assert counters(scheduler) == (0, 0, 0)
        assert scheduler.take(1) is None


def lanes_alive() -> int:
    gc.collect()
    return sum(isinstance(each, Lane) for each in gc.get_objects())


class TestMemory:
    def test_any_number_of_keys_leaves_few_lanes(self) -> None:
        scheduler, before = scheduler_of(), lanes_alive()
        for width in range(10 * KEPT_LANES):
            add(scheduler, key=((width,),))
            scheduler.take(1)

        assert 0 < lanes_alive() - before <= KEPT_LANES

    def test_keys_that_wait_are_all_kept(self) -> None:
        scheduler = scheduler_of()
        requests = [add(scheduler, key=((width,),), now_ns=width + 1) for width in range(3 * KEPT_LANES)]

        taken = [batch.requests[0] for _ in requests if (batch := scheduler.take(999))]

        assert taken == requests


class TestFastLanes:
    @pytest.mark.parametrize(("measured_ns", "fast"), [(99, True), (100, False), (None, False)])
    def test_a_lane_is_fast_when_its_batches_are_predicted_to_be(self, measured_ns: int | None, fast: bool) -> None:
        scheduler = Scheduler(BatchPolicy(max_batch_rows=8), CostModel(), fast_ns=100)
        if measured_ns is not None:
            scheduler.learn(A, 1, measured_ns, 1)

        assert scheduler.add(fake_request(MODEL)).fast is fast

    @pytest.mark.parametrize("delay_us", [0, 1])
    def test_the_oldest_of_the_fast_lanes_can_be_asked_for(self, delay_us: int) -> None:
        policy = BatchPolicy(max_batch_rows=8, max_queue_delay_us=delay_us)
        scheduler = Scheduler(policy, CostModel(), fast_ns=100)
        scheduler.learn(B, 1, 90, 1)
        scheduler.learn(C, 1, 90, 1)
        add(scheduler, 1, A, 1)
        alone = scheduler.next_lane(2000, fast=True)
        lanes = [scheduler.add(fake_request(MODEL, 1, key)) for key in (B, C)]
        for now_ns, lane in zip((3, 2), lanes, strict=True):
            lane.live_requests()[0].queue_ns = now_ns

        assert alone is None
        assert scheduler.next_lane(2000, fast=True) is lanes[1]
        oldest = scheduler.next_lane(2000)
        assert oldest is not None
        assert oldest.key == A

    def test_a_lane_that_becomes_slow_is_fast_no_more(self) -> None:
        scheduler = Scheduler(BatchPolicy(max_batch_rows=8), CostModel(), fast_ns=100)
        scheduler.learn(A, 1, 90, 1)
        lane = scheduler.add(fake_request(MODEL))
        for _ in range(24):
            scheduler.learn(A, 1, 200, 1)

        assert not lane.fast


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of arrivals, takes, cancellations, deadlines and lessons, against a plain list of what waits."""

    @initialize(
        max_rows=st.integers(1, 12),
        cap=st.none() | st.integers(1, 12),
        knee=st.sampled_from((0, 1, 2, 4, 8)),
        queue=st.tuples(st.integers(4, 40), st.integers(100, 1000), st.integers(0, 12)),
    )
    def start(self, max_rows: int, cap: int | None, knee: int, queue: tuple[int, int, int]) -> None:
        self.policy = BatchPolicy(
            max_batch_rows=max_rows,
            cap_rows=cap,
            max_queue_rows=queue[0],
            max_queue_bytes=queue[1],
            max_queue_requests=queue[2],
        )
        self.scheduler = Scheduler(self.policy, CostModel())
        self.knee = knee
        if knee:
            learn(self.scheduler, knee, A, B, C)
        self.now_ns = 1
        self.waiting: list[InferRequest] = []
        self.patience: dict[InferRequest, int] = {}
        self.gone: list[InferRequest] = []

    @rule(rows=st.integers(0, 12), key=st.sampled_from((A, B, C)), timeout_ns=st.integers(0, 20))
    def arrive(self, rows: int, key: Key, timeout_ns: int) -> None:
        self.now_ns += 1
        request = fake_request(MODEL, min(rows, self.policy.max_batch_rows or 1), key)
        request.queue_ns = self.now_ns
        request.deadline_ns = self.now_ns + timeout_ns if timeout_ns else 0
        code = None
        try:
            self.scheduler.add(request)
        except InferError as error:
            code = error.code
        assert (code is Code.OVERLOADED) == self._exceeded_by(request)
        if code is Code.EXPIRED:
            assert self.knee
            assert request.deadline_ns
        if code is None:
            self.patience[request] = len(self.waiting) + 1
            self.waiting.append(request)

    def _exceeded_by(self, request: InferRequest) -> bool:
        policy, more = self.policy, [*self.waiting, request]
        return bool(self.waiting) and (
            sum(each.rows for each in more) > policy.max_queue_rows
            or sum(each.nbytes for each in more) > policy.max_queue_bytes
            or len(more) > (policy.max_queue_requests or policy.max_queue_rows)
        )

    @rule(passed_ns=st.integers(1, 10))
    def take(self, passed_ns: int) -> None:
        self.now_ns += passed_ns
        batch = self.scheduler.take(self.now_ns)
        self._leave(self.scheduler.expired)
        self.scheduler.expired = []
        if batch is None:
            assert not self.waiting
            return
        assert batch.requests[0] is self.waiting[0]
        lane = [request for request in self.waiting if request.key == batch.key]
        assert batch.requests == [request for request in lane if request in batch.requests]
        assert batch.rows == sum(request.rows for request in batch.requests)
        self._assert_capacity(batch.rows, batch.requests[0].rows, lane)
        for request in self.waiting:
            self.patience[request] -= 1
        self._remove(batch.requests)
        # whoever waited ahead of it has gone by now, each with a take of its own at worst
        assert all(self.patience[request] >= 0 for request in batch.requests)
        assert all(self.patience[request] > 0 for request in self.waiting)

    def _assert_capacity(self, rows: int, head_rows: int, lane: list[InferRequest]) -> None:
        lane_rows, all_rows = (sum(request.rows for request in each) for each in (lane, self.waiting))
        limit = max_rows = self.policy.max_batch_rows or 1
        if self.policy.cap_rows:
            limit = min(self.policy.cap_rows, max_rows)
        elif self.knee:
            limit = min(max(self.knee, (all_rows + 1) // 2), max_rows)
        assert rows <= max_rows
        assert rows <= max(limit, head_rows)
        if len(lane) <= LOOK_AHEAD and all(request.rows == 1 for request in lane):
            assert rows == min(limit, lane_rows)

    @precondition(lambda self: self.waiting)
    @rule(position=st.integers(0, 99))
    def cancel(self, position: int) -> None:
        request = self.waiting[position % len(self.waiting)]
        self.scheduler.remove(request)
        self._remove([request])

    @rule(passed_ns=st.integers(0, 10))
    def expire(self, passed_ns: int) -> None:
        self.now_ns += passed_ns
        self._leave(self.scheduler.expire(self.now_ns))

    def _leave(self, expired: list[InferRequest]) -> None:
        late = [request for request in self.waiting if 0 < request.deadline_ns <= self.now_ns]
        assert sorted(map(id, expired)) == sorted(map(id, late))
        self._remove(expired)

    def _remove(self, requests: list[InferRequest]) -> None:
        for request in requests:
            self.waiting.remove(request)
            self.gone.append(request)

    @invariant()
    def it_counts_what_waits(self) -> None:
        assert self.scheduler.rows == sum(request.rows for request in self.waiting)
        assert self.scheduler.live == len(self.waiting)
        assert self.scheduler.nbytes == sum(request.nbytes for request in self.waiting)

    @invariant()
    def those_and_only_those_are_waiting(self) -> None:
        assert all(request.waiting for request in self.waiting)
        assert not any(request.waiting for request in self.gone)

    @invariant()
    def the_alarm_is_never_late(self) -> None:
        deadlines = [request.deadline_ns for request in self.waiting if request.deadline_ns]
        assert not deadlines or 0 < self.scheduler.nearest_deadline_ns() <= min(deadlines)

    def teardown(self) -> None:
        if hasattr(self, "scheduler"):
            assert sorted(map(id, self.scheduler.drain())) == sorted(map(id, self.waiting))
            assert counters(self.scheduler) == (0, 0, 0)


TestWhateverHappens = SchedulerMachine.TestCase
TestWhateverHappens.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
