"""Openings: the header blocks that begin requests. Used by `http2_sending.py`.

All requests of a connection have the same fields, so the blocks are built once: the first enters the fields into the
peer's header table, the others are a few bytes that refer to them. Source: RFC 7541.
"""

from __future__ import annotations

import struct

from hpack import Encoder

from penstock.server.http2.frames import (
    DATA,
    DEFAULT_TABLE_BYTES,
    END_HEADERS,
    FRAME_HEADER,
    FRAME_HEADER_BYTES,
    HEADERS,
    MIN_FRAME_BYTES,
)
from penstock.server.http2.headers import TABLE_SIZE_ZERO, Fields, encode

_ENTRY_BYTES = 32
"""The size of a table entry besides its name and value."""


class Opening:
    """One header block, in the frames that begin a stream."""

    __slots__ = ("_block", "_front", "_pack")

    def __init__(self, block: bytes) -> None:
        if len(block) > MIN_FRAME_BYTES:
            raise ValueError(f"header fields of {len(block)} bytes; {MIN_FRAME_BYTES} is the most")
        self._block = block
        self._front = FRAME_HEADER.pack(len(block) << 8 | HEADERS, END_HEADERS, 0)[: FRAME_HEADER_BYTES - 4]
        self._pack = struct.Struct(f">{len(self._front)}sI{len(block)}sIBI").pack

    def alone(self, stream_id: int) -> bytes:
        """Return HEADERS."""
        return self._front + stream_id.to_bytes(4, "big") + self._block

    def followed(self, stream_id: int, size: int, flags: int) -> bytes:
        """Return HEADERS, and the head of the DATA frame of `size` bytes that follows."""
        return self._pack(self._front, stream_id, self._block, size << 8 | DATA, flags, stream_id)


class Openings:
    """The blocks of one list of fields. Raises: ValueError if they are too large.

    `first` begins a connection, and `rest` follows. After the peer has reduced its table, `shrunk` and then `plain` are
    used, which need no table. Fields that do not fit in the table together never use it.
    """

    def __init__(self, fields: Fields) -> None:
        self.plain = Opening(encode(fields))
        self.shrunk = Opening(TABLE_SIZE_ZERO + encode(fields))
        self.first = self.rest = self.plain
        if sum(len(name) + len(value) + _ENTRY_BYTES for name, value in fields) <= DEFAULT_TABLE_BYTES:
            encoder = Encoder()
            self.first, self.rest = Opening(encoder.encode(fields)), Opening(encoder.encode(fields))
