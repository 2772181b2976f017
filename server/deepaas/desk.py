"""Desk: the worker of a model that answers its other requests while others predict and train. Made by loading.py.

It corresponds to the original's server process: it has imported the model too, returns its metadata, and checks the
arguments of trainings, so that no request waits for a prediction only to learn that an argument is wrong.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from penstock.backends.errors import Code, InferError
from penstock.server.workers.order import NotStartedError
from penstock.server.workers.restarting import RestartingWorker

from .messages import ModelDescription

if TYPE_CHECKING:
    from penstock.backends.backend import Array
    from penstock.server.workers.order import Order
    from penstock.server.workers.worker import Worker

WAIT_S = 5.0
"""How long callers wait for a worker that is restarting."""
LIMIT_S = 60.0
"""The time limit of an answer, uploads included, after which the worker is terminated: others wait for it."""


class Desk:
    """One worker, restarted when it ends. `description` is what it reported at its last start.

    Threads: the event loop's.
    """

    def __init__(self, order: Order) -> None:
        self.order = order
        self.description = ModelDescription()
        self._restarting = RestartingWorker(order, self)
        self._available = asyncio.Event()

    @property
    def pid(self) -> int:
        """The worker's process id, 0 for none."""
        return self._restarting.pid

    async def start(self) -> None:
        """Start the worker. Raises: InferError."""
        await self._restarting.start()
        self._available.set()

    async def call(self, kind: int, body: bytes = b"") -> bytes:
        """Call it. Returns: its answer (carrying/messages.py).

        Raises: InferError: NOT_READY while there is no worker, or if it ended during this call; EXPIRED if it took too
        long.
        """
        try:
            async with asyncio.timeout(WAIT_S):
                worker = await self._worker()
        except TimeoutError:
            raise InferError(Code.NOT_READY, f"{self.order.label} is being restarted") from None
        try:
            answer, _ = await worker.call(kind, body, limit_s=LIMIT_S)
        except NotStartedError:
            raise InferError(Code.NOT_READY, f"{self.order.label} is being restarted") from None
        self._restarting.reset_backoff()
        return answer

    async def _worker(self) -> Worker:
        while (worker := self._restarting.worker) is None or not worker.serving:
            if self._restarting.closing:
                raise InferError(Code.NOT_READY, f"{self.order.label} is stopped")
            self._available.clear()
            await self._available.wait()
        return worker

    async def close(self) -> None:
        """Stop the worker."""
        self._available.set()  # waiting callers get their error once `_restarting` is closing
        worker = self._restarting.worker
        await self._restarting.close(kill=worker is not None and worker.in_flight_count > 0)

    # -- callbacks of RestartingWorker -------------------------------------------------------------------------

    def on_worker_starting(self, worker: Worker) -> None:
        """Take its description of the model: another worker may see other files."""
        worker.ready.add_done_callback(self._on_ready)

    def _on_ready(self, ready: asyncio.Future[tuple[bytes, list[Array | None]]]) -> None:
        if not ready.cancelled() and ready.exception() is None:
            self.description = ModelDescription.read(ready.result()[0])

    def on_worker_gone(self) -> None:
        """Do nothing: there is no state for each worker."""

    def on_worker_lost(self, failure: InferError) -> None:
        """Do nothing: callers wait for a while."""

    def on_restart_failed(self, failure: InferError) -> None:
        """Do nothing: callers wait for a while."""

    def on_worker_restarted(self) -> None:
        """Resume."""
        self._available.set()

    def on_message(self, kind: int, number: int, body: bytes, arrays: list[Array | None]) -> None:
        """Ignore it."""
