"""Promises: when a request would be answered, and the margin learned from how wrong that was."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.backends.errors import InferError
from penstock.batching.request import Key
from penstock.batching.running.batch import Batch
from penstock.batching.scheduling.costs import CostModel
from penstock.batching.scheduling.lane import Lane
from penstock.batching.scheduling.promise import MAX_MARGIN_SHARE, PROBE_NS, QUANTILE, Margin, Promises
from tests.fakes import fake_model, fake_request

KEY = ((4,),)
MODEL = fake_model()
MS = 1_000_000
TARGET_NS = 20 * MS


def promises_of(instances: int = 1) -> tuple[Promises, Lane]:
    """Make Promises for one Lane whose batches of 8 rows take 1 ms."""
    lanes: dict[Key, Lane] = {KEY: Lane(KEY)}
    lane = lanes[KEY]
    lane.full_batch_rows, lane.full_batch_ns, lane.full_batch_p95_ns = 8, float(MS), float(MS)
    costs = CostModel()
    costs.observe(KEY, 8, MS, 1)
    return Promises(lanes, costs, instances), lane


def promised_ns(promises: Promises, lane: Lane, now_ns: int = 0) -> int:
    """The time that one more request would be promised, in nanoseconds from now."""
    request = fake_request(MODEL)
    request.enqueued_ns = request.start_ns = now_ns
    request.target_ns = 1 << 60
    promises.check(request, lane)
    return request.promised_ns - now_ns


def batch_of(now_ns: int, cost_ns: float = MS) -> Batch:
    batch = Batch([fake_request(MODEL)], 1, KEY, now_ns)
    batch.cost_ns = cost_ns
    return batch


class TestMargin:
    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.floats(-1e12, 1e12), max_size=200), st.integers(1, 10**10))
    def test_the_margin_stays_within_its_share_of_the_target(self, late: list[float], target_ns: int) -> None:
        margin = Margin()
        for each in late:
            margin.observe(each, target_ns)

            assert 0 <= margin.ns <= target_ns * MAX_MARGIN_SHARE

    @settings(max_examples=20, deadline=None)
    @given(st.integers(0, 2**32), st.sampled_from((1_000, 100_000, 1_000_000)), st.booleans())
    def test_nearly_all_requests_are_answered_within_the_margin(self, seed: int, scale_ns: int, early: bool) -> None:
        margin, rng = Margin(), random.Random(seed)
        within = 0
        margins_ns = []
        for number in range(6_000):
            late_ns = rng.expovariate(1) * scale_ns - (2 * scale_ns if early else 0)
            if number >= 2_000:
                within += late_ns <= margin.ns
                margins_ns.append(margin.ns)
            margin.observe(late_ns, 100 * scale_ns)

        assert within / 4_000 >= QUANTILE - 0.015
        # 99 of 100 values are below ln 100
        assert sum(margins_ns) / len(margins_ns) <= (3.0 if early else 5.5) * scale_ns

    def test_one_very_late_answer_hardly_changes_the_margin(self) -> None:
        margin = Margin()
        for _ in range(100):
            margin.observe(100_000, TARGET_NS)
        before_ns = margin.ns
        margin.observe(3_000_000_000, TARGET_NS)

        assert margin.ns - before_ns < TARGET_NS / 50

    def test_the_margin_decreases_when_answers_are_on_time(self) -> None:
        margin = Margin()
        for _ in range(200):
            margin.observe(4 * MS, TARGET_NS)
        high_ns = margin.ns
        for _ in range(4_000):
            margin.observe(0, TARGET_NS)

        assert high_ns > 3 * MS
        assert margin.ns < 0.5 * MS


class TestPromise:
    def test_an_idle_device_promises_an_answer_after_one_run(self) -> None:
        promises, lane = promises_of()

        assert promised_ns(promises, lane) == MS

    def test_the_remainder_of_the_current_run_is_added_to_the_promise(self) -> None:
        promises, lane = promises_of()
        promises.record_taken(batch_of(0), 0)

        assert [promised_ns(promises, lane, now_ns) for now_ns in (0, MS // 4, MS)] == [2 * MS, 7 * MS // 4, MS]

    def test_a_late_run_is_assumed_to_last_as_long_again(self) -> None:
        promises, lane = promises_of()
        promises.record_taken(batch_of(0), 0)

        assert promised_ns(promises, lane, 41 * MS) == 41 * MS

    def test_one_late_run_does_not_delay_promises_while_another_instance_is_on_time(self) -> None:
        promises, lane = promises_of(instances=2)
        promises.record_taken(batch_of(0), 0)
        promises.record_taken(batch_of(40 * MS), 40 * MS)

        assert promised_ns(promises, lane, 41 * MS) == MS

    def test_a_finished_run_is_not_added_to_the_promise(self) -> None:
        promises, lane = promises_of()
        batch = batch_of(0, 50 * MS)
        promises.record_taken(batch, 0)
        promises.record_ended(batch, MS, has_waiting=False)

        assert promised_ns(promises, lane, MS) == MS

    @pytest.mark.parametrize(("waiting", "batches"), [(0, 1), (7, 1), (8, 2), (15, 2), (16, 3)])
    def test_a_request_is_promised_the_batch_that_it_fits(self, waiting: int, batches: int) -> None:
        promises, lane = promises_of()
        for _ in range(waiting):
            lane.add(fake_request(MODEL))
        promises.update_backlog(lane)

        assert promised_ns(promises, lane) == batches * MS

    def test_an_idle_instance_beside_a_busy_one_starts_at_once(self) -> None:
        promises, lane = promises_of(instances=2)
        promises.record_taken(batch_of(0, 50 * MS), 0)

        assert promised_ns(promises, lane) == MS

    def test_the_time_between_batches_is_learned_while_requests_wait(self) -> None:
        promises, lane = promises_of()
        now_ns = 0
        for _ in range(200):
            batch = batch_of(now_ns)
            promises.record_taken(batch, now_ns)
            promises.record_ended(batch, now_ns + MS, has_waiting=True)
            now_ns += MS + 300_000

        assert promises.gap_ns == pytest.approx(300_000, rel=0.05)
        promises.record_taken(batch_of(now_ns), now_ns)
        assert promised_ns(promises, lane, now_ns) == pytest.approx(2.3 * MS, rel=0.01)

    def test_time_without_waiting_requests_is_not_counted_as_time_between_batches(self) -> None:
        promises, _ = promises_of()
        for now_ns in range(0, 100 * MS, 10 * MS):
            batch = batch_of(now_ns)
            promises.record_taken(batch, now_ns)
            promises.record_ended(batch, now_ns + MS, has_waiting=False)

        assert promises.gap_ns == 0

    def test_a_clock_read_before_the_end_of_a_batch_does_not_make_the_gap_negative(self) -> None:
        promises, _ = promises_of()
        for now_ns in range(0, 100 * MS, MS):
            batch = batch_of(now_ns)
            promises.record_taken(batch, now_ns)
            promises.record_ended(batch, now_ns + 2 * MS, has_waiting=True)

        assert promises.gap_ns == 0

    @given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=40))
    def test_the_backlog_is_the_sum_over_all_lanes(self, steps: list[tuple[int, bool]]) -> None:
        promises, _ = promises_of()
        lanes = [Lane(((width,),)) for width in range(3)]
        for lane in lanes:
            lane.full_batch_rows, lane.full_batch_ns = 4, 1_000.0 * (1 + lanes.index(lane))
        for number, adds in steps:
            lane = lanes[number]
            if adds:
                lane.add(fake_request(MODEL))
            elif lane.request_count:
                lane.take(3)
            promises.update_backlog(lane)

        assert promises.backlog_ns == sum(-(-lane.rows // 4) * lane.full_batch_ns for lane in lanes)


def test_an_idle_server_periodically_accepts_a_request_that_it_would_reject_as_late() -> None:
    promises, lane = promises_of()
    tried = []
    for now_ns in range(0, 3 * PROBE_NS, PROBE_NS // 10):
        request = fake_request(MODEL)
        request.enqueued_ns = request.start_ns = now_ns
        request.target_ns = now_ns + MS // 2
        try:
            promises.check(request, lane)
            tried.append(now_ns)
        except InferError:
            continue

    assert tried == [0, PROBE_NS, 2 * PROBE_NS]


class TestOverlapping:
    def test_a_batch_taken_during_a_run_is_promised_after_the_run_ends(self) -> None:
        promises, lane = promises_of()
        promises.record_taken(batch_of(0), 0)
        following = batch_of(MS // 2)
        following.device_free_ns = MS
        promises.record_taken(following, MS // 2)

        assert [promised_ns(promises, lane, now_ns) for now_ns in (MS // 2, MS, 3 * MS // 2)] == [
            5 * MS // 2, 2 * MS, 3 * MS // 2,
        ]  # fmt: skip

    def test_no_gap_is_measured_between_overlapping_batches(self) -> None:
        promises, _ = promises_of()
        promises.gap_ns = MS
        first, second = batch_of(0), batch_of(MS // 2)
        second.device_free_ns = MS
        promises.record_taken(first, 0)
        promises.record_taken(second, MS // 2)
        promises.record_ended(first, MS, False)
        third = batch_of(3 * MS)
        promises.record_taken(third, 3 * MS)

        assert promises.gap_ns == MS * 15 / 16
