"""Headers: decoding of header blocks with `hpack`, cached by their bytes; and encoding of constant blocks.

A client repeats the same few blocks once its dynamic table has settled. The result of decoding a block is valid until
that table changes, so most blocks are looked up: 0.1 us, where decoding takes 30. Called by the connection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from hpack import Decoder, HPACKError, OversizedHeaderListError
from hpack.hpack import decode_integer, encode_integer
from hpack.table import HeaderTable

from .frames import END_HEADERS, END_STREAM, HAS_PRIORITY, PADDED, ErrorCode, Http2Error, unpadded

Fields = list[tuple[bytes, bytes]]
T = TypeVar("T")

_TOO_LARGE = "the header block is too large"
_PRIORITY_BYTES = 5
_MAX_CACHED_BLOCKS = 32
_MAX_CACHED_BYTES = 4096
_MAX_RESIZES = 2
"""A block may begin with two changes of the table's size (RFC 7541 4.2). More would only cost time."""
_STATIC_NAMES = {b":status": 8, b"content-type": 31}
_STATIC_FIELDS = {(b":status", b"200"): 8, (b":status", b"400"): 12}


class _TrackedTable(HeaderTable):
    """hpack's table, extended to report changes."""

    changed = False

    def add(self, name: bytes, value: bytes) -> None:
        self.changed = True
        super().add(name, value)

    @property
    def maxsize(self) -> int:
        return self._maxsize

    @maxsize.setter
    def maxsize(self, newmax: int) -> None:
        self.changed = True
        HeaderTable.maxsize.fset(self, newmax)  # type: ignore[attr-defined]


class HeaderDecoder(Generic[T]):
    """The header decoder of one connection.

    Invariants: while `block` is not None, a header block is incomplete and only its CONTINUATION may follow;
    `stream_id` and `end_stream` (END_STREAM) belong to the last HEADERS. `cached` holds only results that decoding the
    same bytes now would give again, without changing the table.
    """

    def __init__(self, max_bytes: int) -> None:
        self.cached: dict[bytes, T] = {}
        self.block: bytearray | None = None
        self.stream_id = 0
        self.end_stream = 0
        self._max_bytes = max_bytes
        self._decoder = Decoder(max_bytes)
        self._table = _TrackedTable()
        self._decoder.header_table = self._table

    def start_block(self, flags: int, stream_id: int, payload: bytes) -> bytes | None:
        """Process HEADERS. Returns: the header block, None if it is incomplete. Raises: Http2Error."""
        if flags & PADDED:
            payload = unpadded(payload)
        if flags & HAS_PRIORITY:
            if len(payload) < _PRIORITY_BYTES:
                raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "HEADERS too short for their priority")
            payload = payload[_PRIORITY_BYTES:]
        if len(payload) > self._max_bytes:
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, _TOO_LARGE)
        self.stream_id, self.end_stream = stream_id, flags & END_STREAM
        if flags & END_HEADERS:
            return payload
        self.block = bytearray(payload)
        return None

    def continue_block(self, flags: int, payload: bytes) -> bytes | None:
        """Process CONTINUATION. Returns: the header block, None if it is incomplete. Raises: Http2Error."""
        block = self.block
        if block is None:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        block += payload
        if len(block) > self._max_bytes:
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, _TOO_LARGE)
        if flags & END_HEADERS:
            self.block = None
            return bytes(block)
        return None

    def decode(self, block: bytes, resolve: Callable[[Fields], T]) -> T:
        """Decode a block, unless it is cached. `resolve` converts the fields to the cached result.

        Raises: Http2Error; the decoder cannot be used after that.
        """
        cached = self.cached.get(block)
        if cached is not None:
            return cached
        table = self._table
        table.changed = False
        _check_resizes(block)
        try:
            fields: Fields = [(name, value) for name, value in self._decoder.decode(block, raw=True)]
        except OversizedHeaderListError as error:
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, "the header list is too large") from error
        except (HPACKError, ValueError, IndexError) as error:
            raise Http2Error(ErrorCode.COMPRESSION_ERROR, "the header block cannot be decoded") from error
        resolved = resolve(fields)
        if table.changed or len(self.cached) >= _MAX_CACHED_BLOCKS:
            self.cached.clear()
        if not table.changed and sum(len(name) + len(value) for name, value in fields) <= _MAX_CACHED_BYTES:
            self.cached[block] = resolved
        return resolved


def _check_resizes(block: bytes) -> None:
    offset = 0
    for _ in range(_MAX_RESIZES + 1):
        if offset >= len(block) or block[offset] & 0xE0 != 0x20:
            return
        try:
            offset += decode_integer(block[offset : offset + 8], 5)[1]
        except HPACKError as error:
            raise Http2Error(ErrorCode.COMPRESSION_ERROR, "the header block cannot be decoded") from error
    raise Http2Error(ErrorCode.COMPRESSION_ERROR, "the header table's size changes more than twice in one block")


TABLE_SIZE_ZERO = b"\x20"
"""The prefix of a block after the peer has reduced the table size: the table is not used at all (RFC 7541 4.2)."""


def prepend_to_block(prefix: bytes, frame: bytes) -> bytes:
    """Insert a notice at the beginning of the block of a HEADERS frame without padding."""
    size = int.from_bytes(frame[:3], "big") + len(prefix)
    return size.to_bytes(3, "big") + frame[3:9] + prefix + frame[9:]


def encode(fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Encode fields without the dynamic table, so that the bytes are valid on every connection at any time."""
    block = bytearray()
    for name, value in fields:
        index = _STATIC_FIELDS.get((name, value))
        if index is not None:
            block.append(0x80 | index)
            continue
        index = _STATIC_NAMES.get(name, 0)
        block += encode_integer(index, 4)
        if not index:
            block += encode_integer(len(name), 7) + name
        block += encode_integer(len(value), 7) + value
    return bytes(block)
