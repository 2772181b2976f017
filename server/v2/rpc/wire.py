"""Protobuf's wire format, as far as inference encodes and decodes it directly."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np

from penstock.backends.protobuf_fields import fields

_INPUT, _OUTPUT = 5 << 3 | 2, 6 << 3 | 2
_SHAPE, _CONTENTS = 3 << 3 | 2, 5 << 3 | 2
_FIELD_COST = 4
_PACKED = frozenset(number << 3 | 2 for number in range(1, 6))
"""Field heads: of a ModelInferRequest, of its tensors, and of packed variable-size numbers in contents."""


def varint(number: int) -> bytes:
    """Encode a non-negative number."""
    if number < 0x80:
        return bytes((number,))
    written = bytearray()
    while number >= 0x80:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)


def has_more_fields(message: bytes, limit: int) -> bool:
    """Return whether a message has more than `limit` top-level fields; invalid messages are left to the parser."""
    try:
        return next(islice(fields(message, 0, len(message)), limit, None), None) is not None
    except (IndexError, KeyError):
        return False


def has_more_elements(message: bytes, limit: int) -> bool:
    """Return whether the tensors of a ModelInferRequest have more than `limit` dims and numbers in `contents`.

    Each other field counts as `_FIELD_COST` of these. Fixed-size numbers do not count: they take no more memory than in
    the message.
    """
    count = 0
    try:
        for elements in _element_counts(message):
            count += elements
            if count > limit:
                return True
    except (IndexError, KeyError):
        pass  # left to the parser, as above
    return False


def _element_counts(message: bytes) -> Iterator[int]:
    """Yield the counts, field by field."""
    for of_message, begin, end in fields(message, 0, len(message)):
        if of_message not in (_INPUT, _OUTPUT):
            continue
        for of_tensor, start, stop in fields(message, begin, end):
            yield _FIELD_COST + (_count_varints(message, start, stop) if of_tensor == _SHAPE else 0)
            if of_tensor == _CONTENTS:
                for head, first, last in fields(message, start, stop):
                    yield _FIELD_COST + (_count_varints(message, first, last) if head in _PACKED else 0)


def _count_varints(message: bytes, start: int, stop: int) -> int:
    """Count varints, each of which ends with a byte below 128."""
    return int(np.count_nonzero(np.frombuffer(message[start:stop], np.int8) >= 0))


def field_head(number: int, size: int) -> bytes:
    """Encode what precedes the `size` bytes of a field: a string, bytes or a message."""
    if size < 0x80 and number < 16:  # most are, and small messages have many
        return bytes((number << 3 | 2, size))
    return varint(number << 3 | 2) + varint(size)


def field(number: int, value: bytes) -> bytes:
    """Encode a whole field: a string, bytes or a message."""
    return field_head(number, len(value)) + value
