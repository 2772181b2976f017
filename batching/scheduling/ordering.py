"""Ordering: answers leave in the order in which their requests came (`preserve_ordering`). Called by sinks.py."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from penstock.batching.request import InferRequest

_PENDING, _ENDED, _REMOVED = range(3)


class Ordering:
    """The requests of one model that were accepted and not yet handed out, in order of arrival.

    Pure. A request takes its place when it is queued, not when it has run: in Triton, two Instances deliver in the
    order in which they finish. Invariant: the first in the line is under way.
    Threads: the event loop's, except `add`, which is called with the model's lock held.
    """

    def __init__(self) -> None:
        self._stopped = False
        self._queue: deque[InferRequest] = deque()
        self._states: dict[InferRequest, int] = {}

    def add(self, request: InferRequest) -> None:
        """Take the last place; a request that runs again (iterations.py) keeps its own."""
        if request in self._states:
            return
        self._states[request] = _PENDING  # first: every request in the line must have a state
        self._queue.append(request)

    def record_ended(self, requests: Iterable[InferRequest]) -> list[InferRequest]:
        """Record that requests have ended. Returns: what to hand out now, including any that never entered."""
        states, released = self._states, []
        for request in requests:
            if request in states:
                states[request] = _ENDED
            else:
                released.append(request)
        return self._pop_released(released)

    def discard(self, request: InferRequest) -> list[InferRequest]:
        """Forget a request that gets no answer. Returns: what to hand out now."""
        if request in self._states:
            self._states[request] = _REMOVED
        return self._pop_released([])

    def stop(self) -> list[InferRequest]:
        """Stop holding requests back. Returns: those that ended and were held back."""
        self._stopped = True
        return self._pop_released([])

    def _pop_released(self, released: list[InferRequest]) -> list[InferRequest]:
        queue, states = self._queue, self._states
        if self._stopped:
            ended = [request for request in queue if states[request] == _ENDED]
            states.update(dict.fromkeys(ended, _REMOVED))
            released += ended
        while queue and states[queue[0]] != _PENDING:
            request = queue.popleft()
            if states.pop(request) == _ENDED:
                released.append(request)
        return released
