"""Compressor: the messages of one call that are compressed on a thread, and what is sent after them, in order.

Made by a CompressingCall. Source: grpc/doc/compression.md.
"""

from __future__ import annotations

import logging
import zlib
from collections import deque
from typing import TYPE_CHECKING

from penstock.server.http2.frames import ErrorCode

from .framing import MIN_COMPRESSED_BYTES, WBITS

if TYPE_CHECKING:
    import asyncio

    from penstock.server.listening.mapped_buffer import Body

    from .compressing_call import CompressingCall

LARGE_BYTES = 1 << 18
"""Messages of at least this size are compressed on a thread: at the highest level this takes about 8 ms."""
_PIECE_BYTES = 1 << 20

logger = logging.getLogger("penstock.grpc")


class Compressor:
    """The messages of one call that wait for compression: the first is on a thread, and the others follow in order.

    Invariants: it exists as long as something waits, and all of that is counted in `shared.unread`. `last_frame` ends
    the stream once everything has been sent. Once it is dropped, nothing more is sent. `_current` is the message on a
    thread, None once the result is not needed.
    Threads: the event loop's, except for the compression.
    """

    __slots__ = ("_call", "_coding", "_current", "_dropped", "_size", "_waiting", "last_frame")

    def __init__(self, call: CompressingCall, coding: bytes, message: Body) -> None:
        self._call = call
        self._coding = coding
        self._waiting: deque[Body] = deque()
        self._current: Body | None = None
        self._size = 0
        self._dropped = False
        self.last_frame = b""
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
        self._current = None  # a thread may come to it much later
        self._call.connection.shared.unread.shrink(self)

    def shed(self) -> None:
        """Send what waits uncompressed: there is too much of it, and it then counts as waiting for the client."""
        message, self._current = self._current, None
        if message is not None:
            self._waiting.appendleft(message)
        while self._waiting:
            message = self._waiting.popleft()
            self._send(len(message), message, 0)
        if not self._dropped:
            self._call.on_compressed(self.last_frame)

    def resume(self) -> None:
        """Send messages that need no thread, up to one that does: any number of small ones may be waiting."""
        while self._waiting:
            message = self._waiting.popleft()
            if len(message) >= MIN_COMPRESSED_BYTES and self._begin(message):
                return
            self._send(len(message), message, 0)
        if not self._dropped:
            self._call.on_compressed(self.last_frame)

    def _begin(self, message: Body) -> bool:
        """Start compressing a message. Returns: False if no thread is available, and it must be sent uncompressed."""
        connection = self._call.connection
        self._current = message
        try:
            future = connection.shared.loop.run_in_executor(None, self._compress, connection.compression)
        except RuntimeError:
            self._current = None
            return False
        future.add_done_callback(self._on_compressed)
        return True

    def _send(self, size: int, message: Body, flag: int) -> None:
        """Send a message that counted as `size` here."""
        self._call.send_compressed(message, flag, self._coding)
        self._size -= size
        self._call.connection.shared.unread.shrink(self, self._size)

    def _on_compressed(self, future: asyncio.Future[bytes]) -> None:
        error = None if future.cancelled() else future.exception()  # an exception never retrieved would be logged
        message, self._current = self._current, None
        if message is None or future.cancelled():
            return
        if error is not None:
            logger.error("an answer could not be compressed", exc_info=error)
            self._call.connection.reset(self._call.stream_id, ErrorCode.INTERNAL_ERROR)
            return
        self._send(len(message), future.result(), 1)
        if not self._dropped:
            self.resume()

    def _compress(self, level: int) -> bytes:
        """Compress, on a thread; stop early if the result is not needed."""
        message, parts = self._current, []
        if message is None:
            return b""
        encoder, view = zlib.compressobj(level, wbits=WBITS[self._coding]), memoryview(message)
        for offset in range(0, len(view), _PIECE_BYTES):
            if self._current is not message:
                return b""
            parts.append(encoder.compress(view[offset : offset + _PIECE_BYTES]))
        parts.append(encoder.flush())
        return b"".join(parts)
