"""Protobuf's wire format, as much of it as inference writes and reads itself."""

from __future__ import annotations

_FIXED = {1: 8, 3: 0, 4: 0, 5: 4}
"""How many bytes follow the head of a field, by its kind. Groups have none of their own: what is in them is counted."""


def varint(number: int) -> bytes:
    """Write a number of 0 and above."""
    if number < 0x80:
        return bytes((number,))
    written = bytearray()
    while number >= 0x80:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)


def has_more_fields(message: bytes, most: int) -> bool:
    """Tell whether a message has more fields of its own than `most`; of what is no message its parser knows better."""
    at, end = 0, len(message)
    try:
        for _ in range(most + 1):
            if at >= end:
                return False
            head, at = _read_varint(message, at)
            kind = head & 7
            if kind == 2:
                size, at = _read_varint(message, at)
                at += size
            elif kind == 0:
                at = _read_varint(message, at)[1]
            else:
                at += _FIXED[kind]
    except (IndexError, KeyError):
        return False
    return True


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = message[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7


def field_head(number: int, size: int) -> bytes:
    """Write what stands before a field of `size` bytes: a string, bytes or a message."""
    return varint(number << 3 | 2) + varint(size)


def field(number: int, value: bytes) -> bytes:
    """Write a whole field: a string, bytes or a message."""
    if len(value) < 0x80 and number < 16:  # most are, and small messages have many
        return bytes((number << 3 | 2, len(value))) + value
    return field_head(number, len(value)) + value
