"""Seat: one thread of a Bench, and its current call. Made by `bench.py`."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from penstock.server.workers.watch import LimitExtension

from .call import HookCall

if TYPE_CHECKING:
    from .replica import Replica


class Seat:
    """One thread of a bench. `running` is its current call, `slow` if that takes long; `guilty` is set when abandoned.

    `doubt` accounts for checks that came late. `lock` decides between a hook that ends and a limit that is exceeded.
    """

    __slots__ = ("asleep", "bell", "doubt", "ended", "guilty", "lock", "nudge", "running", "slow", "thread")

    def __init__(self, run: Callable[[Seat], None], name: str) -> None:
        self.asleep = self.ended = self.slow = False
        self.bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.doubt = LimitExtension()
        self.guilty: Replica | None = None
        self.lock = threading.Lock()
        self.nudge: Callable[[], Any] | None = None
        self.running: HookCall | None = None
        self.thread = threading.Thread(target=run, args=(self,), name=name, daemon=True)

    def looked(self, late_s: float) -> None:
        """Record that a check came this late."""
        running = self.running
        self.doubt.record_check(0 if running is None else running.since_ns, late_s)

    def interrupted(self) -> bool:
        """End the hook of an abandoned thread if it spins, which would hold the GIL half of the time.

        Returns: whether nothing is left to do. A hook that waits in a C function ends when that returns, if ever; a
        daemon thread does not keep the process alive.
        """
        if not self.lock.acquire(blocking=False):
            return False
        try:
            ended = self.running is None or not self.thread.is_alive() or self.guilty is None
            return ended or self.guilty.interrupt(self.thread)  # type: ignore[union-attr]
        finally:
            self.lock.release()

    def ring(self) -> None:
        """Wake the thread."""
        self.asleep = False
        if self.nudge is not None:
            self.nudge()
        else:
            self.bell.put(None)

    # -- on the thread -----------------------------------------------------------------------------------------

    def begin(self, call: HookCall) -> bool:
        """Record the thread's current call; False if it must not run."""
        if not call.begins(time.monotonic_ns()):
            return False
        if call.replica.measures:
            call.cpu_ns = time.thread_time_ns()
        self.running = call
        return True

    def end(self, call: HookCall) -> bool:
        """Record the end of a call; False if the thread has been abandoned."""
        call.end_ns = time.monotonic_ns()
        if call.cpu_ns:
            call.cpu_ns = max(time.thread_time_ns() - call.cpu_ns, 1)
        with self.lock:
            self.running, self.slow = None, False
            return self.guilty is None
