"""BusyPoller: while requests come one at a time, the loop polls for the next before it sleeps. Used by dispatcher.py.

A closed-loop client sends its next request as soon as it has read an answer. A loop that sleeps until then is woken by
the kernel and works with cold caches: single requests of a small model take a third longer, and more CPU time than the
polling (docs/adr/0002-pull-scheduling-two-executors.md).
"""

from __future__ import annotations

import asyncio
import time

from penstock.backends.cpus import usable_cpus

POLL_NS = 100_000
"""How long it polls: a little longer than a closed-loop client without think time takes between an answer and its next
request."""
MIN_SINGLES = 8
"""Polling starts after this many requests have come alone. Several clients at once are better served by a loop that
sleeps: what arrives while it wakes shares a batch."""
MAX_SKIPPED = 64
"""After polling in vain, at most this many single requests pass before it polls again: polling in vain costs each 1.6
us."""


class BusyPoller:
    """Polls for the next request while that pays off: each time it is in vain, twice as many chances are skipped.

    `consecutive_singles`: how many consecutive requests have come alone, as counted by the Dispatcher.
    Threads: the event loop's.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        # on a single CPU, polling would keep the client from running
        self._enabled = usable_cpus() > 1
        self.consecutive_singles = self._backoff = self._remaining_skips = 0
        self._poll_until_ns = 0
        self.polling = False

    def start(self) -> None:
        """Start polling: at least `MIN_SINGLES` requests that came alone have been answered."""
        if self._remaining_skips:
            self._remaining_skips -= 1
        elif self._enabled:
            self._poll_until_ns = time.monotonic_ns() + POLL_NS
            if not self.polling:
                self.polling = True
                self._loop.call_soon(self._poll)

    def on_arrival(self) -> None:
        """Record that something arrived while it was `polling`."""
        self._poll_until_ns = self._backoff = 0

    def _poll(self) -> None:
        """Have the loop poll its sockets once more without blocking."""
        if self._poll_until_ns > time.monotonic_ns():
            self._loop.call_soon(self._poll)
            return
        self.polling = False
        if self._poll_until_ns:
            self._poll_until_ns = 0
            self._backoff = self._remaining_skips = min(2 * self._backoff or 1, MAX_SKIPPED)
