"""RestartingWorker: one worker at a time, and another when that ends. Made by those whose Instances are workers."""

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
    """Whose worker it is. Threads: the event loop's."""

    def moved_in(self, worker: Worker) -> None:
        """Learn of a worker that is being started. `moved_out` follows, whatever becomes of it."""

    def moved_out(self) -> None:
        """Let go of what is under way for the worker: it has ended, or will not serve."""

    def lost(self, failure: InferError) -> None:
        """Learn that there is no worker now; another is started, unless `close` was called."""

    def hopeless(self, failure: InferError) -> None:
        """Learn that none could be started; that is tried again."""

    def back(self) -> None:
        """Learn that there is a worker again."""

    def said(self, kind: int, number: int, body: bytes, arrays: list[Array | None]) -> None:
        """Take what the worker tells."""


class Startable(Protocol):
    """Who has a worker, or several, to start and to end."""

    async def start(self) -> Any:
        """Start. Raises: InferError."""

    async def close(self) -> None:
        """End, started or not."""


async def start_all(each: Sequence[Startable]) -> list[Any]:
    """Start them together; if one fails, or nobody waits any more, all have ended by the time that is raised.

    Returns: what their starts have. Raises: what the first that failed has raised.
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
    """The worker of a Tenant: started anew when it ends, at once, then later and later.

    `worker` is the one that serves, None while there is none. Threads: the event loop's.
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
        """The worker's process id, 0 for none."""
        return self.worker.pid if self.worker is not None else 0

    def count_with(self, counts: Callable[[str], None]) -> None:
        """Have what happens to the workers counted, and what has happened before."""
        self._counts = counts
        while self._counted:
            counts(self._counted.pop(0))

    def _count(self, event: str) -> None:
        if self._counts is None:
            self._counted.append(event)
        else:
            self._counts(event)

    async def start(self) -> Reply:
        """Start the worker. Returns: its answer to being opened. Raises: InferError."""
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
        """Let the worker end; `kill`: although it has something to do."""
        self.closing = True
        if self._restarting is not None:
            self._restarting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._restarting
        starting, self._starting = self._starting, None
        if starting is not None:  # who started it may have been cancelled before it had ended
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
            self._tenant.moved_out()  # not before: user code has something to say as it ends, too

    def proved(self) -> None:
        """Learn that the worker does what it is asked: if something ends it, another is started at once."""
        self._backoff.forget()

    def renew(self) -> None:
        """Let the worker do what it was asked, and end; then start another."""
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
            except Exception as error:  # whatever it is, the next start may go well
                text = error.message if isinstance(error, InferError) else type(error).__name__
                unknown = None if isinstance(error, InferError) else error
                logger.log(logging.ERROR, "%s could not be restarted: %s", self.order.label, text, exc_info=unknown)
                self._tenant.hopeless(InferError(Code.NOT_READY, text))
                continue
            self._tenant.back()
            return
