"""Stream: one HTTP/2 stream, and what flow control holds back of its answer. Base class of the gRPC lane's Call."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from .frames import Fault, window_update

if TYPE_CHECKING:
    from .connection import Http2Connection


LOW_BYTES = 1 << 16
"""A stream with no more than this unsent can accept the next message."""


class Unsent:
    """The unsent part of an answer: payload first, then `last`, the frame that ends the stream.

    `kept` is the memory it holds: a piece keeps all of its bytes until the last of them is sent.
    """

    __slots__ = ("kept", "last", "pieces", "size", "waited_s")

    def __init__(self) -> None:
        self.pieces: deque[memoryview] = deque()
        self.size = self.kept = 0
        self.last = b""
        self.waited_s = 0.0


class Stream:
    """One stream, from its HEADERS until both sides have ended it or one has reset it.

    Invariants: it is in `connection.streams` exactly that long. `credit` is the sum of the peer's WINDOW_UPDATEs minus
    what was sent; adding the outbox's `initial_window` gives the window, even if the peer changes that setting.
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
        """Process a DATA frame's payload. The receiver must update `in_left`."""
        raise NotImplementedError

    def part(self, payload: memoryview, ended: int) -> None:
        """Process the payload of a long DATA frame, or a part of it. Ownership: valid only during this call."""
        self.received(bytes(payload), ended)

    def room(self) -> memoryview | None:
        """Return the buffer for the next payload, if there is one; otherwise None."""
        return None

    def landed(self, size: int, ended: int) -> None:
        """Process `size` bytes written to that buffer, like `received`."""
        raise NotImplementedError

    def refill(self) -> None:
        """Return the used part of its window to the peer."""
        increment = self.connection.limits.stream_window_bytes - self.in_left
        self.in_left += increment
        self.connection.outbox.write(window_update(self.stream_id, increment))

    def left(self) -> None:
        """Handle that pending data has been sent, or that little is left."""

    def shed(self) -> None:
        """Drop pending data of a slow client. Source: gRPC clients map this code to RESOURCE_EXHAUSTED."""
        self.connection.reset(self.stream_id, Fault.ENHANCE_YOUR_CALM)

    def uncount(self) -> None:
        """Stop counting pending data: the connection is being dropped, and the stream will be lost."""
        self.connection.shared.unread.shrink(self)

    def lost(self, code: Fault) -> None:
        """Handle the loss of the stream: reset by the peer or by the connection, which has already forgotten it."""
        raise NotImplementedError

    def tick(self, elapsed_s: float) -> None:
        """Count time without progress."""
