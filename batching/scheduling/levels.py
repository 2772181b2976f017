"""Levels: how requests wait in a model with priority levels or with timeouts that delay. Owned by the Scheduler.

Source: Triton core, PriorityQueue and PolicyQueue of scheduler_utils.cc.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from penstock.backends.errors import Code, InferError
from penstock.batching.request import InferRequest, Key
from penstock.batching.spec import BatchPolicy, QueuePolicy

from .lane import MAX_SKIPPED, Lane, urgency_ns
from .queue_limits import QueueLimits, queue_requests
from .timeouts import default_policy, level_of

STARVATION_NS = 10_000_000_000
"""A request that has waited this long goes first, whatever its level; in Triton it would wait forever. Each batch takes
at most one such request first, so the highest level keeps nearly all of the model's capacity."""
MAX_TOTAL_QUEUES = 4
"""All levels together hold at most this many times what the queue of a model without levels holds. Without this limit,
a client could use a higher level for each request and never be rejected, as there may be as many levels as a number
allows."""
STARVED_LEVEL = -1
"""The level of a request that has waited that long: above the highest."""


class Levels:
    """What each level of one model allows, and what waits in it, across all Lanes.

    The queue's limits apply to what waits in a level and in those above it, so requests of a high level are not kept
    out by those waiting below. Each level may thus add as much as the queue of a model without levels holds, up to
    MAX_TOTAL_QUEUES times as much for all of them.
    """

    def __init__(self, policy: BatchPolicy, limits: QueueLimits) -> None:
        self._policy = policy
        self._limits = limits
        self._max_requests = queue_requests(policy)
        self._default_policy = default_policy(policy)
        self._totals: dict[int, _Totals] = {}
        self._total = _ZERO

    @classmethod
    def from_policy(cls, policy: BatchPolicy, limits: QueueLimits) -> Levels | None:
        """Make the Levels of a model that needs them, or None."""
        is_needed = policy.priority_levels or policy.level_policies or policy.timeout_delays
        return cls(policy, limits) if is_needed else None

    def admit(self, request: InferRequest) -> None:
        """Admit a request to its level, which becomes its priority.

        Raises: InferError (OVERLOADED: the level's queue is full).
        """
        level = request.priority = level_of(self._policy, request.priority)
        self._limits.adapt_max_nbytes(request)
        if self._is_at_request_limit(level) or self._would_overflow(level, request.rows, request.nbytes):
            raise InferError(Code.OVERLOADED, "Exceeds maximum queue size")

    def is_full(self) -> bool:
        """Whether no request of any level can be admitted."""
        levels = self._policy.priority_levels
        highest = min(levels, 1)
        return self._would_overflow(highest, 1, 1) or (levels <= 1 and self._is_at_request_limit(highest))

    def policy(self, level: int) -> QueuePolicy:
        """Return the queue policy of a level."""
        return self._policy.level_policies.get(level, self._default_policy)

    def adjust(self, request: InferRequest, delta: int) -> None:
        """Record that a request started (1) or stopped (-1) waiting in its level."""
        level = request.priority
        self._total = self._total.adjusted(request, delta)
        totals = self._totals[level] = self._totals.get(level, _ZERO).adjusted(request, delta)
        if not totals.requests:
            del self._totals[level]

    def _is_at_request_limit(self, level: int) -> bool:
        return 0 < self.policy(level).max_requests <= self._totals.get(level, _ZERO).requests

    def _would_overflow(self, level: int, rows: int, nbytes: int) -> bool:
        """Whether a level cannot take this many more rows and bytes, counting what waits in it and above it."""
        if not self._exceeds(self._total, rows, nbytes, 1):
            return False
        counted = [totals for each, totals in self._totals.items() if each <= level]
        sums = _Totals(*(sum(each) for each in zip(*counted, strict=True)))
        return self._exceeds(sums, rows, nbytes, 1) or self._exceeds(self._total, 1, 1, MAX_TOTAL_QUEUES)

    def _exceeds(self, totals: _Totals, rows: int, nbytes: int, queues: int) -> bool:
        """Whether adding these rows and bytes to a count exceeds what `queues` queues hold."""
        exceeded = (
            totals.rows + rows > queues * self._limits.max_rows
            or totals.nbytes + nbytes > queues * self._limits.max_nbytes
        )
        return totals.requests > 0 and (exceeded or totals.requests >= queues * self._max_requests)


class _Totals(NamedTuple):
    """What waits in a level."""

    requests: int = 0
    rows: int = 0
    nbytes: int = 0

    def adjusted(self, request: InferRequest, delta: int) -> _Totals:
        """Return the count after a request has come (1) or gone (-1)."""
        return _Totals(self.requests + delta, self.rows + delta * request.rows, self.nbytes + delta * request.nbytes)


_ZERO = _Totals()


class _LevelQueue:
    """The requests of one level in one Lane: those in time, oldest first, and behind them those that were deferred."""

    __slots__ = ("deferred", "in_time", "rows")

    def __init__(self) -> None:
        self.in_time: OrderedDict[InferRequest, None] = OrderedDict()
        self.deferred: OrderedDict[InferRequest, None] = OrderedDict()
        self.rows = 0

    def __iter__(self) -> Iterator[InferRequest]:
        yield from self.in_time
        yield from self.deferred

    def heads(self) -> list[InferRequest]:
        """Return the first of each kind."""
        return [next(iter(each)) for each in (self.in_time, self.deferred) if each]

    def defer(self, request: InferRequest) -> None:
        """Move a request behind all others; one that was deferred before stays where it is."""
        if request in self.in_time:
            del self.in_time[request]
            self.deferred[request] = None

    def discard(self, request: InferRequest) -> None:
        """Remove a request."""
        if request in self.in_time:
            del self.in_time[request]
        else:
            del self.deferred[request]
        self.rows -= request.rows


class LevelLane(Lane):
    """A Lane whose requests have levels: the highest goes first, and a batch may continue into the next ones.

    Within a level the oldest goes first. A request that timed out, if its policy delays those, or that can no longer
    meet its target goes behind all others of its level. One that has waited for STARVATION_NS goes before all. There
    may be as many levels as a number allows: only levels with waiting requests have a queue, and the longest-waiting
    request is found without visiting all queues.
    """

    __slots__ = ("_by_arrival", "_levels", "_queues", "_sorted_levels")

    def __init__(self, key: Key, levels: Levels) -> None:
        super().__init__(key)
        self._levels = levels
        self._queues: dict[int, _LevelQueue] = {}
        self._sorted_levels: list[int] = []
        self._by_arrival: OrderedDict[InferRequest, None] = OrderedDict()

    def add(self, request: InferRequest) -> None:
        """Append a request to its level."""
        level = request.priority
        queue = self._queues.get(level)
        if queue is None:
            queue = self._queues[level] = _LevelQueue()
            insort(self._sorted_levels, level)
        request.waiting = True
        queue.in_time[request] = None
        self._by_arrival[request] = None
        queue.rows += request.rows
        self.rows += request.rows
        self.request_count += 1
        self._levels.adjust(request, 1)

    def remove(self, request: InferRequest) -> None:
        """Remove a request."""
        level = request.priority
        queue = self._queues[level]
        request.waiting = False
        queue.discard(request)
        del self._by_arrival[request]
        if not queue.in_time and not queue.deferred:
            del self._queues[level]
            del self._sorted_levels[bisect_left(self._sorted_levels, level)]
        self.rows -= request.rows
        self.request_count -= 1
        self._levels.adjust(request, -1)

    def delay(self, request: InferRequest) -> bool:
        """Put a request that timed out behind the others of its level. Returns: False if it must fail instead."""
        if not self._levels.policy(request.priority).delays_on_timeout:
            return False
        request.deadline_ns = 0
        self._queues[request.priority].defer(request)
        return True

    def head(self) -> InferRequest | None:
        """Return the request that has waited longest, whatever its level, without removing it."""
        return next(iter(self._by_arrival), None)

    def rank(self, now_ns: int) -> tuple[int, int]:
        """Return the highest waiting level and its urgency; the lowest tuple goes first. Must not be called if empty.

        A starved request ranks above the highest level.
        """
        oldest_ns = next(iter(self._by_arrival)).enqueued_ns
        if now_ns - oldest_ns >= STARVATION_NS:
            return STARVED_LEVEL, oldest_ns
        level = self._sorted_levels[0]
        return level, min([urgency_ns(request) for request in self._queues[level].heads()])

    def urgency_ns(self) -> int:
        """When its most urgent head should be done."""
        return min((urgency_ns(head) for queue in self._queues.values() for head in queue.heads()), default=0)

    def take(self, max_rows: int, end_ns: float = 0, now_ns: int = 0) -> tuple[list[InferRequest], int]:
        """Take requests for one batch, and their rows, as Lane does, highest level first."""
        if end_ns and self.rows > max_rows:
            self._defer_late(max_rows, end_ns)
        taken: list[InferRequest] = []
        rows = skipped = 0
        for request in self.ordered_requests(now_ns):
            if taken and rows + request.rows > max_rows:
                skipped += 1
                if skipped == MAX_SKIPPED:
                    break
                continue
            taken.append(request)
            rows += request.rows
            if rows >= max_rows:
                break
        for request in taken:
            self.remove(request)
        return taken, rows

    def waiting_requests(self) -> list[InferRequest]:
        """List the waiting requests, highest level first."""
        return [request for level in self._sorted_levels for request in self._queues[level]]

    def ordered_requests(self, now_ns: int) -> Iterator[InferRequest]:
        """Iterate over the waiting requests, in the order in which they are served if all fit."""
        oldest = self.head()
        starved = oldest if oldest is not None and now_ns - oldest.enqueued_ns >= STARVATION_NS else None
        if starved is not None:
            yield starved
        for level in self._sorted_levels:
            for request in self._queues[level]:
                if request is not starved:
                    yield request

    def rows_ahead(self, request: InferRequest) -> int:
        """Count the rows that would run before a request arriving now: those of its level and of higher ones."""
        level = request.priority
        return sum(queue.rows for each, queue in self._queues.items() if each <= level)

    def precedes(self, request: InferRequest, urgent_ns: int) -> bool:
        """Whether everything that waits here is of a higher level."""
        return self._sorted_levels[-1] < request.priority

    def expiry_ns(self, request: InferRequest) -> int:
        """Return when a request fails if it is still queued; 0 for never, as when a timeout only delays."""
        return 0 if self._levels.policy(request.priority).delays_on_timeout else request.deadline_ns

    def _defer_late(self, max_rows: int, end_ns: float) -> None:
        """Defer the requests that can no longer meet their target, as far in as a batch reaches."""
        rows = 0
        for level in self._sorted_levels:
            queue = self._queues[level]
            late = []
            for request in queue.in_time:
                if rows >= max_rows:
                    break
                if 0 < request.target_ns < end_ns:
                    late.append(request)
                else:
                    rows += request.rows
            for request in late:
                queue.defer(request)
