"""Properties of the Scheduler under any events: a fake clock, fake Instances, and no sleep."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.backends.errors import Code, InferError
from penstock.batching.request import InferRequest, Key
from penstock.batching.running.batch import Batch
from penstock.batching.scheduling.costs import CostModel
from penstock.batching.scheduling.lane import MAX_SKIPPED, PATIENCE_NS
from penstock.batching.scheduling.scheduler import Scheduler
from penstock.batching.spec import BatchPolicy
from tests.fakes import fake_model, fake_request

A, B, C = ((4,),), ((5,),), ((6,),)
KEYS = (A, B, C)
MODEL = fake_model()
RUN_NS = 20_000


def request_of(now_ns: int, rows: int = 1, key: Key = A, *, target_ns: int = 0, deadline_ns: int = 0) -> InferRequest:
    """A request that arrives now; its target and deadline are relative to now, 0 for none."""
    request = fake_request(MODEL, rows, key)
    request.start_ns = request.enqueued_ns = now_ns
    request.target_ns = now_ns + target_ns if target_ns else 0
    request.deadline_ns = now_ns + deadline_ns if deadline_ns else 0
    return request


class ExactCosts(CostModel):
    """A device with predictable costs: `first_ns` for a batch, and `row_ns` for each of its rows."""

    def __init__(self, first_ns: int, row_ns: int) -> None:
        super().__init__()
        self.first_ns, self.row_ns = first_ns, row_ns

    def predict_ns(self, key: Key, rows: int) -> float:
        return self.first_ns + self.row_ns * max(rows, 1)

    p95_ns = predict_ns

    def rows_within(self, key: Key, ns: float) -> int:
        return max(int((ns - self.first_ns) // self.row_ns), 1)

    def knee_rows(self, key: Key) -> int:
        return 1 + self.first_ns // self.row_ns

    def efficient_rows(self, key: Key) -> int:
        return 0


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of arrivals, takes, ends, cancellations, deadlines and lessons, against a plain list of what waits."""

    @initialize(
        max_rows=st.integers(1, 12),
        cap=st.none() | st.integers(1, 12),
        first_ns=st.sampled_from((0, 5, 40)),
        target_us=st.sampled_from((0, 0, 1)),
        queue=st.tuples(st.integers(4, 40), st.integers(100, 1000), st.integers(0, 12)),
        instances=st.integers(1, 3),
        fast_ns=st.sampled_from((0, 100, 5_000)),
        allowed=st.just(()) | st.lists(st.integers(1, 12), min_size=1, max_size=4, unique=True).map(tuple),
    )
    def start(
        self, max_rows: int, cap: int | None, first_ns: int, target_us: int, queue: tuple[int, int, int],
        instances: int, fast_ns: int, allowed: tuple[int, ...],
    ) -> None:  # fmt: skip
        allowed = tuple(size for size in allowed if size < max_rows)
        self.policy = BatchPolicy(
            max_batch_rows=max_rows,
            cap_rows=cap,
            latency_target_us=target_us,
            max_queue_rows=queue[0],
            max_queue_bytes=queue[1],
            max_queue_requests=queue[2],
            allowed_rows=(*allowed, max_rows) if allowed else (),
        )
        self.costs = ExactCosts(first_ns, 10) if first_ns else CostModel(self.policy.allowed_rows)
        self.scheduler = Scheduler(self.policy, self.costs, fast_ns, instances)
        self.instances = instances
        self.now_ns = 1
        self.waiting: list[InferRequest] = []
        self.running: list[Batch] = []
        self.ends: dict[InferRequest, str] = {}
        self.timed = target_us > 0

    @rule(
        rows=st.integers(0, 12),
        key=st.sampled_from(KEYS),
        timeout_ns=st.just(0) | st.integers(1, 200),
        target_ns=st.just(0) | st.integers(1, 2_000),
    )
    def arrive(self, rows: int, key: Key, timeout_ns: int, target_ns: int) -> None:
        self.now_ns += 1
        rows = min(rows, self.policy.max_batch_rows or 1)
        request = request_of(self.now_ns, rows, key, target_ns=target_ns, deadline_ns=timeout_ns)
        refusal = None
        try:
            self.scheduler.add(request)
        except InferError as error:
            refusal = error
        if refusal is not None:
            late = refusal.retry_after_ns > 0
            assert late or self._exceeded_by(request)
            assert refusal.code is (Code.EXPIRED if late and "timeout" in refusal.message else Code.OVERLOADED)
            assert not late or timeout_ns or target_ns
            self._end([request], "refused")
            return
        assert not self._exceeded_by(request)
        self.timed |= bool(timeout_ns or target_ns)
        self.waiting.append(request)

    def _exceeded_by(self, request: InferRequest) -> bool:
        policy, more = self.policy, [*self.waiting, request]
        return bool(self.waiting) and (
            sum(each.rows for each in more) > policy.max_queue_rows
            or sum(each.nbytes for each in more) > policy.max_queue_bytes
            or len(more) > (policy.max_queue_requests or policy.max_queue_rows)
        )

    @precondition(lambda self: len(self.running) < self.instances)
    @rule(passed_ns=st.integers(1, 60), most_ns=st.sampled_from((0, 0, 30)))
    def take(self, passed_ns: int, most_ns: int) -> None:
        self.now_ns += passed_ns
        batch = self.scheduler.take(self.now_ns, most_ns)
        self._expired(self.scheduler.expired)
        self.scheduler.expired = []
        if batch is None:
            assert not self.waiting
            return
        self.running.append(batch)
        assert {request.key for request in batch.requests} == {batch.key}
        assert batch.rows == sum(request.rows for request in batch.requests)
        assert batch.rows <= (self.policy.max_batch_rows or 1)
        assert batch.rows <= (self.policy.cap_rows or 12) or len(batch.requests) == 1
        self._assert_order(batch)
        for request in batch.requests:
            self.waiting.remove(request)

    def _assert_order(self, batch: Batch) -> None:
        """Check the order of arrival, except for requests that do not fit or can no longer meet a target."""
        if not self.timed:
            assert batch.requests[0] is self.waiting[0]
        lane = [request for request in self.waiting if request.key == batch.key]
        last = max(lane.index(request) for request in batch.requests)
        passed = [request for request in lane[:last] if request not in batch.requests]
        for request in passed:
            assert request.rows > 1 or self._too_late(request)
        in_time = [request for request in batch.requests if not self._too_late(request)]
        assert in_time == [request for request in lane if request in in_time]

    def _too_late(self, request: InferRequest) -> bool:
        most_ns = self.costs.predict_ns(request.key, self.policy.max_batch_rows or 1) or 0
        return 0 < request.target_ns < self.now_ns + most_ns + 60

    @precondition(lambda self: self.running)
    @rule(position=st.integers(0, 9), passed_ns=st.integers(0, 60), learns=st.booleans())
    def end(self, position: int, passed_ns: int, learns: bool) -> None:
        self.now_ns += passed_ns
        batch = self.running.pop(position % len(self.running))
        self.scheduler.record_ended(batch, self.now_ns)
        if learns:
            self.scheduler.learn(batch.key, batch.rows, max(self.now_ns - batch.exec_start_ns, 1), self.now_ns)
        self.scheduler.record_delivered(batch.requests[0], self.now_ns)
        self._end(batch.requests, "run")

    @rule(
        key=st.sampled_from(KEYS),
        lessons=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 10_000)), max_size=12),
    )
    def learn(self, key: Key, lessons: list[tuple[int, int]]) -> None:
        """Record runs of any sizes and durations."""
        for rows, ns in lessons:
            self.scheduler.learn(key, min(rows, self.policy.max_batch_rows or 1), ns, self.now_ns)

    @precondition(lambda self: self.waiting)
    @rule(position=st.integers(0, 99))
    def cancel(self, position: int) -> None:
        request = self.waiting.pop(position % len(self.waiting))
        self.scheduler.remove(request)
        self._end([request], "cancelled")

    @rule(passed_ns=st.integers(0, 60))
    def expire(self, passed_ns: int) -> None:
        self.now_ns += passed_ns
        self._expired(self.scheduler.expire(self.now_ns))

    def _expired(self, expired: list[InferRequest]) -> None:
        late = [request for request in self.waiting if 0 < request.deadline_ns <= self.now_ns]
        assert sorted(map(id, expired)) == sorted(map(id, late))
        for request in expired:
            self.waiting.remove(request)
        self._end(expired, "expired")

    def _end(self, requests: Iterable[InferRequest], how: str) -> None:
        for request in requests:
            assert request not in self.ends
            assert not request.waiting
            self.ends[request] = how

    @invariant()
    def counters_match_the_waiting_requests(self) -> None:
        assert self.scheduler.rows == sum(request.rows for request in self.waiting)
        assert self.scheduler.request_count == len(self.waiting)
        assert self.scheduler.nbytes == sum(request.nbytes for request in self.waiting)

    @invariant()
    def exactly_the_queued_requests_are_waiting(self) -> None:
        assert all(request.waiting for request in self.waiting)
        assert not any(request.waiting for batch in self.running for request in batch.requests)

    @invariant()
    def the_alarm_is_never_late(self) -> None:
        deadlines = [request.deadline_ns for request in self.waiting if request.deadline_ns]
        assert not deadlines or 0 < self.scheduler.nearest_deadline_ns() <= min(deadlines)

    @invariant()
    def the_backlog_is_zero_if_no_request_waits(self) -> None:
        assert self.scheduler.promises.backlog_ns >= -1e-3
        assert self.waiting or abs(self.scheduler.promises.backlog_ns) < 1e-3

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self._end(self.scheduler.drain(), "dropped")
        assert all(request in self.ends for request in self.waiting)
        assert (self.scheduler.rows, self.scheduler.request_count, self.scheduler.nbytes) == (0, 0, 0)


TestWhateverHappens = SchedulerMachine.TestCase
TestWhateverHappens.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


TIMES_US = st.just(0) | st.integers(20, 400)
ARRIVAL = st.tuples(st.sampled_from(KEYS), TIMES_US, TIMES_US)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(ARRIVAL, max_size=12),
    st.lists(st.lists(ARRIVAL, max_size=6), min_size=1, max_size=30),
    st.sampled_from((0, 1, 1, 50)),
    st.integers(1, 4),
)
def test_no_request_waits_forever_however_urgent_later_requests_are(
    before: list[tuple[Key, int, int]],
    while_it_waits: list[list[tuple[Key, int, int]]],
    victims_target_us: int,
    max_rows: int,
) -> None:
    """Once the victim's patience ends, it goes before all later requests: at worst behind all that wait by then."""
    costs = CostModel()
    scheduler = Scheduler(BatchPolicy(max_batch_rows=max_rows, max_queue_rows=10_000), costs)
    now_ns = PATIENCE_NS
    step_ns = PATIENCE_NS // (len(while_it_waits) - 1) if len(while_it_waits) > 1 else PATIENCE_NS

    def arrive(arrivals: list[tuple[Key, int, int]]) -> None:
        for key, target_us, timeout_us in arrivals:
            request = request_of(now_ns, 1, key, target_ns=target_us * 1000, deadline_ns=timeout_us * 1000)
            try:
                scheduler.add(request)
            except InferError:
                continue

    arrive(before)
    victim = request_of(now_ns, 1, B, target_ns=victims_target_us * 1000)
    scheduler.add(victim)
    for key in KEYS:
        costs.observe(key, 1, RUN_NS, now_ns)
        costs.observe(key, max_rows, RUN_NS, now_ns)
    for arrivals in while_it_waits:
        arrive(arrivals)
        scheduler.take(now_ns)
        now_ns += step_ns
    now_ns = max(now_ns, victim.enqueued_ns + PATIENCE_NS)
    takes_left = scheduler.request_count
    while victim.waiting:
        assert takes_left > 0
        arrive(while_it_waits[takes_left % len(while_it_waits)])
        scheduler.take(now_ns)
        takes_left -= 1
        now_ns += 1_000


@settings(max_examples=80, deadline=None)
@given(
    gaps=st.lists(st.integers(0, 1_500), min_size=1, max_size=200),
    keys=st.integers(1, 3),
    first_ns=st.integers(500, 4_000),
    row_ns=st.integers(50, 1_000),
    target_us=st.integers(9, 60),
)
def test_admission_is_exact_if_the_device_takes_the_predicted_time(
    gaps: list[int], keys: int, first_ns: int, row_ns: int, target_us: int
) -> None:
    """Accepted requests are answered in time; rejected ones could not have been, within one batch per Lane."""
    costs = ExactCosts(first_ns, row_ns)
    scheduler = Scheduler(BatchPolicy(max_batch_rows=16, latency_target_us=target_us, max_queue_rows=10_000), costs)
    target_ns = target_us * 1_000
    now_ns, busy_until_ns = 1, 0
    running: Batch | None = None

    def advance(to_ns: int) -> None:
        """Let the device work until then."""
        nonlocal running, busy_until_ns, now_ns
        while running is not None and busy_until_ns <= to_ns:
            scheduler.record_ended(running, busy_until_ns)
            scheduler.record_delivered(running.requests[0], busy_until_ns)
            # other Lanes' last batches may have grown since then, which the margin allows for
            grown_ns = (keys - 1) * costs.predict_ns(A, 16)
            assert all(busy_until_ns <= request.target_ns + grown_ns for request in running.requests)
            take(busy_until_ns)
        now_ns = to_ns

    def take(at_ns: int) -> None:
        nonlocal running, busy_until_ns
        running = scheduler.take(at_ns)
        if running is not None:
            busy_until_ns = at_ns + int(costs.predict_ns(A, running.rows))

    for number, gap_ns in enumerate(gaps):
        advance(now_ns + gap_ns)
        request = request_of(now_ns, 1, KEYS[(number * number) % keys], target_ns=target_ns)
        try:
            scheduler.add(request)
        except InferError:
            # at best: the current run, all waiting rows in full batches, and the slack of one batch per Lane
            left_ns = max(busy_until_ns - now_ns, 0) if running is not None else 0
            rows = scheduler.rows
            full_rows = max(lane.full_batch_rows for lane in scheduler._lanes.values())
            full_ns = costs.predict_ns(A, full_rows)
            assert left_ns + (rows // full_rows + keys + 1) * full_ns > target_ns
            continue
        if running is None:
            take(now_ns)
    advance(now_ns + 1_000_000_000)
    assert scheduler.request_count == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 60), st.booleans()), min_size=1, max_size=60))
def test_canceling_at_any_point_keeps_the_order_of_other_requests(steps: list[tuple[int, int, bool]]) -> None:
    scheduler = Scheduler(BatchPolicy(max_batch_rows=4, latency_target_us=1_000_000), ExactCosts(10, 1))
    waiting: list[InferRequest] = []
    remaining: list[InferRequest] = []
    for number, (rows, position, cancels) in enumerate(steps, 1):
        request = request_of(number, min(rows, 4), target_ns=1_000_000_000)
        scheduler.add(request)
        waiting.append(request)
        if cancels:
            scheduler.remove(waiting.pop(position % len(waiting)))
        elif position % 3 == 0 and (batch := scheduler.take(number)) is not None:
            assert batch.requests == [each for each in waiting if each in batch.requests]
            remaining += batch.requests
            waiting = [each for each in waiting if each not in batch.requests]
    while (batch := scheduler.take(len(steps))) is not None:
        assert batch.requests[0] is waiting[0]
        remaining += batch.requests
        waiting = [each for each in waiting if each not in batch.requests]

    assert not waiting
    assert len(set(map(id, remaining))) == len(remaining)
    assert scheduler.request_count == 0
    assert len(remaining) <= MAX_SKIPPED + len(steps)
