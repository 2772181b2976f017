"""Holding: whether the hooks of a model hold the interpreter for so long that they belong into processes of their own.

Called by `placement.py` and by replicas whose hooks run in the server's process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

LONG_NS = 2_000_000
"""What a call of a hook may compute, on average."""
LATE_NS = 1_000_000
"""What the event loop may be late while a hook runs, on average, for no reason of its own."""
ENOUGH = 20
"""Of how many calls, and of how many looks at the loop, an average is taken."""
LOOK_S = 0.005

Found = Callable[[str, int, int], None]
"""Called with a hook, what it computes for on average, and how late the loop is meanwhile. Units: nanoseconds."""


class Average:
    """The mean of every so many values, begun anew after them."""

    __slots__ = ("_count", "_sum")

    def __init__(self) -> None:
        self._count = self._sum = 0

    def add(self, value: int) -> int | None:
        """Take a value. Returns: the mean, when enough have come."""
        self._count += 1
        self._sum += value
        if self._count < ENOUGH:
            return None
        mean = self._sum // self._count
        self._count = self._sum = 0
        return mean


class Holding:
    """Says, once, that a model's hooks hold up the event loop.

    Calls that take long by the clock are a reason to measure what they compute: the processor time of their thread.
    That is no proof: numpy gives the interpreter away while it computes. So the loop is looked at as well, from when a
    hook computes for long until it does not: how late its timer goes off while a hook runs, less what the loop itself
    has computed since the timer was set. `measures`: every call's processor time is to be told.
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
        """Whether the loop is being looked at."""
        return self._timer is not None

    def took(self, hook: str, cpu_ns: int) -> None:
        """Hear of a call, and the processor time that it took; 0: that was not measured, and it took long."""
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
        """Take one look: how late the loop was, and what it and the process have computed since the timer was set.

        Where the machine stands still for a moment nobody computes, and it is not the hook.
        """
        mean_ns = self._late.add(max(min(late_ns, all_ns) - own_ns, 0))
        if mean_ns is not None and mean_ns > LATE_NS and self._long and not self._ended:
            self.close()
            hook = max(self._long, key=self._long.__getitem__)
            self._found(hook, self._long[hook], mean_ns)

    def close(self) -> None:
        """Look no more."""
        self._ended, self.measures = True, False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
