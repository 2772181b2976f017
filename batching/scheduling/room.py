"""Room: how much may wait for a model: as much as is said, or else some full batches of it. Held by the Scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.batching.request import InferRequest
    from penstock.batching.spec import BatchPolicy

FULL_BATCHES = 4
"""One runs, one is gathered, and as many again come while those are answered: 1024 clients in lock step with images of
602 kB and batches of 256 were refused in a queue that held fewer than two."""
LEAST_ROWS = 1024
LEAST_BYTES = 256 << 20
SHARE = 16
"""What one queue takes beyond that is at most this part of the memory there is: there may be many models."""


class Room:
    """How much may wait: `rows`, `nbytes` and `requests`.

    Where nothing is said there is room for FULL_BATCHES of the model, in rows, and in bytes with rows as large as the
    largest that has come. Pure; the Scheduler's caller holds the model's lock.
    """

    def __init__(self, policy: BatchPolicy, memory_bytes: int = 0) -> None:
        """`memory_bytes` is what there is for all models; 0: that is not known, and the least holds."""
        self._full_rows = FULL_BATCHES * (policy.max_batch_rows or 1)
        self.rows = queue_rows(policy)
        self.requests = min(policy.max_queue_requests or self.rows, self.rows)
        self.nbytes = policy.max_queue_bytes or LEAST_BYTES
        self.most_bytes = policy.max_queue_bytes or max(LEAST_BYTES, memory_bytes // SHARE)

    def holds(self, rows: int, nbytes: int, requests: int) -> bool:
        """Tell whether so much may wait."""
        return rows <= self.rows and nbytes <= self.nbytes and requests <= self.requests

    def bytes_for(self, request: InferRequest) -> int:
        """Give how many bytes may wait, a request with rows of this size among them: its size counts from now on."""
        if self.nbytes < self.most_bytes:
            full_bytes = self._full_rows * request.nbytes // max(request.rows, 1)
            self.nbytes = min(max(self.nbytes, full_bytes), self.most_bytes)
        return self.nbytes


def queue_rows(policy: BatchPolicy) -> int:
    """Give how many rows may wait where the policy is complete: in any case those of the requests that are said to."""
    if policy.max_queue_rows:
        return policy.max_queue_rows
    own = policy.level_policies.values()
    others = max(policy.priority_levels - len(own), 0 if own else 1)
    requests = others * policy.max_queue_requests + sum(each.max_requests for each in own)
    return max(LEAST_ROWS, max(requests, FULL_BATCHES) * (policy.max_batch_rows or 1))


def whole_rows(policy: BatchPolicy, batch_rows: int) -> int:
    """Give the rows of the largest request that an empty queue takes in parts: each part waits as a request."""
    most = queue_rows(policy)
    return min(most, (policy.max_queue_requests or most) * batch_rows)
