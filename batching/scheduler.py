"""Scheduler: all Lanes of a model, and the choice of what an idle Instance runs next."""

from __future__ import annotations

from penstock.backends.errors import Code, InferError

from .batch import Batch
from .costs import CostModel
from .lane import Lane
from .request import InferRequest, Key
from .spec import BatchPolicy

KEPT_LANES = 64
LOOK_AGAIN = 64
"""One in so many batches grows past the size where time per row was seen to rise."""
UNKNOWN_NS = 1 << 61
"""What a batch of a Key that has never run is taken to last: too long for the loop, unless it is pinned to the loop."""


class Scheduler:
    """Pull scheduling: a Batch closes when an Instance asks for one, and grows by itself while all are busy.

    Pure: it is told the time, and its caller holds the model's lock. Invariants: a request is in one Lane or in one
    Batch, never in both; a Batch has at most `max_batch_rows` rows and one Key; the Lane whose head has waited
    longest goes first, so no Key starves.
    """

    def __init__(self, policy: BatchPolicy, costs: CostModel, fast_ns: int = 0, instances: int = 1) -> None:
        self._max_rows = policy.max_batch_rows or 1
        self._batched = bool(policy.max_batch_rows)
        self._cap_rows = policy.cap_rows or 0
        self._delay_ns = policy.max_queue_delay_us * 1000
        self._preferred = sorted(policy.preferred_rows)
        self._queue_rows = policy.max_queue_rows
        self._queue_bytes = policy.max_queue_bytes
        # requests without rows fill the queue all the same
        self._queue_requests = policy.max_queue_requests or policy.max_queue_rows
        self._costs = costs
        self._lanes: dict[Key, Lane] = {}
        self._nearest_ns = 0
        self._fast_ns = fast_ns
        self._instances = instances
        self._held_back = 0
        self.expired: list[InferRequest] = []
        self.rows = 0
        self.nbytes = 0
        self.live = 0

    def add(self, request: InferRequest) -> Lane:
        """Put a request in its Lane.

        Raises: InferError (OVERLOADED: the queue is full, in rows, bytes or requests; EXPIRED: it is so long that the
        request's deadline would pass in it).
        """
        if (
            self.rows + request.rows > self._queue_rows
            or self.nbytes + request.nbytes > self._queue_bytes
            or self.live >= self._queue_requests
        ) and self.live:
            raise InferError(Code.OVERLOADED, "Exceeds maximum queue size")
        deadline_ns = request.deadline_ns
        if deadline_ns and request.queue_ns + self._wait_ns(request.key) > deadline_ns:
            raise InferError(Code.EXPIRED, "Request timeout expired")
        lane = self._lanes.get(request.key)
        if lane is None:
            lane = self._new_lane(request.key)
        lane.add(request)
        self.rows += request.rows
        self.nbytes += request.nbytes
        self.live += 1
        if deadline_ns and (not self._nearest_ns or deadline_ns < self._nearest_ns):
            self._nearest_ns = deadline_ns
        return lane

    def _wait_ns(self, key: Key) -> float:
        """Predict how long a request would wait, as if all that waits were of its Key.

        Short of the truth by what is left of the batches under way, and 0 for a Key that has never run: better to
        take in what expires than to refuse what could be served.
        """
        batch_rows = max(min(self.rows, self._max_rows), 1)
        batch_ns = self._costs.predict_ns(key, batch_rows) if self.live else None
        return 0 if batch_ns is None else batch_ns * self.rows / batch_rows / self._instances

    def full(self) -> bool:
        """Whether nothing more can be taken in: lets the door refuse before a body is decoded."""
        return self.rows >= self._queue_rows or self.nbytes >= self._queue_bytes or self.live >= self._queue_requests

    def take(self, now_ns: int, most_ns: float = 0) -> Batch | None:
        """Close a Batch for an idle Instance, or None when nothing is due.

        `most_ns`: what it may be predicted to take, because others wait for the device; 0: as long as it likes.
        """
        lane = self.next_lane(now_ns)
        return None if lane is None else self.take_from(lane, now_ns, most_ns)

    def take_from(self, lane: Lane, now_ns: int, most_ns: float = 0) -> Batch:
        """Close a Batch from a Lane that `next_lane` gave."""
        limit = self._limit(lane)
        if most_ns:
            limit = min(limit, self._costs.rows_within(lane.key, most_ns) or limit)
        requests, rows = lane.take(limit)
        self.rows -= rows
        self.live -= len(requests)
        for request in requests:
            self.nbytes -= request.nbytes
        batch = Batch(requests, rows, lane.key, now_ns)
        batch.cost_ns = self._costs.predict_ns(lane.key, rows) or 0.0
        return batch

    def finished(self, batch: Batch, now_ns: int) -> None:
        """Note that a Batch that was taken is no longer under way, however it ended."""

    def next_lane(self, now_ns: int, *, fast: bool = False) -> Lane | None:
        """Choose the due Lane whose head has waited longest, of the fast ones only if so told.

        Those past their deadline are taken out first.
        """
        if self._nearest_ns and self._nearest_ns <= now_ns:
            self.expired += self.expire(now_ns)
        if not self.live:
            return None
        if len(self._lanes) == 1 and not self._delay_ns:
            only = next(iter(self._lanes.values()))
            return only if only.fast or not fast else None
        oldest: Lane | None = None
        oldest_ns = 0
        for lane in self._lanes.values():
            if lane.live and (lane.fast or not fast):
                head = lane.head()
                head_ns = head.queue_ns if head is not None else 0
                if (oldest is None or head_ns < oldest_ns) and self._due_ns(lane, head_ns) <= now_ns:
                    oldest, oldest_ns = lane, head_ns
        return oldest

    def due_ns(self, now_ns: int) -> int:
        """When the next Lane that is held open becomes due; 0 when none is held."""
        heads = [(lane, lane.head()) for lane in self._lanes.values() if lane.live]
        dues = [self._due_ns(lane, head.queue_ns) for lane, head in heads if head is not None]
        return min((due for due in dues if due > now_ns), default=0)

    def remove(self, request: InferRequest) -> None:
        """Take out a request that waits."""
        self._lanes[request.key].remove(request)
        self.rows -= request.rows
        self.nbytes -= request.nbytes
        self.live -= 1

    def nearest_deadline_ns(self) -> int:
        """When `expire` must be called next; 0 for never. May be early, never late."""
        return self._nearest_ns

    def expire(self, now_ns: int) -> list[InferRequest]:
        """Take out those whose deadline has passed."""
        waiting = [r for lane in self._lanes.values() for r in lane.live_requests() if r.deadline_ns]
        expired = [request for request in waiting if request.deadline_ns <= now_ns]
        self._nearest_ns = min((r.deadline_ns for r in waiting if r.deadline_ns > now_ns), default=0)
        for request in expired:
            self.remove(request)
        return expired

    def learn(self, key: Key, rows: int, ns: int, now_ns: int) -> None:
        """Note that a batch of `rows` took `ns`, gather and scatter included."""
        if self._costs.observe(key, rows, ns, now_ns):
            lane = self._lanes.get(key)
            if lane is not None:
                lane.fast = self._fast(key)

    def drain(self) -> list[InferRequest]:
        """Take out everything that waits."""
        dropped = [request for lane in self._lanes.values() for request in lane.live_requests()]
        for request in dropped:
            self.remove(request)
        return dropped

    def _new_lane(self, key: Key) -> Lane:
        if len(self._lanes) >= KEPT_LANES:
            for old in [k for k, lane in self._lanes.items() if not lane.live]:
                del self._lanes[old]
        lane = self._lanes[key] = Lane(key)
        lane.fast = self._fast(key)
        return lane

    def _fast(self, key: Key) -> bool:
        predicted_ns = self._costs.predict_ns(key, self._costs.knee_rows(key))
        return (UNKNOWN_NS if predicted_ns is None else predicted_ns) < self._fast_ns

    def _limit(self, lane: Lane) -> int:
        """How many rows a batch of this Lane may have now.

        The knee keeps model and front end overlapped: with 32 clients in lock step two batches of 16 beat one of 32.
        When more waits than two such batches hold, half of all that waits may go, of whatever Keys it is: the other
        half is what the model runs on while the front end answers this one. But a batch does not grow to where its
        rows take longer, except now and then, to see whether they still do.
        """
        if not self._batched:
            return 0
        if self._preferred:
            fitting = [size for size in self._preferred if size <= lane.rows]
            return fitting[-1] if fitting else self._max_rows
        if self._cap_rows:
            return min(self._cap_rows, self._max_rows)
        knee = self._costs.knee_rows(lane.key)
        if not knee:
            return self._max_rows
        limit = min(max(knee, (self.rows + 1) // 2), self._max_rows)
        most = self._costs.most_rows(lane.key)
        if not most or limit <= most:
            return limit
        self._held_back += 1
        return most if self._held_back % LOOK_AGAIN else limit

    def _due_ns(self, lane: Lane, head_ns: int) -> int:
        if not self._delay_ns:
            return 0
        wanted = self._preferred[-1] if self._preferred else self._max_rows
        if lane.rows >= wanted or lane.rows in self._preferred:
            return 0
        return head_ns + self._delay_ns
