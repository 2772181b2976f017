"""Threads: pools that go on with the threads they have, where the system (pids.max, RLIMIT_NPROC) gives no more.

Made for the event loops of a server's processes, and for what a loop has done on threads of its own kind. And locks of
threads, by name.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TypeVar

import uvloop

T = TypeVar("T")


class Threads(ThreadPoolExecutor):
    """A pool whose work waits for the threads that there are, where no other can be had.

    `submit` raises RuntimeError only where there is none at all, and then the work is not done.
    """

    def _adjust_thread_count(self) -> None:
        try:
            super()._adjust_thread_count()
        except RuntimeError:
            if not self._threads:
                self._work_queue.get_nowait()  # what has just been put there, for which nobody would come
                raise


class StripedLocks:
    """Locks by name, of which there are always the same few: names that clients make up cost no memory.

    Two names may share a lock, so a thread holds one of these at a time.
    """

    def __init__(self) -> None:
        self._locks = tuple(threading.Lock() for _ in range(64))

    def of(self, name: str) -> threading.Lock:
        """Give the lock of a name."""
        return self._locks[hash(name) % len(self._locks)]


def new_loop() -> asyncio.AbstractEventLoop:
    """Make the event loop of a process, with a thread from the start: whatever the limits are later, a server ends.

    Raises: RuntimeError.
    """
    threads = Threads(thread_name_prefix="penstock")
    threads.submit(int)
    loop = uvloop.new_event_loop()
    loop.set_default_executor(threads)
    return loop


def begin(pool: Executor | None, function: Callable[..., T], *args: object) -> asyncio.Future[T]:
    """Have a pool do something, or the running loop's own threads, if it has none and gets none."""
    loop = asyncio.get_running_loop()
    try:
        return loop.run_in_executor(pool, function, *args)
    except RuntimeError:
        return loop.run_in_executor(None, function, *args)
