"""Lines: connections of fixed slots, reopened whenever they end."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from .carriers import Carrier, Slot
from .reconnecting import Reconnector


class FixedSlot(Slot, Protocol):
    """A slot of a line. It sends on `carrier`, which the line keeps current."""

    carrier: Carrier


class FixedConnection:
    """One connection and its slots. While it is down, it is itself their carrier: it queues requests and connects."""

    def __init__(self, openings: Reconnector) -> None:
        self.slots: list[FixedSlot] = []
        self._openings = openings
        self._carrier: Carrier | None = None
        self._waiting: list[tuple[bytes, Slot]] = []
        self._reopening: asyncio.Task[None] | None = None

    async def ready(self) -> None:
        """Connect unless connected. Raises: OSError."""
        if self._carrier is None and self._reopening is None:
            self._on_open(await self._openings.connect(self._on_lost))

    def add(self, slot: FixedSlot) -> None:
        """Add a slot."""
        slot.carrier = self._carrier or self
        self.slots.append(slot)

    def send(self, request: bytes, slot: Slot) -> None:
        """Send once there is a connection."""
        self._waiting.append((request, slot))
        if self._reopening is None:
            self._reopening = asyncio.ensure_future(self._open())

    def close(self) -> None:
        """Close the connection without notifying anyone."""
        carrier, self._carrier = self._carrier, None
        if carrier is not None:
            carrier.close()
        if self._reopening is not None:
            self._reopening.cancel()
            self._reopening = None
        self._waiting.clear()
        self._set_carrier(self)

    def _on_lost(self, reason: str) -> None:
        self._carrier = None
        self._set_carrier(self)
        if reason:
            self._openings.on_failure(reason)

    async def _open(self) -> None:
        carrier = await self._openings.reconnect(self._on_lost)
        self._reopening = None
        if carrier is not None:
            self._on_open(carrier)
            return
        waiting, self._waiting = self._waiting, []
        for _, slot in waiting:
            slot.on_lost(time.monotonic_ns(), "the server is gone")

    def _on_open(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._set_carrier(carrier)
        waiting, self._waiting = self._waiting, []
        for request, slot in waiting:
            carrier.send(request, slot)

    def _set_carrier(self, carrier: Carrier) -> None:
        for slot in self.slots:
            slot.carrier = carrier


class FixedConnections:
    """As many lines as a process's slots need."""

    def __init__(self, openings: Reconnector) -> None:
        self._openings = openings
        self._connections: list[FixedConnection] = []

    async def ready(self) -> None:
        """Connect those that are not. Raises: OSError."""
        for line in self._connections:
            await line.ready()

    async def add(self, slot: FixedSlot) -> None:
        """Add a slot, on a new line if needed. Raises: OSError."""
        if not self._connections or len(self._connections[-1].slots) >= self._openings.slots_each:
            line = FixedConnection(self._openings)
            await line.ready()
            self._connections.append(line)
        self._connections[-1].add(slot)

    def close(self) -> None:
        """Close all connections without notifying anyone."""
        for line in self._connections:
            line.close()
