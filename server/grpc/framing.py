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
WINDOW = {GZIP: 31, DEFLATE: 15}
MIN_COMPRESSED = 256
"""Smaller answers are not compressed."""
_EARNEST_BYTES = 4096
"""A large message gets its own memory only once this much of it has arrived: the announced length cannot be trusted."""

_MOST_PARTS = 1024
"""The most message parts that are kept separate; beyond this, for a client that sends tiny pieces, they are joined,
because each takes about fifty bytes that are not counted."""


class MessageError(Exception):
    """A message that cannot be accepted: the status and text of the answer."""

    def __init__(self, status: Status, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


class Incoming:
    """What has arrived of a call's messages.

    Invariants: `have` bytes are stored in `_parts`, of whose first one `_at` bytes are consumed. `need` is the size of
    the message with its prefix, or of the prefix alone while the size is unknown. A large message goes to
    `_body_buffer`, and `_parts` hold what follows it. Once `settled`, further bytes are only stored until the message
    is complete. `held` is for the owner's accounting. `total` counts everything that has arrived.
    """

    __slots__ = ("_at", "_body_buffer", "_flag", "_known", "_parts", "have", "held", "most", "need", "settled", "total")

    def __init__(self, most: int) -> None:
        self.most = most
        self.have = 0
        self.need = PREFIX_BYTES
        self.held = 0
        self.total = 0
        self.settled = self._known = False
        self._flag = 0
        self._at = 0
        self._parts: deque[bytes] = deque()
        self._body_buffer: BodyBuffer | None = None

    def feed(self, payload: bytes | memoryview) -> None:
        """Store received bytes."""
        buffer, size = self._body_buffer, len(payload)
        self.have += size
        self.total += size
        if buffer is not None:
            missing = buffer.missing_bytes
            if size <= missing:
                buffer.append(payload)
                return
            buffer.append(payload[:missing])
            payload = payload[missing:]
        if payload:
            self._parts.append(bytes(payload))
            if len(self._parts) > _MOST_PARTS:
                self._parts = deque((b"".join(self._parts),))

    def room(self) -> memoryview | None:
        """Return the buffer for the next bytes, if the current message has one; otherwise None. Then call `landed`."""
        return (
            self._body_buffer.free_space()
            if self._body_buffer is not None and self._body_buffer.missing_bytes
            else None
        )

    def landed(self, size: int) -> None:
        """Account for `size` bytes written to that buffer."""
        if self._body_buffer is not None:
            self._body_buffer.received_bytes += size
        self.have += size
        self.total += size

    def next(self) -> tuple[int, bytes] | None:
        """Return whether the next message is compressed, and the message; None if it is incomplete.

        Raises: MessageError.
        """
        if self.have < self.need:
            self._land()
            return None
        if self._body_buffer is not None:
            flag, message = self._flag, self._body_buffer.finish()
            self.have -= self.need
            self._body_buffer = None
        else:
            flag, length = PREFIX.unpack(self._prefix())
            if not self._known:
                self._check(flag, length)
                self._known = True
                self.need = PREFIX_BYTES + length
                if self.have < self.need:
                    self._land()
                    return None
            self._drop(PREFIX_BYTES)
            message = self._take(length)
        self._known = self.settled = False
        self.need = PREFIX_BYTES
        return flag, message

    def _check(self, flag: int, length: int) -> None:
        if flag > 1:
            raise MessageError(Status.INTERNAL, f"message with unknown flags {flag:#04x}")
        if length > self.most:
            text = f"Received message larger than max ({length} vs. {self.most})"
            raise MessageError(Status.RESOURCE_EXHAUSTED, text)

    def _land(self) -> None:
        """Allocate memory for a large message, once some of it has arrived."""
        if self.settled or not self._known:
            return
        self.settled = self.have >= _EARNEST_BYTES or self.need < LARGE_BYTES
        if not self.settled or self.need < LARGE_BYTES:
            return
        self._flag, length = PREFIX.unpack(self._prefix())
        self._body_buffer = BodyBuffer(length)
        at = self._at + PREFIX_BYTES
        for part in self._parts:
            self._body_buffer.append(memoryview(part)[at:])
            at = 0
        self._parts.clear()
        self._at = 0

    def _prefix(self) -> bytes:
        first, at = self._parts[0], self._at
        if len(first) - at < PREFIX_BYTES:
            # tiny pieces: join them
            first, at = b"".join(self._parts)[at:], 0
            self._parts = deque((first,))
            self._at = 0
        return first[at : at + PREFIX_BYTES]

    def _drop(self, size: int) -> None:
        self.have -= size
        self._at += size
        if self._at == len(self._parts[0]):
            self._parts.popleft()
            self._at = 0

    def _take(self, size: int) -> bytes:
        if not size:
            return b""
        parts, at = self._parts, self._at
        first = parts[0]
        if len(first) - at >= size:
            message = first[at : at + size]
            self._drop(size)
            return message
        taken = [first[at:]]
        parts.popleft()
        left = size - len(taken[0])
        while left and len(parts[0]) <= left:
            taken.append(parts.popleft())
            left -= len(taken[-1])
        if left:
            taken.append(parts[0][:left])
        self._at = left
        self.have -= size
        return b"".join(taken)


def compress(message: Body, coding: bytes, level: int) -> bytes:
    """Compress a message."""
    encoder = zlib.compressobj(level, wbits=WINDOW[coding])
    return encoder.compress(message) + encoder.flush()
