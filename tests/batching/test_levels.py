"""Levels: priority levels, timeouts that delay, and a queue for each level, in Lanes and in the Scheduler."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.backends.errors import Code, InferError
from penstock.batching.request import InferRequest, Key
from penstock.batching.scheduling.costs import CostModel
from penstock.batching.scheduling.lane import MAX_SKIPPED
from penstock.batching.scheduling.levels import STARVATION_NS, LevelLane, Levels
from penstock.batching.scheduling.queue_limits import QueueLimits
from penstock.batching.scheduling.scheduler import Scheduler
from penstock.batching.spec import BatchPolicy, QueuePolicy
from tests.fakes import fake_model, fake_request

A, B = ((4,),), ((5,),)
MODEL = fake_model()


def scheduler_of(costs: CostModel | None = None, **policy: Any) -> Scheduler:
    terms = {"max_batch_rows": 8, "priority_levels": 3, "default_priority": 2} | policy
    return Scheduler(BatchPolicy(**terms), costs or CostModel())


def add(
    scheduler: Scheduler, priority: int = 0, rows: int = 1, key: Key = A, *, now_ns: int = 1, deadline_ns: int = 0
) -> InferRequest:
    request = fake_request(MODEL, rows, key)
    request.start_ns = request.enqueued_ns = now_ns
    request.priority, request.deadline_ns = priority, deadline_ns
    scheduler.add(request)
    return request


def take_requests(scheduler: Scheduler, now_ns: int = 1) -> list[InferRequest]:
    batch = scheduler.take(now_ns)
    return [] if batch is None else batch.requests


class TestOrder:
    def test_the_highest_level_goes_first_then_the_oldest_request(self) -> None:
        scheduler = scheduler_of()
        requests = [add(scheduler, priority) for priority in (3, 0, 1, 2, 7, 1)]

        assert take_requests(scheduler) == [requests[at] for at in (2, 5, 1, 3, 4, 0)]

    def test_a_lower_level_fills_the_room_left_by_a_higher_one(self) -> None:
        scheduler = scheduler_of(max_batch_rows=4)
        low, high, big = add(scheduler, 3, 1), add(scheduler, 1, 3), add(scheduler, 2, 2)

        assert [take_requests(scheduler), take_requests(scheduler)] == [[high, low], [big]]

    def test_the_lane_with_the_highest_level_goes_first_then_the_most_urgent_lane(self) -> None:
        scheduler = scheduler_of()
        low, other = add(scheduler, 3, key=A, now_ns=1), add(scheduler, 2, key=B, now_ns=2)
        later = add(scheduler, 2, key=A, now_ns=3)

        assert [take_requests(scheduler), take_requests(scheduler)] == [[other], [later, low]]

    def test_a_held_lane_does_not_block_a_full_lane_of_a_lower_level(self) -> None:
        scheduler = scheduler_of(max_queue_delay_us=100)
        high, low = add(scheduler, 1, key=A), add(scheduler, 3, 8, key=B)

        assert [take_requests(scheduler), take_requests(scheduler), take_requests(scheduler, 100_001)] == [
            [low],
            [],
            [high],
        ]

    def test_preferred_sizes_count_over_all_levels(self) -> None:
        scheduler = scheduler_of(preferred_rows=(2, 6), max_queue_delay_us=100)
        low, high = add(scheduler, 3), add(scheduler, 1)
        middle = add(scheduler, 2)

        assert [take_requests(scheduler), take_requests(scheduler)] == [[high, middle], []]
        assert take_requests(scheduler, 100_001) == [low]

    def test_the_queue_delay_counts_from_the_oldest_request_of_any_level(self) -> None:
        scheduler = scheduler_of(max_queue_delay_us=100)
        low, high = add(scheduler, 3, now_ns=1_000), add(scheduler, 1, now_ns=50_000)

        assert scheduler.due_ns(60_000) == 101_000
        assert take_requests(scheduler, 101_000) == [high, low]

    def test_a_batch_skips_a_limited_number_of_requests_that_do_not_fit(self) -> None:
        scheduler = scheduler_of()
        first, *_ = [add(scheduler, 2, rows) for rows in (2, *[7] * (MAX_SKIPPED - 1))]
        fits = add(scheduler, 3)

        assert take_requests(scheduler) == [first, fits]

        first = add(scheduler, 1, 2)
        add(scheduler, 2, 7)
        add(scheduler, 3)

        assert take_requests(scheduler) == [first]

    def test_a_model_without_rows_runs_one_request_at_a_time_in_level_order(self) -> None:
        scheduler = scheduler_of(max_batch_rows=0)
        low, high = add(scheduler, 3), add(scheduler, 1)

        assert [take_requests(scheduler), take_requests(scheduler), take_requests(scheduler)] == [[high], [low], []]


class TestStarvation:
    def test_a_starving_request_goes_first_and_takes_one_place_in_the_batch(self) -> None:
        scheduler = scheduler_of(max_batch_rows=2)
        starved = [add(scheduler, 3, now_ns=at) for at in (1, 2)]
        high = [add(scheduler, 1, now_ns=STARVATION_NS) for _ in range(4)]

        assert [take_requests(scheduler, STARVATION_NS) for _ in range(1)] == [high[:2]]
        assert [take_requests(scheduler, STARVATION_NS + 5) for _ in range(2)] == [
            [starved[0], high[2]],
            [starved[1], high[3]],
        ]

    def test_the_lane_of_a_starving_request_goes_first(self) -> None:
        scheduler = scheduler_of()
        starved, high = add(scheduler, 3, key=A, now_ns=1), add(scheduler, 1, key=B, now_ns=2)

        assert [take_requests(scheduler, STARVATION_NS + 1), take_requests(scheduler, STARVATION_NS + 1)] == [
            [starved],
            [high],
        ]

    def test_a_late_clock_alone_starves_no_request(self) -> None:
        scheduler, now_ns = scheduler_of(), 10 * STARVATION_NS
        low, high = add(scheduler, 3, key=A, now_ns=now_ns), add(scheduler, 1, key=B, now_ns=now_ns)

        assert [take_requests(scheduler, now_ns + 1), take_requests(scheduler, now_ns + 1)] == [[high], [low]]


class TestTimeouts:
    def test_a_delayed_request_goes_behind_its_own_level_and_before_the_next(self) -> None:
        scheduler = scheduler_of(timeout_delays=True)
        delayed = [add(scheduler, 2, deadline_ns=20), add(scheduler, 2, deadline_ns=10)]
        others = [add(scheduler, 3), add(scheduler, 2), add(scheduler, 1)]

        assert scheduler.expire(10) == scheduler.expire(30) == []
        late = add(scheduler, 2, deadline_ns=99)
        assert scheduler.nearest_deadline_ns() == 99
        assert take_requests(scheduler, 30) == [others[2], others[1], late, delayed[1], delayed[0], others[0]]
        assert scheduler.expired == []

    def test_a_delayed_request_is_as_urgent_as_one_without_a_timeout(self) -> None:
        scheduler = scheduler_of(timeout_delays=True)
        other, delayed = add(scheduler, key=B, now_ns=1), add(scheduler, key=A, now_ns=2, deadline_ns=10)

        assert [take_requests(scheduler, 10), take_requests(scheduler, 10)] == [[other], [delayed]]

    def test_each_level_delays_or_rejects_expired_requests_by_its_own_policy(self) -> None:
        scheduler = scheduler_of(level_policies={1: QueuePolicy(delays_on_timeout=True)})
        delayed, rejected = add(scheduler, 1, deadline_ns=10), add(scheduler, 3, deadline_ns=10)

        assert take_requests(scheduler, 10) == [delayed]
        assert scheduler.expired == [rejected]

    def test_expired_requests_are_delayed_without_priority_levels(self) -> None:
        scheduler = scheduler_of(priority_levels=0, default_priority=0, timeout_delays=True)
        delayed, other = add(scheduler, deadline_ns=10), add(scheduler, 9)

        assert take_requests(scheduler, 10) == [other, delayed]

    def test_a_delayed_request_can_be_canceled(self) -> None:
        scheduler = scheduler_of(timeout_delays=True)
        delayed = add(scheduler, deadline_ns=10)
        scheduler.expire(10)
        scheduler.remove(delayed)

        assert (scheduler.request_count, scheduler.rows, take_requests(scheduler, 20)) == (0, 0, [])


class Slow(CostModel):
    """A device that needs a millisecond for a batch of up to eight rows."""

    def __init__(self) -> None:
        super().__init__()
        for rows in (1, 2, 4, 8):
            self.observe(A, rows, 1_000_000, 1)
            self.observe(B, rows, 1_000_000, 1)


class TestAdmission:
    def test_only_requests_ahead_in_the_lane_count_against_a_deadline(self) -> None:
        scheduler = scheduler_of(Slow())
        for _ in range(32):
            add(scheduler, 2)

        assert add(scheduler, 1, deadline_ns=500_000).waiting
        with pytest.raises(InferError) as caught:
            add(scheduler, 2, deadline_ns=500_000)
        with pytest.raises(InferError):
            add(scheduler, 3, deadline_ns=500_000)
        assert caught.value.code is Code.EXPIRED

    def test_another_lane_counts_against_a_deadline_if_all_of_it_has_a_higher_level(self) -> None:
        scheduler = scheduler_of(Slow())
        for _ in range(32):
            add(scheduler, 2, key=B)

        assert add(scheduler, 1, deadline_ns=500_000).waiting
        assert add(scheduler, 2, deadline_ns=500_000).waiting
        with pytest.raises(InferError):
            add(scheduler, 3, deadline_ns=500_000)

    def test_a_lane_with_some_requests_of_a_lower_level_does_not_count_against_a_deadline(self) -> None:
        scheduler = scheduler_of(Slow())
        for priority in (2, 3) * 16:
            add(scheduler, priority, key=B)

        assert add(scheduler, 3, deadline_ns=500_000).waiting

    def test_a_request_whose_timeout_only_delays_is_never_rejected_as_late(self) -> None:
        scheduler = scheduler_of(Slow(), timeout_delays=True)
        for _ in range(64):
            add(scheduler)

        assert add(scheduler, 3, deadline_ns=2).waiting

    def test_no_request_is_rejected_as_late_before_its_body_is_decoded(self) -> None:
        scheduler = scheduler_of(Slow(), latency_target_us=1_000)
        for _ in range(64):
            add(scheduler, 3)

        assert scheduler.late_error(1, 1) is None

    def test_a_request_that_will_miss_its_target_gives_way_within_its_level(self) -> None:
        scheduler = scheduler_of(max_batch_rows=1)
        for rows in (1, 2):
            scheduler.learn(A, rows, 1_000_000, 1)
        requests = []
        for priority, target_ns in ((2, 2_000_000), (2, 90_000_000), (3, 90_000_000)):
            request = fake_request(MODEL)
            request.start_ns = request.enqueued_ns = 1
            request.priority, request.target_ns = priority, target_ns
            scheduler.add(request)
            requests.append(request)

        assert [take_requests(scheduler, 5_000_000)[0] for _ in range(3)] == [requests[at] for at in (1, 0, 2)]


FOUR_REQUESTS = [({"max_queue_rows": 4}, 1), ({"max_queue_bytes": 4 * 16}, 1), ({"max_queue_rows": 4}, 0)]
"""Limits of four requests, each with so many rows: by rows, by bytes, and by the number of requests."""


class TestQueueLimits:
    def test_each_level_has_its_own_queue_limit(self) -> None:
        scheduler = scheduler_of(max_queue_requests=2, level_policies={1: QueuePolicy(max_requests=1)})
        for priority in (1, 2, 2, 3, 3):
            add(scheduler, priority)

        for priority in (1, 2, 3, 0):
            with pytest.raises(InferError, match="Exceeds maximum queue size") as caught:
                add(scheduler, priority)
            assert caught.value.code is Code.OVERLOADED
        assert not scheduler.is_full()

    @pytest.mark.parametrize("levels", [0, 1])
    def test_a_full_queue_is_known_before_decoding_only_with_a_single_level(self, levels: int) -> None:
        scheduler = scheduler_of(
            priority_levels=levels, default_priority=levels, timeout_delays=True, max_queue_requests=2
        )
        was_full = [scheduler.is_full()]
        for _ in range(2):
            add(scheduler)
            was_full.append(scheduler.is_full())

        assert was_full == [False, False, True]

    @pytest.mark.parametrize(("bound", "rows"), FOUR_REQUESTS)
    def test_requests_of_a_lower_level_do_not_fill_the_queue_of_a_higher_one(
        self, bound: dict[str, Any], rows: int
    ) -> None:
        scheduler = scheduler_of(**bound)
        for priority in (3, 2, 1):
            for _ in range(4 if priority == 3 else 2):
                add(scheduler, priority, rows)
            assert not scheduler.is_full()
        for _ in range(2):
            add(scheduler, 1, rows)

        assert scheduler.is_full()
        for priority in (1, 2, 3):
            with pytest.raises(InferError, match="Exceeds maximum queue size"):
                add(scheduler, priority)
        assert [request.priority for request in take_requests(scheduler)][:8] == [1] * 4 + [2] * 2 + [3] * 2

    @pytest.mark.parametrize(("bound", "rows"), FOUR_REQUESTS)
    def test_all_levels_together_hold_at_most_four_times_the_queue_limit(
        self, bound: dict[str, Any], rows: int
    ) -> None:
        scheduler = scheduler_of(priority_levels=1000, default_priority=1000, **bound)
        for priority in range(1000, 984, -1):
            add(scheduler, priority, rows)

        with pytest.raises(InferError, match="Exceeds maximum queue size"):
            add(scheduler, 984)
        assert scheduler.request_count == 16
        take_requests(scheduler)
        add(scheduler, 984)

    def test_a_request_larger_than_the_queue_is_accepted_if_no_equal_or_higher_level_waits(self) -> None:
        scheduler = scheduler_of(max_queue_rows=2)
        add(scheduler, 3)

        assert add(scheduler, 1, 8).waiting
        with pytest.raises(InferError):
            add(scheduler, 2)

    @pytest.mark.parametrize("leaves", ["take", "remove", "expire", "drain"])
    def test_a_request_that_leaves_the_queue_makes_room(self, leaves: str) -> None:
        scheduler = scheduler_of(level_policies={1: QueuePolicy(max_requests=1)})
        for _ in range(3):
            request = add(scheduler, 1, deadline_ns=5)
            if leaves == "take":
                take_requests(scheduler)
            elif leaves == "remove":
                scheduler.remove(request)
            elif leaves == "expire":
                assert scheduler.expire(5) == [request]
            else:
                assert scheduler.drain() == [request]

    def test_a_rejected_request_takes_no_room(self) -> None:
        scheduler = scheduler_of(Slow(), level_policies={3: QueuePolicy(max_requests=1)})
        for _ in range(64):
            add(scheduler, 2)
        with pytest.raises(InferError):
            add(scheduler, 3, deadline_ns=2)

        assert add(scheduler, 3).waiting


def test_rows_of_a_removed_request_no_longer_count_in_its_lane() -> None:
    policy = BatchPolicy(priority_levels=2, default_priority=1)
    lane = LevelLane(A, Levels(policy, QueueLimits(policy)))
    remaining, removed = fake_request(MODEL, 2), fake_request(MODEL, 3)
    for request in (remaining, removed):
        request.priority = 1
        lane.add(request)

    lane.remove(removed)

    assert (lane.rows, lane.rows_ahead(remaining)) == (2, 2)


def test_a_late_request_beyond_the_batch_keeps_its_place_in_its_level() -> None:
    policy = BatchPolicy(priority_levels=2, default_priority=1)
    lane = LevelLane(A, Levels(policy, QueueLimits(policy)))
    first, late, last = (fake_request(MODEL, rows) for rows in (2, 1, 1))
    late.target_ns = 10
    for request in (first, late, last):
        request.priority = 1
        lane.add(request)

    assert lane.take(2, end_ns=20) == ([first], 2)
    assert lane.take(1) == ([late], 1)


def test_a_lane_keeps_queues_only_for_levels_with_waiting_requests() -> None:
    policy = BatchPolicy(priority_levels=2**64 - 1, default_priority=1)
    levels = Levels(policy, QueueLimits(policy))
    lane = LevelLane(A, levels)
    for level in range(1, 1000):
        request = fake_request(MODEL)
        request.priority = level
        lane.add(request)
        lane.take(8)

    assert (lane.request_count, lane._queues, lane._sorted_levels, levels._totals) == (0, {}, [], {})


class TestHolding:
    def test_no_batch_is_taken_until_the_configured_number_of_requests_has_arrived(self) -> None:
        scheduler = scheduler_of(hold_requests=3, priority_levels=0, default_priority=0)
        first = [add(scheduler, rows=8), add(scheduler)]
        assert take_requests(scheduler) == []
        first.append(add(scheduler))

        assert [take_requests(scheduler), take_requests(scheduler)] == [first[:1], first[1:]]
        again = add(scheduler)
        assert take_requests(scheduler) == [again]

    def test_expired_and_canceled_requests_do_not_count_toward_the_number_held(self) -> None:
        scheduler = scheduler_of(hold_requests=2, priority_levels=0, default_priority=0)
        late, canceled = add(scheduler, deadline_ns=5), None
        assert take_requests(scheduler, 6) == []
        assert scheduler.expired == [late]
        canceled = add(scheduler)
        scheduler.remove(canceled)
        assert take_requests(scheduler, 6) == []
        remaining = [add(scheduler), add(scheduler)]

        assert take_requests(scheduler, 6) == remaining
