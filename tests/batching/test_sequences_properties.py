"""Properties of sequences under any events: a fake clock, fake Instances, and no sleep."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.backends.errors import Code, InferError
from penstock.batching.request import InferRequest, InSequence, Key
from penstock.batching.running.batch import Batch
from penstock.batching.scheduling.costs import CostModel
from penstock.batching.scheduling.scheduler import Scheduler
from penstock.batching.sequences.sequences import Sequences
from penstock.batching.spec import BatchPolicy, SequenceSpec
from tests.fakes import fake_model, fake_request

MODEL = fake_model()
IDS = (1, 2, 3, 4, 5, "1", "a")
KEYS: tuple[Key, ...] = (((4,),), ((5,),))
IDLE_US = 1
IDLE_NS = IDLE_US * 1000


class ModelSequence:
    """One sequence as the test sees it: its requests in order, and how far they have come."""

    def __init__(self, identity: int | str) -> None:
        self.id = identity
        self.waiting: list[InferRequest] = []
        self.running: InferRequest | None = None
        self.open = True
        self.idle_since_ns = 0

    @property
    def over(self) -> bool:
        return not self.open and not self.waiting and self.running is None


class SequencesMachine(RuleBasedStateMachine):
    """Any order of arrivals, takes, ends, cancellations, deadlines and pauses, against a plain list of sequences."""

    @initialize(
        direct=st.booleans(),
        rows=st.integers(1, 2),
        instances=st.integers(1, 2),
        candidates=st.integers(0, 3),
        hold=st.sampled_from(((0, 0.0), (0, 0.0), (1, 0.5), (1, 1.0))),
        queue=st.integers(3, 20),
        remembers=st.booleans(),
    )
    def start(
        self, direct: bool, rows: int, instances: int, candidates: int, hold: tuple[int, float], queue: int,
        remembers: bool,
    ) -> None:  # fmt: skip
        self.direct, self.rows, self.instances, self.queue = direct, rows, instances, queue
        self.hold_ns = hold[0] * 1000 if direct else 0
        self.slots = (rows if direct else candidates or rows) * instances
        spec = SequenceSpec(direct, IDLE_US, max_delay_us=hold[0], min_utilization=hold[1], max_candidates=candidates)
        policy = BatchPolicy(max_batch_rows=rows, max_queue_rows=queue)
        self.numbers = frozenset(range(instances))
        self.sequences = Sequences("m", spec, rows, instances, model_keeps_state=remembers)
        self.scheduler = Scheduler(policy, CostModel(), 0, instances, self.sequences)
        self.now_ns = 1
        self.model_sequences: list[ModelSequence] = []
        self.running: list[Batch] = []
        self.ended: list[InferRequest] = []

    # -- what happens ------------------------------------------------------------------------------------------

    @rule(numbers=st.frozensets(st.integers(0, 3), min_size=1, max_size=3))
    def instances_come_and_go(self, numbers: frozenset[int]) -> None:
        self.slots = self.slots // len(self.numbers) * len(numbers)
        self.numbers = numbers
        self.sequences.set_instances(numbers, self.now_ns)
        self.scheduler.expire(self.now_ns)

    @rule(count=st.integers(1, 7), key=st.sampled_from(KEYS))
    def begin(self, count: int, key: Key) -> None:
        for identity in IDS[:count]:
            self.arrive(identity, True, 1, key, 0)

    @rule(
        identity=st.sampled_from(IDS),
        start=st.booleans(),
        end=st.integers(0, 3),
        key=st.sampled_from(KEYS),
        timeout_ns=st.sampled_from((0, 0, 0, 300)),
    )
    def arrive(self, identity: int | str, start: bool, end: int, key: Key, timeout_ns: int) -> None:
        self._pass(1)
        request = fake_request(MODEL, 1, key)
        request.enqueued_ns = request.start_ns = self.now_ns
        request.deadline_ns = self.now_ns + timeout_ns if timeout_ns else 0
        request.sequence = InSequence(identity, start, not end)
        one = next((one for one in self.model_sequences if one.open and one.id == identity), None)
        refusal = None
        try:
            self.scheduler.add(request)
        except InferError as error:
            refusal = error
        if refusal is not None:
            headless = one is None and not start
            assert refusal.code is (Code.INVALID if headless else Code.OVERLOADED)
            assert "must specify the START flag" in refusal.message if headless else self._in_queue() >= self.queue
            return
        assert one is not None or start
        if one is None:
            one = ModelSequence(identity)
            self.model_sequences.append(one)
        one.waiting.append(request)
        one.open = not request.sequence.end

    def _in_queue(self) -> int:
        return sum(len(one.waiting) for one in self.model_sequences)

    @precondition(lambda self: len(self.running) < self.instances)
    @rule(passed_ns=st.integers(0, 500))
    def take(self, passed_ns: int) -> None:
        self._pass(passed_ns)
        batch = self.scheduler.take(self.now_ns)
        self._fail(self.scheduler.expired)
        self.scheduler.expired = []
        if batch is None:
            ready = [one for one in self._placed() if one.waiting and one.running is None]
            assert not ready or self.direct
            assert not ready or self.hold_ns or self.running
            return
        self.running.append(batch)
        assert 0 < len(batch.requests) <= self.rows
        assert {request.key for request in batch.requests} == {batch.key}
        owners = [self._owner(request) for request in batch.requests]
        assert len(set(owners)) == len(owners)
        for one, request in zip(owners, batch.requests, strict=True):
            assert one.running is None
            assert one.waiting.pop(0) is request
            one.running = request
        if self.direct:
            at = [request.active_sequence.row for request in batch.requests]
            assert at == sorted(set(at))
            assert at == (batch.row_positions or list(range(len(at))))
            (instance,) = {request.active_sequence.instance for request in batch.requests}
            others = [each for each in self.running[:-1] if each.key == batch.key]
            assert all(each.requests[0].active_sequence.instance != instance for each in others)

    @precondition(lambda self: self.running)
    @rule(passed_ns=st.integers(0, 500), which=st.integers(0, 1))
    def finish(self, passed_ns: int, which: int) -> None:
        self._pass(passed_ns)
        batch = self.running.pop(which % len(self.running))
        self.scheduler.record_ended(batch, self.now_ns)
        for request in batch.requests:
            one = self._owner(request)
            one.running = None
            one.idle_since_ns = self.now_ns
        self._tidy()

    @rule(which=st.integers(0, 30))
    def cancel(self, which: int) -> None:
        waiting = [request for one in self.model_sequences for request in one.waiting]
        if not waiting:
            return
        request = waiting[which % len(waiting)]
        one = self._owner(request)
        placed = one in self._placed()
        behind = (
            one.waiting[one.waiting.index(request) + 1 :] if placed else [r for r in one.waiting if r is not request]
        )
        self.scheduler.remove(request, self.now_ns)
        assert self.scheduler.orphaned == behind
        self.scheduler.orphaned = []
        self._end([request, *behind])

    @rule(passed_ns=st.integers(0, 3 * IDLE_NS))
    def wait(self, passed_ns: int) -> None:
        self._pass(passed_ns)

    # -- what follows ------------------------------------------------------------------------------------------

    def _pass(self, passed_ns: int) -> None:
        """Let time pass, and ring the alarm when it is due."""
        until_ns = self.now_ns + passed_ns
        while 0 < (due_ns := self.scheduler.nearest_deadline_ns()) <= until_ns:
            self.now_ns = max(self.now_ns, due_ns)
            self._fail(self.scheduler.expire(self.now_ns))
            self._forget_idle()
        self.now_ns = until_ns
        self._forget_idle()

    def _fail(self, expired: list[InferRequest]) -> None:
        for request in expired:
            assert request.active_sequence.row < 0
        self._end(expired)

    def _end(self, requests: list[InferRequest]) -> None:
        for request in requests:
            one = self._owner(request)
            one.waiting.remove(request)
            one.open = False
            assert not request.waiting
        self._tidy()

    def _forget_idle(self) -> None:
        for one in self.model_sequences:
            if one.open and not one.waiting and one.running is None and self.now_ns >= one.idle_since_ns + IDLE_NS:
                one.open = False
        self._tidy()

    def _tidy(self) -> None:
        self.model_sequences = [one for one in self.model_sequences if not one.over]

    def _owner(self, request: InferRequest) -> ModelSequence:
        return next(one for one in self.model_sequences if request in one.waiting or one.running is request)

    def _placed(self) -> list[ModelSequence]:
        """First come, first served: the oldest sequences have the slots."""
        return [one for one in self.model_sequences if self._real(one) >= 0]

    def _real(self, one: ModelSequence) -> int:
        request = one.running or (one.waiting[0] if one.waiting else None)
        return 0 if request is None else request.active_sequence.row

    @invariant()
    def counters_match_the_waiting_requests(self) -> None:
        waiting = [request for one in self.model_sequences for request in one.waiting]
        assert self.scheduler.request_count == self.scheduler.rows == len(waiting)
        assert self.scheduler.nbytes == sum(request.nbytes for request in waiting)
        assert len(self.sequences) == len(self.model_sequences)
        backlog = [request for request in waiting if request.active_sequence.row < 0]
        assert self.sequences.backlog_requests == len(backlog)
        assert self.sequences.backlog_bytes == sum(request.nbytes for request in backlog)

    @invariant()
    def slots_are_never_shared_and_are_given_in_order(self) -> None:
        busy = [
            request.active_sequence
            for one in self.model_sequences
            for request in (one.running, *one.waiting)
            if request is not None
        ]
        placed = {each for each in busy if each.row >= 0}
        assert len({(each.row, each.instance) for each in placed}) == len(placed)
        here = [each for each in self.sequences._active if each.row >= 0 and each.instance in self.numbers]
        assert len(here) <= self.slots
        if self.sequences.model_keeps_state:
            # only one sequence of an id has a slot, and others overtake those that wait for it
            ids = [each.id for each in self.sequences._active if each.row >= 0]
            assert len(set(ids)) == len(ids)
            able = [one for one in self.model_sequences if self._real(one) < 0 and one.id not in ids]
            assert not able or len(here) == self.slots
            return
        waits = [self._real(one) < 0 for one in self.model_sequences]
        assert waits == sorted(waits)
        if True in waits:
            assert len(here) == self.slots

    def teardown(self) -> None:
        """Nothing is left once all requests have run, were canceled or have become idle."""
        if not hasattr(self, "scheduler"):
            return
        while self.running:
            self.finish(0, 0)
        for _ in range(1000):
            self._pass(2 * IDLE_NS)
            self.take(0)
            if not self.running and not self.model_sequences:
                break
            while self.running:
                self.finish(0, 0)
        assert len(self.sequences) == self.scheduler.request_count == 0
        assert not self.scheduler.drain()


TestSequences = SequencesMachine.TestCase
TestSequences.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
