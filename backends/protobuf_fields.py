"""The fields of a message in protobuf's wire format, found without parsing it.

Called where a message is too large to be parsed before it is known what is in it.
"""

from __future__ import annotations

from collections.abc import Iterator

_FIXED = {1: 8, 3: 0, 4: 0, 5: 4}
"""How many bytes follow the head of a field, by its kind. Groups have none of their own: what is in them is counted."""
_MOST_SHIFT = 63
"""Of a number's last 7 bits: a longer one is none of protobuf's, and to read all of it takes the square of the time."""


def fields(message: bytes | memoryview, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Give the fields of a message: the head of each, and where what it holds begins and ends.

    Raises: IndexError, KeyError, where it is none.
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
            raise IndexError("a number that does not end")
