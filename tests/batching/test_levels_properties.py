"""Properties of levels, policies, sizes and delays under any events, checked against a list of waiting requests."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.backends.errors import Code, InferError
from penstock.batching.request import InferRequest, Key
from penstock.batching.running.batch import Batch
from penstock.batching.scheduling.costs import CostModel
from penstock.batching.scheduling.levels import STARVATION_NS
from penstock.batching.scheduling.scheduler import Scheduler
from penstock.batching.scheduling.sizing import find_prefix
from penstock.batching.scheduling.timeouts import level_of, queue_deadline_ns
from penstock.batching.spec import BatchPolicy, QueuePolicy
from tests.fakes import fake_model, fake_request

A, B, C = ((4,),), ((5,),), ((6,),)
MODEL = fake_model()
POLICIES = st.builds(
    QueuePolicy, st.sampled_from((0, 0, 1, 2)), st.booleans(), st.sampled_from((0, 0, 1, 3)), st.booleans()
)


class PolicyMachine(RuleBasedStateMachine):
    """Any order of arrivals, takes, cancellations and deadlines. `put_off`: the delayed requests, in order."""

    @initialize(
        max_rows=st.integers(1, 8),
        levels=st.sampled_from((0, 1, 3, 2**64 - 1)),
        default=POLICIES,
        own=st.dictionaries(st.integers(1, 3), POLICIES, max_size=2),
        preferred=st.sets(st.integers(1, 8), max_size=2),
        delay_us=st.sampled_from((0, 0, 1, 3)),
        hold=st.sampled_from((0, 0, 3)),
    )
    def start(
        self, max_rows: int, levels: int, default: QueuePolicy, own: dict[int, QueuePolicy], preferred: set[int],
        delay_us: int, hold: int,
    ) -> None:  # fmt: skip
        self.policy = BatchPolicy(
            max_batch_rows=max_rows,
            preferred_rows=tuple(size for size in preferred if size <= max_rows),
            max_queue_delay_us=delay_us,
            max_queue_rows=20,
            default_timeout_us=default.default_timeout_us,
            allow_timeout_override=default.allow_timeout_override,
            max_queue_requests=default.max_requests,
            timeout_delays=default.delays_on_timeout,
            priority_levels=levels,
            default_priority=min(levels, 2),
            level_policies={level: each for level, each in own.items() if level <= levels},
            hold_requests=hold,
        )
        self.default = default
        self.scheduler = Scheduler(self.policy, CostModel())
        self.hold = hold
        self.now_ns = 1
        self.waiting: list[InferRequest] = []
        self.put_off: list[InferRequest] = []
        self.deadlines: dict[InferRequest, int] = {}
        self.ended: set[InferRequest] = set()

    def _own(self, level: int) -> QueuePolicy:
        return self.policy.level_policies.get(level, self.default)

    @rule(
        rows=st.integers(1, 8), key=st.sampled_from((A, A, B)), priority=st.integers(0, 4),
        timeout_us=st.sampled_from((0, 0, 1, 2)), passed_ns=st.integers(0, 900),
    )  # fmt: skip
    def arrive(self, rows: int, key: Key, priority: int, timeout_us: int, passed_ns: int) -> None:
        self.now_ns += passed_ns
        self._expire()
        request = fake_request(MODEL, min(rows, self.policy.max_batch_rows or 1), key)
        request.start_ns = request.enqueued_ns = self.now_ns
        request.priority = priority
        request.deadline_ns = queue_deadline_ns(self.now_ns, timeout_us, self.policy, 0, priority)
        level = level_of(self.policy, priority)
        own = self._own(level)
        assert bool(request.deadline_ns) == bool(own.default_timeout_us or (own.allow_timeout_override and timeout_us))
        there = sum(each.priority == level for each in self.waiting)
        above = [each for each in self.waiting if self.scheduler.levels is None or each.priority <= level]
        over = sum(each.rows for each in above) + request.rows > self.policy.max_queue_rows
        if 0 < own.max_requests <= there or (over and above):
            with pytest.raises(InferError, match="Exceeds maximum queue size") as refused:
                self.scheduler.add(request)
            assert refused.value.code is Code.OVERLOADED
            return
        self.scheduler.add(request)
        assert request.priority == (level if self.scheduler.levels is not None else priority)
        request.priority = level
        self.deadlines[request] = request.deadline_ns
        self.waiting.append(request)

    @rule(passed_ns=st.integers(0, 2_000))
    def take(self, passed_ns: int) -> None:
        self.now_ns += passed_ns
        self._expire(run=False)
        batch = self.scheduler.take(self.now_ns)
        self._expire()
        if len(self.waiting) < self.hold:
            assert batch is None
            return
        if self.waiting:
            self.hold = 0
        if batch is None:
            assert not any(self._goes(key) for key in (A, B))
            return
        self._check(batch)
        self.scheduler.record_ended(batch, self.now_ns)
        for request in batch.requests:
            assert not request.waiting
            self.waiting.remove(request)
            self.put_off = [each for each in self.put_off if each is not request]
            self._end(request)

    def _line(self, key: Key) -> list[InferRequest]:
        """Return the waiting requests of a Key in the order in which they must run."""
        mine = [request for request in self.waiting if request.key == key]
        in_time = [request for request in mine if request not in self.put_off]
        late = [request for request in self.put_off if request.key == key]
        return sorted([*in_time, *late], key=lambda request: request.priority)  # stable: those in time come first

    def _goes(self, key: Key) -> int:
        """Return how many rows of a Key run now, as in Triton; 0 for none."""
        line = self._line(key)
        if not line:
            return 0
        prefix = find_prefix(
            [request.rows for request in line],
            self.policy.preferred_rows or (self.policy.max_batch_rows or 1,),
            self.policy.max_batch_rows or 1,
        )
        delay_ns = self.policy.max_queue_delay_us * 1000
        over = self.now_ns - min(request.enqueued_ns for request in line) >= delay_ns
        if prefix.preferred_rows and not (over and delay_ns):
            return prefix.preferred_rows
        return prefix.fitting_rows if over or prefix.complete else 0

    def _check(self, batch: Batch) -> None:
        line = self._line(batch.key)
        assert batch.rows == sum(request.rows for request in batch.requests) <= (self.policy.max_batch_rows or 1)
        assert self._goes(batch.key)
        assert batch.requests == [request for request in line if request in batch.requests]
        assert batch.requests[0] is line[0]
        if self.policy.preferred_rows:
            assert batch.rows == self._goes(batch.key)
            assert batch.requests == line[: len(batch.requests)]
        else:
            remaining = [request for request in line if request not in batch.requests]
            assert all(batch.rows + request.rows > (self.policy.max_batch_rows or 1) for request in remaining)
        others = [self._line(key)[0].priority for key in (A, B) if self._goes(key)]
        assert batch.requests[0].priority == min(others)

    @precondition(lambda self: self.waiting)
    @rule(position=st.integers(0, 99))
    def cancel(self, position: int) -> None:
        request = self.waiting.pop(position % len(self.waiting))
        self.put_off = [each for each in self.put_off if each is not request]
        self.scheduler.remove(request, self.now_ns)
        self._end(request)

    @rule(passed_ns=st.integers(0, 2_000))
    def expire(self, passed_ns: int) -> None:
        self.now_ns += passed_ns
        self._expire()

    def _expire(self, *, run: bool = True) -> None:
        """Let deadlines pass, here and, if `run`, in the Scheduler."""
        if run:
            self.scheduler.expired += self.scheduler.expire(self.now_ns)
        late = [request for request in self.waiting if 0 < self.deadlines[request] <= self.now_ns]
        for request in sorted(late, key=lambda request: self.deadlines[request]):
            if self._own(request.priority).delays_on_timeout:
                self.deadlines[request] = 0
                self.put_off.append(request)
        failed, self.scheduler.expired = (self.scheduler.expired, []) if run else ([], self.scheduler.expired)
        if run:
            assert {*failed} == {request for request in late if not self._own(request.priority).delays_on_timeout}
            for request in failed:
                self.waiting.remove(request)
                self._end(request)

    def _end(self, request: InferRequest) -> None:
        assert request not in self.ended
        self.ended.add(request)

    @invariant()
    def counters_match_the_waiting_requests(self) -> None:
        assert self.scheduler.rows == sum(request.rows for request in self.waiting)
        assert self.scheduler.request_count == len(self.waiting)
        assert all(request.waiting for request in self.waiting)
        if self.scheduler.levels is not None:
            by_level = sorted(self.waiting, key=lambda request: request.priority)
            for level, group in groupby(by_level, key=lambda request: request.priority):
                each = list(group)
                rows, nbytes = sum(request.rows for request in each), sum(request.nbytes for request in each)
                assert self.scheduler.levels._totals[level] == (len(each), rows, nbytes)
            assert len(self.scheduler.levels._totals) == len({request.priority for request in self.waiting})

    @invariant()
    def the_alarm_is_never_late(self) -> None:
        deadlines = [self.deadlines[request] for request in self.waiting if self.deadlines[request]]
        assert not deadlines or 0 < self.scheduler.nearest_deadline_ns() <= min(deadlines)

    @invariant()
    def held_batches_are_due_in_time(self) -> None:
        if not self.policy.max_queue_delay_us or self.hold:
            return
        for key in (A, B):
            line = self._line(key)
            if line and not self._goes(key):
                due = min(request.enqueued_ns for request in line) + self.policy.max_queue_delay_us * 1000
                assert 0 < self.scheduler.due_ns(self.now_ns) <= due

    def teardown(self) -> None:
        if hasattr(self, "scheduler"):
            assert {*self.scheduler.drain()} == {*self.waiting}
            assert (self.scheduler.rows, self.scheduler.request_count, self.scheduler.nbytes) == (0, 0, 0)


TestWhateverHappens = PolicyMachine.TestCase
TestWhateverHappens.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


@settings(max_examples=60, deadline=None)
@given(
    before=st.lists(st.tuples(st.sampled_from((A, B, C)), st.integers(1, 3)), max_size=12),
    coming=st.lists(st.lists(st.tuples(st.sampled_from((A, B, C)), st.integers(1, 3)), max_size=5), min_size=1),
    max_rows=st.integers(1, 4),
    delays=st.booleans(),
)
def test_no_request_starves_however_many_of_a_higher_level_keep_arriving(
    before: list[tuple[Key, int]], coming: list[list[tuple[Key, int]]], max_rows: int, delays: bool
) -> None:
    """Once a request is starving, only those that have waited as long go first, at worst in one batch each."""
    scheduler = Scheduler(
        BatchPolicy(
            max_batch_rows=max_rows, priority_levels=3, default_priority=3, timeout_delays=delays, max_queue_rows=10_000
        ),
        CostModel(),
    )
    now_ns = 1

    def arrive(key: Key, priority: int) -> InferRequest:
        request = fake_request(MODEL, 1, key)
        request.start_ns = request.enqueued_ns = now_ns
        request.priority = priority
        request.deadline_ns = now_ns + 5 if delays else 0
        scheduler.add(request)
        return request

    for key, priority in before:
        arrive(key, priority)
    victim = arrive(B, 3)
    now_ns += STARVATION_NS
    takes_left = scheduler.request_count
    while victim.waiting:
        assert takes_left > 0
        for key, priority in coming[takes_left % len(coming)]:
            arrive(key, priority)
        scheduler.take(now_ns)
        assert not scheduler.expired or not delays
        takes_left -= 1
        now_ns += 1_000
