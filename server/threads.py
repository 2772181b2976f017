"""Thread pools that keep working with the threads they have if the system (pids.max, RLIMIT_NPROC) allows no more.

Used for the event loops of a server's processes, and for work that a loop hands to dedicated threads. Also locks by
name.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple

import uvloop

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class ThreadPool(ThreadPoolExecutor):
    """A pool whose work waits for existing threads if no new thread can be started.

    `submit` raises RuntimeError only if there is no thread at all; the work is then not done.
    """

    def _adjust_thread_count(self) -> None:
        try:
            super()._adjust_thread_count()
        except RuntimeError:
            if not self._threads:
                self._work_queue.get_nowait()  # the item just queued, which no thread would take
                raise


class StripedLocks:
    """A fixed number of locks, chosen by name, so that client-defined names cost no memory.

    Two names may share a lock, so a thread must hold only one at a time.
    """

    def __init__(self) -> None:
        self._locks = tuple(threading.Lock() for _ in range(64))

    def lock_for(self, name: str) -> threading.Lock:
        """Return the lock for a name."""
        return self._locks[hash(name) % len(self._locks)]


def new_loop() -> asyncio.AbstractEventLoop:
    """Make the event loop of a process with one thread already started, so it can shut down even at the thread limit.

    Raises: RuntimeError.
    """
    loop = uvloop.new_event_loop()
    set_threads(loop)
    return loop


def set_threads(loop: asyncio.AbstractEventLoop, load_threads: int = 0) -> None:
    """Give a loop as many threads as asyncio does, and one for each of `load_threads` models that load at a time.

    Without the latter, large requests would wait until a model has been loaded. One thread is already started.
    Raises: RuntimeError.
    """
    threads = ThreadPool(min(32, (os.cpu_count() or 1) + 4) + load_threads, "penstock")
    threads.submit(int)
    loop.set_default_executor(threads)


def run_in_pool(pool: Executor | None, function: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
    """Run a function on a pool; on the running loop's own threads if there is no pool or it cannot start a thread."""
    loop = asyncio.get_running_loop()
    try:
        return loop.run_in_executor(pool, function, *args)
    except RuntimeError:
        return loop.run_in_executor(None, function, *args)
