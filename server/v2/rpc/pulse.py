"""Pulse: one timer for all open streams that nobody wakes: health's Watch, and idle streams when the server drains."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

INTERVAL_S = 0.2


class Pulse:
    """Calls what has been added every 0.2 s. Without anything there is no timer.

    `beat` is what the timer calls; tests call it too.
    """

    def __init__(self) -> None:
        self._listeners: dict[Callable[[], None], None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._listeners)

    def add(self, listener: Callable[[], None]) -> None:
        """Call `listener` from now on."""
        self._listeners[listener] = None
        self._start()

    def remove(self, listener: Callable[[], None]) -> None:
        """Call `listener` no more."""
        self._listeners.pop(listener, None)
        if not self._listeners and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def beat(self) -> None:
        """Call them all."""
        self._timer = None
        for listener in list(self._listeners):
            listener()
        self._start()

    def _start(self) -> None:
        if self._listeners and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self.beat)
