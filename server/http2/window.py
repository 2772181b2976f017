"""ReceiveWindow: flow control of incoming data for an HTTP/2 connection as a whole. Owned by Http2Connection.

A stream's own window is `Stream.receive_window`. Source: RFC 9113 6.9.
"""

from __future__ import annotations

from .frames import DEFAULT_WINDOW, ErrorCode, Http2Error, window_update
from .outbox import Outbox


class ReceiveWindow:
    """What the peer may still send.

    Invariant: `remaining` is refilled as soon as half of the window is used, because memory is bounded by
    `shared.max_receive_bytes` instead.
    """

    __slots__ = ("_outbox", "_size", "refill_below", "remaining")

    def __init__(self, size: int, outbox: Outbox) -> None:
        self._size = size
        self._outbox = outbox
        self.remaining = DEFAULT_WINDOW
        self.refill_below = size // 2

    def consume(self, size: int) -> None:
        """Count DATA. Raises: Http2Error."""
        self.remaining -= size
        if self.remaining < self.refill_below:
            self.refill()

    def refill(self) -> None:
        """Refill the window.

        Raises: Http2Error if the peer has sent more than the window.
        """
        if self.remaining < 0:
            raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "more DATA than the connection's window")
        increment = self._size - self.remaining
        if increment > 0:
            self.remaining += increment
            self._outbox.write(window_update(0, increment))
