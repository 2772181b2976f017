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

from .lane import LOOK_AHEAD, Lane, urgency_ns
from .room import Room, queue_requests
from .timeouts import default_policy, level_of

STARVED_NS = 10_000_000_000
"""A request that has waited this long goes first, whatever its level; in Triton it would wait forever. Each batch takes
at most one such request first, so the highest level keeps nearly all of the model's capacity."""
QUEUES = 4
"""All levels together hold at most this many times what the queue of a model without levels holds. Without this limit,
a client could use a higher level for each request and never be rejected, as there may be as many levels as a number
allows."""
STARVED = -1
"""The level of a request that has waited that long: above the highest."""


class Levels:
    """What each level of one model allows, and what waits in it, across all Lanes.

    The queue's limits apply to what waits in a level and in those above it, so requests of a high level are not kept
    out by those waiting below. Each level may thus add as much as the queue of a model without levels holds, up to
    QUEUES times as much for all of them.
    """

    def __init__(self, policy: BatchPolicy, room: Room) -> None:
        self._policy = policy
        self._room = room
        self._requests = queue_requests(policy)
        self._default = default_policy(policy)
        self._waiting: dict[int, _Count] = {}
        self._all = _NOTHING

    @classmethod
    def of(cls, policy: BatchPolicy, room: Room) -> Levels | None:
        """Make the Levels of a model that needs them, or None."""
        needed = policy.priority_levels or policy.level_policies or policy.timeout_delays
        return cls(policy, room) if needed else None

    def admit(self, request: InferRequest) -> None:
        """Admit a request to its level, which becomes its priority.

        Raises: InferError (OVERLOADED: the level's queue is full).
        """
        level = request.priority = level_of(self._policy, request.priority)
        self._room.bytes_for(request)
        if self._has_its_most(level) or self._is_full(level, request.rows, request.nbytes):
            raise InferError(Code.OVERLOADED, "Exceeds maximum queue size")

    def full(self) -> bool:
        """Whether no request of any level can be admitted."""
        levels = self._policy.priority_levels
        highest = min(levels, 1)
        return self._is_full(highest, 1, 1) or (levels <= 1 and self._has_its_most(highest))

    def policy(self, level: int) -> QueuePolicy:
        """Return the queue policy of a level."""
        return self._policy.level_policies.get(level, self._default)

    def count(self, request: InferRequest, more: int) -> None:
        """Record that a request started (1) or stopped (-1) waiting in its level."""
        level = request.priority
        self._all = self._all.with_more(request, more)
        count = self._waiting[level] = self._waiting.get(level, _NOTHING).with_more(request, more)
        if not count.requests:
            del self._waiting[level]

    def _has_its_most(self, level: int) -> bool:
        return 0 < self.policy(level).max_requests <= self._waiting.get(level, _NOTHING).requests

    def _is_full(self, level: int, rows: int, nbytes: int) -> bool:
        """Whether a level cannot take this many more rows and bytes, counting what waits in it and above it."""
        if not self._passes(self._all, rows, nbytes, 1):
            return False
        before = [count for each, count in self._waiting.items() if each <= level]
        sums = _Count(*(sum(each) for each in zip(*before, strict=True)))
        return self._passes(sums, rows, nbytes, 1) or self._passes(self._all, 1, 1, QUEUES)

    def _passes(self, count: _Count, rows: int, nbytes: int, queues: int) -> bool:
        """Whether adding these rows and bytes to a count exceeds what `queues` queues hold."""
        over = count.rows + rows > queues * self._room.rows or count.nbytes + nbytes > queues * self._room.nbytes
        return count.requests > 0 and (over or count.requests >= queues * self._requests)


class _Count(NamedTuple):
    """What waits in a level."""

    requests: int = 0
    rows: int = 0
    nbytes: int = 0

    def with_more(self, request: InferRequest, more: int) -> _Count:
        """Return the count after a request has come (1) or gone (-1)."""
        return _Count(self.requests + more, self.rows + more * request.rows, self.nbytes + more * request.nbytes)


_NOTHING = _Count()


class _Line:
    """The requests of one level in one Lane: those in time, oldest first, and behind them those that were deferred."""

    __slots__ = ("in_time", "put_off", "rows")

    def __init__(self) -> None:
        self.in_time: OrderedDict[InferRequest, None] = OrderedDict()
        self.put_off: OrderedDict[InferRequest, None] = OrderedDict()
        self.rows = 0

    def __iter__(self) -> Iterator[InferRequest]:
        yield from self.in_time
        yield from self.put_off

    def heads(self) -> list[InferRequest]:
        """Return the first of each kind."""
        return [next(iter(each)) for each in (self.in_time, self.put_off) if each]

    def defer(self, request: InferRequest) -> None:
        """Move a request behind all others; one that was deferred before stays where it is."""
        if request in self.in_time:
            del self.in_time[request]
            self.put_off[request] = None

    def discard(self, request: InferRequest) -> None:
        """Remove a request."""
        if request in self.in_time:
            del self.in_time[request]
        else:
            del self.put_off[request]
        self.rows -= request.rows


class LevelLane(Lane):
    """A Lane whose requests have levels: the highest goes first, and a batch may continue into the next ones.

    Within a level the oldest goes first. A request that timed out, if its policy delays those, or that can no longer
    meet its target goes behind all others of its level. One that has waited for STARVED_NS goes before all. There may
    be as many levels as a number allows: only levels with waiting requests have a line, and the longest-waiting request
    is found without visiting all lines.
    """

    __slots__ = ("_arrived", "_levels", "_lines", "_sorted")

    def __init__(self, key: Key, levels: Levels) -> None:
        super().__init__(key)
        self._levels = levels
        self._lines: dict[int, _Line] = {}
        self._sorted: list[int] = []
        self._arrived: OrderedDict[InferRequest, None] = OrderedDict()

    def add(self, request: InferRequest) -> None:
        """Append a request to its level."""
        level = request.priority
        line = self._lines.get(level)
        if line is None:
            line = self._lines[level] = _Line()
            insort(self._sorted, level)
        request.waiting = True
        line.in_time[request] = None
        self._arrived[request] = None
        line.rows += request.rows
        self.rows += request.rows
        self.live += 1
        self._levels.count(request, 1)

    def remove(self, request: InferRequest) -> None:
        """Remove a request."""
        level = request.priority
        line = self._lines[level]
        request.waiting = False
        line.discard(request)
        del self._arrived[request]
        if not line.in_time and not line.put_off:
            del self._lines[level]
            del self._sorted[bisect_left(self._sorted, level)]
        self.rows -= request.rows
        self.live -= 1
        self._levels.count(request, -1)

    def delay(self, request: InferRequest) -> bool:
        """Put a request that timed out behind the others of its level. Returns: False if it must fail instead."""
        if not self._levels.policy(request.priority).delays_on_timeout:
            return False
        request.deadline_ns = 0
        self._lines[request.priority].defer(request)
        return True

    def head(self) -> InferRequest | None:
        """Return the request that has waited longest, whatever its level, without removing it."""
        return next(iter(self._arrived), None)

    def rank(self, now_ns: int) -> tuple[int, int]:
        """Return the highest waiting level and its urgency; the lowest tuple goes first. Must not be called if empty.

        A starved request ranks above the highest level.
        """
        oldest_ns = next(iter(self._arrived)).enqueued_ns
        if now_ns - oldest_ns >= STARVED_NS:
            return STARVED, oldest_ns
        level = self._sorted[0]
        return level, min([urgency_ns(request) for request in self._lines[level].heads()])

    def urgency_ns(self) -> int:
        """When its most urgent head should be done."""
        return min((urgency_ns(head) for line in self._lines.values() for head in line.heads()), default=0)

    def take(self, limit_rows: int, done_ns: float = 0, now_ns: int = 0) -> tuple[list[InferRequest], int]:
        """Take requests for one batch, and their rows, as Lane does, highest level first."""
        if done_ns and self.rows > limit_rows:
            self._pass_over(limit_rows, done_ns)
        taken: list[InferRequest] = []
        rows = passed = 0
        for request in self.line(now_ns):
            if taken and rows + request.rows > limit_rows:
                passed += 1
                if passed == LOOK_AHEAD:
                    break
                continue
            taken.append(request)
            rows += request.rows
            if rows >= limit_rows:
                break
        for request in taken:
            self.remove(request)
        return taken, rows

    def live_requests(self) -> list[InferRequest]:
        """List the waiting requests, highest level first."""
        return [request for level in self._sorted for request in self._lines[level]]

    def line(self, now_ns: int) -> Iterator[InferRequest]:
        """Iterate over the waiting requests, in the order in which they are served if all fit."""
        oldest = self.head()
        starved = oldest if oldest is not None and now_ns - oldest.enqueued_ns >= STARVED_NS else None
        if starved is not None:
            yield starved
        for level in self._sorted:
            for request in self._lines[level]:
                if request is not starved:
                    yield request

    def rows_before(self, request: InferRequest) -> int:
        """Count the rows that would run before a request arriving now: those of its level and of higher ones."""
        level = request.priority
        return sum(line.rows for each, line in self._lines.items() if each <= level)

    def goes_before(self, request: InferRequest, urgent_ns: int) -> bool:
        """Whether everything that waits here is of a higher level."""
        return self._sorted[-1] < request.priority

    def must_leave_ns(self, request: InferRequest) -> int:
        """Return when a request fails if it is still queued; 0 for never, as when a timeout only delays."""
        return 0 if self._levels.policy(request.priority).delays_on_timeout else request.deadline_ns

    def _pass_over(self, limit_rows: int, done_ns: float) -> None:
        """Defer the requests that can no longer meet their target, as far into the queue as a batch reaches."""
        rows = 0
        for level in self._sorted:
            line = self._lines[level]
            late = []
            for request in line.in_time:
                if rows >= limit_rows:
                    break
                if 0 < request.target_ns < done_ns:
                    late.append(request)
                else:
                    rows += request.rows
            for request in late:
                line.defer(request)
