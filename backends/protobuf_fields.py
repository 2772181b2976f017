"""The fields of a message in protobuf's wire format, found without parsing it.

Used if a message is too large to be parsed before its contents are known.
"""

from __future__ import annotations

from collections.abc import Iterator

_FIXED = {1: 8, 3: 0, 4: 0, 5: 4}
"""How many bytes follow the head of a field, by its kind. Groups have none of their own: their contents are counted."""
_MOST_SHIFT = 63
"""The shift of a number's last 7 bits: longer numbers are not valid protobuf, and reading one takes quadratic time."""


def fields(message: bytes | memoryview, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield the fields of a message: the head of each, and the start and end of its contents.

    Raises: IndexError, KeyError, if it is not one.
    """
    while at < end:
        head = message[at]
        at += 1
        if head >= 0x80:
            head, at = _read_varint(message, at - 1)
        kind = head & 7
        if kind == 2:
            size = message[at]
            at += 1
            if size >= 0x80:
                size, at = _read_varint(message, at - 1)
            stop = at + size
        elif kind == 0:
            stop = _read_varint(message, at)[1]
        else:
            stop = at + _FIXED[kind]
        yield head, at, stop
        at = stop


def _read_varint(message: bytes | memoryview, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = message[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7
        if shift > _MOST_SHIFT:
            raise IndexError("an unterminated varint")
