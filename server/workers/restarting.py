"""RestartingWorker: one worker at a time, replaced when it ends. Used where an Instance is a worker."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from penstock.backends.errors import Code, InferError

from .backoff import Backoff
from .order import NotBegunError, Order, WorkerLost
from .worker import Reply, Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.backends.backend import Array

logger = logging.getLogger("penstock.workers")


class Tenant(Protocol):
    """The owner of a RestartingWorker. Threads: the event loop's."""

    def moved_in(self, worker: Worker) -> None:
        """Handle a new worker, which is being started. `moved_out` always follows."""

    def moved_out(self) -> None:
        """Drop the work in flight for the worker: it has ended, or will not serve."""

    def lost(self, failure: InferError) -> None:
        """Handle the loss of the worker; another is started unless `close` was called."""

    def hopeless(self, failure: InferError) -> None:
        """Handle a failed restart; it will be retried."""

    def back(self) -> None:
        """Handle the return of a serving worker."""

    def said(self, kind: int, number: int, body: bytes, arrays: list[Array | None]) -> None:
        """Handle a message from the worker."""


class Startable(Protocol):
    """Something that starts and closes one worker or several."""

    async def start(self) -> Any:
        """Start. Raises: InferError."""

    async def close(self) -> None:
        """End, whether started or not."""


async def start_all(each: Sequence[Startable]) -> list[Any]:
    """Start all together. If one fails or the caller is cancelled, close all before raising.

    Returns: the results of their starts. Raises: the exception of the first in order that failed.
    """
    try:
        done = await asyncio.gather(*(one.start() for one in each), return_exceptions=True)
        for result in done:
            if isinstance(result, BaseException):
                raise result
    except BaseException:
        await asyncio.gather(*(one.close() for one in each))
        raise
    return done


class RestartingWorker:
    """The worker of a Tenant, restarted when it ends: at once, then with growing delays.

    `worker` is the one that serves; None while there is none. Threads: the event loop's.
    """

    def __init__(self, order: Order, tenant: Tenant) -> None:
        self.order = replace(order, count=self._count)
        self.worker: Worker | None = None
        self.closing = False
        self._starting: Worker | None = None
        self._tenant = tenant
        self._loop = asyncio.get_running_loop()
        self._backoff = Backoff()
        self._restarting: asyncio.Task[None] | None = None
        self._counted: list[str] = []
        self._counts: Callable[[str], None] | None = None

    @property
    def pid(self) -> int:
        """The worker's process id; 0 for none."""
        return self.worker.pid if self.worker is not None else 0

    def count_with(self, counts: Callable[[str], None]) -> None:
        """Set the counter for worker events, and report the events counted so far."""
        self._counts = counts
        while self._counted:
            counts(self._counted.pop(0))

    def _count(self, event: str) -> None:
        if self._counts is None:
            self._counted.append(event)
        else:
            self._counts(event)

    async def start(self) -> Reply:
        """Start the worker. Returns: its answer to OPEN. Raises: InferError."""
        worker = self._starting = Worker(self.order, self._lost, self._tenant.said)
        self._tenant.moved_in(worker)
        try:
            reply = await worker.ready
            if not worker.serves:
                raise NotBegunError
        except BaseException as error:
            self._tenant.moved_out()
            worker.kill(f"{self.order.label} is no longer needed")
            await asyncio.shield(worker.ended)  # `close` may wait for it too
            self._starting = None
            if isinstance(error, NotBegunError):
                raise InferError(Code.NOT_READY, f"{self.order.label} has ended") from error
            raise
        self.worker, self._starting = worker, None
        self._backoff.serves(self._loop.time())
        return reply

    async def close(self, *, kill: bool) -> None:
        """End the worker: after its calls, or at once if `kill`."""
        self.closing = True
        if self._restarting is not None:
            self._restarting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._restarting
        starting, self._starting = self._starting, None
        if starting is not None:  # the task that started it may have been cancelled before it ended
            starting.kill(f"{self.order.label} is no longer needed")
            await starting.ended
        worker, self.worker = self.worker, None
        if worker is None:
            return
        if kill:
            worker.kill(f"{self.order.label} is stopped: the server is stopping")
        worker.stop()
        try:
            await worker.ended
        finally:
            self._tenant.moved_out()  # not earlier: user code may still send messages as it ends

    def proved(self) -> None:
        """Record that the worker does its work: if it ends, another is started at once."""
        self._backoff.forget()

    def renew(self) -> None:
        """Replace the worker: let it finish its calls, then start another."""
        worker = self.worker
        if worker is None or self.closing or not worker.serves:
            return
        self._backoff.forget()
        worker.stop()
        worker.ended.add_done_callback(lambda _: self._lost(worker))

    def _lost(self, worker: Worker) -> None:
        if worker is not self.worker:
            return
        self.worker = None
        self._tenant.moved_out()
        self._tenant.lost(WorkerLost(f"{self.order.label} ended and is being restarted"))
        if not self.closing:
            self._restarting = self._loop.create_task(self._restart())

    async def _restart(self) -> None:
        while True:
            await asyncio.sleep(self._backoff.ended(self._loop.time()))
            try:
                await self.start()
            except Exception as error:  # the next start may succeed, whatever the error
                text = error.message if isinstance(error, InferError) else type(error).__name__
                unknown = None if isinstance(error, InferError) else error
                logger.log(logging.ERROR, "%s could not be restarted: %s", self.order.label, text, exc_info=unknown)
                self._tenant.hopeless(InferError(Code.NOT_READY, text))
                continue
            self._tenant.back()
            return
