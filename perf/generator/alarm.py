"""An alarm for the loop, exact to microseconds: what the loop takes to wake is learned."""

from __future__ import annotations

import asyncio
import ctypes
import sys
import time
from collections.abc import Callable

from penstock.batching.timer import KernelTimer, LoopTimer, Timer

_PR_SET_TIMERSLACK = 29  # Linux, linux/prctl.h
_EARLY_NS = 100_000
_LEARN_NS = 200


def alarm(ring: Callable[[], None]) -> Timer:
    """Make an alarm of the running loop, in whose thread `ring` is called: it sets the alarm again or silences it."""
    loop = asyncio.get_running_loop()
    return EarlyTimer(loop, ring) if sys.platform == "linux" else LoopTimer(loop, ring)


class EarlyTimer(KernelTimer):
    """One that is set early.

    From the timer to the ring it takes 50 us where the core was asleep: it is set early by what nine of ten wakes take,
    as learned wake by wake, and the tenth spins until it is due.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        super().__init__(loop, self._wake)
        ctypes.PyDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
        self._rings = ring
        self._at_ns = 0
        self._early_ns = 0

    def set(self, at_ns: int) -> None:
        self._at_ns = at_ns
        super().set(at_ns - self._early_ns)

    def _wake(self) -> None:
        at_ns = self._at_ns
        ahead_ns = at_ns - time.monotonic_ns()
        if ahead_ns > _EARLY_NS:  # it rang for a time that has been taken back since the loop heard of it
            return
        if ahead_ns <= 0:
            self._early_ns = min(self._early_ns + _LEARN_NS, _EARLY_NS)
        else:
            self._early_ns = max(self._early_ns - 9 * _LEARN_NS, 0)
            while time.monotonic_ns() < at_ns:
                pass
        self._rings()
