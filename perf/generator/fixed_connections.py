"""Lines: connections of fixed slots, reopened whenever they end."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from .carriers import Carrier, Slot
from .reconnecting import Reconnector


class LineSlot(Slot, Protocol):
    """A slot of a line. It sends on `carrier`, which the line keeps current."""

    carrier: Carrier


class Line:
    """One connection and its slots. While it is down, it is itself their carrier: it queues requests and connects."""

    def __init__(self, openings: Reconnector) -> None:
        self.slots: list[LineSlot] = []
        self._openings = openings
        self._carrier: Carrier | None = None
        self._kept: list[tuple[bytes, Slot]] = []
        self._again: asyncio.Task[None] | None = None

    async def ready(self) -> None:
        """Connect unless connected. Raises: OSError."""
        if self._carrier is None and self._again is None:
            self._up(await self._openings.connect(self._lost))

    def add(self, slot: LineSlot) -> None:
        """Add a slot."""
        slot.carrier = self._carrier or self
        self.slots.append(slot)

    def send(self, request: bytes, slot: Slot) -> None:
        """Send once there is a connection."""
        self._kept.append((request, slot))
        if self._again is None:
            self._again = asyncio.ensure_future(self._open())

    def close(self) -> None:
        """Close the connection without notifying anyone."""
        carrier, self._carrier = self._carrier, None
        if carrier is not None:
            carrier.close()
        if self._again is not None:
            self._again.cancel()
            self._again = None
        self._kept.clear()
        self._point(self)

    def _lost(self, why: str) -> None:
        self._carrier = None
        self._point(self)
        if why:
            self._openings.on_failure(why)

    async def _open(self) -> None:
        carrier = await self._openings.reconnect(self._lost)
        self._again = None
        if carrier is not None:
            self._up(carrier)
            return
        kept, self._kept = self._kept, []
        for _, slot in kept:
            slot.lost(time.monotonic_ns(), "the server is gone")

    def _up(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._point(carrier)
        kept, self._kept = self._kept, []
        for request, slot in kept:
            carrier.send(request, slot)

    def _point(self, carrier: Carrier) -> None:
        for slot in self.slots:
            slot.carrier = carrier


class Lines:
    """As many lines as a process's slots need."""

    def __init__(self, openings: Reconnector) -> None:
        self._openings = openings
        self._lines: list[Line] = []

    async def ready(self) -> None:
        """Connect those that are not. Raises: OSError."""
        for line in self._lines:
            await line.ready()

    async def add(self, slot: LineSlot) -> None:
        """Add a slot, on a new line if needed. Raises: OSError."""
        if not self._lines or len(self._lines[-1].slots) >= self._openings.slots_each:
            line = Line(self._openings)
            await line.ready()
            self._lines.append(line)
        self._lines[-1].add(slot)

    def close(self) -> None:
        """Close all connections without notifying anyone."""
        for line in self._lines:
            line.close()
