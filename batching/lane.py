"""Lane: the waiting line of one Key."""

from __future__ import annotations

from collections import deque

from .request import InferRequest, Key

LOOK_AHEAD = 32
"""How many requests that do not fit a batch are looked past before it is closed."""


class Lane:
    """Requests of one Key, oldest first. Pure: no clock, lock or thread; the Scheduler tells it what it needs.

    A request that was cancelled or has expired is no longer `waiting` and is dropped when it is met. `live` and `rows`
    count only those that still wait. `fast` is the Scheduler's mark: batches
    of this Key run in less time than a hand-over takes.
    """

    __slots__ = ("_waiting", "fast", "key", "live", "rows")

    def __init__(self, key: Key) -> None:
        self.key = key
        self.rows = 0
        self.live = 0
        self.fast = False
        self._waiting: deque[InferRequest] = deque()

    def add(self, request: InferRequest) -> None:
        """Put a request last."""
        request.waiting = True
        self._waiting.append(request)
        self.rows += request.rows
        self.live += 1

    def remove(self, request: InferRequest) -> None:
        """Take out a request before its turn; its place is dropped when it is met."""
        request.waiting = False
        self.rows -= request.rows
        self.live -= 1
        if len(self._waiting) > 2 * self.live + LOOK_AHEAD:
            # behind a head that stays, places of the departed would keep their tensors alive without bound
            self._waiting = deque(self.live_requests())
        elif not self.live:
            self._waiting.clear()

    def head(self) -> InferRequest | None:
        """Give the oldest request that still waits, and leave it there."""
        waiting = self._waiting
        while waiting:
            if waiting[0].waiting:
                return waiting[0]
            waiting.popleft()
        return None

    def take(self, limit_rows: int) -> tuple[list[InferRequest], int]:
        """Take requests for one batch, oldest first, and their rows.

        The head is always taken, so that nothing starves. One that would pass `limit_rows` is looked past and
        keeps its place: of [2, 7, 1] with a limit of 8 the batch is 2 + 1, and the 7 is next.
        """
        waiting = self._waiting
        if self.rows <= limit_rows and self.live == len(waiting):
            taken, rows = list(waiting), self.rows
            waiting.clear()
            self.rows = self.live = 0
            for request in taken:
                request.waiting = False
            return taken, rows
        taken = []
        passed: list[InferRequest] = []
        rows = 0
        while waiting and len(passed) < LOOK_AHEAD:
            request = waiting.popleft()
            if not request.waiting:
                continue
            if taken and rows + request.rows > limit_rows:
                passed.append(request)
                continue
            request.waiting = False
            taken.append(request)
            rows += request.rows
            if rows >= limit_rows:
                break
        waiting.extendleft(reversed(passed))
        self.rows -= rows
        self.live -= len(taken)
        if not self.live:
            waiting.clear()
        return taken, rows

    def live_requests(self) -> list[InferRequest]:
        """List those that still wait, oldest first."""
        return [request for request in self._waiting if request.waiting]
