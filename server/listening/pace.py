"""Pace: how fast those are refused who come again at once, although a refusal told them when to.

One for a port, asked by its connections. A refusal costs the event loop what serving a small request does, and clients
that ask again for each that they get take what the models need: docs/adr/0006-overload.md has the figures.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import asyncio

logger = logging.getLogger("penstock.server")

EVERY_S = 0.000_125
"""One such refusal leaves in so long: 8,000 a second, about a third of a core."""
BURST_S = 0.02
"""So long they may be ahead of that, which is 160 at once: an open load comes in bursts, as do many users behind a
pool of connections, while clients that ask again for each refusal that they get never let it grow back."""
MOST_S = 0.007
"""None is held for longer, however many there are: with 20 ms more would be left for others, but who measures how fast
he is refused may ask again at once, too."""
TOLD_S = 1.0
"""Who asks again within that was told not to: it is the least that Retry-After can say."""
_HALF_STEP_S = 0.000_5
"""uvloop's timers count whole milliseconds: what is due sooner need not wait for one, and one may be early by that."""


class Refused(Protocol):
    """A connection or a call whose refusal is held."""

    def send_held(self) -> None:
        """Send it."""


class Pace:
    """Refusals that are held, in the order in which they are due.

    Invariants: each is sent once, unless it is forgotten. There is one timer, and all that is due when it rings leaves
    in one turn of the loop.
    Threads: the event loop's.
    """

    def __init__(self) -> None:
        self._held: dict[Refused, float] = {}
        self._next_s = 0.0
        self._rings = False

    def holds(self, refused: Refused, loop: asyncio.AbstractEventLoop) -> bool:
        """Hold the refusal of who came again too early. Returns: False if it may leave at once."""
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
        """Hold it no longer."""
        self._held.pop(refused, None)

    def _ring(self, loop: asyncio.AbstractEventLoop) -> None:
        now_s, held = loop.time(), self._held
        while held and held[first := next(iter(held))] <= now_s + _HALF_STEP_S:
            del held[first]
            try:
                first.send_held()
            except Exception:  # the others are still to go
                logger.exception("a refusal that was held could not be sent")
        self._rings = bool(held)
        if held:
            loop.call_later(held[next(iter(held))] - now_s, self._ring, loop)
