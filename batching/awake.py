"""Awake: where requests come one by one, the loop looks for the next one before it sleeps. Told by turns.py.

A client that asks one thing after another sends the next as soon as it has read an answer. A loop that sleeps until
then is woken by the kernel and works with cold caches: lone requests of a small model take a third longer, and more
CPU time than the looking (docs/adr/0002-pull-scheduling-two-executors.md).
"""

from __future__ import annotations

import asyncio
import time

from penstock.backends.cpus import usable_cpus

AWAKE_NS = 100_000
"""For how long it looks: a little longer than a client in a hurry takes for an answer and its next request."""
LONE_TURNS = 8
"""So many requests have come alone before it looks. Several clients at once are better served by a loop that sleeps:
what comes while it wakes shares a batch."""
MOST_SKIPPED = 64
"""After looks in vain so many lone requests at most pass by until it looks again: a look in vain costs each 1.6 us."""


class Awake:
    """Looks for what comes next while that pays: after each look in vain twice as many chances go by unused.

    `looking`: whether it does. `lone`: how many requests have come alone, one after another, as Turns counts them.
    Threads: the event loop's.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        # where there is one CPU, who is to send the next request waits for it
        self._possible = usable_cpus() > 1
        self.lone = self._skipped = self._to_skip = 0
        self._until_ns = 0
        self.looking = False

    def stay(self) -> None:
        """Look from now on: `LONE_TURNS` requests and more have been answered that came alone."""
        if self._to_skip:
            self._to_skip -= 1
        elif self._possible:
            self._until_ns = time.monotonic_ns() + AWAKE_NS
            if not self.looking:
                self.looking = True
                self._loop.call_soon(self._look)

    def came(self) -> None:
        """Note that something has come while it was `looking`."""
        self._until_ns = self._skipped = 0

    def _look(self) -> None:
        """Have the loop look at its sockets once more, without waiting for them."""
        if self._until_ns > time.monotonic_ns():
            self._loop.call_soon(self._look)
            return
        self.looking = False
        if self._until_ns:
            self._until_ns = 0
            self._skipped = self._to_skip = min(2 * self._skipped or 1, MOST_SKIPPED)
