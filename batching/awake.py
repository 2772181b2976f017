"""Awake: while requests come one at a time, the loop polls for the next before it sleeps. Driven by turns.py.

A closed-loop client sends its next request as soon as it has read an answer. A loop that sleeps until then is woken by
the kernel and works with cold caches: single requests of a small model take a third longer, and more CPU time than the
polling (docs/adr/0002-pull-scheduling-two-executors.md).
"""

from __future__ import annotations

import asyncio
import time

from penstock.backends.cpus import usable_cpus

AWAKE_NS = 100_000
"""How long it polls: a little longer than a closed-loop client without think time takes between an answer and its next
request."""
LONE_TURNS = 8
"""Polling starts after this many requests have come alone. Several clients at once are better served by a loop that
sleeps: what arrives while it wakes shares a batch."""
MOST_SKIPPED = 64
"""After polling in vain, at most this many single requests pass before it polls again: polling in vain costs each 1.6
us."""


class Awake:
    """Polls for the next request while that pays off: each time it is in vain, twice as many chances are skipped.

    `looking`: whether it is polling. `lone`: how many consecutive requests have come alone, as counted by Turns.
    Threads: the event loop's.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        # on a single CPU, polling would keep the client from running
        self._possible = usable_cpus() > 1
        self.lone = self._skipped = self._to_skip = 0
        self._until_ns = 0
        self.looking = False

    def stay(self) -> None:
        """Start polling: at least `LONE_TURNS` requests that came alone have been answered."""
        if self._to_skip:
            self._to_skip -= 1
        elif self._possible:
            self._until_ns = time.monotonic_ns() + AWAKE_NS
            if not self.looking:
                self.looking = True
                self._loop.call_soon(self._look)

    def came(self) -> None:
        """Record that something arrived while it was `looking`."""
        self._until_ns = self._skipped = 0

    def _look(self) -> None:
        """Have the loop poll its sockets once more without blocking."""
        if self._until_ns > time.monotonic_ns():
            self._loop.call_soon(self._look)
            return
        self.looking = False
        if self._until_ns:
            self._until_ns = 0
            self._skipped = self._to_skip = min(2 * self._skipped or 1, MOST_SKIPPED)
