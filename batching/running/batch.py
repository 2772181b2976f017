"""Batch: requests that run together."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from penstock.batching.request import InferRequest, Key

Stamps = tuple[int, int, int, int]
"""When a Batch was taken, its inputs were gathered, the model returned, and its outputs were scattered."""

HANDLING_NS = 4_000
"""What gathering and scattering may take for one request by itself: 1.2 to 3.5 us were measured."""


class Batch:
    """Closed at birth: its requests never change; one Instance runs it once.

    Units: stamps in monotonic nanoseconds, in this order: `exec_start_ns` (an Instance took it), `compute_start_ns`
    (inputs gathered), `compute_end_ns` (the model returned), `exec_end_ns` (outputs scattered). Every request of
    the batch shares them. `cost_ns` is what it was predicted to take when it was closed, 0 for a Key never run.
    `free_ns`: when the device was free for it, since another Batch of its Instance was still there when it was taken;
    0: it was free. What was predicted, until that one has ended.
    `places` are the rows of the run at which the requests stand, ascending, where they do not follow one another: a
    direct sequence has a row of its own. Rows between them run empty, and so do those after them up to `span_rows`.
    None: they follow one another. `runs` is in how many runs they ran: more than one where they were sent to another
    process together and ran there one after another; 0: statistics have it by now. `again` are those of its requests
    that are to run once more, in another Batch (iterations.py); who runs it says so.
    """

    __slots__ = (
        "again", "compute_end_ns", "compute_start_ns", "cost_ns", "exec_end_ns", "exec_start_ns", "free_ns",
        "key", "places", "requests", "rows", "runs", "span_rows",
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
        self.free_ns = 0
        self.places: list[int] | None = None
        self.span_rows = rows
        self.runs = 1
        self.again: Collection[InferRequest] = ()

    @property
    def handling_ns(self) -> int:
        """What its requests, rather than the model and large tensors, took while it ran: Python, one after another."""
        before_ns = max(self.compute_start_ns - (self.free_ns or self.exec_start_ns), 0)
        around_ns = before_ns + self.exec_end_ns - self.compute_end_ns
        return min(around_ns, HANDLING_NS * len(self.requests))


def parted(batch: Batch, requests: Sequence[InferRequest]) -> list[Batch]:
    """Give what is to be delivered of a Batch: those that went well together, and each that failed alone."""
    well = [request for request in requests if request.error is None]
    if len(well) == len(batch.requests):
        return [batch]
    parts = [well] if well else []
    parts += [[request] for request in requests if request.error is not None]
    return [part_of(batch, each) for each in parts]


def part_of(batch: Batch, requests: list[InferRequest]) -> Batch:
    """Make a Batch, with a Batch's stamps, of some of its requests."""
    part = Batch(requests, sum([request.rows for request in requests]), batch.key, batch.exec_start_ns)
    part.compute_start_ns, part.compute_end_ns = batch.compute_start_ns, batch.compute_end_ns
    part.exec_end_ns = batch.exec_end_ns
    part.runs = min(batch.runs, len(requests))
    return part
