"""The open loop: every request is sent when it is due, whether or not earlier ones were answered.

Latency is measured from when a request was due, so waiting for the sender or for a free connection is part of it (no
coordinated omission). Requests that are due but cannot be sent are not queued: the schedule stops advancing, so an
overloaded server costs no memory, no request is dropped, and they leave in order.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

from .alarm import alarm
from .carriers import Carrier
from .orders import Load
from .pacing import HALT_LIMIT_S, NEVER_NS, UNANSWERED, IdleEvent, LoadContext, TimedSlot
from .schedule import due_ns

MAX_CONNECTIONS = 2048
"""The most connections if the load does not set a limit."""
_INITIAL_CONNECTIONS = 16
_MIN_FREE = 8
"""How many places are kept free, so that a burst does not wait for connections."""


class _OpenSlot(TimedSlot):
    """Room for one request on one connection."""

    __slots__ = ("closed",)

    def __init__(self, loop: OpenLoop, carrier: Carrier) -> None:
        super().__init__(loop.recorder, loop.on_slot_free)
        self.carrier = carrier
        self.closed = False

    def on_lost(self, now_ns: int, reason: str) -> None:
        self.closed = True
        super().on_lost(now_ns, reason)


class _Connection:
    """The places of one connection."""

    def __init__(self, loop: OpenLoop) -> None:
        self._loop = loop
        self.slots: list[_OpenSlot] = []
        self.closed = False

    def add_slots(self, carrier: Carrier, count: int) -> None:
        self.slots = [_OpenSlot(self._loop, carrier) for _ in range(count)]

    def on_lost(self, reason: str) -> None:
        self.closed = True
        for slot in self.slots:
            slot.closed = True
        self._loop.on_connection_end(self, reason)


class OpenLoop:
    """Follows a schedule. Free places are used last in, first out, so that those in use stay few and warm."""

    def __init__(self, context: LoadContext) -> None:
        self.recorder = context.recorder
        self._context = context
        self._alarm = alarm(self._wake)
        self._idle_event = IdleEvent()
        self._connections: set[_Connection] = set()
        self._free: list[_OpenSlot] = []
        self._opening: set[asyncio.Task[None]] = set()
        self._max_connections = 1
        self._draw = context.payloads.stream(context.part.number).__next__
        self._next: Iterator[int] = iter(())
        self._times: Iterator[int] = iter(())
        self._due_ns = NEVER_NS
        self._in_flight = 0
        self._is_starved = False

    async def ready(self, load: Load) -> None:
        part = self._context.part
        self._next = due_ns(load, part)
        self._max_connections = max(part.share(load.connections or MAX_CONNECTIONS), 1)
        for _ in range(min(self._max_connections, _INITIAL_CONNECTIONS) - len(self._connections)):
            connection = _Connection(self)
            self._add_connection(connection, await self._context.openings.connect(connection.on_lost))

    def start(self, start_ns: int) -> None:
        self._times = (start_ns + at_ns for at_ns in self._next)
        self._due_ns = next(self._times, NEVER_NS)
        self._wake()

    def stop(self) -> None:
        self._alarm.disarm()
        self._due_ns = NEVER_NS
        self._is_starved = False

    async def halt(self) -> None:
        self.stop()
        if not await self._idle_event.wait(self.in_flight, HALT_LIMIT_S):
            self._fail_in_flight()

    def in_flight(self) -> int:
        return self._in_flight

    def behind_ns(self) -> int:
        return max(time.monotonic_ns() - self._due_ns, 0)

    def close(self) -> None:
        self.stop()
        self._alarm.close()
        for task in self._opening:
            task.cancel()
        self._close_connections()

    def on_slot_free(self, slot: _OpenSlot) -> None:
        """Handle the end of a place's request."""
        self._in_flight -= 1
        if not slot.closed:
            self._free.append(slot)
        if self._is_starved:
            self._wake()
        if not self._in_flight:
            self._idle_event.set()

    def on_connection_end(self, connection: _Connection, reason: str) -> None:
        """Handle the end of a connection."""
        self._connections.discard(connection)
        if reason:
            self._context.openings.on_failure(reason)

    def _wake(self) -> None:
        """Send what is due."""
        free, draw, now_ns, at_ns = self._free, self._draw, time.monotonic_ns(), self._due_ns
        while at_ns <= now_ns and free:
            slot = free.pop()
            if slot.closed:
                continue
            self._in_flight += 1
            self.recorder.waited_for_connection += self._is_starved
            slot.send(draw(), at_ns)
            at_ns = next(self._times, NEVER_NS)
        self._due_ns = at_ns
        self._is_starved = at_ns <= now_ns
        if self._is_starved or at_ns == NEVER_NS:
            self._alarm.disarm()
        else:
            self._alarm.set(at_ns)
        if len(free) < _MIN_FREE:
            self._open_more()

    def _open_more(self) -> None:
        missing = -(-(_MIN_FREE - len(self._free)) // self._context.openings.slots_each) - len(self._opening)
        room = self._max_connections - len(self._connections) - len(self._opening)
        for _ in range(min(missing, room)):
            self._opening.add(asyncio.ensure_future(self._open()))

    async def _open(self) -> None:
        connection = _Connection(self)
        carrier = await self._context.openings.reconnect(connection.on_lost)
        self._opening.discard(asyncio.current_task())
        if carrier is not None and not connection.closed:
            self._add_connection(connection, carrier)
            if self._is_starved:
                self._wake()

    def _add_connection(self, connection: _Connection, carrier: Carrier) -> None:
        connection.add_slots(carrier, self._context.openings.slots_each)
        self._connections.add(connection)
        self._free.extend(connection.slots)

    def _fail_in_flight(self) -> None:
        for _ in range(self._in_flight):
            self.recorder.fail(UNANSWERED)
        self._in_flight = 0
        self._close_connections()

    def _close_connections(self) -> None:
        for slot in [slot for connection in self._connections for slot in connection.slots[:1]]:
            slot.carrier.close()
        self._connections.clear()
        self._free.clear()
