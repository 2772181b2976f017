"""Layouts: the datatypes and shapes of a list of tensors, sent once over a wire and then referred to by number.

Called by `wire.py`. Strings are object arrays: they are sent as the lengths of all elements, in native byte order, then
the elements, which arrive as `bytes`. Writing 870,000 of them takes 0.2 s, and reading as long; with each element after
its length, as in the v2 protocol, 0.7 and 0.6 s.
"""

from __future__ import annotations

import json
import math
import re
import struct
from array import array as numbers
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.backends.backend import Array

from .arena import Mirror, WireError

ALIGNMENT = 64
NO_SLOT = 0xFFFF_FFFF
SLOT = struct.Struct("<I")
_KINDS = "biufO"
MAX_TENSORS = 4096
_MAX_AXES = 64
_DTYPE_NAME = re.compile(rf"[<>|=]?[{_KINDS}]\d{{0,2}}")
_LONG_STRING_RATIO = 64
"""Strings whose average length exceeds this multiple of the size of a length are not copied as one block."""
_BYTES_ONLY = {bytes}

Part = tuple[np.dtype[Any], tuple[int, ...], int]
"""A tensor: datatype, shape, and bytes; -1 bytes for strings, whose size is sent with each message."""


class Layout:
    """The tensors of one kind of message. `strings` is how many of them are strings. Units: bytes.

    `offsets` and `nbytes` are the tensors' places in the payload and its size, if there are no strings. `padding` is
    for the sender: the bytes after the only tensor if it is small and sent unconverted, else None. `single_bytes` is
    for the receiver: the size in a frame of the only tensor; 0 if there are others or strings, or none has arrived yet.
    """

    __slots__ = ("nbytes", "number", "offsets", "padding", "parts", "single_bytes", "strings")

    def __init__(self, number: int, parts: Sequence[Part | None]) -> None:
        self.number = number
        self.parts = parts
        self.padding: bytes | None = None
        self.single_bytes = 0
        self.strings = sum(part is not None and part[2] < 0 for part in parts)
        self.offsets, self.nbytes = (
            compute_offsets([part[2] if part else 0 for part in parts]) if not self.strings else ([], 0)
        )

    def encode(self) -> bytes:
        """Encode it for the other process."""
        return write_parts(self.parts)


def compute_offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return the offset of each part of a payload, aligned, and the size of the payload."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += (size + ALIGNMENT - 1) & -ALIGNMENT
    return offsets, end


def layout_key(arrays: Sequence[Array | None]) -> tuple[Any, ...]:
    """Return the key that tensors of the same Layout share."""
    return tuple([None if array is None else (array.dtype, array.shape) for array in arrays])


def join_tensors(parts: Sequence[Any], arrays: Sequence[Array | None]) -> bytes:
    """Concatenate tensors, each aligned."""
    pieces: list[bytes] = []
    for part, array in zip(parts, arrays, strict=True):
        if array is not None:
            native = array if array.dtype == part[0] else array.astype(part[0])
            piece = native.tobytes()
            surplus = -len(piece) % 64
            pieces.append(piece + bytes(surplus) if surplus else piece)
    return b"".join(pieces)


def describe_tensors(arrays: Sequence[Array | None]) -> list[Part | None]:
    """Describe tensors. Raises: TypeError for one that cannot be sent, ValueError for too many."""
    if len(arrays) > MAX_TENSORS:
        raise ValueError(f"{len(arrays)} tensors, {MAX_TENSORS} can travel in one message")
    parts: list[Part | None] = []
    for array in arrays:
        if array is None:
            parts.append(None)
            continue
        if array.dtype.kind not in _KINDS:
            raise TypeError(f"a tensor of numpy's {array.dtype} cannot be sent to another process")
        parts.append((array.dtype.newbyteorder("="), array.shape, -1 if array.dtype.hasobject else array.nbytes))
    return parts


def write_parts(parts: Sequence[Part | None]) -> bytes:
    """Encode a layout for the other process."""
    return json.dumps([part and ["O" if part[2] < 0 else part[0].str, part[1]] for part in parts]).encode()


def read_parts(encoded: bytes) -> list[Part | None]:
    """Decode the result of `write_parts`. Raises: WireError."""
    try:
        rows = json.loads(encoded)
        if len(rows) > MAX_TENSORS:
            raise WireError("a layout of too many tensors")
        return [None if row is None else _part(str(row[0]), row[1]) for row in rows]
    except (ValueError, TypeError, IndexError, KeyError, OverflowError, RecursionError) as error:
        raise WireError(f"a layout that cannot be read: {error}") from error


def _part(name: str, dims: Sequence[int]) -> Part:
    if not _DTYPE_NAME.fullmatch(name):
        raise WireError(f"no tensor has datatype {name}")
    dtype: np.dtype[Any] = np.dtype(name)
    shape = tuple(map(int, dims))
    if min(shape, default=0) < 0 or len(shape) > _MAX_AXES:
        raise WireError(f"no tensor is {name} {shape}")
    return dtype, shape, tensor_bytes(dtype, shape)


def tensor_bytes(dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    """Return the size of a tensor in bytes; -1 for strings."""
    return -1 if dtype.hasobject else math.prod(shape) * dtype.itemsize


def pack_strings(array: Array) -> bytes:
    """Encode an object array as the lengths of its elements, then these. Raises: ValueError if one is too long."""
    values = array.ravel().tolist()
    if set(map(type, values)) != _BYTES_ONLY:
        values = [bytes(each) if isinstance(each, bytes | bytearray) else str(each).encode() for each in values]
    try:
        return b"".join([numbers("I", map(len, values)), *values])
    except OverflowError:
        raise ValueError(f"a string of {max(map(len, values))} bytes") from None


def unpack_strings(payload: memoryview, shape: tuple[int, ...]) -> Array:
    """Decode the result of `pack_strings`. Raises: WireError; TypeError if the lengths are truncated."""
    position = 4 * math.prod(shape)
    lengths = payload[:position].cast("I")
    if len(payload) > _LONG_STRING_RATIO * position:
        elements = [bytes(payload[position : (position := position + length)]) for length in lengths]
    else:
        text = bytes(payload)  # slicing bytes takes half the time
        elements = [text[position : (position := position + length)] for length in lengths]
    if position != len(payload):
        raise WireError("strings that do not end with their payload")
    array = np.empty(len(elements), np.object_)
    array[:] = elements
    return array.reshape(shape)


def read_strings(layout: Layout, data: memoryview, mirror: Mirror) -> list[Array | None]:
    """Read tensors that include strings, whose sizes are in the message. Raises: WireError, and numpy's errors."""
    (slot,) = SLOT.unpack_from(data)
    if slot == NO_SLOT and len(layout.parts) == 1:
        (size,) = SLOT.unpack_from(data, 4)
        if len(data) == 8 + size + -size % ALIGNMENT:  # as below, in a third of the time
            return [unpack_strings(data[8 : 8 + size], layout.parts[0][1])]  # type: ignore[index]
    start = 4 + 4 * layout.strings
    string_sizes = iter(struct.unpack_from(f"<{layout.strings}I", data, 4))
    sizes = [0 if part is None else next(string_sizes) if part[2] < 0 else part[2] for part in layout.parts]
    offsets, nbytes = compute_offsets(sizes)
    if slot == NO_SLOT:
        if len(data) - start != nbytes:
            raise WireError(f"{len(data) - start} bytes of tensors where {nbytes} should be")
        buffer: Any = bytearray(data[start:])
    else:
        buffer = mirror.view(slot, nbytes)
    arrays: list[Array | None] = []
    for part, begin, size in zip(layout.parts, offsets, sizes, strict=True):
        if part is None:
            arrays.append(None)
        elif part[2] < 0:
            arrays.append(unpack_strings(memoryview(buffer).cast("B")[begin : begin + size], part[1]))
        else:
            arrays.append(np.ndarray(part[1], part[0], buffer, begin))
    return arrays
