"""Framing: assembles gRPC messages from DATA frames, and compresses them. Used by the calls.

Source: grpc/doc/PROTOCOL-HTTP2.md, compression.md.
"""

from __future__ import annotations

import struct
import zlib
from collections import deque
from typing import TYPE_CHECKING

from penstock.server.listening.body_buffer import LARGE_BYTES, BodyBuffer

from .method import Status

if TYPE_CHECKING:
    from penstock.server.listening.mapped_buffer import Body

PREFIX = struct.Struct(">BI")
PREFIX_BYTES = PREFIX.size
GZIP, DEFLATE = b"gzip", b"deflate"
WBITS = {GZIP: 31, DEFLATE: 15}
MIN_COMPRESSED_BYTES = 256
"""Smaller answers are not compressed."""
_MIN_BUFFER_BYTES = 4096
"""A large message gets its own memory only once this much of it has arrived: the announced length cannot be trusted."""

MESSAGES_PER_TURN = 128
"""After this many messages of a stream, other connections have their turn: a frame may hold thousands, each a request,
and 8 MiB may be read in one turn of the loop."""
_MAX_PARTS = 1024
"""The most message parts that are kept separate; beyond this, for a client that sends tiny pieces, they are joined,
because each takes about fifty bytes that are not counted."""


class MessageError(Exception):
    """A message that cannot be accepted: the status and text of the answer."""

    def __init__(self, status: Status, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


class IncomingMessages:
    """What has arrived of a call's messages.

    Invariants: `stored_bytes` are in `_parts`, of whose first one `_offset` bytes are consumed. `needed_bytes` is the
    size of the message with its prefix, or of the prefix alone while the size is unknown. A large message goes to
    `_body_buffer`, and `_parts` hold what follows it. Once `storage_decided`, further bytes are only stored until the
    message is complete. `received_bytes` counts everything that has arrived. For the owner: `counted_bytes` are counted
    elsewhere, and `turn_messages` more messages may be delivered before the loop has a turn.
    """

    __slots__ = (
        "_body_buffer", "_flags", "_offset", "_parts", "_size_known", "counted_bytes", "max_bytes", "needed_bytes",
        "received_bytes", "storage_decided", "stored_bytes", "turn_messages",
    )  # fmt: skip

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.stored_bytes = 0
        self.needed_bytes = PREFIX_BYTES
        self.counted_bytes = 0
        self.received_bytes = 0
        self.storage_decided = self._size_known = False
        self.turn_messages = MESSAGES_PER_TURN
        self._flags = 0
        self._offset = 0
        self._parts: deque[bytes] = deque()
        self._body_buffer: BodyBuffer | None = None

    def feed(self, payload: bytes | memoryview) -> None:
        """Store received bytes."""
        buffer, size = self._body_buffer, len(payload)
        self.stored_bytes += size
        self.received_bytes += size
        if buffer is not None:
            missing = buffer.missing_bytes
            if size <= missing:
                buffer.append(payload)
                return
            buffer.append(payload[:missing])
            payload = payload[missing:]
        if payload:
            self._parts.append(bytes(payload))
            if len(self._parts) > _MAX_PARTS:
                self._parts = deque((b"".join(self._parts),))

    def get_buffer(self) -> memoryview | None:
        """Return the buffer for the next bytes, None if the current message has none. Then call `buffer_updated`."""
        return (
            self._body_buffer.free_space()
            if self._body_buffer is not None and self._body_buffer.missing_bytes
            else None
        )

    def buffer_updated(self, size: int) -> None:
        """Account for `size` bytes written to that buffer."""
        if self._body_buffer is not None:
            self._body_buffer.received_bytes += size
        self.stored_bytes += size
        self.received_bytes += size

    def next(self) -> tuple[int, bytes] | None:
        """Return whether the next message is compressed, and the message; None if it is incomplete.

        Raises: MessageError.
        """
        if self.stored_bytes < self.needed_bytes:
            self._allocate_body_buffer()
            return None
        if self._body_buffer is not None:
            flag, message = self._flags, self._body_buffer.finish()
            self.stored_bytes -= self.needed_bytes
            self._body_buffer = None
        else:
            flag, length = PREFIX.unpack(self._prefix())
            if not self._size_known:
                self._check_prefix(flag, length)
                self._size_known = True
                self.needed_bytes = PREFIX_BYTES + length
                if self.stored_bytes < self.needed_bytes:
                    self._allocate_body_buffer()
                    return None
            self._consume(PREFIX_BYTES)
            message = self._read(length)
        self._size_known = self.storage_decided = False
        self.needed_bytes = PREFIX_BYTES
        return flag, message

    def _check_prefix(self, flag: int, length: int) -> None:
        if flag > 1:
            raise MessageError(Status.INTERNAL, f"message with unknown flags {flag:#04x}")
        if length > self.max_bytes:
            text = f"Received message larger than max ({length} vs. {self.max_bytes})"
            raise MessageError(Status.RESOURCE_EXHAUSTED, text)

    def _allocate_body_buffer(self) -> None:
        """Allocate memory for a large message, once some of it has arrived."""
        if self.storage_decided or not self._size_known:
            return
        self.storage_decided = self.stored_bytes >= _MIN_BUFFER_BYTES or self.needed_bytes < LARGE_BYTES
        if not self.storage_decided or self.needed_bytes < LARGE_BYTES:
            return
        self._flags, length = PREFIX.unpack(self._prefix())
        self._body_buffer = BodyBuffer(length)
        offset = self._offset + PREFIX_BYTES
        for part in self._parts:
            self._body_buffer.append(memoryview(part)[offset:])
            offset = 0
        self._parts.clear()
        self._offset = 0

    def _prefix(self) -> bytes:
        first, offset = self._parts[0], self._offset
        if len(first) - offset < PREFIX_BYTES:
            # tiny pieces: join them
            first, offset = b"".join(self._parts)[offset:], 0
            self._parts = deque((first,))
            self._offset = 0
        return first[offset : offset + PREFIX_BYTES]

    def _consume(self, size: int) -> None:
        self.stored_bytes -= size
        self._offset += size
        if self._offset == len(self._parts[0]):
            self._parts.popleft()
            self._offset = 0

    def _read(self, size: int) -> bytes:
        if not size:
            return b""
        parts, offset = self._parts, self._offset
        first = parts[0]
        if len(first) - offset >= size:
            message = first[offset : offset + size]
            self._consume(size)
            return message
        chunks = [first[offset:]]
        parts.popleft()
        remaining = size - len(chunks[0])
        while remaining and len(parts[0]) <= remaining:
            chunks.append(parts.popleft())
            remaining -= len(chunks[-1])
        if remaining:
            chunks.append(parts[0][:remaining])
        self._offset = remaining
        self.stored_bytes -= size
        return b"".join(chunks)


def compress(message: Body, coding: bytes, level: int) -> bytes:
    """Compress a message."""
    encoder = zlib.compressobj(level, wbits=WBITS[coding])
    return encoder.compress(message) + encoder.flush()
