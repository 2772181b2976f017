"""Stream: one HTTP/2 stream, and what flow control holds back of its answer. Base class of the gRPC lane's Call."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from .frames import ErrorCode, window_update

if TYPE_CHECKING:
    from .connection import Http2Connection


LOW_BYTES = 1 << 16
"""A stream with no more than this unsent can accept the next message."""


class Unsent:
    """The unsent part of an answer: payload first, then `last_frame`, the frame that ends the stream.

    `held_bytes` is the memory it holds: a piece keeps all of its bytes until the last of them is sent.
    """

    __slots__ = ("held_bytes", "last_frame", "pieces", "size", "stalled_s")

    def __init__(self) -> None:
        self.pieces: deque[memoryview] = deque()
        self.size = self.held_bytes = 0
        self.last_frame = b""
        self.stalled_s = 0.0


class Stream:
    """One stream, from its HEADERS until both sides have ended it or one has reset it.

    Invariants: it is in `connection.streams` exactly that long. `credit` is the sum of the peer's WINDOW_UPDATEs minus
    what was sent; adding the outbox's `initial_window` gives the window, even if the peer changes that setting.
    `receive_window` is what the peer may still send.
    """

    __slots__ = ("connection", "credit", "receive_window", "remote_ended", "stream_id", "unsent")

    connection: Http2Connection
    stream_id: int
    credit: int
    receive_window: int
    remote_ended: bool
    unsent: Unsent | None

    def received(self, payload: bytes, end_stream: int) -> None:
        """Process a DATA frame's payload. The receiver must update `receive_window`."""
        raise NotImplementedError

    def received_part(self, payload: memoryview, end_stream: int) -> None:
        """Process the payload of a long DATA frame, or a part of it. Ownership: valid only during this call."""
        self.received(bytes(payload), end_stream)

    def get_buffer(self) -> memoryview | None:
        """Return the buffer for the next payload, if there is one; otherwise None."""
        return None

    def buffer_updated(self, size: int, end_stream: int) -> None:
        """Process `size` bytes written to that buffer, like `received`."""
        raise NotImplementedError

    def refill(self) -> None:
        """Return the used part of its window to the peer."""
        increment = self.connection.limits.stream_window_bytes - self.receive_window
        self.receive_window += increment
        self.connection.outbox.write(window_update(self.stream_id, increment))

    def on_writable(self) -> None:
        """Handle that pending data has been sent, or that little is left."""

    def shed(self) -> None:
        """Drop pending data of a slow client. Source: gRPC clients map this code to RESOURCE_EXHAUSTED."""
        self.connection.reset(self.stream_id, ErrorCode.ENHANCE_YOUR_CALM)

    def untrack_unsent(self) -> None:
        """Stop counting pending data: the connection is being dropped, and the stream will be lost."""
        self.connection.shared.unread.shrink(self)

    def on_reset(self, code: ErrorCode) -> None:
        """Handle the loss of the stream: reset by the peer or by the connection, which has already forgotten it."""
        raise NotImplementedError

    def tick(self, elapsed_s: float) -> None:
        """Count time without progress."""
