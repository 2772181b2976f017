"""Scheduler: all Lanes of a model, and the choice of what an idle Instance runs next."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.backends.errors import Code, InferError
from penstock.batching.request import InferRequest, Key, Pin
from penstock.batching.running.batch import Batch
from penstock.batching.sequences.sequences import Sequences
from penstock.batching.spec import BatchPolicy

from .costs import CostModel
from .deadlines import Deadlines
from .lane import Lane
from .levels import LevelLane, Levels
from .ordering import Ordering
from .promise import Promises
from .queue_limits import QueueLimits
from .sizing import Sizing

MAX_IDLE_LANES = 64


class Scheduler:
    """Pull scheduling: a Batch closes when an Instance asks for one, and grows by itself while all are busy.

    Pure: it is told the time, its caller holds the model's lock. Invariants: a request is in one Lane or in one Batch,
    never in both; a Batch has at most `max_batch_rows` rows and one Key; the Lane whose head is most urgent goes first.
    Without targets and deadlines that is the oldest, so no Key starves. A request that would be answered after its
    target is rejected on arrival. Promises are computed from the first target or deadline on, and cost nothing before.
    If a model has `levels`, so do its Lanes, and the highest goes first. In `ordering`, answers wait for earlier ones.
    """

    def __init__(
        self, policy: BatchPolicy, costs: CostModel, fast_ns: int = 0, instances: int = 1,
        sequences: Sequences | None = None, memory_bytes: int = 0,
    ) -> None:  # fmt: skip
        self.limits = QueueLimits(policy, memory_bytes)
        self._costs = costs
        self._lanes: dict[Key, Lane] = {}
        self._deadlines = Deadlines()
        self.target_ns = policy.latency_target_us * 1000
        self._uses_promises = self.target_ns > 0
        self.levels = Levels.from_policy(policy, self.limits)
        self.promises = Promises(self._lanes, costs, instances, has_levels=self.levels is not None)
        use_lockstep = sequences is None and self.levels is None
        self.sizing = Sizing(policy, costs, self.promises, fast_ns, use_lockstep=use_lockstep)
        self.memory_cap = self.sizing.memory_cap
        self.ordering = Ordering() if policy.preserve_ordering else None
        # nothing runs until more than this many wait
        self._hold_count = max(policy.hold_requests - 1, 0)
        self.sequences = sequences
        self.expired: list[InferRequest] = []
        self.orphaned: list[InferRequest] = []
        self.rows = self.nbytes = self.request_count = 0

    def add(self, request: InferRequest) -> None:
        """Put a request in its Lane, or behind its sequence.

        Raises: InferError (OVERLOADED: the queue is full, in rows, bytes or requests, or the request would be answered
        after its target; EXPIRED: its deadline would pass in the queue).
        """
        if self.sequences is not None:
            self._add_to_sequence(request, self.sequences)
            return
        limits, rows, nbytes = self.limits, self.rows + request.rows, self.nbytes + request.nbytes
        if self.levels is not None:
            self.levels.admit(request)
        elif (
            rows > limits.max_rows
            or (nbytes > limits.max_nbytes and nbytes > limits.adapt_max_nbytes(request))
            or self.request_count >= limits.max_requests
        ) and self.request_count:
            raise InferError(Code.OVERLOADED, "Exceeds maximum queue size")
        lane = self._lanes.get(request.key) or self._new_lane(request.key)
        if request.deadline_ns or request.target_ns:
            if not self._uses_promises:
                self._uses_promises = True
                self._update_lanes()
            self.sizing.lockstep.record_slack(request)
            self.promises.check(request, lane)
        lane.add(request)
        if self._uses_promises:
            self.promises.update_backlog(lane)
        self.rows, self.nbytes = rows, nbytes
        self.request_count += 1
        if request.deadline_ns:
            self._deadlines.add(request, self.request_count)
        if self.ordering is not None:
            self.ordering.add(request)

    def add_all(self, requests: Sequence[InferRequest], rows: int, nbytes: int) -> bool:
        """Queue requests of one Key (arrivals.py). Returns: False if full, or if each needs its own checks."""
        if self._uses_promises or self.levels is not None or self.sequences is not None or self.ordering is not None:
            return False
        if not self.limits.allows(self.rows + rows, self.nbytes + nbytes, self.request_count + len(requests)):
            return False
        lane = self._lanes.get(requests[0].key) or self._new_lane(requests[0].key)
        lane.add_all(requests, rows)
        self.rows += rows
        self.nbytes += nbytes
        self.request_count += len(requests)
        return True

    def _add_to_sequence(self, request: InferRequest, sequences: Sequences) -> None:
        """Put a request behind its sequence.

        The queue's limits apply separately to sequences under way and to those waiting for a slot: a backlog would
        otherwise keep out the very requests that let it end. Raises: InferError (INVALID, OVERLOADED).
        """
        limits, count, nbytes = self.limits, sequences.backlog_requests, sequences.backlog_bytes
        if not sequences.check(request):
            count, nbytes = self.request_count - count, self.nbytes - nbytes
        if count and (count >= limits.max_requests or nbytes + request.nbytes > limits.adapt_max_nbytes(request)):
            raise InferError(Code.OVERLOADED, "Exceeds maximum queue size")
        request.waiting = True
        request.target_ns = 0
        self._adjust_counts(request)
        self._enqueue(sequences.admit(request, request.enqueued_ns))
        if request.deadline_ns and sequences.can_expire(request):
            self._deadlines.add(request, self.request_count)

    def _adjust_counts(self, request: InferRequest, sign: int = 1) -> None:
        self.rows += sign * request.rows
        self.nbytes += sign * request.nbytes
        self.request_count += sign

    def _enqueue(self, requests: list[InferRequest]) -> None:
        """Put requests that were waiting behind their sequence in their Lanes."""
        for request in requests:
            (self._lanes.get(request.key) or self._new_lane(request.key)).add(request)
            if self.ordering is not None:
                self.ordering.add(request)

    def is_full(self) -> bool:
        """Whether the queue is full, so that requests can be rejected before their body is decoded.

        Always False with sequences: which one a request belongs to is not known by then.
        """
        if self.sequences is not None:
            return False
        if self.levels is not None:
            return self.levels.is_full()
        limits, count = self.limits, self.request_count
        return self.rows >= limits.max_rows or self.nbytes >= limits.max_nbytes or count >= limits.max_requests

    def late_error(self, now_ns: int, arrived_ns: int) -> InferError | None:
        """Return the error of a request read now that would be late however small it is; None to accept it.

        As with `is_full`, before decoding. Always None with levels: the one of the request is not known by then.
        """
        if not self.target_ns or self.levels is not None:
            return None
        return self.promises.late_error(now_ns, arrived_ns, self.target_ns, has_waiting=self.request_count > 0)

    def take(self, now_ns: int, max_run_ns: float = 0, free_ns: int = 0, pin: Pin = None) -> Batch | None:
        """Close a Batch for an idle Instance, or return None if nothing is due.

        `max_run_ns`: the longest predicted run allowed while others wait for the device; 0: no limit. `free_ns`: when
        the current run is predicted to end; 0: none. `pin`: as in next_lane.
        """
        lane = self.next_lane(now_ns, pin=pin)
        return None if lane is None else self.take_from(lane, now_ns, max_run_ns, free_ns=free_ns)

    def take_from(
        self, lane: Lane, now_ns: int, max_run_ns: float = 0, max_unknown_rows: int = 0, free_ns: int = 0
    ) -> Batch:
        """Close a Batch from a Lane that `next_lane` returned. `max_unknown_rows`: as in `Sizing.limit`."""
        limit = self.sizing.limit(lane, self.rows, now_ns, max_run_ns, max_unknown_rows)
        if self.sequences is not None:
            requests, rows = self.sequences.take(lane, limit)
        else:
            end_ns = max(now_ns, free_ns) + lane.full_batch_ns if self._uses_promises else 0
            requests, rows = lane.take(limit, end_ns, now_ns)
        self.rows -= rows
        self.request_count -= len(requests)
        self.nbytes -= sum([request.nbytes for request in requests])
        batch = Batch(requests, rows, lane.key, now_ns)
        batch.device_free_ns = free_ns
        if self.sequences is not None:
            self.sequences.assign_rows(batch)
        batch.cost_ns = self._costs.predict_ns(lane.key, rows) or 0.0
        if self._uses_promises:
            self.promises.record_taken(batch, now_ns)
            self.promises.update_backlog(lane)
        self.sizing.lockstep.record_taken(lane, rows, self.rows, now_ns)
        if not self.request_count:
            self._deadlines.clear()
        return batch

    def free_batch_rows(self, now_ns: int) -> int:
        """Return how many more rows could join the batch that would be closed now; 0 if it can grow no more."""
        lane = self.next_lane(now_ns)
        return self.sizing.max_batch_rows(lane) - (0 if lane is None else lane.rows)

    def record_ended(self, batch: Batch, now_ns: int, next_running: bool = False) -> None:
        """Record that a Batch that was taken is no longer under way, however it ended.

        `next_running`: its Instance is already running the next one.
        """
        if self.sequences is not None:
            for request in batch.rerun_requests:
                self._adjust_counts(request)
            self._enqueue(self.sequences.record_ended(batch, now_ns))
        if self._uses_promises:
            self.promises.record_ended(batch, now_ns, self.request_count > 0 and not next_running)
        self.sizing.lockstep.record_ended(batch.rows, self.rows, now_ns, next_running=next_running)

    def record_delivered(self, request: InferRequest, now_ns: int) -> None:
        """Learn from one promised request of a batch that was just answered. Event loop; no lock needed."""
        if request.target_ns:
            self.promises.record_delivered(request, now_ns)

    def next_lane(self, now_ns: int, *, fast_only: bool = False, pin: Pin = None) -> Lane | None:
        """Choose the most urgent Lane of those that are due; with `fast_only`, only of the fast ones.

        `pin`: only Keys that end with this Pin (sequences.py). Requests past their deadline are removed first.
        """
        if 0 < self._deadlines.nearest_ns <= now_ns:
            self.expired += self.expire(now_ns)
        if self.request_count <= self._hold_count:
            return None
        if self._hold_count:
            if self.sequences is not None and not self.sequences.has_enough(self.request_count, self._hold_count):
                return None
            self._hold_count = 0
        if len(self._lanes) == 1 and not self.sizing.may_hold and self.sequences is None:
            sole_lane = next(iter(self._lanes.values()))
            return sole_lane if sole_lane.fast or not fast_only else None
        if self.levels is not None:
            return self._highest_lane(now_ns, fast_only=fast_only)
        first, first_ns = None, 0
        for lane in self._lanes.values():
            head = lane.head()
            if head is not None and (lane.fast or not fast_only) and (pin is None or lane.key[-1] == pin):
                urgent_ns = lane.urgency_ns() if self._uses_promises else head.enqueued_ns
                if (first is None or urgent_ns < first_ns) and self._is_due(lane, head, now_ns):
                    first, first_ns = lane, urgent_ns
        return first

    def _highest_lane(self, now_ns: int, *, fast_only: bool) -> Lane | None:
        """Choose the Lane with the highest level of those that are due, and of these the most urgent."""
        first, first_rank = None, (0, 0)
        for lane in self._lanes.values():
            if lane.request_count and (lane.fast or not fast_only):
                rank, head = lane.rank(now_ns), lane.head()
                if head is not None and (first is None or rank < first_rank) and self._is_due(lane, head, now_ns):
                    first, first_rank = lane, rank
        return first

    def _is_due(self, lane: Lane, head: InferRequest, now_ns: int) -> bool:
        return not self.sizing.may_hold or self.sizing.due_ns(lane, head, now_ns) <= now_ns

    def due_ns(self, now_ns: int) -> int:
        """When the next Lane that is held open becomes due; 0 when none is held."""
        heads = ((lane, lane.head()) for lane in self._lanes.values())
        dues = (self.sizing.due_ns(lane, head, now_ns) for lane, head in heads if head is not None)
        return min((due for due in dues if due > now_ns), default=0)

    def remove(self, request: InferRequest, now_ns: int = 0) -> None:
        """Remove a waiting request. Those behind it in its sequence go too, into `orphaned`."""
        if self.sequences is None or not self.sequences.holds(request):
            lane = self._lanes[request.key]
            lane.remove(request)
            if self._uses_promises:
                self.promises.update_backlog(lane)
        removed = [request]
        if self.sequences is not None:
            followers, ready = self.sequences.end_at(request, now_ns)
            self._enqueue(ready)
            self.orphaned += followers
            removed += followers
        for each in removed:
            each.waiting = False
            self._adjust_counts(each, -1)
        if not self.request_count:
            self._deadlines.clear()

    def nearest_deadline_ns(self) -> int:
        """When `expire` must be called next; 0 for never. May be early, never late. Any thread, no lock needed."""
        nearest_ns = self._deadlines.nearest_ns
        idle_ns = 0 if self.sequences is None else self.sequences.next_reap_ns()
        return min(nearest_ns or idle_ns, idle_ns or nearest_ns)

    def expire(self, now_ns: int) -> list[InferRequest]:
        """Remove requests whose deadline has passed; if the policy delays those, they stay, behind the others."""
        expired = self._deadlines.pop_expired(now_ns)
        if self.levels is not None:
            expired = [request for request in expired if not self._lanes[request.key].delay(request)]
        if self.sequences is not None:
            return self._expire_sequences(expired, self.sequences, now_ns)
        for request in expired:
            self.remove(request, now_ns)
        return expired

    def _expire_sequences(self, expired: list[InferRequest], sequences: Sequences, now_ns: int) -> list[InferRequest]:
        """Remove the sequences of requests that expired without a slot, and end idle sequences."""
        removed, saved, self.orphaned = [], self.orphaned, []
        for request in expired:
            if request.waiting and sequences.can_expire(request):
                self.remove(request, now_ns)
                removed.append(request)
        self._enqueue(sequences.reap(now_ns))
        followers, self.orphaned = self.orphaned, saved
        return removed + followers

    def learn(self, key: Key, rows: int, run_ns: int, now_ns: int, handling_ns: int = 0) -> None:
        """Learn that a batch of `rows` took `run_ns`, gather and scatter included. `handling_ns` of it: as in Batch."""
        if self._costs.observe(key, rows, run_ns, now_ns) and (lane := self._lanes.get(key)) is not None:
            lane.record_handling(handling_ns / max(rows, 1))
            self.sizing.update_lane(lane, with_promises=self._uses_promises)

    def resize(self, instances: int, fast_ns: int) -> None:
        """Adapt to another number of Instances. If `fast_ns` was 0, no Lane ever becomes fast."""
        self.promises.instances = instances
        self.sizing.resize(instances, fast_ns)
        for lane in self._lanes.values():
            lane.fast = False
        self._update_lanes()

    def expedite(self, now_ns: int, *, end_idle: bool) -> None:
        """Stop holding batches open: no more requests will join. `end_idle`: as in `Sequences.expedite`."""
        self._hold_count = 0
        self.sizing.expedite()
        if self.sequences is not None:
            self.sequences.expedite(now_ns, end_idle=end_idle)

    def drain(self) -> list[InferRequest]:
        """Remove everything that waits."""
        dropped = [request for lane in self._lanes.values() for request in lane.waiting_requests()]
        dropped += [] if self.sequences is None else self.sequences.held_requests()
        for request in dropped:
            if request.waiting:
                self.remove(request)
        self.orphaned.clear()
        return dropped

    def _new_lane(self, key: Key) -> Lane:
        # if most Lanes have waiting requests, there is little to drop and the scan takes long
        if len(self._lanes) >= max(MAX_IDLE_LANES, 2 * self.request_count):
            for idle_key in [k for k, lane in self._lanes.items() if not lane.request_count]:
                del self._lanes[idle_key]
        lane = self._lanes[key] = Lane(key) if self.levels is None else LevelLane(key, self.levels)
        self.sizing.update_lane(lane, with_promises=self._uses_promises)
        return lane

    def _update_lanes(self) -> None:
        for lane in self._lanes.values():
            self.sizing.update_lane(lane, with_promises=self._uses_promises)
