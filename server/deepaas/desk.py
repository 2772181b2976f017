"""Desk: the worker of a model that answers what is asked of it while others predict and train. Made by loading.py.

It is what the original's server process was: it has imported the model too, tells its metadata, and reads the arguments
of trainings, so that nobody waits for a prediction to be told that an argument is wrong.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from penstock.backends.errors import Code, InferError
from penstock.server.workers.kept import RestartingWorker
from penstock.server.workers.order import NotBegunError

from .messages import ModelDescription

if TYPE_CHECKING:
    from penstock.backends.backend import Array
    from penstock.server.workers.order import Order
    from penstock.server.workers.worker import Worker

WAIT_S = 5.0
"""For how long who asks waits for a worker that is being restarted."""
LIMIT_S = 60.0
"""How long an answer may take, uploads included, before the worker is ended: others wait for theirs."""


class Desk:
    """One worker, started anew when it ends. `description` is what it has said when it was started last.

    Threads: the event loop's.
    """

    def __init__(self, order: Order) -> None:
        self.order = order
        self.description = ModelDescription()
        self._kept = RestartingWorker(order, self)
        self._there = asyncio.Event()

    @property
    def pid(self) -> int:
        """The worker's process id, 0 for none."""
        return self._kept.pid

    async def start(self) -> None:
        """Start the worker. Raises: InferError."""
        await self._kept.start()
        self._there.set()

    async def ask(self, kind: int, body: bytes = b"") -> bytes:
        """Ask it. Returns: its answer (carrying/messages.py).

        Raises: InferError: NOT_READY while there is no worker, or if it has ended on this; EXPIRED if it took too long.
        """
        try:
            async with asyncio.timeout(WAIT_S):
                worker = await self._worker()
        except TimeoutError:
            raise InferError(Code.NOT_READY, f"{self.order.label} is being restarted") from None
        try:
            answer, _ = await worker.call(kind, body, limit_s=LIMIT_S)
        except NotBegunError:
            raise InferError(Code.NOT_READY, f"{self.order.label} is being restarted") from None
        self._kept.proved()
        return answer

    async def _worker(self) -> Worker:
        while (worker := self._kept.worker) is None or not worker.serves:
            if self._kept.closing:
                raise InferError(Code.NOT_READY, f"{self.order.label} is stopped")
            self._there.clear()
            await self._there.wait()
        return worker

    async def close(self) -> None:
        """Have the worker end."""
        self._there.set()  # who waits is told, once this has begun to close
        worker = self._kept.worker
        await self._kept.close(kill=worker is not None and worker.waiting > 0)

    # -- as RestartingWorker tells it --------------------------------------------------------------------------

    def moved_in(self, worker: Worker) -> None:
        """Take what it will say of the model: another worker may see other files."""
        worker.ready.add_done_callback(self._described)

    def _described(self, ready: asyncio.Future[tuple[bytes, list[Array | None]]]) -> None:
        if not ready.cancelled() and ready.exception() is None:
            self.description = ModelDescription.read(ready.result()[0])

    def moved_out(self) -> None:
        """Nothing is kept for a worker."""

    def lost(self, failure: InferError) -> None:
        """Who asks waits a little."""

    def hopeless(self, failure: InferError) -> None:
        """Likewise."""

    def back(self) -> None:
        """Go on."""
        self._there.set()

    def said(self, kind: int, number: int, body: bytes, arrays: list[Array | None]) -> None:
        """Take nothing."""
