"""Pace: limits the rate of rejections to clients that retry at once, ignoring Retry-After.

One per port, used by its connections. A rejection costs the event loop as much as serving a small request, and clients
that retry after each one take the time that models need: docs/adr/0006-overload.md has the figures.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import asyncio

logger = logging.getLogger("penstock.server")

EVERY_S = 0.000_125
"""The interval between such rejections: 8,000 a second, about a third of a core."""
BURST_S = 0.02
"""How far they may be ahead of that rate, which is 160 at once: open-loop load and many users behind a connection pool
come in bursts, while clients that retry after each rejection never let the allowance recover."""
MOST_S = 0.007
"""The longest that one is held, however many there are: 20 ms would leave more for others, but a client that measures
the rejection latency may retry at once too."""
TOLD_S = 1.0
"""A retry within this time ignores Retry-After, whose minimum this is."""
_HALF_STEP_S = 0.000_5
"""uvloop's timers have a resolution of 1 ms: what is due sooner need not wait for one, and one may be this early."""


class Refused(Protocol):
    """A connection or a call whose rejection is held."""

    def send_held(self) -> None:
        """Send the rejection."""


class Pace:
    """Held rejections, in order of due time.

    Invariants: each is sent once, unless it is forgotten. There is one timer, and everything due when it fires is sent
    in one turn of the loop.
    Threads: the event loop's.
    """

    def __init__(self) -> None:
        self._held: dict[Refused, float] = {}
        self._next_s = 0.0
        self._rings = False

    def holds(self, refused: Refused, loop: asyncio.AbstractEventLoop) -> bool:
        """Hold the rejection of a client that retried too early. Returns: False if it can be sent at once."""
        now_s = loop.time()
        turn_s = max(self._next_s, now_s)
        self._next_s = min(turn_s + EVERY_S, now_s + BURST_S + MOST_S)
        due_s = turn_s - BURST_S
        if due_s - now_s < _HALF_STEP_S:
            return False
        self._held[refused] = due_s
        if not self._rings:
            self._rings = True
            loop.call_later(due_s - now_s, self._ring, loop)
        return True

    def forget(self, refused: Refused) -> None:
        """Stop holding a rejection, without sending it."""
        self._held.pop(refused, None)

    def _ring(self, loop: asyncio.AbstractEventLoop) -> None:
        now_s, held = loop.time(), self._held
        while held and held[first := next(iter(held))] <= now_s + _HALF_STEP_S:
            del held[first]
            try:
                first.send_held()
            except Exception:  # the others must still be sent
                logger.exception("a refusal that was held could not be sent")
        self._rings = bool(held)
        if held:
            loop.call_later(held[next(iter(held))] - now_s, self._ring, loop)
