"""Hosts: the workers of a model whose calls are carried. The Engine sees their WorkerSlots: each runs one Batch.

Made by what opens such models: carrying/loading.py, seldon/loading.py. What runs the Batches is in worker_slots.py.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.backends.errors import Code, InferError
from penstock.server.workers.order import Order
from penstock.server.workers.restarting import RestartingWorker, start_all

from .worker_slots import WorkerSlot

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.backends.backend import Array
    from penstock.batching.request import InferRequest
    from penstock.server.workers.worker import Worker

SLOTS = 2
"""Of a worker: it has its next calls while the answers of the last are on their way."""
SLOW_NS = 2_000_000
"""A worker whose calls take longer has only one Batch at a time, where there are other workers or batches are shared:
the pause between two is nothing then, and what waits at a worker is not run by another and joins no batch."""


@dataclass
class Crew:
    """All workers of one model, and what they share. Units: `limit_s` for a call, seconds, 0 for none.

    `told` is called with what a worker answers to being opened, whenever one has started. `slow`: calls take long.
    `most_calls` says how many calls a worker is to serve, 0 for any number.
    """

    limit_s: float
    told: Callable[[bytes], None] = lambda _: None
    hosts: list[CarryingHost] = field(default_factory=list)
    slow: bool = False
    most_calls: Callable[[], int] = lambda: 0

    @property
    def shares(self) -> bool:
        """Whether calls share batches."""
        return False

    def slot(self, host: CarryingHost) -> WorkerSlot:
        """Make a WorkerSlot of a CarryingHost."""
        return WorkerSlot(host)

    def done(self, requests: Sequence[InferRequest]) -> None:
        """Learn that requests are answered."""

    async def left(self) -> None:
        """Learn that a CarryingHost is closed."""

    def hopeless(self) -> None:
        """Learn that what waits is answered, as there is nobody to run it."""

    def pace(self, ns: float) -> None:
        """Learn what a call takes; if that is much, a worker has one Batch at a time where that is of use."""
        slow = ns > SLOW_NS and (len(self.hosts) > 1 or self.shares)
        if slow is not self.slow:
            self.slow = slow
            for host in self.hosts:
                host.rest(rests=slow)

    def slots(self) -> list[WorkerSlot]:
        """List the WorkerSlots, those of different workers next to each other: calls are spread before they queue."""
        return [slot for row in zip(*(host.slots for host in self.hosts), strict=True) for slot in row]

    async def start(self) -> bytes:
        """Start all workers. Returns: what one of them answers to being opened. Raises: what it was not opened for."""
        first, *_ = await start_all(self.hosts)
        return bytes(first)


class CarryingHost:
    """One worker, which `kept` has, and its WorkerSlots. `free_ns` is when it had answered all it was asked.

    Threads: the event loop's.
    """

    def __init__(self, order: Order, crew: Crew) -> None:
        self.order = order
        self.crew = crew
        self.free_ns = 0
        self._may_serve = 0
        self.kept = RestartingWorker(order, self)
        self.slots = [crew.slot(self) for _ in range(SLOTS)]
        self._open = SLOTS

    async def start(self) -> bytes:
        """Start the worker. Returns: its answer to being opened. Raises: InferError."""
        body, _ = await self.kept.start()
        return body

    def served(self, calls: int) -> None:
        """Count calls. After so many as there may be, another worker takes the place of this one."""
        if self._may_serve:
            self._may_serve -= calls
            if self._may_serve <= 0:
                self._may_serve = 0
                self.kept.renew()

    async def left(self) -> None:
        """Note that a WorkerSlot is closed; with the last one, the worker ends."""
        self._open -= 1
        if not self._open:
            await self.close()

    async def close(self) -> None:
        """Have the worker end."""
        await self.kept.close(kill=any(slot.busy for slot in self.slots))
        await self.crew.left()

    def rest(self, *, rests: bool) -> None:
        """Have all WorkerSlots but the first take nothing for now, or go on."""
        for slot in self.slots[1:]:
            if slot.takes is None:
                continue
            if rests:
                slot.takes.down(InferError(Code.NOT_READY, f"{self.order.label} has enough to do"), hopeless=False)
            elif self.kept.worker is not None:
                slot.takes.up()

    # -- as RestartingWorker tells it --------------------------------------------------------------------------

    def moved_in(self, worker: Worker) -> None:
        """Take what it will say of what it serves: another worker than the first may see other files."""
        self._may_serve = self.crew.most_calls()
        worker.ready.add_done_callback(self._described)

    def _described(self, ready: asyncio.Future[tuple[bytes, list[Array | None]]]) -> None:
        if not ready.cancelled() and ready.exception() is None:
            self.crew.told(ready.result()[0])

    def moved_out(self) -> None:
        """Nothing is kept for a worker but its calls."""

    def said(self, kind: int, number: int, body: bytes, arrays: list[Array | None]) -> None:
        """Take nothing: such a worker tells nothing of itself."""

    def lost(self, failure: InferError) -> None:
        """Leave what waits to others."""
        for slot in self.slots:
            slot.leave(failure)

    def hopeless(self, failure: InferError) -> None:
        """Have what waits answered, if nobody else can run it."""
        self.crew.hopeless()
        for slot in self.slots:
            if slot.takes is not None:
                slot.takes.down(failure, hopeless=True)

    def back(self) -> None:
        """Go on."""
        for slot in self.slots[:1] if self.crew.slow else self.slots:
            if slot.takes is not None:
                slot.takes.up()
