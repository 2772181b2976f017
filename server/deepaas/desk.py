"""Desk: the worker of a model that answers what is asked of it while others predict and train. Made by loading.py.

It is what the original's server process was: it has imported the model too, tells its metadata, and reads the arguments
of trainings, so that nobody waits for a prediction to be told that an argument is wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backends.errors import Code, InferError
from penstock.server.workers.kept import Kept
from penstock.server.workers.order import NotBegunError

from .messages import Description

if TYPE_CHECKING:
    from penstock.backends.backend import Array
    from penstock.server.workers.order import Order
    from penstock.server.workers.worker import Worker


class Desk:
    """One worker, started anew when it ends. Threads: the event loop's."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.description = Description()
        self._kept = Kept(order, self)

    @property
    def pid(self) -> int:
        """The worker's process id, 0 for none."""
        return self._kept.pid

    async def start(self) -> None:
        """Start the worker. Raises: InferError."""
        self.description = Description.read((await self._kept.start())[0])

    async def ask(self, kind: int, body: bytes = b"") -> bytes:
        """Ask it. Returns: its answer (carrying/messages.py). Raises: InferError."""
        worker = self._kept.worker
        try:
            if worker is None:
                raise NotBegunError
            return (await worker.call(kind, body))[0]
        except NotBegunError:
            raise InferError(Code.NOT_READY, f"{self.order.label} is started again") from None

    async def close(self) -> None:
        """Have the worker end."""
        await self._kept.close(kill=True)

    # -- as Kept tells it --------------------------------------------------------------------------------------

    def moved_in(self, worker: Worker) -> None:
        """Nothing is kept for a worker."""

    def moved_out(self) -> None:
        """Likewise."""

    def lost(self, failure: InferError) -> None:
        """Who asks is told."""

    def hopeless(self, failure: InferError) -> None:
        """Likewise."""

    def back(self) -> None:
        """Go on."""

    def said(self, kind: int, number: int, body: bytes, arrays: list[Array | None]) -> None:
        """Take nothing."""
