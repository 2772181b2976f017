"""PoolThread: one thread of a HookThreadPool, and its current call; and how a thread that spins in user code is ended.

Made by `thread_pool.py`.
"""

from __future__ import annotations

import ctypes
import queue
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.server.workers.watch import LimitExtension

from .call import HookCall

if TYPE_CHECKING:
    from .replica import Replica


class PoolThread:
    """One thread of a pool. `running_call` is its current call, `is_slow` if that takes long.

    `abandoned_replica` is the replica it is abandoned with, if it is. `doubt` accounts for checks that came late.
    `lock` decides between a hook that ends and a limit that is exceeded.
    """

    __slots__ = (
        "abandoned_replica", "doubt", "has_ended", "is_idle", "is_slow", "lock", "running_call", "thread", "wake_loop",
        "wake_queue",
    )  # fmt: skip

    def __init__(self, run: Callable[[PoolThread], None], name: str) -> None:
        self.is_idle = self.has_ended = self.is_slow = False
        self.wake_queue: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.doubt = LimitExtension()
        self.abandoned_replica: Replica | None = None
        self.lock = threading.Lock()
        self.wake_loop: Callable[[], Any] | None = None
        self.running_call: HookCall | None = None
        self.thread = threading.Thread(target=run, args=(self,), name=name, daemon=True)

    def record_check(self, delay_s: float) -> None:
        """Record that a check came this late."""
        running = self.running_call
        self.doubt.record_check(0 if running is None else running.limit_start_ns, delay_s)

    def try_interrupt(self) -> bool:
        """End the hook of an abandoned thread if it spins, which would hold the GIL half of the time.

        Returns: whether nothing is left to do. A hook that waits in a C function ends when that returns, if ever; a
        daemon thread does not keep the process alive.
        """
        if not self.lock.acquire(blocking=False):
            return False
        try:
            is_done = self.running_call is None or not self.thread.is_alive() or self.abandoned_replica is None
            return is_done or self.abandoned_replica.interrupt(self.thread)  # type: ignore[union-attr]
        finally:
            self.lock.release()

    def wake(self) -> None:
        """Wake the thread."""
        self.is_idle = False
        if self.wake_loop is not None:
            self.wake_loop()
        else:
            self.wake_queue.put(None)

    # -- on the thread -----------------------------------------------------------------------------------------

    def begin(self, call: HookCall) -> bool:
        """Record the thread's current call; False if it must not run."""
        if not call.try_start(time.monotonic_ns()):
            return False
        if call.replica.measures_cpu:
            call.cpu_ns = time.thread_time_ns()
        self.running_call = call
        return True

    def end(self, call: HookCall) -> bool:
        """Record the end of a call; False if the thread has been abandoned."""
        call.end_ns = time.monotonic_ns()
        if call.cpu_ns:
            call.cpu_ns = max(time.thread_time_ns() - call.cpu_ns, 1)
        with self.lock:
            self.running_call, self.is_slow = None, False
            return self.abandoned_replica is None


class InterruptedHookError(SystemExit):
    """Raised in the middle of an abandoned hook."""


def interrupt(ident: int, folder: Path, *roots: Path) -> bool:
    """Raise an exception in a thread if it is executing a file in `folder` or below a root; return whether it was.

    Anywhere else the exception might strike between taking a lock and the `try` that releases it: in an import, in
    logging, in a library. A thread that waits inside a C function called from such a file gets it when that returns.
    Threads: the caller must ensure that the thread does not end meanwhile, since another may then have its id.
    """
    frame = sys._current_frames().get(ident)  # noqa: SLF001 - documented, though specific to CPython
    if frame is None or not _is_own(Path(frame.f_code.co_filename), folder, roots):
        return False
    raised = ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(InterruptedHookError))
    return bool(raised)


def _is_own(file: Path, folder: Path, roots: tuple[Path, ...]) -> bool:
    if file.parent == folder:
        return True
    # a project may contain its environment
    return "site-packages" not in file.parts and any(root in file.parents for root in roots)
