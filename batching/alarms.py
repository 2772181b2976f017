"""Alarms: one timer per model, for deadlines and for batches that are held open."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .model import Model

LATE_S = 0.1
"""An alarm that goes off so late finds a loop, or a machine, that stood still. Where there are sequences it then does
not ring for as long: what has come meanwhile, to front ends too, is still to be read."""


class Alarms:
    """Rings for a model at the earliest time it was set to; there is never a timer per request.

    Units: monotonic nanoseconds. Threads: the event loop's.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[Model], None]) -> None:
        self._loop = loop
        self._ring = ring
        # uvloop gives a plain Handle, one without when(), for what is due at once
        self._timers: dict[Model, tuple[float, asyncio.Handle]] = {}

    def set(self, model: Model, due_ns: int) -> None:
        """Ring at `due_ns`, unless it rings before that anyway."""
        when = self._loop.time() + (due_ns - time.monotonic_ns()) / 1e9
        timer = self._timers.get(model)
        if timer is not None:
            if timer[0] <= when:
                return
            timer[1].cancel()
        self._timers[model] = when, self._loop.call_at(when, self._expired, model)

    def cancel(self, model: Model) -> None:
        """Never ring for a model again."""
        timer = self._timers.pop(model, None)
        if timer is not None:
            timer[1].cancel()

    def clear(self) -> None:
        """Never ring again."""
        for _, timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _expired(self, model: Model) -> None:
        when, _ = self._timers.pop(model)
        if model.scheduler.sequences is not None and self._loop.time() > when + LATE_S:
            # a sequence that went on may seem to have been idle
            self._timers[model] = -math.inf, self._loop.call_later(LATE_S, self._rings, model)
        else:
            self._ring(model)

    def _rings(self, model: Model) -> None:
        del self._timers[model]
        self._ring(model)
