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
_MIN_NS = 1  # a time of 0 would disarm the timer


class Timer(Protocol):
    """Rings when due, and may keep ringing until set again or silenced, which the callee must do.

    Units: nanoseconds of the monotonic clock. Threads: the event loop's.
    """

    def set(self, at_ns: int) -> None:
        """Ring at this time, or at once if it has passed. Replaces the time set before."""

    def disarm(self) -> None:
        """Stop ringing until set again."""

    def close(self) -> None:
        """Stop ringing for good."""


def make_timer(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> Timer:
    """Make a kernel timer, or a loop timer if the system has none."""
    try:
        return KernelTimer(loop, callback)
    except (AttributeError, OSError):
        return LoopTimer(loop, callback)


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class KernelTimer:
    """A timer that the loop polls like a socket; available on Linux.

    Setting it also clears its ring, so its file is never read: one system call per ring.
    Raises: AttributeError, OSError if the system has none.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        libc = ctypes.PyDLL(None, use_errno=True)  # none of these calls blocks, so the GIL is kept
        self._loop = loop
        self._file = libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_FLAGS)
        if self._file < 0:
            raise OSError(ctypes.get_errno(), "no timer was created")
        self._finalizer = weakref.finalize(self, os.close, self._file)
        self._itimerspec = _Itimerspec()
        self._value = self._itimerspec.value
        self._settime = libc.timerfd_settime
        self._arguments = (self._file, _TFD_TIMER_ABSTIME, ctypes.byref(self._itimerspec), None)
        loop.add_reader(self._file, callback)

    def set(self, at_ns: int) -> None:
        self._value.tv_sec, self._value.tv_nsec = divmod(max(at_ns, _MIN_NS), 1_000_000_000)
        self._settime(*self._arguments)

    def disarm(self) -> None:
        self._value.tv_sec = self._value.tv_nsec = 0
        self._settime(*self._arguments)

    def close(self) -> None:
        if self._finalizer.alive:
            self._loop.remove_reader(self._file)
            self._finalizer()


class LoopTimer:
    """The loop's own timer, at most a millisecond late; it rings once."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._callback = callback
        self._handle: asyncio.Handle | None = None

    def set(self, at_ns: int) -> None:
        self.disarm()
        # uvloop rounds, down as well as up
        self._handle = self._loop.call_later(ceil((at_ns - time.monotonic_ns()) / 1e6) / 1e3, self._callback)

    def disarm(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def close(self) -> None:
        self.disarm()
