"""Alarms: when to look at models again, for deadlines and for batches that are held open."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from .timer import Timer, make_timer

if TYPE_CHECKING:
    from .model import Model

logger = logging.getLogger("penstock.batching")

STALL_NS = 100_000_000
"""An alarm this late means that the loop or the machine stood still. For a model with sequences it is then put off by
as long again: requests that came meanwhile, including to front ends, have not been read yet."""


class Alarms:
    """Rings for a model at the earliest time it was set to. All models share one timer; there is never one per request.

    `_timer_due_ns` is what the timer is set to, 0 if not set. Models in `_postponed` have been put off once and are not
    put off again.
    Units: monotonic nanoseconds. Threads: the event loop's.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, on_due: Callable[[Model], None],
        make_timer: Callable[[asyncio.AbstractEventLoop, Callable[[], None]], Timer] = make_timer,
    ) -> None:  # fmt: skip
        self._loop = loop
        self._on_due = on_due
        self._make_timer = make_timer
        self._timer: Timer | None = None
        self._due: dict[Model, int] = {}
        self._postponed: set[Model] = set()
        self._timer_due_ns = 0
        self._closed = False

    def set(self, model: Model, due_ns: int) -> None:
        """Ring at `due_ns`, unless an earlier ring is already set."""
        before_ns = self._due.get(model, due_ns + 1)
        if before_ns <= due_ns or model in self._postponed or self._closed:
            return
        self._due[model] = due_ns
        if not self._timer_due_ns or due_ns < self._timer_due_ns:
            self._set_timer(due_ns)

    def cancel(self, model: Model) -> None:
        """Clear the alarm of a model."""
        self._due.pop(model, None)
        self._postponed.discard(model)

    def close(self) -> None:
        """Stop ringing for good."""
        self._closed = True
        self._due.clear()
        if self._timer is not None:
            self._timer.close()
            self._timer = None

    def _set_timer(self, due_ns: int) -> None:
        if self._timer is None:
            self._timer = self._make_timer(self._loop, self._on_timer)
        self._timer_due_ns = due_ns
        self._timer.set(due_ns)

    def _on_timer(self) -> None:
        """Ring for every model that is due, and set the timer for the next."""
        now_ns = time.monotonic_ns()
        due = [model for model, due_ns in self._due.items() if due_ns <= now_ns]
        self._timer_due_ns = 1  # no time is earlier, so the timer is set only once below
        for model in due:
            due_ns = self._due.pop(model, 0)
            if not due_ns:  # an earlier ring cancelled it
                continue
            if model.scheduler.sequences is not None and now_ns > due_ns + STALL_NS and model not in self._postponed:
                # a sequence that continued may look idle
                self._postponed.add(model)
                self._due[model] = now_ns + STALL_NS
                continue
            self._postponed.discard(model)
            try:
                self._on_due(model)
            except Exception:  # the other models are due as well
                logger.exception("model %s: a scheduled callback failed", model.name)
        if self._closed or self._timer is None:
            return
        self._timer_due_ns = 0
        if self._due:
            self._set_timer(min(self._due.values()))
        else:
            self._timer.disarm()
