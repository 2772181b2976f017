"""LoopThread: an event loop on a thread of its own, for Workers whose callers block. Used by loader.py."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class LoopThread:
    """The loop runs while it has users: from the first `acquire` until every `acquire` has been matched by a `release`.

    Threads: any but the loop's own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Add a user."""
        with self._lock:
            if not self._users:
                self._loop = loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=_run_loop, args=(loop,), name="isolated", daemon=True)
                self._thread.start()
            self._users += 1

    def release(self) -> None:
        """Remove a user."""
        with self._lock:
            self._users -= 1
            if self._users or self._loop is None or self._thread is None:
                return
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._loop = self._thread = None

    def call_soon(self, function: Callable[[*Ts], object], *args: *Ts) -> None:
        """Schedule a call on the loop; does nothing if it has no users."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # it has just ended
                loop.call_soon_threadsafe(function, *args)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop, and wait for it; an interruption cancels it, and waits for its end."""
        if self._loop is None:
            coroutine.close()
            raise RuntimeError("nobody uses the loop")
        ended = threading.Event()

        async def run_and_signal() -> T:
            try:
                return await coroutine
            finally:
                ended.set()

        future = asyncio.run_coroutine_threadsafe(run_and_signal(), self._loop)
        try:
            return future.result()
        except (KeyboardInterrupt, SystemExit, CancelledError):
            future.cancel()
            ended.wait()
            raise


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    # the thread that starts the loop may be pinned to some CPUs (batching/devices/placement.py), not meant for the loop
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, os.sched_getaffinity(os.getpid()))
    asyncio.set_event_loop(loop)
    loop.run_forever()
