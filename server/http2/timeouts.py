"""Timeouts: how long a peer may take to begin, to finish a frame, and to read answers, and a connection's maximum age.

Owned by Http2Connection, whose sweep calls it about every second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .frames import ErrorCode, Http2Error

if TYPE_CHECKING:
    from .connection import Http2Connection

LINGER_S = 5.0
"""How long further input from a rejected peer is read and dropped: closing at once could discard the GOAWAY."""


class Timeouts:
    """Times without progress, in seconds. `linger_s` is how long the peer may take after the connection is closed."""

    __slots__ = ("_age_s", "_closed_s", "_idle_s", "_last_unsent_bytes", "_stalled_s", "_unfinished_s", "linger_s")

    def __init__(self) -> None:
        self.linger_s = LINGER_S
        self._age_s = self._closed_s = self._idle_s = self._stalled_s = self._unfinished_s = 0.0
        self._last_unsent_bytes = 0

    def tick(self, connection: Http2Connection, elapsed_s: float) -> None:
        """Count elapsed time, and close when a limit is exceeded."""
        self._age_s += elapsed_s
        if connection.closed:
            self._closed_s += elapsed_s
            if self._closed_s > self.linger_s:
                connection.transport.abort()
        elif not connection.preface_received:
            if self._age_s > connection.limits.preface_timeout_s:
                connection.transport.abort()
        elif not self._tick_unsent(connection, elapsed_s) and not self._tick_unfinished(connection, elapsed_s):
            for stream in list(connection.streams.values()):
                stream.tick(elapsed_s)
            self._tick_age(connection, elapsed_s)
            connection.keepalive.tick(elapsed_s)

    def _tick_unsent(self, connection: Http2Connection, elapsed_s: float) -> bool:
        """Drop a peer that reads nothing of what is pending."""
        unsent, previous = connection.outbox.unsent_bytes(), self._last_unsent_bytes
        self._last_unsent_bytes = unsent
        self._stalled_s = self._stalled_s + elapsed_s if unsent and unsent >= previous > 0 else 0.0
        if self._stalled_s <= connection.limits.write_timeout_s:
            return False
        connection.transport.abort()
        return True

    def _tick_unfinished(self, connection: Http2Connection, elapsed_s: float) -> bool:
        """Reject a frame or a header block that is not completed in time."""
        if not connection.reader.is_stalled(connection):
            self._unfinished_s = 0.0
            return False
        self._unfinished_s += elapsed_s
        if self._unfinished_s <= connection.limits.receive_timeout_s:
            return False
        connection.fail(Http2Error(ErrorCode.ENHANCE_YOUR_CALM, "a frame or a header block was not finished in time"))
        return True

    def _tick_age(self, connection: Http2Connection, elapsed_s: float) -> None:
        limits = connection.limits
        self._idle_s = 0.0 if connection.streams else self._idle_s + elapsed_s
        expired = 0 < limits.max_age_s < self._age_s
        if expired and connection.drain.draining:
            if 0 < limits.max_age_grace_s <= self._age_s - limits.max_age_s:
                connection.transport.abort()
        elif expired or 0 < limits.idle_timeout_s < self._idle_s:
            if expired:
                # the grace period begins with the GOAWAY, which may be a second late
                self._age_s = limits.max_age_s
            connection.shutdown()
