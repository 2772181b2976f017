"""Timer: wakes the event loop at a time, exact to microseconds. Used by the Alarms, and by perf/'s load generator.

The loop's own timers count whole milliseconds: what is due in 0.4 is due at once to them, and who then looks whether it
is, and sets another, keeps a core busy until it is.
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
_SOONEST_NS = 1  # a time of 0 would be none


class Timer(Protocol):
    """Rings when it is due, and goes on to ring until it is set again or silenced: by who is rung, at the latest.

    Units: nanoseconds of the monotonic clock. Threads: the event loop's.
    """

    def set(self, at_ns: int) -> None:
        """Ring at a time, at once where it has passed, and not at the one set before."""

    def silence(self) -> None:
        """Ring no more until it is set again."""

    def close(self) -> None:
        """Ring never again."""


def timer(loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> Timer:
    """Make a timer of the kernel, or one of the loop where there is none to be had."""
    try:
        return KernelTimer(loop, ring)
    except (AttributeError, OSError):
        return LoopTimer(loop, ring)


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class KernelTimer:
    """A timer that the loop waits for as for a socket; Linux has them.

    Setting it also takes back that it has rung, so its file is never read: one call to the kernel for each ring.
    Raises: AttributeError, OSError where there is none.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        libc = ctypes.PyDLL(None, use_errno=True)  # none of the calls waits: the GIL is kept
        self._loop = loop
        self._file = libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_FLAGS)
        if self._file < 0:
            raise OSError(ctypes.get_errno(), "no timer to be had")
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
    """The loop's own, a millisecond late at most; it rings once."""

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
