"""Holding: whether a model's hooks hold the GIL for so long that they belong in separate processes.

Used by `placement.py` and by replicas whose hooks run in the server's process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

LONG_NS = 2_000_000
"""How long a call of a hook may compute, on average."""
LATE_NS = 1_000_000
"""How late the event loop may be while a hook runs, on average, other than by its own computation."""
ENOUGH = 20
"""The number of calls, or of checks of the loop, in an average."""
LOOK_S = 0.005

Found = Callable[[str, int, int], None]
"""Called with a hook, its average computing time, and how late the loop is meanwhile. Units: nanoseconds."""


class Average:
    """The mean of consecutive groups of values."""

    __slots__ = ("_count", "_sum")

    def __init__(self) -> None:
        self._count = self._sum = 0

    def add(self, value: int) -> int | None:
        """Add a value. Returns: the mean, at the end of a group."""
        self._count += 1
        self._sum += value
        if self._count < ENOUGH:
            return None
        mean = self._sum // self._count
        self._count = self._sum = 0
        return mean


class GilMonitor:
    """Reports, once, that a model's hooks delay the event loop.

    Calls with a long duration make it measure their CPU time. A high CPU time proves nothing yet: numpy releases the
    GIL while it computes. So while a hook computes for long, the loop is checked as well: how late its timer fires
    while a hook runs, minus what the loop itself has computed since the timer was set. `measures`: every call's CPU
    time must be reported.
    Threads: the event loop's.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, running: Callable[[], bool], found: Found) -> None:
        self.measures = False
        self._loop = loop
        self._running = running
        self._found = found
        self._slow = 0
        self._computed: dict[str, Average] = {}
        self._long: dict[str, int] = {}
        self._late = Average()
        self._timer: asyncio.TimerHandle | None = None
        self._ended = False

    @property
    def looks(self) -> bool:
        """Whether the loop is being checked."""
        return self._timer is not None

    def took(self, hook: str, cpu_ns: int) -> None:
        """Record a call and its CPU time; 0 means that this was not measured, and that the call was slow."""
        if self._ended:
            return
        if not cpu_ns:
            self._slow += 1
            if self._slow >= ENOUGH:
                self._slow, self.measures = 0, True
            return
        mean_ns = self._computed.setdefault(hook, Average()).add(cpu_ns)
        if mean_ns is None:
            return
        if mean_ns > LONG_NS:
            self._long[hook] = mean_ns
            if self._timer is None:
                self._look_again()
        else:
            self._long.pop(hook, None)
            self.measures = bool(self._long)

    def _look_again(self) -> None:
        due_ns = time.monotonic_ns() + int(LOOK_S * 1e9)
        cpu_ns = time.thread_time_ns(), time.process_time_ns()
        self._timer = self._loop.call_later(LOOK_S, self._look, due_ns, *cpu_ns)

    def _look(self, due_ns: int, cpu_ns: int, all_ns: int) -> None:
        self._timer = None
        if not self._long or self._ended:
            return
        if self._running():
            own_ns, all_ns = time.thread_time_ns() - cpu_ns, time.process_time_ns() - all_ns
            self.late(time.monotonic_ns() - due_ns, own_ns, all_ns)
        if not self._ended:
            self._look_again()

    def late(self, late_ns: int, own_ns: int, all_ns: int) -> None:
        """Record one check: how late the loop was, and what it and the process have computed since the timer was set.

        If the machine stops for a moment nothing computes, and the hook is not the cause.
        """
        mean_ns = self._late.add(max(min(late_ns, all_ns) - own_ns, 0))
        if mean_ns is not None and mean_ns > LATE_NS and self._long and not self._ended:
            self.close()
            hook = max(self._long, key=self._long.__getitem__)
            self._found(hook, self._long[hook], mean_ns)

    def close(self) -> None:
        """Stop checking."""
        self._ended, self.measures = True, False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
