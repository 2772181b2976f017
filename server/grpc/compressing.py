"""CompressingCall: a call whose answers are compressed; its Compressor does so on a thread for large messages.

Made by the lane's connection. Source: grpc/doc/compression.md.
"""

from __future__ import annotations

import logging
import zlib
from collections import deque
from typing import TYPE_CHECKING

from penstock.server.http2.frames import ErrorCode

from . import answer_frames
from .call import GrpcCall
from .framing import MIN_COMPRESSED_BYTES, WBITS, compress

if TYPE_CHECKING:
    import asyncio

    from penstock.server.listening.mapped_buffer import Body

    from .connection import GrpcConnection
    from .request import GrpcRequest

LARGE_BYTES = 1 << 18
"""Messages of at least this size are compressed on a thread: at the highest level this takes about 8 ms."""
_PIECE_BYTES = 1 << 20

logger = logging.getLogger("penstock.grpc")


class CompressingCall(GrpcCall):
    """One RPC whose answers are compressed, if its client accepts that.

    Invariants: while `compressor` is set, messages are sent through it, and the response headers have been sent.
    """

    __slots__ = ("compressor",)

    def __init__(self, connection: GrpcConnection, stream_id: int, request: GrpcRequest) -> None:
        super().__init__(connection, stream_id, request)
        self.compressor: Compressor | None = None

    def answer(self, message: Body) -> None:
        """Send the single message of a unary answer, and OK."""
        self.send(message)
        self.finish()

    def send(self, message: Body, flag: int = 0, coding: bytes = b"") -> None:
        """Send one message of a stream."""
        if self.ended:
            return
        connection, coding = self.connection, self.request.answer_coding
        if self.compressor is not None:
            self.compressor.add(message)
        elif not coding or len(message) < MIN_COMPRESSED_BYTES:
            super().send(message, 0, coding)
        elif len(message) < LARGE_BYTES:
            super().send(compress(message, coding, connection.compression), 1, coding)
        else:
            if not self.headers_sent:
                self.headers_sent = True
                connection.outbox.send_headers(answer_frames.response_headers(self.stream_id, coding))
            self.compressor = Compressor(self, coding, message)
            self.compressor.resume()

    def send_compressed(self, message: Body, flag: int, coding: bytes) -> None:
        """Send a message that a Compressor has prepared."""
        super().send(message, flag, coding)

    def on_compressed(self, last_frame: bytes) -> None:
        """Handle the end of a Compressor; `last_frame` ends the stream, if it is set."""
        self.compressor = None
        if not last_frame:
            if self.writable:
                self.on_writable()
        elif self.unsent is None:
            self.connection.end(self, last_frame)
        else:
            self.unsent.last_frame = last_frame

    def _send_last(self, last_frame: bytes) -> None:
        if self.compressor is None:
            super()._send_last(last_frame)
            return
        self.release()
        self.connection.outbox.answer_count += 1
        self.compressor.last_frame = last_frame

    @property
    def writable(self) -> bool:
        """Whether all or nearly all that was sent has left."""
        return self.compressor is None and super().writable

    def untrack_unsent(self) -> None:
        """Stop counting pending data, including messages being compressed."""
        super().untrack_unsent()
        if self.compressor is not None:
            self.compressor.drop()

    def on_reset(self, code: ErrorCode) -> None:
        """Handle the loss of the call: it cannot be answered."""
        if self.compressor is not None:
            self.compressor.drop()
            self.compressor = None
        super().on_reset(code)

    def tick(self, elapsed_s: float) -> None:
        """Count time without progress; not while a thread compresses, which is not the client's fault."""
        if self.compressor is None or self.unsent is not None:
            super().tick(elapsed_s)


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
