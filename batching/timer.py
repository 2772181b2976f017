"""Timer: wakes the event loop at a given time, exact to microseconds. Used by Alarms and by perf/'s load generator.

The loop's own timers count whole milliseconds. One due in 0.4 ms fires at once, and a caller that then finds nothing
due and sets another keeps a core busy until it is.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
import weakref
from collections.abc import Callable
from math import ceil
from typing import Protocol

_CLOCK_MONOTONIC = 1  # Linux, linux/time.h
_TFD_TIMER_ABSTIME = 1  # Linux, linux/timerfd.h
_TFD_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC
_SOONEST_NS = 1  # a time of 0 would disarm the timer


class Timer(Protocol):
    """Rings when due, and may keep ringing until set again or silenced, which the callee must do.

    Units: nanoseconds of the monotonic clock. Threads: the event loop's.
    """

    def set(self, at_ns: int) -> None:
        """Ring at this time, or at once if it has passed. Replaces the time set before."""

    def silence(self) -> None:
        """Stop ringing until set again."""

    def close(self) -> None:
        """Stop ringing for good."""


def timer(loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> Timer:
    """Make a kernel timer, or a loop timer if the system has none."""
    try:
        return KernelTimer(loop, ring)
    except (AttributeError, OSError):
        return LoopTimer(loop, ring)


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class KernelTimer:
    """A timer that the loop polls like a socket; available on Linux.

    Setting it also clears its ring, so its file is never read: one system call per ring.
    Raises: AttributeError, OSError if the system has none.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        libc = ctypes.PyDLL(None, use_errno=True)  # none of these calls blocks, so the GIL is kept
        self._loop = loop
        self._file = libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_FLAGS)
        if self._file < 0:
            raise OSError(ctypes.get_errno(), "no timer was created")
        self._end = weakref.finalize(self, os.close, self._file)
        self._when = _Itimerspec()
        self._value = self._when.value
        self._settime = libc.timerfd_settime
        self._arguments = (self._file, _TFD_TIMER_ABSTIME, ctypes.byref(self._when), None)
        loop.add_reader(self._file, ring)

    def set(self, at_ns: int) -> None:
        self._value.tv_sec, self._value.tv_nsec = divmod(max(at_ns, _SOONEST_NS), 1_000_000_000)
        self._settime(*self._arguments)

    def silence(self) -> None:
        self._value.tv_sec = self._value.tv_nsec = 0
        self._settime(*self._arguments)

    def close(self) -> None:
        if self._end.alive:
            self._loop.remove_reader(self._file)
            self._end()


class LoopTimer:
    """The loop's own timer, at most a millisecond late; it rings once."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._loop = loop
        self._ring = ring
        self._next: asyncio.Handle | None = None

    def set(self, at_ns: int) -> None:
        self.silence()
        # uvloop rounds, down as well as up
        self._next = self._loop.call_later(ceil((at_ns - time.monotonic_ns()) / 1e6) / 1e3, self._ring)

    def silence(self) -> None:
        if self._next is not None:
            self._next.cancel()
            self._next = None

    def close(self) -> None:
        self.silence()
