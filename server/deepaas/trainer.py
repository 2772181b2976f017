"""Trainer: the process of one training, which ends with it. Made by loading.py, run by trainings.py."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from penstock.server.workers.order import NotStartedError, WorkerLost
from penstock.server.workers.worker import Worker

from .inside.files import remove_stale_folders
from .messages import PROGRESS, TRAIN

if TYPE_CHECKING:
    from penstock.backends.backend import Array
    from penstock.server.workers.order import Order


class Trainer:
    """One training. `training`: the model is loaded, and trains.

    Invariant: after `run`, no process and no uploaded file is left. Threads: the event loop's.
    """

    def __init__(self, order: Order) -> None:
        self.training = False
        self._order = order
        self._worker: Worker | None = None
        self._kill_reason = ""

    async def run(self, request: bytes) -> bytes:
        """Train. Returns: the answer to TRAIN (messages.py), once all output is in the log.

        Raises: InferError with the reason if there is no answer.
        """
        if self._kill_reason:
            raise WorkerLost(self._kill_reason)
        worker = self._worker = Worker(self._order, on_message=self._on_message)
        try:
            return await self._answer(worker, request)
        finally:
            if worker.serving:
                worker.stop()
            else:
                worker.kill(f"{self._order.label} cannot continue")
            await worker.ended
            await asyncio.to_thread(remove_stale_folders)  # it may have been killed

    async def _answer(self, worker: Worker, request: bytes) -> bytes:
        try:
            await worker.ready
            answer, _ = await worker.call(TRAIN, request)
        except NotStartedError:
            raise WorkerLost(worker.end_message or f"{self._order.label} has ended") from None
        except WorkerLost as lost:
            if worker.killed_externally:
                raise WorkerLost(f"{lost.message}: by another process, or because memory ran out") from None
            raise
        return answer

    def kill(self, reason: str) -> None:
        """Terminate it, and all processes it started, now."""
        self._kill_reason = reason
        if self._worker is not None:
            self._worker.kill(reason)

    def _on_message(self, kind: int, number: int, body: bytes, arrays: list[Array | None]) -> None:
        if kind == PROGRESS:
            self.training = True
