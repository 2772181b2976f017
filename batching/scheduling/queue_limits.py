"""QueueLimits: how much may wait for a model, as configured or else several full batches. Owned by the Scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.batching.request import InferRequest
    from penstock.batching.spec import BatchPolicy

FULL_BATCHES = 4
"""One runs, one is gathered, and as many arrive while those are answered: 1024 closed-loop clients with images of 602
kB and batches of 256 were rejected by a queue that held fewer than two."""
CLIENT_BATCHES = 64
"""There is room for the rows of this many: 64 clients that send a full batch each, as load generators do, are no flood.
Small requests are limited by their number."""
MIN_ROWS = 1024
MIN_BYTES = 256 << 20
MEMORY_FRACTION = 16
"""A queue takes at most this fraction of memory beyond that minimum, since there may be many models."""


class QueueLimits:
    """How much may wait: `max_rows`, `max_nbytes` and `max_requests`.

    By default there is room for as many requests as FULL_BATCHES of the model have rows, for the rows of
    CLIENT_BATCHES, and for the bytes of FULL_BATCHES whose rows are as large as the largest seen. Pure; the
    Scheduler's caller holds the model's lock.
    """

    def __init__(self, policy: BatchPolicy, memory_bytes: int = 0) -> None:
        """`memory_bytes` is the memory for all models; 0 means unknown, so the minimum applies."""
        self._full_batches_rows = FULL_BATCHES * (policy.max_batch_rows or 1)
        self.max_rows = queue_rows(policy)
        self.max_requests = _level_requests(policy)
        self.max_nbytes = policy.max_queue_bytes or MIN_BYTES
        self.nbytes_ceiling = policy.max_queue_bytes or max(MIN_BYTES, memory_bytes // MEMORY_FRACTION)

    def allows(self, rows: int, nbytes: int, requests: int) -> bool:
        """Whether this much may wait."""
        return rows <= self.max_rows and nbytes <= self.max_nbytes and requests <= self.max_requests

    def adapt_max_nbytes(self, request: InferRequest) -> int:
        """Return how many bytes may wait, after taking this request's row size into account from now on."""
        if self.max_nbytes < self.nbytes_ceiling:
            full_bytes = self._full_batches_rows * request.nbytes // max(request.rows, 1)
            self.max_nbytes = min(max(self.max_nbytes, full_bytes), self.nbytes_ceiling)
        return self.max_nbytes


def queue_rows(policy: BatchPolicy) -> int:
    """Return how many rows may wait under a complete policy: at least those of the configured number of requests."""
    if policy.max_queue_rows:
        return policy.max_queue_rows
    return max(MIN_ROWS, max(_configured_requests(policy), CLIENT_BATCHES) * (policy.max_batch_rows or 1))


def queue_requests(policy: BatchPolicy) -> int:
    """Return how many requests may wait, across all levels."""
    if policy.max_queue_rows:
        return policy.max_queue_rows
    return max(MIN_ROWS, FULL_BATCHES * (policy.max_batch_rows or 1), _configured_requests(policy))


def max_split_rows(policy: BatchPolicy, batch_rows: int) -> int:
    """Return the rows of the largest request that an empty queue takes in parts: each part waits as a request."""
    return min(queue_rows(policy), _level_requests(policy) * batch_rows)


def _level_requests(policy: BatchPolicy) -> int:
    """Return how many requests may wait in one level."""
    return min(policy.max_queue_requests or queue_requests(policy), queue_rows(policy))


def _configured_requests(policy: BatchPolicy) -> int:
    own = policy.level_policies.values()
    others = max(policy.priority_levels - len(own), 0 if own else 1)
    return others * policy.max_queue_requests + sum(each.max_requests for each in own)
