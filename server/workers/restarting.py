"""RestartingWorker: one worker at a time, replaced when it ends. Used where an Instance is a worker."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from penstock.backends.errors import Code, InferError

from .backoff import Backoff
from .order import NotStartedError, Order, WorkerLost
from .worker import Reply, Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.backends.backend import Array

logger = logging.getLogger("penstock.workers")


class WorkerOwner(Protocol):
    """The owner of a RestartingWorker. Threads: the event loop's."""

    def on_worker_starting(self, worker: Worker) -> None:
        """Handle a new worker, which is being started. `on_worker_gone` always follows."""

    def on_worker_gone(self) -> None:
        """Drop the work in flight for the worker: it has ended, or will not serve."""

    def on_worker_lost(self, failure: InferError) -> None:
        """Handle the loss of the worker; another is started unless `close` was called."""

    def on_restart_failed(self, failure: InferError) -> None:
        """Handle a failed restart; it will be retried."""

    def on_worker_restarted(self) -> None:
        """Handle the return of a serving worker."""

    def on_message(self, kind: int, number: int, body: bytes, arrays: list[Array | None]) -> None:
        """Handle a message from the worker."""


class Startable(Protocol):
    """Something that starts and closes one worker or several."""

    async def start(self) -> Any:
        """Start. Raises: InferError."""

    async def close(self) -> None:
        """End, whether started or not."""


async def start_all(startables: Sequence[Startable]) -> list[Any]:
    """Start all together. If one fails or the caller is cancelled, close all before raising.

    Returns: the results of their starts. Raises: the exception of the first in order that failed.
    """
    try:
        results = await asyncio.gather(*(startable.start() for startable in startables), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
    except BaseException:
        await asyncio.gather(*(startable.close() for startable in startables))
        raise
    return results


class RestartingWorker:
    """The worker of a WorkerOwner, restarted when it ends: at once, then with growing delays.

    `worker` is the one that serves; None while there is none. Threads: the event loop's.
    """

    def __init__(self, order: Order, owner: WorkerOwner) -> None:
        self.order = replace(order, on_event=self._count)
        self.worker: Worker | None = None
        self.closing = False
        self._starting: Worker | None = None
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._backoff = Backoff()
        self._restarting: asyncio.Task[None] | None = None
        self._early_events: list[str] = []
        self._on_event: Callable[[str], None] | None = None

    @property
    def pid(self) -> int:
        """The worker's process id; 0 for none."""
        return self.worker.pid if self.worker is not None else 0

    def set_event_counter(self, on_event: Callable[[str], None]) -> None:
        """Set the counter for worker events, and report the events counted so far."""
        self._on_event = on_event
        while self._early_events:
            on_event(self._early_events.pop(0))

    def _count(self, event: str) -> None:
        if self._on_event is None:
            self._early_events.append(event)
        else:
            self._on_event(event)

    async def start(self) -> Reply:
        """Start the worker. Returns: its answer to OPEN. Raises: InferError."""
        worker = self._starting = Worker(self.order, self._on_lost, self._owner.on_message)
        self._owner.on_worker_starting(worker)
        try:
            reply = await worker.ready
            if not worker.serving:
                raise NotStartedError
        except BaseException as error:
            self._owner.on_worker_gone()
            worker.kill(f"{self.order.label} is no longer needed")
            await asyncio.shield(worker.ended)  # `close` may wait for it too
            self._starting = None
            if isinstance(error, NotStartedError):
                raise InferError(Code.NOT_READY, f"{self.order.label} has ended") from error
            raise
        self.worker, self._starting = worker, None
        self._backoff.record_serving(self._loop.time())
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
            self._owner.on_worker_gone()  # not earlier: user code may still send messages as it ends

    def reset_backoff(self) -> None:
        """Record that the worker does its work: if it ends, another is started at once."""
        self._backoff.reset()

    def replace_worker(self) -> None:
        """Replace the worker: let it finish its calls, then start another."""
        worker = self.worker
        if worker is None or self.closing or not worker.serving:
            return
        self._backoff.reset()
        worker.stop()
        worker.ended.add_done_callback(lambda _: self._on_lost(worker))

    def _on_lost(self, worker: Worker) -> None:
        if worker is not self.worker:
            return
        self.worker = None
        self._owner.on_worker_gone()
        self._owner.on_worker_lost(WorkerLost(f"{self.order.label} ended and is being restarted"))
        if not self.closing:
            self._restarting = self._loop.create_task(self._restart())

    async def _restart(self) -> None:
        while True:
            await asyncio.sleep(self._backoff.next_delay_s(self._loop.time()))
            try:
                await self.start()
            except Exception as error:  # the next start may succeed, whatever the error
                text = error.message if isinstance(error, InferError) else type(error).__name__
                unknown = None if isinstance(error, InferError) else error
                logger.log(logging.ERROR, "%s could not be restarted: %s", self.order.label, text, exc_info=unknown)
                self._owner.on_restart_failed(InferError(Code.NOT_READY, text))
                continue
            self._owner.on_worker_restarted()
            return
