"""Http2Shared: the common state of a port's connections. Made by the composition root, one per port."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from penstock.server.listening.rejection_pacer import RejectionPacer
from penstock.server.listening.tally import Tally
from penstock.server.listening.unread_answers import UnreadAnswers

from .frames import INITIAL_WINDOW_SIZE, MAX_CONCURRENT_STREAMS, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE, settings

if TYPE_CHECKING:
    from .connection import Http2Connection
    from .limits import Http2Limits
    from .outbox import Outbox

logger = logging.getLogger("penstock.http2")

_SCRATCH_BYTES = 8192
"""The size of one read between large messages; what it holds of the next one beyond its head is copied twice."""
_MAX_TICKS_PER_TURN = 1024


class Http2Shared:
    """Connections, and one write per connection and loop turn.

    Invariants: `settings` is what each connection sends first. An Outbox with data to write is in `dirty`, and then a
    flush is scheduled. `held_bytes` is what all connections hold of incomplete messages, not above `max_receive_bytes`
    for long. `scratch` is written and read within one call from the transport, for any connection. `unread` is shared
    by all ports.
    Threads: the event loop's.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, limits: Http2Limits, max_receive_bytes: int) -> None:
        self.loop = loop
        self.limits = limits
        self.settings = settings(
            {
                MAX_CONCURRENT_STREAMS: limits.max_streams,
                INITIAL_WINDOW_SIZE: limits.stream_window_bytes,
                MAX_FRAME_SIZE: limits.frame_bytes,
                MAX_HEADER_LIST_SIZE: limits.max_header_bytes,
            }
        )
        self.max_receive_bytes = max_receive_bytes
        self.held_bytes = 0
        self.unread = UnreadAnswers(loop=loop)
        self.pacer = RejectionPacer()
        self.tally = Tally("grpc")
        self.connections: set[Http2Connection] = set()
        self.dirty: list[Outbox] = []
        self.draining = False
        self.scratch = memoryview(bytearray(_SCRATCH_BYTES))

    def schedule_flush(self, outbox: Outbox) -> None:
        """Schedule a connection's write for the end of this loop turn."""
        outbox.dirty = True
        self.dirty.append(outbox)
        if len(self.dirty) == 1:
            self.loop.call_soon(self.flush)

    def flush(self) -> None:
        """Write for all connections with data to write."""
        dirty, self.dirty = self.dirty, []
        for outbox in dirty:
            outbox.dirty = False
            try:
                outbox.flush()
            except Exception:
                # the other connections must still be written
                logger.exception("an HTTP/2 connection failed")
                outbox.transport.abort()

    def sweep(self, elapsed_s: float) -> None:
        """Enforce time limits, keepalive and age: one pass about every second, instead of timers."""
        self._tick(list(self.connections), elapsed_s)

    def _tick(self, connections: list[Http2Connection], elapsed_s: float) -> None:
        """Tick the connections, some in each turn of the loop, because their streams are ticked too."""
        ticked = 0
        while connections and ticked < _MAX_TICKS_PER_TURN:
            connection = connections.pop()
            ticked += 1 + len(connection.streams)
            if connection in self.connections:
                try:
                    connection.tick(elapsed_s)
                except Exception:  # as in `flush`: the other connections must still be checked
                    logger.exception("an HTTP/2 connection failed")
                    with suppress(Exception):
                        connection.transport.abort()
        if connections:
            self.loop.call_soon(self._tick, connections, elapsed_s)
