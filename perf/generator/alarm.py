"""An alarm for the loop, accurate to microseconds: it learns how long the loop takes to wake."""

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
    """Make an alarm on the running loop, which calls `ring` in its thread. `ring` sets it again or silences it."""
    loop = asyncio.get_running_loop()
    return EarlyTimer(loop, ring) if sys.platform == "linux" else LoopTimer(loop, ring)


class EarlyTimer(KernelTimer):
    """A timer that is set early.

    From the timer to the ring takes 50 us if the core was asleep. The timer is therefore set early by what nine of ten
    wakes take, learned wake by wake; if the loop wakes early, it spins until the time is due.
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
        if ahead_ns > _EARLY_NS:  # it rang for a time that has since been withdrawn
            return
        if ahead_ns <= 0:
            self._early_ns = min(self._early_ns + _LEARN_NS, _EARLY_NS)
        else:
            self._early_ns = max(self._early_ns - 9 * _LEARN_NS, 0)
            while time.monotonic_ns() < at_ns:
                pass
        self._rings()
