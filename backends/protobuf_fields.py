"""The fields of a message in protobuf's wire format, found without parsing it.

Used if a message is too large to be parsed before its contents are known.
"""

from __future__ import annotations

from collections.abc import Iterator

_FIXED_SIZES = {1: 8, 3: 0, 4: 0, 5: 4}
"""How many bytes follow the head of a field, by its kind. Groups have none of their own: their contents are counted."""
_MAX_SHIFT = 63
"""The shift of a number's last 7 bits: longer numbers are not valid protobuf, and reading one takes quadratic time."""


def fields(message: bytes | memoryview, offset: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield the fields of a message: the head of each, and the start and end of its contents.

    Raises: IndexError, KeyError, if it is not one.
    """
    while offset < end:
        tag = message[offset]
        offset += 1
        if tag >= 0x80:
            tag, offset = _read_varint(message, offset - 1)
        wire_type = tag & 7
        if wire_type == 2:
            size = message[offset]
            offset += 1
            if size >= 0x80:
                size, offset = _read_varint(message, offset - 1)
            stop = offset + size
        elif wire_type == 0:
            stop = _read_varint(message, offset)[1]
        else:
            stop = offset + _FIXED_SIZES[wire_type]
        yield tag, offset, stop
        offset = stop


def _read_varint(message: bytes | memoryview, offset: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = message[offset]
        offset += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, offset
        shift += 7
        if shift > _MAX_SHIFT:
            raise IndexError("an unterminated varint")
