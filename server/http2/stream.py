"""Stream: one HTTP/2 stream, and what of its answer waits for flow control. The gRPC lane's Call descends from it."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from .frames import Fault, window_update

if TYPE_CHECKING:
    from .connection import Http2Connection


LOW_BYTES = 1 << 16
"""A stream with no more than this unsent can take the next message."""


class Unsent:
    """What of an answer has not left: payload first, then `last`, the frame that ends the stream.

    `kept` is the memory of that: a piece keeps all of its bytes until the last of them has left.
    """

    __slots__ = ("kept", "last", "pieces", "size", "waited_s")

    def __init__(self) -> None:
        self.pieces: deque[memoryview] = deque()
        self.size = self.kept = 0
        self.last = b""
        self.waited_s = 0.0


class Stream:
    """One stream, from its HEADERS until both sides have ended it or one has reset it.

    Invariants: it is in `connection.streams` exactly as long. `credit` is what the peer's WINDOW_UPDATEs gave less what
    was sent, so that with the outbox's `initial_window` it is the window, whatever becomes of the peer's setting.
    `in_left` is what the peer may still send.
    """

    __slots__ = ("connection", "credit", "in_left", "remote_ended", "stream_id", "unsent")

    connection: Http2Connection
    stream_id: int
    credit: int
    in_left: int
    remote_ended: bool
    unsent: Unsent | None

    def received(self, payload: bytes, ended: int) -> None:
        """Take a DATA frame's payload. `in_left` is the receiver's to keep."""
        raise NotImplementedError

    def part(self, payload: memoryview, ended: int) -> None:
        """Take the payload of a long DATA frame, or a part of it. Ownership: it is lent for this call."""
        self.received(bytes(payload), ended)

    def room(self) -> memoryview | None:
        """Give where the next payload may be written instead, if there is such a place."""
        return None

    def landed(self, size: int, ended: int) -> None:
        """Learn that so much has been written there; else as `received`."""
        raise NotImplementedError

    def refill(self) -> None:
        """Give back what the peer has used of its window."""
        increment = self.connection.limits.stream_window_bytes - self.in_left
        self.in_left += increment
        self.connection.outbox.write(window_update(self.stream_id, increment))

    def left(self) -> None:
        """Learn that what waited has gone out, or that there is little left of it."""

    def give_up(self) -> None:
        """Drop what waits: clients take too little. Source: gRPC's clients make RESOURCE_EXHAUSTED of this code."""
        self.connection.reset(self.stream_id, Fault.ENHANCE_YOUR_CALM)

    def uncount(self) -> None:
        """Count what waits no longer: its connection is being dropped, and the stream will be lost."""
        self.connection.shared.untaken.lessen(self)

    def lost(self, code: Fault) -> None:
        """Learn that the stream is gone: reset by the peer or by the connection, which has forgotten it already."""
        raise NotImplementedError

    def tick(self, elapsed_s: float) -> None:
        """Count the time without progress."""
