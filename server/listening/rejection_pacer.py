"""RejectionPacer: limits the rate of rejections to clients that retry at once, ignoring Retry-After.

One per port, used by its connections. A rejection costs the event loop as much as serving a small request, and clients
that retry after each one take the time that models need: docs/adr/0006-overload.md has the figures.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import asyncio

logger = logging.getLogger("penstock.server")

INTERVAL_S = 0.000_125
"""The interval between such rejections: 8,000 a second, about a third of a core."""
BURST_S = 0.02
"""How far they may be ahead of that rate, which is 160 at once: open-loop load and many users behind a connection pool
come in bursts, while clients that retry after each rejection never let the allowance recover."""
MAX_HOLD_S = 0.007
"""The longest that one is held, however many there are: 20 ms would leave more for others, but a client that measures
the rejection latency may retry at once too."""
EARLY_RETRY_S = 1.0
"""A retry within this time ignores Retry-After, whose minimum this is."""
_HALF_STEP_S = 0.000_5
"""uvloop's timers have a resolution of 1 ms: what is due sooner need not wait for one, and one may be this early."""


class HeldRejection(Protocol):
    """A connection or a call whose rejection is held."""

    def send_held(self) -> None:
        """Send the rejection."""


class RejectionPacer:
    """Held rejections, in order of due time.

    Invariants: each is sent once, unless it is discarded. There is one timer, and everything due when it fires is sent
    in one turn of the loop.
    Threads: the event loop's.
    """

    def __init__(self) -> None:
        self._held: dict[HeldRejection, float] = {}
        self._next_slot_s = 0.0
        self._timer_set = False

    def hold(self, rejection: HeldRejection, loop: asyncio.AbstractEventLoop) -> bool:
        """Hold the rejection of a client that retried too early. Returns: False if it can be sent at once."""
        now_s = loop.time()
        slot_s = max(self._next_slot_s, now_s)
        self._next_slot_s = min(slot_s + INTERVAL_S, now_s + BURST_S + MAX_HOLD_S)
        due_s = slot_s - BURST_S
        if due_s - now_s < _HALF_STEP_S:
            return False
        self._held[rejection] = due_s
        if not self._timer_set:
            self._timer_set = True
            loop.call_later(due_s - now_s, self._send_due, loop)
        return True

    def discard(self, rejection: HeldRejection) -> None:
        """Stop holding a rejection, without sending it."""
        self._held.pop(rejection, None)

    def _send_due(self, loop: asyncio.AbstractEventLoop) -> None:
        now_s, held = loop.time(), self._held
        while held and held[first := next(iter(held))] <= now_s + _HALF_STEP_S:
            del held[first]
            try:
                first.send_held()
            except Exception:  # the others must still be sent
                logger.exception("a held rejection could not be sent")
        self._timer_set = bool(held)
        if held:
            loop.call_later(held[next(iter(held))] - now_s, self._send_due, loop)
