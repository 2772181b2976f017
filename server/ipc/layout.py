"""Layouts: what a list of tensors looks like, told once over a wire and then named by its number.

Called by `wire.py`. Strings are object arrays: the lengths of all elements travel, in the machine's order of bytes, and
then the elements, which come out as `bytes`. 870,000 take 0.2 s to write so, and as long to read; each after its own
length, as in the v2 protocol, 0.7 and 0.6.
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
MOST_TENSORS = 4096
_MOST_AXES = 64
_NAME = re.compile(rf"[<>|=]?[{_KINDS}]\d{{0,2}}")
_LONG = 64
"""Strings that are longer than so many times their lengths, on the average, are not copied all together."""
_BYTES_ONLY = {bytes}

Part = tuple[np.dtype[Any], tuple[int, ...], int]
"""A tensor: datatype, shape, and bytes; -1 bytes for strings, which say how many with each message."""


class Layout:
    """The tensors of one kind of message. `strings` is how many of them are strings. Units: bytes.

    `offsets` and `nbytes` are where each tensor is in the payload, and how much there is, where no strings are.
    `padding` is the sender's: what follows the bytes of a small tensor that is alone and as it travels, else None.
    `alone` is the receiver's: with how many bytes the one tensor that there is travels in a frame; 0 where there are
    others, or strings, or none has come yet.
    """

    __slots__ = ("alone", "nbytes", "number", "offsets", "padding", "parts", "strings")

    def __init__(self, number: int, parts: Sequence[Part | None]) -> None:
        self.number = number
        self.parts = parts
        self.padding: bytes | None = None
        self.alone = 0
        self.strings = sum(part is not None and part[2] < 0 for part in parts)
        self.offsets, self.nbytes = place([part[2] if part else 0 for part in parts]) if not self.strings else ([], 0)

    def written(self) -> bytes:
        """Write it for the other process."""
        return write_parts(self.parts)


def place(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Give where each part of a payload begins, and where all of it ends; each is aligned."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += (size + ALIGNMENT - 1) & -ALIGNMENT
    return offsets, end


def form_of(arrays: Sequence[Array | None]) -> tuple[Any, ...]:
    """Give what tensors have in common with others of their Layout."""
    return tuple([None if array is None else (array.dtype, array.shape) for array in arrays])


def joined(parts: Sequence[Any], arrays: Sequence[Array | None]) -> bytes:
    """Give tensors one after another, each aligned."""
    pieces: list[bytes] = []
    for part, array in zip(parts, arrays, strict=True):
        if array is not None:
            native = array if array.dtype == part[0] else array.astype(part[0])
            piece = native.tobytes()
            surplus = -len(piece) % 64
            pieces.append(piece + bytes(surplus) if surplus else piece)
    return b"".join(pieces)


def parts_of(arrays: Sequence[Array | None]) -> list[Part | None]:
    """Describe tensors. Raises: TypeError for one that cannot travel, ValueError for too many."""
    if len(arrays) > MOST_TENSORS:
        raise ValueError(f"{len(arrays)} tensors, {MOST_TENSORS} can travel in one message")
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
    """Write a layout for the other process."""
    return json.dumps([part and ["O" if part[2] < 0 else part[0].str, part[1]] for part in parts]).encode()


def read_parts(written: bytes) -> list[Part | None]:
    """Read what `write_parts` has written. Raises: WireError."""
    try:
        rows = json.loads(written)
        if len(rows) > MOST_TENSORS:
            raise WireError("a layout of too many tensors")
        return [None if row is None else _part(str(row[0]), row[1]) for row in rows]
    except (ValueError, TypeError, IndexError, KeyError, OverflowError, RecursionError) as error:
        raise WireError(f"a layout that cannot be read: {error}") from error


def _part(name: str, dims: Sequence[int]) -> Part:
    if not _NAME.fullmatch(name):
        raise WireError(f"no tensor has datatype {name}")
    dtype: np.dtype[Any] = np.dtype(name)
    shape = tuple(map(int, dims))
    if min(shape, default=0) < 0 or len(shape) > _MOST_AXES:
        raise WireError(f"no tensor is {name} {shape}")
    return dtype, shape, -1 if dtype.hasobject else math.prod(shape) * dtype.itemsize


def pack_strings(array: Array) -> bytes:
    """Write the elements of an object array after the lengths of all. Raises: ValueError for what cannot be written."""
    values = array.ravel().tolist()
    if set(map(type, values)) != _BYTES_ONLY:
        values = [bytes(each) if isinstance(each, bytes | bytearray) else str(each).encode() for each in values]
    try:
        return b"".join([numbers("I", map(len, values)), *values])
    except OverflowError:
        raise ValueError(f"a string of {max(map(len, values))} bytes") from None


def unpack_strings(payload: memoryview, shape: tuple[int, ...]) -> Array:
    """Read what `pack_strings` has written. Raises: WireError; TypeError where lengths end too early."""
    position = 4 * math.prod(shape)
    lengths = payload[:position].cast("I")
    if len(payload) > _LONG * position:
        elements = [bytes(payload[position : (position := position + length)]) for length in lengths]
    else:
        text = bytes(payload)  # whose slices are made in half the time
        elements = [text[position : (position := position + length)] for length in lengths]
    if position != len(payload):
        raise WireError("strings that do not end with their payload")
    array = np.empty(len(elements), np.object_)
    array[:] = elements
    return array.reshape(shape)


def read_strings(layout: Layout, data: memoryview, mirror: Mirror) -> list[Array | None]:
    """Read tensors of which some are strings, whose sizes come with them. Raises: WireError, and what numpy raises."""
    (slot,) = SLOT.unpack_from(data)
    if slot == NO_SLOT and len(layout.parts) == 1:
        (size,) = SLOT.unpack_from(data, 4)
        if len(data) == 8 + size + -size % ALIGNMENT:  # as below, in a third of the time
            return [unpack_strings(data[8 : 8 + size], layout.parts[0][1])]  # type: ignore[index]
    start = 4 + 4 * layout.strings
    told = iter(struct.unpack_from(f"<{layout.strings}I", data, 4))
    sizes = [0 if part is None else next(told) if part[2] < 0 else part[2] for part in layout.parts]
    offsets, nbytes = place(sizes)
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
