"""One process of the generator: carries out the orders of `fleet.py`, received through a pipe."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import uvloop

from .carriers import Opener
from .closed_loop import ClosedLoop
from .http import HttpOpener
from .open_loop import OpenLoop
from .orders import ARRAYS, NO_TIMES, Load, Part, Payloads, Target, Window
from .pacing import LoadContext, Pacing
from .reconnecting import Reconnector
from .recording import Recorder
from .serial_loop import SerialLoop

READY, START, TAKE, COUNT, HALT = "ready", "start", "take", "count", "halt"
"""Prepare a load; begin it; return the Window since the last mark; count what ended since then; stop sending."""


class _Process:
    """Carries out orders, possibly concurrently: a load may be read while it is being halted."""

    def __init__(self, orders: Connection, failures: Connection, setup: tuple[Target, Payloads, Part]) -> None:
        target, payloads, part = setup
        self._orders = orders
        self._failures = failures
        self._recorder = Recorder(self._on_failure)
        self._context = LoadContext(Reconnector(opener(target), self._recorder), payloads, self._recorder, part)
        self._pacing: Pacing = ClosedLoop(self._context)
        self._writer = ThreadPoolExecutor(1)  # sends a large window while the loop runs on
        self._tasks: set[asyncio.Task[None]] = set()
        self.ended = asyncio.Event()

    def on_order(self) -> None:
        try:
            serial, order, *arguments = self._orders.recv()
        except (EOFError, OSError):  # the parent has ended or was killed
            self.ended.set()
            return
        task = asyncio.ensure_future(self._carry_out(serial, order, *arguments))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle an exception in the loop: a load that may have stopped must not be measured."""
        loop.default_exception_handler(context)
        self._recorder.abort(f"the generator failed: {context.get('exception') or context.get('message')}")

    async def _carry_out(self, serial: int, order: str, *arguments: Any) -> None:
        try:
            succeeded, answer = True, await getattr(self, f"_{order}")(*arguments)
        except Exception as error:  # noqa: BLE001 (it is the parent that raises it)
            succeeded, answer = False, (isinstance(error, OSError | ValueError), f"{error}" or type(error).__name__)
        self._writer.submit(self._reply, serial, succeeded, answer)

    def _reply(self, serial: int, succeeded: bool, answer: Any) -> None:
        """Send an answer. A Window's times follow it as raw memory."""
        with contextlib.suppress(OSError):  # the parent has ended
            if not isinstance(answer, Window):
                self._orders.send((serial, succeeded, answer))
                return
            times = [getattr(answer, name) for name in ARRAYS]
            for name in ARRAYS:
                setattr(answer, name, NO_TIMES)
            self._orders.send((serial, succeeded, answer))
            for each in times:
                self._orders.send_bytes(each.data.cast("B") if len(each) else b"")

    async def _ready(self, load: Load) -> None:
        pacing_type = ClosedLoop if not load.open else SerialLoop if load.sequences else OpenLoop
        if type(self._pacing) is not pacing_type:
            await self._pacing.halt()
            self._pacing.close()
            self._pacing = pacing_type(self._context)
        self._recorder.reset()
        await self._pacing.ready(load)

    async def _start(self, start_ns: int) -> None:
        self._pacing.start(start_ns)

    async def _take(self) -> Window:
        return self._recorder.take(self._pacing.in_flight(), self._pacing.behind_ns())

    async def _count(self) -> int:
        return self._recorder.ended

    async def _halt(self) -> None:
        await self._pacing.halt()
        gc.collect()

    def _on_failure(self, reason: str) -> None:
        self._pacing.stop()
        with contextlib.suppress(OSError):
            self._failures.send(reason)


def opener(target: Target) -> Opener:
    """Return the Opener for a target."""
    if target.grpc is None:
        return HttpOpener(target)
    from .grpc import GrpcOpener

    return GrpcOpener(target)


def main(orders: int, failures: int) -> None:
    """Serve the pipe until it ends. `orders`, `failures`: file descriptors opened by `fleet.py`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    gc.disable()
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        uvloop.run(_serve(Connection(orders), Connection(failures, readable=False)))


async def _serve(orders: Connection, failures: Connection) -> None:
    sys.path[:] = orders.recv()
    process = _Process(orders, failures, orders.recv())
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(process.on_loop_error)
    loop.add_reader(orders.fileno(), process.on_order)
    os.set_blocking(orders.fileno(), True)  # uvloop has just changed that
    await process.ended.wait()
    os._exit(0)  # skip an orderly end of connections, threads and streams
