"""Protobuf's wire format, as much of it as inference writes and reads itself."""

from __future__ import annotations


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


def field_head(number: int, size: int) -> bytes:
    """Write what stands before a field of `size` bytes: a string, bytes or a message."""
    return varint(number << 3 | 2) + varint(size)


def field(number: int, value: bytes) -> bytes:
    """Write a whole field: a string, bytes or a message."""
    if len(value) < 0x80 and number < 16:  # most are, and small messages have many
        return bytes((number << 3 | 2, len(value))) + value
    return field_head(number, len(value)) + value
