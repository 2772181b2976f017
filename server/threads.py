"""Threads: a pool that goes on with the threads it has, where the system gives no more of them.

Made for the event loops of a server's processes, and for what a loop has done on threads of its own kind.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import uvloop


class Threads(ThreadPoolExecutor):
    """A pool of at most `most` threads.

    Invariant: one is there from the start, so work given to it is done, and a server ends, whatever the limits of
    processes and threads (pids.max, RLIMIT_NPROC) are by then. More come as they are needed and can be had.
    Raises: RuntimeError, when it is made, if not even one can be had.
    """

    def __init__(self, most: int | None = None, name: str = "") -> None:
        super().__init__(most, name)
        self.submit(int)

    def _adjust_thread_count(self) -> None:
        # the work is in the queue by now, and whoever is idle next takes it
        with suppress(*((RuntimeError,) if self._threads else ())):
            super()._adjust_thread_count()


def new_loop() -> asyncio.AbstractEventLoop:
    """Make the event loop of a process, with such threads. Raises: RuntimeError."""
    threads = Threads(name="penstock")
    loop = uvloop.new_event_loop()
    loop.set_default_executor(threads)
    return loop
