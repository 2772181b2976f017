"""Drain: the graceful shutdown of an HTTP/2 connection: a GOAWAY, a PING, the final GOAWAY, and the close.

Owned by Http2Connection. Source: RFC 9113 6.8; gRPC's servers.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from .frames import MAX_WINDOW, PING, Fault, frame, goaway

if TYPE_CHECKING:
    from .connection import Http2Connection

DRAIN_PING = b"penstock"
GOODBYE_S = 1.0
"""How long a peer may take to close after the final GOAWAY and its last answer."""
DRAIN_LINGER_S = 0.5
"""How long a call may still arrive after the first GOAWAY, if the peer does not answer the PING."""


class Drain:
    """The state of a connection's shutdown.

    Invariants: `draining` is set with the first GOAWAY, or before it for a client that has not begun. `leaving` is set
    with the final one: no stream above `last_id` is opened any more, and the connection closes with its last stream.
    `late`: it was accepted while its port was draining, so no work is started for it, and it gets a GOAWAY after a
    moment; if `hurried`, after its first call. Not before: of grpcio clients (1.85) that got a GOAWAY right after the
    SETTINGS, one in a thousand considered the connection usable, and waited on it until the call's deadline.
    """

    __slots__ = ("_loop", "draining", "hurried", "late", "leaving")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.draining = self.leaving = self.late = self.hurried = False

    def come_late(self, connection: Http2Connection) -> None:
        """Schedule the end of a connection accepted while its port was draining."""
        self.late = True
        self._loop.call_later(DRAIN_LINGER_S, _let_go, connection)

    def begin(self, connection: Http2Connection) -> None:
        """Announce the shutdown, answer what was sent before the peer learned of it, then close."""
        if self.draining:
            return
        if self.late and not connection.last_id:
            self.hurried = True
            return
        self.draining = True
        if connection.begun:
            self.announce(connection)
        else:
            self._loop.call_later(DRAIN_LINGER_S, _drop_silent, connection)

    def announce(self, connection: Http2Connection) -> None:
        """Tell the peer to open no more streams; its answer to the PING shows that it knows."""
        connection.outbox.write(goaway(MAX_WINDOW, Fault.NO_ERROR) + frame(PING, 0, 0, DRAIN_PING))
        self._loop.call_later(DRAIN_LINGER_S, self._leave, connection)

    def acknowledged(self, connection: Http2Connection) -> None:
        """Process the peer's answer to the PING."""
        if self.draining:
            self._leave(connection)

    def _leave(self, connection: Http2Connection) -> None:
        """Accept no more calls: the peer has had time to learn that it should not send any."""
        if self.leaving or connection.closed:
            return
        self.leaving = True
        connection.max_streams = 0
        connection.outbox.flushed = partial(_close_unused, connection)
        connection.outbox.write(goaway(connection.last_id, Fault.NO_ERROR))


def _let_go(connection: Http2Connection) -> None:
    """End a late connection; one that has sent no call needs no GOAWAY."""
    if connection.last_id:
        connection.shutdown()
    elif not connection.closed:
        connection.transport.close()


def _drop_silent(connection: Http2Connection) -> None:
    if not connection.begun and not connection.closed:
        connection.transport.close()


def _close_unused(connection: Http2Connection) -> None:
    """Close once all accepted calls have been answered."""
    if not connection.streams:
        connection.close(GOODBYE_S)
