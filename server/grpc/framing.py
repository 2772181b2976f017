"""Framing: gRPC's messages, put together from what DATA frames hold, and their compression. Called by the calls.

Source: grpc/doc/PROTOCOL-HTTP2.md, compression.md.
"""

from __future__ import annotations

import struct
import zlib
from collections import deque
from typing import TYPE_CHECKING

from penstock.server.listening.landing import LARGE_BYTES, Landing

from .method import Status

if TYPE_CHECKING:
    from penstock.server.listening.mapped import Body

PREFIX = struct.Struct(">BI")
PREFIX_BYTES = PREFIX.size
GZIP, DEFLATE = b"gzip", b"deflate"
WINDOW = {GZIP: 31, DEFLATE: 15}
MIN_COMPRESSED = 256
"""Answers below this are sent as they are."""
_EARNEST_BYTES = 4096
"""A message from here on is put where it stays as it comes, once so much of it has: memory is not had for a word."""

_MOST_PARTS = 1024
"""Parts of messages that are kept apart; more of them, of a client that sends crumbs, are put together: each takes some
fifty bytes, which nobody counts."""


class MessageError(Exception):
    """A message that cannot be taken: the status and text of the answer."""

    def __init__(self, status: Status, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


class Incoming:
    """What has arrived of a call's messages.

    Invariants: `have` bytes are kept, in `_parts`, of the first of which `_at` are used up. `need` is how many a whole
    message takes with its prefix, or a prefix alone while it is not known. A large one goes to `_landing`, and `_parts`
    have what follows it. Once `settled`, more of it is kept and that is all, until it is whole. `held` is the owner's,
    for its accounts. `total` is all that has ever come.
    """

    __slots__ = ("_at", "_flag", "_known", "_landing", "_parts", "have", "held", "most", "need", "settled", "total")

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
        self._landing: Landing | None = None

    def feed(self, payload: bytes | memoryview) -> None:
        """Take what came."""
        landing, size = self._landing, len(payload)
        self.have += size
        self.total += size
        if landing is not None:
            missing = landing.missing
            if size <= missing:
                landing.put(payload)
                return
            landing.put(payload[:missing])
            payload = payload[missing:]
        if payload:
            self._parts.append(bytes(payload))
            if len(self._parts) > _MOST_PARTS:
                self._parts = deque((b"".join(self._parts),))

    def room(self) -> memoryview | None:
        """Give where the next bytes may be written instead, if a message has its place; then they are `landed`."""
        return self._landing.room() if self._landing is not None and self._landing.missing else None

    def landed(self, size: int) -> None:
        """Take that so many bytes have been written there."""
        if self._landing is not None:
            self._landing.have += size
        self.have += size
        self.total += size

    def next(self) -> tuple[int, bytes] | None:
        """Give the next whole message, and whether it is compressed; None while it is not there.

        Raises: MessageError.
        """
        if self.have < self.need:
            self._land()
            return None
        if self._landing is not None:
            flag, message = self._flag, self._landing.whole()
            self.have -= self.need
            self._landing = None
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
        """Give a large message its place, once some of it has come."""
        if self.settled or not self._known:
            return
        self.settled = self.have >= _EARNEST_BYTES or self.need < LARGE_BYTES
        if not self.settled or self.need < LARGE_BYTES:
            return
        self._flag, length = PREFIX.unpack(self._prefix())
        self._landing = Landing(length)
        at = self._at + PREFIX_BYTES
        for part in self._parts:
            self._landing.put(memoryview(part)[at:])
            at = 0
        self._parts.clear()
        self._at = 0

    def _prefix(self) -> bytes:
        first, at = self._parts[0], self._at
        if len(first) - at < PREFIX_BYTES:
            # crumbs: put together what is there
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
    """Put a coding on a message."""
    encoder = zlib.compressobj(level, wbits=WINDOW[coding])
    return encoder.compress(message) + encoder.flush()
