"""Room: how much may wait for a model: as much as is said, or else some full batches of it. Held by the Scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.batching.request import InferRequest
    from penstock.batching.spec import BatchPolicy

FULL_BATCHES = 4
"""One runs, one is gathered, and as many again come while those are answered: 1024 clients in lock step with images of
602 kB and batches of 256 were refused in a queue that held fewer than two."""
CLIENTS_BATCHES = 64
"""There is room for the rows of so many: 64 clients that send a full batch each, as load generators do, are no flood.
One of small requests is bounded by their number."""
LEAST_ROWS = 1024
LEAST_BYTES = 256 << 20
SHARE = 16
"""What one queue takes beyond that is at most this part of the memory there is: there may be many models."""


class Room:
    """How much may wait: `rows`, `nbytes` and `requests`.

    Where nothing is said there is room for as many requests as FULL_BATCHES of the model have rows, for the rows of
    CLIENTS_BATCHES, and for the bytes of FULL_BATCHES with rows as large as the largest that has come. Pure; the
    Scheduler's caller holds the model's lock.
    """

    def __init__(self, policy: BatchPolicy, memory_bytes: int = 0) -> None:
        """`memory_bytes` is what there is for all models; 0: that is not known, and the least holds."""
        self._full_rows = FULL_BATCHES * (policy.max_batch_rows or 1)
        self.rows = queue_rows(policy)
        self.requests = _line(policy)
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
    return max(LEAST_ROWS, max(_said_requests(policy), CLIENTS_BATCHES) * (policy.max_batch_rows or 1))


def queue_requests(policy: BatchPolicy) -> int:
    """Give how many requests may wait, those of all levels together."""
    if policy.max_queue_rows:
        return policy.max_queue_rows
    return max(LEAST_ROWS, FULL_BATCHES * (policy.max_batch_rows or 1), _said_requests(policy))


def whole_rows(policy: BatchPolicy, batch_rows: int) -> int:
    """Give the rows of the largest request that an empty queue takes in parts: each part waits as a request."""
    return min(queue_rows(policy), _line(policy) * batch_rows)


def _line(policy: BatchPolicy) -> int:
    """Give how many requests may wait in one line."""
    return min(policy.max_queue_requests or queue_requests(policy), queue_rows(policy))


def _said_requests(policy: BatchPolicy) -> int:
    own = policy.level_policies.values()
    others = max(policy.priority_levels - len(own), 0 if own else 1)
    return others * policy.max_queue_requests + sum(each.max_requests for each in own)
