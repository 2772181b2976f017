"""GilMonitor: whether a model's hooks hold the GIL for so long that they belong in separate processes.

Used by `placement.py` and by replicas whose hooks run in the server's process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

MAX_COMPUTE_NS = 2_000_000
"""How long a call of a hook may compute, on average."""
MAX_DELAY_NS = 1_000_000
"""How late the event loop may be while a hook runs, on average, other than by its own computation."""
SAMPLE_COUNT = 20
"""The number of calls, or of checks of the loop, in an average."""
CHECK_INTERVAL_S = 0.005

OnDetected = Callable[[str, int, int], None]
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
        if self._count < SAMPLE_COUNT:
            return None
        mean = self._sum // self._count
        self._count = self._sum = 0
        return mean


class GilMonitor:
    """Reports, once, that a model's hooks delay the event loop.

    Calls with a long duration make it measure their CPU time. A high CPU time proves nothing yet: numpy releases the
    GIL while it computes. So while a hook computes for long, the loop is checked as well: how late its timer fires
    while a hook runs, minus what the loop itself has computed since the timer was set. `measures_cpu`: every call's CPU
    time must be reported.
    Threads: the event loop's.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, is_hook_running: Callable[[], bool], on_detected: OnDetected
    ) -> None:
        self.measures_cpu = False
        self._loop = loop
        self._is_hook_running = is_hook_running
        self._on_detected = on_detected
        self._slow_calls = 0
        self._compute_ns: dict[str, Average] = {}
        self._long_mean_ns: dict[str, int] = {}
        self._delays_ns = Average()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def is_checking(self) -> bool:
        """Whether the loop is being checked."""
        return self._timer is not None

    def record_call(self, hook: str, cpu_ns: int) -> None:
        """Record a call and its CPU time; 0 means that this was not measured, and that the call was slow."""
        if self._closed:
            return
        if not cpu_ns:
            self._slow_calls += 1
            if self._slow_calls >= SAMPLE_COUNT:
                self._slow_calls, self.measures_cpu = 0, True
            return
        mean_ns = self._compute_ns.setdefault(hook, Average()).add(cpu_ns)
        if mean_ns is None:
            return
        if mean_ns > MAX_COMPUTE_NS:
            self._long_mean_ns[hook] = mean_ns
            if self._timer is None:
                self._schedule_check()
        else:
            self._long_mean_ns.pop(hook, None)
            self.measures_cpu = bool(self._long_mean_ns)

    def _schedule_check(self) -> None:
        due_ns = time.monotonic_ns() + int(CHECK_INTERVAL_S * 1e9)
        cpu_ns = time.thread_time_ns(), time.process_time_ns()
        self._timer = self._loop.call_later(CHECK_INTERVAL_S, self._check, due_ns, *cpu_ns)

    def _check(self, due_ns: int, cpu_ns: int, process_cpu_ns: int) -> None:
        self._timer = None
        if not self._long_mean_ns or self._closed:
            return
        if self._is_hook_running():
            loop_cpu_ns, process_cpu_ns = time.thread_time_ns() - cpu_ns, time.process_time_ns() - process_cpu_ns
            self.record_delay(time.monotonic_ns() - due_ns, loop_cpu_ns, process_cpu_ns)
        if not self._closed:
            self._schedule_check()

    def record_delay(self, delay_ns: int, loop_cpu_ns: int, process_cpu_ns: int) -> None:
        """Record one check: how late the loop was, and what it and the process have computed since the timer was set.

        If the machine stops for a moment nothing computes, and the hook is not the cause.
        """
        mean_ns = self._delays_ns.add(max(min(delay_ns, process_cpu_ns) - loop_cpu_ns, 0))
        if mean_ns is not None and mean_ns > MAX_DELAY_NS and self._long_mean_ns and not self._closed:
            self.close()
            hook = max(self._long_mean_ns, key=self._long_mean_ns.__getitem__)
            self._on_detected(hook, self._long_mean_ns[hook], mean_ns)

    def close(self) -> None:
        """Stop checking."""
        self._closed, self.measures_cpu = True, False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
