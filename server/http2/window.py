"""ReceiveWindow: flow control of incoming data for an HTTP/2 connection as a whole. Owned by Http2Connection.

A stream's own window is `Stream.in_left`. Source: RFC 9113 6.9.
"""

from __future__ import annotations

from .frames import DEFAULT_WINDOW, Fault, Http2Error, window_update
from .outbox import Outbox


class ReceiveWindow:
    """What the peer may still send.

    Invariant: `left` is refilled as soon as half of the window is used, because memory is bounded by
    `shared.receive_bytes` instead.
    """

    __slots__ = ("_outbox", "_size", "left", "low")

    def __init__(self, size: int, outbox: Outbox) -> None:
        self._size = size
        self._outbox = outbox
        self.left = DEFAULT_WINDOW
        self.low = size // 2

    def take(self, size: int) -> None:
        """Count DATA. Raises: Http2Error."""
        self.left -= size
        if self.left < self.low:
            self.refill()

    def refill(self) -> None:
        """Refill the window.

        Raises: Http2Error if the peer has sent more than the window.
        """
        if self.left < 0:
            raise Http2Error(Fault.FLOW_CONTROL_ERROR, "more DATA than the connection's window")
        increment = self._size - self.left
        if increment > 0:
            self.left += increment
            self._outbox.write(window_update(0, increment))
