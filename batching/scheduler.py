"""Scheduler: all Lanes of a model, and the choice of what an idle Instance runs next."""

from __future__ import annotations

from penstock.backends.errors import Code, InferError

from .batch import Batch
from .caps import MemoryCap
from .costs import CostModel
from .deadlines import Deadlines
from .lane import Lane
from .promise import Promises
from .request import InferRequest, Key
from .sequences import Sequences
from .spec import BatchPolicy

KEPT_LANES = 64
LOOK_AGAIN = 64
"""One in so many batches grows past the size where time per row was seen to rise."""
HARDLY = 1.25
"""Under a tight target a batch may take this much longer than one row."""
TRUSTED = 1.15
"""A p95 above the mean by more than this factor is an outlier of a size that seldom runs; what the device does now and
then is left to the margin. Without it one run of 10 ms in 500 had 9% refused at 80% of the knee, with it 1%
(docs/adr/0009)."""
UNKNOWN_NS = 1 << 61
"""What a batch of a Key that never ran is taken to last: too long for the loop, unless it is pinned to it."""


class Scheduler:
    """Pull scheduling: a Batch closes when an Instance asks for one, and grows by itself while all are busy.

    Pure: it is told the time, its caller holds the model's lock. Invariants: a request is in one Lane or in one Batch,
    never in both; a Batch has at most `max_batch_rows` rows and one Key; the Lane whose head is most urgent
    goes first, which is the one that has waited longest where there are no targets and deadlines, so no Key starves.
    What would be answered after its target is refused at the door; promises are reckoned once somebody has a target or
    a deadline, and cost nothing before.
    """

    def __init__(self, policy: BatchPolicy, costs: CostModel, fast_ns: int = 0, instances: int = 1) -> None:
        self._max_rows = policy.max_batch_rows or 1
        self._batched = bool(policy.max_batch_rows)
        self._cap_rows = policy.cap_rows or 0
        self._delay_ns = policy.max_queue_delay_us * 1000
        self._preferred = sorted(policy.preferred_rows)
        self._queue_rows = policy.max_queue_rows
        self._queue_bytes = policy.max_queue_bytes
        self._queue_requests = policy.max_queue_requests or policy.max_queue_rows
        self._costs = costs
        self._lanes: dict[Key, Lane] = {}
        self._deadlines = Deadlines()
        self._fast_ns = fast_ns
        self._allowed = sorted(policy.allowed_rows)
        self._held_back = self._last_rows = 0
        self._most_ns = 0.0
        self._late: InferError | None = None
        self._late_arrived_ns = 0
        self.target_ns = policy.latency_target_us * 1000
        self._promising = self.target_ns > 0
        self.promises = Promises(self._lanes, costs, instances)
        self.memory_cap = MemoryCap()
        self.sequences: Sequences | None = None
        self.expired: list[InferRequest] = []
        self.rows = 0
        self.nbytes = 0
        self.live = 0

    def add(self, request: InferRequest) -> None:
        """Put a request in its Lane, or behind its sequence.

        Raises: InferError (OVERLOADED: the queue is full, in rows, bytes or requests, or the request would be
        answered after its target; EXPIRED: its deadline would pass in the queue).
        """
        if (
            self.rows + request.rows > self._queue_rows
            or self.nbytes + request.nbytes > self._queue_bytes
            or self.live >= self._queue_requests
        ) and self.live:
            raise InferError(Code.OVERLOADED, "Exceeds maximum queue size")
        deadline_ns = request.deadline_ns
        if self.sequences is not None:
            ready = self.sequences.admit(request, request.queue_ns)
            request.waiting = True
            self._enter(ready)
        else:
            lane = self._lanes.get(request.key) or self._new_lane(request.key)
            if deadline_ns or request.target_ns:
                if not self._promising:
                    self._begin_promising()
                self.promises.check(request, lane)
            lane.add(request)
            if self._promising:
                self.promises.reckon(lane)
        self.rows += request.rows
        self.nbytes += request.nbytes
        self.live += 1
        if deadline_ns:
            self._deadlines.add(request, self.live)

    def _enter(self, requests: list[InferRequest]) -> None:
        """Put requests that have waited behind their sequence in their Lanes."""
        for request in requests:
            (self._lanes.get(request.key) or self._new_lane(request.key)).add(request)

    def full(self) -> bool:
        """Whether nothing more can be taken in: lets the door refuse before a body is decoded."""
        return self.rows >= self._queue_rows or self.nbytes >= self._queue_bytes or self.live >= self._queue_requests

    def late(self, now_ns: int, arrived_ns: int) -> InferError | None:
        """Give the error of a request that is read now and would be late, however small it is; None if it need not.

        Lets the door refuse before a body is decoded, where the model has a target.
        """
        if not self.target_ns or not self.live:
            return None
        if self._late is None or arrived_ns != self._late_arrived_ns:
            # worked out once for all that arrived together: a fifth of the loop's time at twice what can be served
            self._late, self._late_arrived_ns = self.promises.late(now_ns, arrived_ns, self.target_ns), arrived_ns
        return self._late

    def take(self, now_ns: int, most_ns: float = 0) -> Batch | None:
        """Close a Batch for an idle Instance, or None when nothing is due.

        `most_ns`: what it may be predicted to take, because others wait for the device; 0: as long as it likes.
        """
        lane = self.next_lane(now_ns)
        return None if lane is None else self.take_from(lane, now_ns, most_ns)

    def take_from(self, lane: Lane, now_ns: int, most_ns: float = 0) -> Batch:
        """Close a Batch from a Lane that `next_lane` gave."""
        limit = self._limit(lane)
        if self.memory_cap.rows:
            limit = min(limit, self.memory_cap.limit(now_ns) or limit)
        if most_ns:
            limit = min(limit, self._costs.rows_within(lane.key, most_ns) or limit)
        if self._promising:
            self._most_ns = most_ns
            requests, rows = lane.take(limit, now_ns + lane.full_ns, now_ns)
        else:
            requests, rows = lane.take(limit)
        self._last_rows = rows
        self._late = None
        self.rows -= rows
        self.live -= len(requests)
        for request in requests:
            self.nbytes -= request.nbytes
        batch = Batch(requests, rows, lane.key, now_ns)
        if self.sequences is not None:
            self.sequences.arrange(batch)
        batch.cost_ns = self._costs.predict_ns(lane.key, rows) or 0.0
        if self._promising:
            self.promises.took(batch, now_ns)
            self.promises.reckon(lane)
        if not self.live:
            self._deadlines.clear()
        return batch

    def finished(self, batch: Batch, now_ns: int) -> None:
        """Note that a Batch that was taken is no longer under way, however it ended."""
        if self.sequences is not None:
            self._enter(self.sequences.left(batch.requests, now_ns))
        if self._promising:
            self.promises.ended(batch, now_ns, self.live > 0)

    def delivered(self, request: InferRequest, now_ns: int) -> None:
        """Learn from one request of a batch that was promised, and was answered now. Event loop; no lock needed."""
        if request.target_ns:
            self.promises.delivered(request.promised_ns, request.target_ns - request.start_ns, now_ns)

    def next_lane(self, now_ns: int, *, fast: bool = False) -> Lane | None:
        """Choose the most urgent Lane of those that are due, of the fast ones only if so told.

        Those past their deadline are taken out first.
        """
        if 0 < self._deadlines.nearest_ns <= now_ns:
            self.expired += self.expire(now_ns)
        if not self.live:
            return None
        if len(self._lanes) == 1 and not self._delay_ns:
            only = next(iter(self._lanes.values()))
            return only if only.fast or not fast else None
        first: Lane | None = None
        first_ns = 0
        for lane in self._lanes.values():
            head = lane.head()
            if head is not None and (lane.fast or not fast):
                urgent_ns = lane.urgency_ns() if self._promising else head.queue_ns
                if (first is None or urgent_ns < first_ns) and self._due_ns(lane, head) <= now_ns:
                    first, first_ns = lane, urgent_ns
        return first

    def due_ns(self, now_ns: int) -> int:
        """When the next Lane that is held open becomes due; 0 when none is held."""
        heads = [(lane, lane.head()) for lane in self._lanes.values() if lane.live]
        dues = [self._due_ns(lane, head) for lane, head in heads if head is not None]
        return min((due for due in dues if due > now_ns), default=0)

    def remove(self, request: InferRequest, now_ns: int = 0) -> None:
        """Take out a request that waits."""
        if self.sequences is not None and self.sequences.holds(request):
            request.waiting = False
        else:
            lane = self._lanes[request.key]
            lane.remove(request)
            if self._promising:
                self.promises.reckon(lane)
        self.rows -= request.rows
        self.nbytes -= request.nbytes
        self.live -= 1
        if self.sequences is not None:
            self._enter(self.sequences.left((request,), now_ns))
        if not self.live:
            self._deadlines.clear()

    def nearest_deadline_ns(self) -> int:
        """When `expire` must be called next; 0 for never. May be early, never late. Any thread, no lock needed."""
        nearest_ns = self._deadlines.nearest_ns
        if self.sequences is None:
            return nearest_ns
        idle_ns = self.sequences.idle_ns()
        return min(nearest_ns or idle_ns, idle_ns or nearest_ns)

    def expire(self, now_ns: int) -> list[InferRequest]:
        """Take out those whose deadline has passed."""
        expired = self._deadlines.passed(now_ns)
        for request in expired:
            self.remove(request, now_ns)
        if self.sequences is not None:
            self._enter(self.sequences.reap(now_ns))
        return expired

    def learn(self, key: Key, rows: int, ns: int, now_ns: int) -> None:
        """Note that a batch of `rows` took `ns`, gather and scatter included."""
        if self._costs.observe(key, rows, ns, now_ns):
            lane = self._lanes.get(key)
            if lane is not None:
                self._review(lane)

    def leave_loop(self) -> None:
        """Call no Lane fast any more, whatever is measured."""
        self._fast_ns = 0
        for lane in self._lanes.values():
            lane.fast = False

    def drain(self) -> list[InferRequest]:
        """Take out everything that waits."""
        dropped = [request for lane in self._lanes.values() for request in lane.live_requests()]
        if self.sequences is not None:
            dropped += self.sequences.held()
        for request in dropped:
            self.remove(request)
        return dropped

    def _new_lane(self, key: Key) -> Lane:
        if len(self._lanes) >= KEPT_LANES:
            for old in [k for k, lane in self._lanes.items() if not lane.live]:
                del self._lanes[old]
        lane = self._lanes[key] = Lane(key)
        self._review(lane)
        return lane

    def _review(self, lane: Lane) -> None:
        """Take over what is known by now of a Lane's run times."""
        lane.fast = self._fast(lane.key)
        if self._promising:
            self._size(lane)
            self.promises.reckon(lane)

    def _begin_promising(self) -> None:
        self._promising = True
        for lane in self._lanes.values():
            self._review(lane)

    def _size(self, lane: Lane) -> None:
        """Note what a batch holds when enough waits, and what it takes.

        With a target it is the biggest that can be run twice within it: one may have begun just before a request came,
        the next is its own. Where even one row takes longer than that, it is what takes hardly longer than one row.
        Up to twice the biggest that has run is taken to cost what that did: otherwise a Key that is new is refused
        before it can show that more rows do not take as much longer as they are.
        """
        costs, key, promises = self._costs, lane.key, self.promises
        one_ns = costs.predict_ns(key, 1)
        if one_ns is None:
            return
        rows = self._preferred[-1] if self._preferred else self._cap_rows or costs.most_rows(key) or self._max_rows
        rows = min(rows, self._max_rows, self.memory_cap.rows or rows)
        if self._most_ns:
            rows = min(rows, costs.rows_within(key, self._most_ns))
        known_rows = min(rows, costs.seen_rows(key) or rows)
        if self.target_ns:
            half_ns = (self.target_ns - promises.margin.ns) / 2 - promises.between_ns
            known_rows = min(known_rows, costs.rows_within(key, max(half_ns, HARDLY * one_ns)))
        rows = min(rows, 2 * known_rows if known_rows == costs.seen_rows(key) else known_rows)
        run_ns, p95_ns = costs.predict_ns(key, known_rows) or 0.0, costs.p95_ns(key, known_rows) or 0.0
        lane.full_rows = rows
        lane.full_ns = run_ns + promises.between_ns
        lane.full_p95_ns = min(p95_ns, TRUSTED * run_ns)

    def _fast(self, key: Key) -> bool:
        predicted_ns = self._costs.predict_ns(key, self._costs.knee_rows(key))
        return (UNKNOWN_NS if predicted_ns is None else predicted_ns) < self._fast_ns

    def _limit(self, lane: Lane) -> int:
        """How many rows a batch of this Lane may have now.

        The knee keeps model and front end overlapped: with 32 clients in lock step two batches of 16 beat one of 32.
        When more waits, nearly half of all that is in flight may go, of whatever Keys: what waits, and what the last
        batch held, which the front end answers now. Clients in lock step then form two batches that take turns; where
        requests come by themselves, a batch soon holds all that waits. But it does not grow to where its rows take
        longer, except now and then, to see whether they still do. With a target it holds what the target allows.
        """
        if not self._batched:
            return 0
        if self._preferred:
            fitting = [size for size in self._preferred if size <= lane.rows]
            return fitting[-1] if fitting else self._max_rows
        if self.target_ns and lane.full_rows:
            return lane.full_rows
        if self._cap_rows:
            return min(self._cap_rows, self._max_rows)
        knee = self._costs.knee_rows(lane.key)
        if not knee:
            return self._max_rows
        limit = max(knee, (12 * (self.rows + self._last_rows) + 24) // 25)
        if self._allowed:
            # what is padded up might as well be real
            limit = next((size for size in self._allowed if size >= limit), limit)
        limit = min(limit, self._max_rows)
        most = self._costs.most_rows(lane.key)
        if not most or limit <= most:
            return limit
        self._held_back += 1
        return most if self._held_back % LOOK_AGAIN else limit

    def _due_ns(self, lane: Lane, head: InferRequest) -> int:
        """When a Lane's batch is closed at the latest: its delay is over, or its oldest would miss its target.

        A deadline closes nothing: who stated both a delay and a shorter timeout gets what Triton gives, expiry.
        """
        if not self._delay_ns:
            return 0
        wanted = self._preferred[-1] if self._preferred else self._max_rows
        if lane.rows >= wanted or lane.rows in self._preferred:
            return 0
        due_ns = head.queue_ns + self._delay_ns
        if not head.target_ns:
            return due_ns
        run_ns = self._costs.p95_ns(lane.key, lane.rows + 1)
        return 0 if run_ns is None else min(due_ns, int(head.target_ns - run_ns - self.promises.margin.ns))
