"""An alarm for the loop, exact to microseconds: the loop's own timers are rounded to whole milliseconds."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import time
from collections.abc import Callable
from typing import Protocol

_CLOCK_MONOTONIC = 1  # Linux, linux/time.h
_TFD_TIMER_ABSTIME = 1  # Linux, linux/timerfd.h
_TFD_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC
_PR_SET_TIMERSLACK = 29  # Linux, linux/prctl.h
_EARLY_NS = 100_000
_LEARN_NS = 200
_SOONEST_NS = 1  # an alarm at 0 would be none


class Alarm(Protocol):
    """Rings once for each time it is set."""

    def set(self, at_ns: int) -> None:
        """Ring at a time of the monotonic clock, at once where it has passed, and not at the one set before."""

    def silence(self) -> None:
        """Ring no more until it is set again."""

    def close(self) -> None:
        """Ring never again."""


def alarm(ring: Callable[[], None]) -> Alarm:
    """Make an alarm of the running loop, in whose thread `ring` is called: it sets the alarm again or silences it."""
    loop = asyncio.get_running_loop()
    return _TimerAlarm(loop, ring) if sys.platform == "linux" else _LoopAlarm(loop, ring)


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class _TimerAlarm:
    """A timer of the kernel that the loop waits for as for a socket.

    Setting it also takes back that it has rung, so its file is never read: one call to the kernel for each ring. From
    the timer to the ring it takes 50 us where the core was asleep: it is set early by what nine of ten wakes take, as
    learned wake by wake, and the tenth spins until it is due.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        libc = ctypes.PyDLL(None, use_errno=True)  # none of the calls waits: the GIL is kept
        libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
        self._loop = loop
        self._file = libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_FLAGS)
        if self._file < 0:
            raise OSError(ctypes.get_errno(), "no timer to be had")
        self._when = _Itimerspec()
        self._value = self._when.value
        self._settime = libc.timerfd_settime
        self._arguments = (self._file, _TFD_TIMER_ABSTIME, ctypes.byref(self._when), None)
        self._ring = ring
        self._at_ns = 0
        self._early_ns = 0
        loop.add_reader(self._file, self._wake)

    def set(self, at_ns: int) -> None:
        self._at_ns = at_ns
        self._value.tv_sec, self._value.tv_nsec = divmod(max(at_ns - self._early_ns, _SOONEST_NS), 1_000_000_000)
        self._settime(*self._arguments)

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
        self._ring()

    def silence(self) -> None:
        self._value.tv_sec = self._value.tv_nsec = 0
        self._settime(*self._arguments)

    def close(self) -> None:
        if self._file >= 0:
            self._loop.remove_reader(self._file)
            os.close(self._file)
            self._file = -1


class _LoopAlarm:
    """The loop's own timers, where the kernel has no timer files: up to a millisecond late, as `late_ns` then says."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._loop = loop
        self._ring = ring
        self._next: asyncio.TimerHandle | None = None

    def set(self, at_ns: int) -> None:
        self.silence()
        self._next = self._loop.call_later(max(at_ns - time.monotonic_ns(), 0) / 1e9, self._ring)

    def silence(self) -> None:
        if self._next is not None:
            self._next.cancel()
            self._next = None

    def close(self) -> None:
        self.silence()
