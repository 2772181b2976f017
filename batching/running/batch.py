"""Batch: requests that run together."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from penstock.batching.request import InferRequest, Key

Stamps = tuple[int, int, int, int]
"""When a Batch was taken, its inputs were gathered, the model returned, and its outputs were scattered."""

MAX_HANDLING_NS = 4_000
"""Upper bound for gathering and scattering per request; 1.2 to 3.5 us were measured."""


class Batch:
    """Closed when made: its requests never change; one Instance runs it once.

    Units: stamps in monotonic nanoseconds, in this order: `exec_start_ns` (an Instance took it), `compute_start_ns`
    (inputs gathered), `compute_end_ns` (the model returned), `exec_end_ns` (outputs scattered). Every request of the
    batch shares them. `cost_ns` is the run time predicted when it was closed, 0 for a Key never run. `device_free_ns`:
    when its device becomes free, if another Batch of its Instance was there when it was taken; a prediction until that
    one has ended. 0: the device was free.
    `row_positions` are the rows of the run at which the requests are, ascending, if these are not contiguous: each
    direct sequence has its own row. Rows between them, and after them up to `span_rows`, run empty. None: contiguous.
    `run_count` is the number of runs: more than one if they were sent to another process together and ran there one
    after another; 0 if statistics already count it. `rerun_requests` are those of its requests that run once more, in
    another Batch (iterations.py); whatever runs it sets that.
    """

    __slots__ = (
        "compute_end_ns",
        "compute_start_ns",
        "cost_ns",
        "device_free_ns",
        "exec_end_ns",
        "exec_start_ns",
        "key",
        "requests",
        "rerun_requests",
        "row_positions",
        "rows",
        "run_count",
        "span_rows",
    )  # fmt: skip

    def __init__(self, requests: list[InferRequest], rows: int, key: Key, exec_start_ns: int) -> None:
        self.requests = requests
        self.rows = rows
        self.key = key
        self.exec_start_ns = exec_start_ns
        self.compute_start_ns = exec_start_ns
        self.compute_end_ns = exec_start_ns
        self.exec_end_ns = exec_start_ns
        self.cost_ns = 0.0
        self.device_free_ns = 0
        self.row_positions: list[int] | None = None
        self.span_rows = rows
        self.run_count = 1
        self.rerun_requests: Collection[InferRequest] = ()

    @property
    def handling_ns(self) -> int:
        """Time spent on its requests in Python, one after another, rather than on the model and large tensors."""
        before_ns = max(self.compute_start_ns - (self.device_free_ns or self.exec_start_ns), 0)
        around_ns = before_ns + self.exec_end_ns - self.compute_end_ns
        return min(around_ns, MAX_HANDLING_NS * len(self.requests))


def split_by_result(batch: Batch, requests: Sequence[InferRequest]) -> list[Batch]:
    """Split a Batch for delivery: the requests that succeeded together, and each that failed alone."""
    succeeded = [request for request in requests if request.error is None]
    if len(succeeded) == len(batch.requests):
        return [batch]
    parts = [succeeded] if succeeded else []
    parts += [[request] for request in requests if request.error is not None]
    return [sub_batch(batch, each) for each in parts]


def sub_batch(batch: Batch, requests: list[InferRequest]) -> Batch:
    """Make a Batch of some of a Batch's requests, with the same stamps."""
    part = Batch(requests, sum([request.rows for request in requests]), batch.key, batch.exec_start_ns)
    part.compute_start_ns, part.compute_end_ns = batch.compute_start_ns, batch.compute_end_ns
    part.exec_end_ns = batch.exec_end_ns
    part.run_count = min(batch.run_count, len(requests))
    return part
