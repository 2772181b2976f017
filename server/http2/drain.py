"""Drain: the graceful shutdown of an HTTP/2 connection: a GOAWAY, a PING, the final GOAWAY, and the end.

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
"""How long a peer that has been told to go, and has had all its answers, may take to close."""
DRAIN_LINGER_S = 0.5
"""How long a call that is on its way may still arrive after the first GOAWAY, if the peer does not answer its PING."""


class Drain:
    """How far a connection is with that.

    Invariants: `draining` is set with the first GOAWAY, or before it for a client that has not begun. `leaving` is set
    with the final one: no stream above `last_id` is opened any more, and the connection closes with its last stream.
    `late` says that it came while its port was drained: no work is begun for it, and it is told to go after a moment;
    where it is `hurried`, once it has asked something. Not before: of grpcio's clients (1.85) that got a GOAWAY just
    after the SETTINGS, one in a thousand took the connection for good, and waited there until its deadline.
    """

    __slots__ = ("_loop", "draining", "hurried", "late", "leaving")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.draining = self.leaving = self.late = self.hurried = False

    def come_late(self, connection: Http2Connection) -> None:
        """Let a connection go soon that has come while its port was drained."""
        self.late = True
        self._loop.call_later(DRAIN_LINGER_S, _let_go, connection)

    def begin(self, connection: Http2Connection) -> None:
        """Say so, answer what was sent before the peer learned it, then close."""
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
        """Tell the peer to open no more streams; its answer to the PING says that it knows."""
        connection.outbox.write(goaway(MAX_WINDOW, Fault.NO_ERROR) + frame(PING, 0, 0, DRAIN_PING))
        self._loop.call_later(DRAIN_LINGER_S, self._leave, connection)

    def acknowledged(self, connection: Http2Connection) -> None:
        """Take the answer to its PING."""
        if self.draining:
            self._leave(connection)

    def _leave(self, connection: Http2Connection) -> None:
        """Take no more calls: the peer has had time to learn that it should not send any."""
        if self.leaving or connection.closed:
            return
        self.leaving = True
        connection.max_streams = 0
        connection.outbox.flushed = partial(_close_unused, connection)
        connection.outbox.write(goaway(connection.last_id, Fault.NO_ERROR))


def _let_go(connection: Http2Connection) -> None:
    """End a connection that came late; one that has asked nothing need not be told."""
    if connection.last_id:
        connection.shutdown()
    elif not connection.closed:
        connection.transport.close()


def _drop_silent(connection: Http2Connection) -> None:
    if not connection.begun and not connection.closed:
        connection.transport.close()


def _close_unused(connection: Http2Connection) -> None:
    """Close, once what was accepted has been answered."""
    if not connection.streams:
        connection.close(GOODBYE_S)
