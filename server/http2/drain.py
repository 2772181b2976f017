"""Drain: the graceful shutdown of an HTTP/2 connection: a GOAWAY, a PING, the final GOAWAY, and the close.

Owned by Http2Connection. Source: RFC 9113 6.8; gRPC's servers.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from .frames import MAX_WINDOW, PING, ErrorCode, frame, goaway

if TYPE_CHECKING:
    from .connection import Http2Connection

DRAIN_PING = b"penstock"
FINAL_LINGER_S = 1.0
"""How long a peer may take to close after the final GOAWAY and its last answer."""
DRAIN_LINGER_S = 0.5
"""How long a call may still arrive after the first GOAWAY, if the peer does not answer the PING."""


class Drain:
    """The state of a connection's shutdown.

    Invariants: `draining` is set with the first GOAWAY, or before it for a client that has not begun.
    `final_goaway_sent` is set with the final one: no stream above `last_id` is opened any more, and the connection
    closes with its last stream. `accepted_in_drain`: it was accepted while its port was draining, so no work is started
    for it, and it gets a GOAWAY after a moment; if `expedited`, after its first call. Not before: of grpcio clients
    (1.85) that got a GOAWAY right after the SETTINGS, one in a thousand considered the connection usable, and waited on
    it until the call's deadline.
    """

    __slots__ = ("_loop", "accepted_in_drain", "draining", "expedited", "final_goaway_sent")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.draining = self.final_goaway_sent = self.accepted_in_drain = self.expedited = False

    def schedule_late_close(self, connection: Http2Connection) -> None:
        """Schedule the end of a connection accepted while its port was draining."""
        self.accepted_in_drain = True
        self._loop.call_later(DRAIN_LINGER_S, _close_late, connection)

    def begin(self, connection: Http2Connection) -> None:
        """Announce the shutdown, answer what was sent before the peer learned of it, then close."""
        if self.draining:
            return
        if self.accepted_in_drain and not connection.last_id:
            self.expedited = True
            return
        self.draining = True
        if connection.preface_received:
            self.announce(connection)
        else:
            self._loop.call_later(DRAIN_LINGER_S, _close_without_preface, connection)

    def announce(self, connection: Http2Connection) -> None:
        """Tell the peer to open no more streams; its answer to the PING shows that it knows."""
        connection.outbox.write(goaway(MAX_WINDOW, ErrorCode.NO_ERROR) + frame(PING, 0, 0, DRAIN_PING))
        self._loop.call_later(DRAIN_LINGER_S, self._send_final_goaway, connection)

    def acknowledged(self, connection: Http2Connection) -> None:
        """Process the peer's answer to the PING."""
        if self.draining:
            self._send_final_goaway(connection)

    def _send_final_goaway(self, connection: Http2Connection) -> None:
        """Accept no more calls: the peer has had time to learn that it should not send any."""
        if self.final_goaway_sent or connection.closed:
            return
        self.final_goaway_sent = True
        connection.max_streams = 0
        connection.outbox.on_flush = partial(_close_if_idle, connection)
        connection.outbox.write(goaway(connection.last_id, ErrorCode.NO_ERROR))


def _close_late(connection: Http2Connection) -> None:
    """End a late connection; one that has sent no call needs no GOAWAY."""
    if connection.last_id:
        connection.shutdown()
    elif not connection.closed:
        connection.transport.close()


def _close_without_preface(connection: Http2Connection) -> None:
    if not connection.preface_received and not connection.closed:
        connection.transport.close()


def _close_if_idle(connection: Http2Connection) -> None:
    """Close once all accepted calls have been answered."""
    if not connection.streams:
        connection.close(FINAL_LINGER_S)
