"""Ticker: one timer for all streams that no event wakes: health's Watch, and idle streams while the server drains."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

INTERVAL_S = 0.2
_MAX_CALLS_PER_TURN = 512
"""The number of calls per turn of the loop: one connection may have a thousand idle streams open."""


class Ticker:
    """Calls every listener each 0.2 s. Without listeners there is no timer.

    `tick` is what the timer calls; tests call it too. `tick_count` counts the ticks.
    """

    def __init__(self) -> None:
        self._listeners: dict[Callable[[], None], None] = {}
        self._due: deque[Callable[[], None]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self.tick_count = 0

    def __len__(self) -> int:
        return len(self._listeners)

    def add(self, listener: Callable[[], None]) -> None:
        """Start calling `listener`."""
        self._listeners[listener] = None
        self._start()

    def remove(self, listener: Callable[[], None]) -> None:
        """Stop calling `listener`."""
        self._listeners.pop(listener, None)
        if not self._listeners and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def tick(self) -> None:
        """Call all listeners."""
        self._timer = None
        self.tick_count += 1
        self._due.extend(self._listeners)
        self._call()

    def _call(self) -> None:
        due = self._due
        try:
            for _ in range(min(len(due), _MAX_CALLS_PER_TURN)):
                listener = due.popleft()
                if listener in self._listeners:
                    listener()
        finally:
            if due:
                asyncio.get_running_loop().call_soon(self._call)
            else:
                self._start()

    def _start(self) -> None:
        if self._listeners and self._timer is None and not self._due:
            self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self.tick)
