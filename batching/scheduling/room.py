"""Room: how much may wait for a model: the configured limits, or else several full batches. Owned by the Scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.batching.request import InferRequest
    from penstock.batching.spec import BatchPolicy

FULL_BATCHES = 4
"""One runs, one is gathered, and as many arrive while those are answered: 1024 closed-loop clients with images of 602
kB and batches of 256 were rejected by a queue that held fewer than two."""
CLIENTS_BATCHES = 64
"""There is room for the rows of this many: 64 clients that send a full batch each, as load generators do, are no flood.
Small requests are limited by their number."""
LEAST_ROWS = 1024
LEAST_BYTES = 256 << 20
SHARE = 16
"""A queue takes at most this fraction of memory beyond that minimum, since there may be many models."""


class Room:
    """How much may wait: `rows`, `nbytes` and `requests`.

    By default there is room for as many requests as FULL_BATCHES of the model have rows, for the rows of
    CLIENTS_BATCHES, and for the bytes of FULL_BATCHES whose rows are as large as the largest seen. Pure; the
    Scheduler's caller holds the model's lock.
    """

    def __init__(self, policy: BatchPolicy, memory_bytes: int = 0) -> None:
        """`memory_bytes` is the memory for all models; 0 means unknown, so the minimum applies."""
        self._full_rows = FULL_BATCHES * (policy.max_batch_rows or 1)
        self.rows = queue_rows(policy)
        self.requests = _line(policy)
        self.nbytes = policy.max_queue_bytes or LEAST_BYTES
        self.most_bytes = policy.max_queue_bytes or max(LEAST_BYTES, memory_bytes // SHARE)

    def holds(self, rows: int, nbytes: int, requests: int) -> bool:
        """Whether this much may wait."""
        return rows <= self.rows and nbytes <= self.nbytes and requests <= self.requests

    def bytes_for(self, request: InferRequest) -> int:
        """Return how many bytes may wait, after taking this request's row size into account from now on."""
        if self.nbytes < self.most_bytes:
            full_bytes = self._full_rows * request.nbytes // max(request.rows, 1)
            self.nbytes = min(max(self.nbytes, full_bytes), self.most_bytes)
        return self.nbytes


def queue_rows(policy: BatchPolicy) -> int:
    """Return how many rows may wait under a complete policy: at least those of the configured number of requests."""
    if policy.max_queue_rows:
        return policy.max_queue_rows
    return max(LEAST_ROWS, max(_said_requests(policy), CLIENTS_BATCHES) * (policy.max_batch_rows or 1))


def queue_requests(policy: BatchPolicy) -> int:
    """Return how many requests may wait, across all levels."""
    if policy.max_queue_rows:
        return policy.max_queue_rows
    return max(LEAST_ROWS, FULL_BATCHES * (policy.max_batch_rows or 1), _said_requests(policy))


def whole_rows(policy: BatchPolicy, batch_rows: int) -> int:
    """Return the rows of the largest request that an empty queue takes in parts: each part waits as a request."""
    return min(queue_rows(policy), _line(policy) * batch_rows)


def _line(policy: BatchPolicy) -> int:
    """Return how many requests may wait in one level."""
    return min(policy.max_queue_requests or queue_requests(policy), queue_rows(policy))


def _said_requests(policy: BatchPolicy) -> int:
    own = policy.level_policies.values()
    others = max(policy.priority_levels - len(own), 0 if own else 1)
    return others * policy.max_queue_requests + sum(each.max_requests for each in own)
