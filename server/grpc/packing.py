"""Packing: the messages of one call that are compressed on a thread, and what is sent after them, in order.

Made by a CodedCall. Source: grpc/doc/compression.md.
"""

from __future__ import annotations

import logging
import zlib
from collections import deque
from typing import TYPE_CHECKING

from penstock.server.http2.frames import Fault

from .framing import MIN_COMPRESSED, WINDOW

if TYPE_CHECKING:
    import asyncio

    from penstock.server.listening.mapped_buffer import Body

    from .coded_call import CodedCall

LARGE_BYTES = 1 << 18
"""Messages of at least this size are compressed on a thread: at the highest level this takes about 8 ms."""
_PIECE_BYTES = 1 << 20

logger = logging.getLogger("penstock.grpc")


class Packing:
    """The messages of one call that wait for compression: the first is on a thread, and the others follow in order.

    Invariants: it exists as long as something waits, and all of that is counted in `shared.unread`. `last` ends the
    stream once everything has been sent. Once it is dropped, nothing more is sent. `_now` is the message on a thread,
    None once the result is not needed.
    Threads: the event loop's, except for the compression.
    """

    __slots__ = ("_call", "_coding", "_dropped", "_now", "_size", "_waiting", "last")

    def __init__(self, call: CodedCall, coding: bytes, message: Body) -> None:
        self._call = call
        self._coding = coding
        self._waiting: deque[Body] = deque()
        self._now: Body | None = None
        self._size = 0
        self._dropped = False
        self.last = b""
        self.add(message)

    def add(self, message: Body) -> None:
        """Send another message after those that wait."""
        self._waiting.append(message)
        self._size += len(message)
        self._call.connection.shared.unread.grow(self, self._size)

    def drop(self) -> None:
        """Discard everything: there is nobody to send it to."""
        self._dropped = True
        self._waiting.clear()
        self._now = None  # a thread may come to it much later
        self._call.connection.shared.unread.shrink(self)

    def shed(self) -> None:
        """Send what waits uncompressed: there is too much of it, and it then counts as waiting for the client."""
        message, self._now = self._now, None
        if message is not None:
            self._waiting.appendleft(message)
        while self._waiting:
            message = self._waiting.popleft()
            self._send(len(message), message, 0)
        if not self._dropped:
            self._call.packed(self.last)

    def go_on(self) -> None:
        """Send messages that need no thread, up to one that does: any number of small ones may be waiting."""
        while self._waiting:
            message = self._waiting.popleft()
            if len(message) >= MIN_COMPRESSED and self._begin(message):
                return
            self._send(len(message), message, 0)
        if not self._dropped:
            self._call.packed(self.last)

    def _begin(self, message: Body) -> bool:
        """Start compressing a message. Returns: False if no thread is available, and it must be sent uncompressed."""
        connection = self._call.connection
        self._now = message
        try:
            begun = connection.shared.loop.run_in_executor(None, self._compress, connection.compression)
        except RuntimeError:
            self._now = None
            return False
        begun.add_done_callback(self._go_on_with)
        return True

    def _send(self, size: int, message: Body, flag: int) -> None:
        """Send a message that counted as `size` here."""
        self._call.pass_on(message, flag, self._coding)
        self._size -= size
        self._call.connection.shared.unread.shrink(self, self._size)

    def _go_on_with(self, packed: asyncio.Future[bytes]) -> None:
        error = None if packed.cancelled() else packed.exception()  # an exception never retrieved would be logged
        message, self._now = self._now, None
        if message is None or packed.cancelled():
            return
        if error is not None:
            logger.error("an answer could not be compressed", exc_info=error)
            self._call.connection.reset(self._call.stream_id, Fault.INTERNAL_ERROR)
            return
        self._send(len(message), packed.result(), 1)
        if not self._dropped:
            self.go_on()

    def _compress(self, level: int) -> bytes:
        """Compress, on a thread; stop early if the result is not needed."""
        message, parts = self._now, []
        if message is None:
            return b""
        encoder, view = zlib.compressobj(level, wbits=WINDOW[self._coding]), memoryview(message)
        for at in range(0, len(view), _PIECE_BYTES):
            if self._now is not message:
                return b""
            parts.append(encoder.compress(view[at : at + _PIECE_BYTES]))
        parts.append(encoder.flush())
        return b"".join(parts)
