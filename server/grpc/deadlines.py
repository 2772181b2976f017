"""CallDeadlines: ends calls whose deadline has passed, with one timer per port. Called by calls as they begin and end.

A call is added to the time slot in which it is due, and removed when it ends, so neither costs more with many calls,
and nothing is left of calls that have ended.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Callable
from typing import Protocol

logger = logging.getLogger("penstock.grpc")

_SHIFTS = (22, 28, 34)
"""Slots of 4 ms, 0.3 s and 17 s: calls in the longer ones are placed again when their slot comes."""
_NEAR_SLOTS = 1 << 10
"""How many slots of one size lie ahead before the next size is used."""


class Expiring(Protocol):
    """Something with a deadline."""

    deadline_ns: int

    def expire(self) -> None: ...


class CallDeadlines:
    """Time slots, by the time at which they end."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Callable[[], int]) -> None:
        self._loop = loop
        self.clock = clock
        self._slots: dict[int, dict[Expiring, None]] = {}
        self._slot_heap: list[int] = []
        self._slot_of: dict[Expiring, int] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = 0

    def add(self, call: Expiring) -> None:
        """Watch a deadline."""
        self._schedule(call, self.clock())
        self._arm()

    def _schedule(self, call: Expiring, now: int) -> None:
        remaining_ns = max(0, call.deadline_ns - now)
        # the slot that ends at or after the deadline; for longer slots the previous one, to place the call again
        shift = _SHIFTS[0]
        slot = ((call.deadline_ns >> shift) + 1) << shift
        for longer in _SHIFTS[1:]:
            if remaining_ns >> shift >= _NEAR_SLOTS:
                shift = longer
                slot = (call.deadline_ns >> shift) << shift
        calls = self._slots.get(slot)
        if calls is None:
            calls = self._slots[slot] = {}
            heapq.heappush(self._slot_heap, slot)
        calls[call] = None
        self._slot_of[call] = slot

    def discard(self, call: Expiring) -> None:
        """Forget a deadline."""
        slot = self._slot_of.pop(call, None)
        members = self._slots.get(slot) if slot is not None else None
        if members is not None:
            members.pop(call, None)

    def _arm(self) -> None:
        if not self._slot_heap:
            return
        first = self._slot_heap[0]
        if self._timer is not None:
            if self._timer_ns <= first:
                return
            self._timer.cancel()
        self._timer_ns = first
        self._timer = self._loop.call_later(max(0, first - self.clock()) / 1e9, self.fire)

    def fire(self) -> None:
        """End what is due. Called by the timer."""
        self._timer = None
        now = self.clock()
        while self._slot_heap and self._slot_heap[0] <= now:
            for call in list(self._slots.pop(heapq.heappop(self._slot_heap))):
                # ending one may have ended others
                if self._slot_of.pop(call, None) is None:
                    continue
                if call.deadline_ns > now:
                    self._schedule(call, now)
                    continue
                try:
                    call.expire()
                except Exception:  # the remaining ones are due too
                    logger.exception("a call could not be ended at its deadline")
        self._arm()

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
