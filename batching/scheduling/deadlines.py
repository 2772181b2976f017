"""Deadlines: which waiting request expires next. Owned by the Scheduler."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from penstock.batching.request import InferRequest

MAX_STALE = 32
"""How many requests that left the queue may be kept in addition to the waiting ones."""


class Deadlines:
    """The waiting requests that have a deadline, earliest first.

    A request that left the queue is dropped when it is reached, or when there are too many: they would keep their
    tensors alive until their deadline. `nearest_ns` is when the next may expire, 0 for never.
    """

    def __init__(self) -> None:
        self.nearest_ns = 0
        self._added_count = 0
        self._heap: list[tuple[int, int, InferRequest]] = []

    def add(self, request: InferRequest, waiting_count: int) -> None:
        """Add a waiting request; `waiting_count` is how many wait, including this one."""
        self._added_count += 1
        heap = self._heap
        heappush(heap, (request.deadline_ns, self._added_count, request))
        if len(heap) > 2 * waiting_count + MAX_STALE:
            heap = self._heap = [entry for entry in heap if entry[2].waiting]
            heapify(heap)
        self.nearest_ns = heap[0][0]

    def pop_expired(self, now_ns: int) -> list[InferRequest]:
        """Remove those that still wait and whose deadline has passed, earliest first."""
        heap = self._heap
        expired = []
        while heap and (heap[0][0] <= now_ns or not heap[0][2].waiting):
            request = heappop(heap)[2]
            if request.waiting:
                expired.append(request)
        self.nearest_ns = heap[0][0] if heap else 0
        return expired

    def clear(self) -> None:
        """Forget all, because nothing waits."""
        if self.nearest_ns:
            self._heap.clear()
            self.nearest_ns = 0
