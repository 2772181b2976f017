"""Crew and CarryingHost: the workers of a model whose calls are carried, each with WorkerSlots that run one Batch.

Created by the loaders of such models: carrying/loading.py, seldon/loading.py. The slots are in worker_slots.py.
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
"""WorkerSlots per worker: with two, the worker has its next calls while the answers to the last are on their way."""
SLOW_NS = 2_000_000
"""A worker whose calls take longer uses one slot only, if there are other workers or batches are shared: the pause
between two Batches is then negligible, while a Batch waiting at one worker cannot run on another or grow."""


@dataclass
class Crew:
    """All workers of one model, and their shared state. Units: `limit_s` of a call, seconds, 0 for none.

    `on_opened` is called with each worker's answer to OPEN. `slow`: calls take long. `max_calls` returns how many
    calls a worker may serve, 0 for any number.
    """

    limit_s: float
    on_opened: Callable[[bytes], None] = lambda _: None
    hosts: list[CarryingHost] = field(default_factory=list)
    slow: bool = False
    max_calls: Callable[[], int] = lambda: 0

    @property
    def shares_batches(self) -> bool:
        """Whether calls share batches."""
        return False

    def make_slot(self, host: CarryingHost) -> WorkerSlot:
        """Make a WorkerSlot of a CarryingHost."""
        return WorkerSlot(host)

    def on_answered(self, requests: Sequence[InferRequest]) -> None:
        """Handle answered requests."""

    async def on_host_closed(self) -> None:
        """Handle the end of a CarryingHost."""

    def on_restart_failed(self) -> None:
        """Handle that waiting requests fail, since no worker can run them."""

    def update_call_time(self, ns: float) -> None:
        """Update the measured time of a call; if it is long, limit each worker to one Batch at a time if that helps."""
        slow = ns > SLOW_NS and (len(self.hosts) > 1 or self.shares_batches)
        if slow is not self.slow:
            self.slow = slow
            for host in self.hosts:
                host.set_suspended(suspended=slow)

    def slots(self) -> list[WorkerSlot]:
        """List the WorkerSlots, alternating between workers, so calls are spread before they queue."""
        return [slot for row in zip(*(host.slots for host in self.hosts), strict=True) for slot in row]

    async def start(self) -> bytes:
        """Start all workers. Returns: the first worker's answer to OPEN. Raises: the error of the first that failed."""
        first, *_ = await start_all(self.hosts)
        return bytes(first)


class CarryingHost:
    """One worker, in `restarting_worker`, and its WorkerSlots.

    `idle_since_ns` is when it had last answered all its calls. Threads: the event loop's.
    """

    def __init__(self, order: Order, crew: Crew) -> None:
        self.order = order
        self.crew = crew
        self.idle_since_ns = 0
        self._remaining_calls = 0
        self.restarting_worker = RestartingWorker(order, self)
        self.slots = [crew.make_slot(self) for _ in range(SLOTS)]
        self._open_slots = SLOTS

    async def start(self) -> bytes:
        """Start the worker. Returns: its answer to OPEN. Raises: InferError."""
        body, _ = await self.restarting_worker.start()
        return body

    def count_served(self, calls: int) -> None:
        """Count served calls. When the maximum is reached, replace the worker."""
        if self._remaining_calls:
            self._remaining_calls -= calls
            if self._remaining_calls <= 0:
                self._remaining_calls = 0
                self.restarting_worker.replace_worker()

    async def on_slot_closed(self) -> None:
        """Count a closed WorkerSlot; with the last one, the worker ends."""
        self._open_slots -= 1
        if not self._open_slots:
            await self.close()

    async def close(self) -> None:
        """End the worker."""
        await self.restarting_worker.close(kill=any(slot.busy for slot in self.slots))
        await self.crew.on_host_closed()

    def set_suspended(self, *, suspended: bool) -> None:
        """Suspend all WorkerSlots but the first, or resume them."""
        for slot in self.slots[1:]:
            if slot.instance is None:
                continue
            if suspended:
                slot.instance.on_down(InferError(Code.NOT_READY, f"{self.order.label} is saturated"), permanent=False)
            elif self.restarting_worker.worker is not None:
                slot.instance.on_up()

    # -- the WorkerOwner of the RestartingWorker -----------------------------------------------------------------------

    def on_worker_starting(self, worker: Worker) -> None:
        """Wait for the answer to OPEN, which describes the model: a later worker may see other files."""
        self._remaining_calls = self.crew.max_calls()
        worker.ready.add_done_callback(self._on_opened)

    def _on_opened(self, ready: asyncio.Future[tuple[bytes, list[Array | None]]]) -> None:
        if not ready.cancelled() and ready.exception() is None:
            self.crew.on_opened(ready.result()[0])

    def on_worker_gone(self) -> None:
        """Do nothing: only calls are kept for a worker, and they fail by themselves."""

    def on_message(self, kind: int, number: int, body: bytes, arrays: list[Array | None]) -> None:
        """Ignore the message: such a worker sends none."""

    def on_worker_lost(self, failure: InferError) -> None:
        """Suspend the slots, and leave waiting requests to other workers."""
        for slot in self.slots:
            slot.suspend(failure)

    def on_restart_failed(self, failure: InferError) -> None:
        """Fail the waiting requests if no other worker can run them."""
        self.crew.on_restart_failed()
        for slot in self.slots:
            if slot.instance is not None:
                slot.instance.on_down(failure, permanent=True)

    def on_worker_restarted(self) -> None:
        """Resume the slots."""
        for slot in self.slots[:1] if self.crew.slow else self.slots:
            if slot.instance is not None:
                slot.instance.on_up()
