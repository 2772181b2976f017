"""Lane: the queue of one Key."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain

from penstock.batching.request import InferRequest, Key

MAX_SKIPPED = 32
"""How many requests that do not fit a batch are skipped before it is closed."""
PATIENCE_NS = 1_000_000_000
"""A request that has waited this long goes before all that came later, whatever their targets."""
FOREVER_NS = 1 << 62
HANDLING_SAMPLES = 8
"""`handling_ns_per_row` is a mean over about this many of the latest samples, of which one comes every 20 ms or so."""


def urgency_ns(request: InferRequest) -> int:
    """When a request should be done: its target or its deadline, and at the latest when patience ends."""
    urgent_ns = request.enqueued_ns + PATIENCE_NS
    if request.target_ns and request.target_ns < urgent_ns:
        urgent_ns = request.target_ns
    if request.deadline_ns and request.deadline_ns < urgent_ns:
        urgent_ns = request.deadline_ns
    return urgent_ns


class Lane:
    """Requests of one Key, oldest first. Pure: no clock, lock or thread; the Scheduler passes in what it needs.

    A cancelled or expired request is no longer `waiting` and is dropped when it is reached. `request_count` and `rows`
    count only those that still wait. A request that can no longer meet its target steps aside while not everything fits
    a batch; it runs when there is room or when patience ends.
    Kept here by the Scheduler: `fast`: batches of this Key run in less time than a hand-over takes;
    `handling_ns_per_row`: how many nanoseconds of that are Python, per row, on whichever thread (Batch.handling_ns).
    For promises: `full_batch_rows`, what a batch holds when enough waits (0: never run); `full_batch_ns`, the time from
    the start of such a batch until the next starts; `full_batch_p95_ns`, its run time at the 95th percentile;
    `backlog_ns`, the time that everything waiting here will take.
    """

    __slots__ = (
        "_deferred", "_waiting", "backlog_ns", "fast", "full_batch_ns", "full_batch_p95_ns", "full_batch_rows",
        "handling_ns_per_row", "key", "request_count", "rows",
    )  # fmt: skip

    def __init__(self, key: Key) -> None:
        self.key = key
        self.rows = 0
        self.request_count = 0
        self.fast = False
        self.handling_ns_per_row = 0.0
        self.full_batch_rows = 0
        self.full_batch_ns = 0.0
        self.full_batch_p95_ns = 0.0
        self.backlog_ns = 0.0
        self._waiting: deque[InferRequest] = deque()
        self._deferred: deque[InferRequest] = deque()

    def record_handling(self, ns: float) -> None:
        """Record the time per row that a batch spent in Python rather than in its run."""
        self.handling_ns_per_row += (
            (ns - self.handling_ns_per_row) / HANDLING_SAMPLES if self.handling_ns_per_row else ns
        )

    def add(self, request: InferRequest) -> None:
        """Append a request."""
        request.waiting = True
        self._waiting.append(request)
        self.rows += request.rows
        self.request_count += 1

    def add_all(self, requests: Sequence[InferRequest], rows: int) -> None:
        """Append requests that have `rows` rows together."""
        for request in requests:
            request.waiting = True
        self._waiting += requests
        self.rows += rows
        self.request_count += len(requests)

    def remove(self, request: InferRequest) -> None:
        """Remove a request before its turn; its entry is dropped when it is reached."""
        request.waiting = False
        self.rows -= request.rows
        self.request_count -= 1
        if not self.request_count:
            self._waiting.clear()
            self._deferred.clear()
        elif len(self._waiting) + len(self._deferred) > 2 * self.request_count + MAX_SKIPPED:
            # behind a head that stays, entries of removed requests would keep their tensors alive without bound
            self._waiting = deque(request for request in self._waiting if request.waiting)
            self._deferred = deque(request for request in self._deferred if request.waiting)

    def head(self) -> InferRequest | None:
        """Return the oldest waiting request without removing it."""
        return _first_waiting(self._waiting) or _first_waiting(self._deferred)

    def urgency_ns(self) -> int:
        """When its most urgent head should be done; for requests that stepped aside only patience counts."""
        head, deferred = _first_waiting(self._waiting), _first_waiting(self._deferred)
        patience_ns = deferred.enqueued_ns + PATIENCE_NS if deferred is not None else 0
        if head is None:
            return patience_ns
        urgent_ns = urgency_ns(head)
        return min(urgent_ns, patience_ns) if deferred is not None else urgent_ns

    def take(self, max_rows: int, end_ns: float = 0, now_ns: int = 0) -> tuple[list[InferRequest], int]:
        """Take requests for one batch, oldest first, and return them with their rows.

        The head is always taken, so nothing starves. A request that would exceed `max_rows` is skipped and keeps its
        place: of [2, 7, 1] with a limit of 8 the batch is 2 + 1, and the 7 is next. `end_ns` is when the batch will
        have run, if there are targets: requests whose target is earlier step aside.
        """
        waiting = self._waiting
        if self.rows <= max_rows and self.request_count == len(waiting) and not self._deferred:
            taken, rows = list(waiting), self.rows
            waiting.clear()
            self.rows = self.request_count = 0
            for request in taken:
                request.waiting = False
            return taken, rows
        taken = []
        rows = 0
        if end_ns and self.rows > max_rows:
            self._defer_late(max_rows, end_ns)
        if self._deferred:
            rows = _move_fitting(self._deferred, max_rows, taken, rows, now_ns - PATIENCE_NS)
        rows = _move_fitting(waiting, max_rows, taken, rows)
        if self._deferred:
            rows = _move_fitting(self._deferred, max_rows, taken, rows)
        self.rows -= rows
        self.request_count -= len(taken)
        if not self.request_count:
            waiting.clear()
            self._deferred.clear()
        return taken, rows

    def _defer_late(self, max_rows: int, end_ns: float) -> None:
        """Move aside the requests that can no longer meet their target, as far into the queue as a batch reaches."""
        waiting = self._waiting
        in_time: list[InferRequest] = []
        rows = 0
        while waiting and (rows < max_rows or not in_time):
            request = waiting.popleft()
            if not request.waiting:
                continue
            if 0 < request.target_ns < end_ns:
                self._deferred.append(request)
            else:
                in_time.append(request)
                rows += request.rows
        waiting.extendleft(reversed(in_time))

    def waiting_requests(self) -> list[InferRequest]:
        """List the waiting requests, those that stepped aside first, each oldest first."""
        return [request for queue in (self._deferred, self._waiting) for request in queue if request.waiting]

    def ordered_requests(self, now_ns: int) -> Iterator[InferRequest]:
        """Iterate over the waiting requests, in the order in which they are served if all fit."""
        return (request for request in chain(self._waiting, self._deferred) if request.waiting)

    def rows_ahead(self, request: InferRequest) -> int:
        """Count the rows that would run before a request arriving now."""
        return self.rows

    def precedes(self, request: InferRequest, urgent_ns: int) -> bool:
        """Whether all that waits here runs before a request of another Lane that should be done at `urgent_ns`."""
        return self.urgency_ns() <= urgent_ns

    def rank(self, now_ns: int) -> tuple[int, int]:
        """Return the highest waiting level and its urgency; the lowest tuple goes first. Here all levels are equal."""
        return 0, self.urgency_ns()

    def delay(self, request: InferRequest) -> bool:
        """Let a request that timed out wait on, behind others. Returns: False if it must fail instead, as here."""
        return False

    def expiry_ns(self, request: InferRequest) -> int:
        """Return when a request fails if it is still queued; 0 for never."""
        return request.deadline_ns


def _first_waiting(queue: deque[InferRequest]) -> InferRequest | None:
    while queue:
        if queue[0].waiting:
            return queue[0]
        queue.popleft()
    return None


def _move_fitting(
    queue: deque[InferRequest], max_rows: int, taken: list[InferRequest], rows: int, queued_until_ns: int = FOREVER_NS
) -> int:
    """Move what fits and was queued by `queued_until_ns` to `taken`, which has `rows` rows. Returns: its new rows."""
    skipped: list[InferRequest] = []
    while queue and (rows < max_rows or not taken):
        request = queue[0]
        if request.enqueued_ns > queued_until_ns:
            break
        queue.popleft()
        if not request.waiting:
            continue
        new_rows = rows + request.rows
        if new_rows > max_rows and taken:
            skipped.append(request)
            if len(skipped) == MAX_SKIPPED:
                break
            continue
        request.waiting = False
        taken.append(request)
        rows = new_rows
    queue.extendleft(reversed(skipped))
    return rows
