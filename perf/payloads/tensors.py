"""Tensors to send: random, zeros, or from JSON values or raw bytes. Elements are as on the v2 wire.

Used by `inputs.py`. Random data is as perf_analyzer's, with two differences: floating-point numbers are in [0, 1),
since random bits would include NaN, infinities and numbers that slow a processor down; BOOL is 0 or 1.
"""

from __future__ import annotations

import base64
import binascii
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.backends.datatypes import DATATYPES, Datatype
from penstock.backends.errors import InferError
from penstock.perf.profiling.model import Tensor
from penstock.server.v2 import tensors as wire

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .?!"
"""The alphabet of random strings."""
_LENGTH = struct.Struct("<I")
_ACCEPTED_TYPES: dict[str, tuple[type, ...]] = {"b": (bool,), "i": (int,), "u": (int,), "f": (int, float), "O": (str,)}
_WORDS = {"b": "true and false", "i": "whole numbers", "u": "whole numbers", "f": "numbers", "O": "strings"}


class InputError(ValueError):
    """The requests cannot be built from what was given. The text is one line and names the flag."""


@dataclass(frozen=True, slots=True)
class Values:
    """One input of one row, or of one request without rows: `raw` is little-endian and row-major."""

    shape: tuple[int, ...]
    raw: bytes


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a tensor in shared memory. Units: bytes."""

    region: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class InputTensor:
    """One input of one request, `shape` with its rows. If it is in shared memory, `raw` is empty."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    raw: bytes = b""
    place: Place | None = None


Step = tuple[InputTensor, ...]
"""All inputs of one request."""


def datatype_of(tensor: Tensor) -> Datatype:
    """Return the entry of the datatype table. Raises: InputError."""
    try:
        return DATATYPES[tensor.datatype]
    except KeyError:
        raise InputError(f"input '{tensor.name}' is of datatype {tensor.datatype}, which is not known") from None


def text_of(shape: Sequence[int]) -> str:
    """Format a shape."""
    return f"[{','.join(map(str, shape))}]"


def nbytes_of(datatype: str, shape: Sequence[int]) -> int | None:
    """Return the size of a tensor in bytes; None if its shape or datatype leaves that open."""
    size = DATATYPES[datatype].size_bytes if datatype in DATATYPES else 0
    return size * math.prod(shape) if size and -1 not in shape else None


def random(tensor: Tensor, rng: np.random.Generator) -> Values:
    """Make random numbers: whole numbers over the full range of their datatype."""
    kind, count = datatype_of(tensor), math.prod(tensor.shape)
    if kind.dtype.kind == "f":
        return Values(tensor.shape, rng.random(count, np.float32).astype(kind.dtype).tobytes())
    if kind.name == "BF16":
        # the upper half of a float's bits
        bits = rng.random(count, np.float32).view(np.uint32) >> 16
        return Values(tensor.shape, bits.astype("<u2").tobytes())
    if kind.name == "BOOL":
        return Values(tensor.shape, rng.integers(0, 2, count, np.uint8).tobytes())
    return Values(tensor.shape, rng.bytes(count * kind.size_bytes))


def zeros(tensor: Tensor) -> Values:
    """Make zeros. Not for BYTES, whose elements are strings."""
    return Values(tensor.shape, bytes(math.prod(tensor.shape) * datatype_of(tensor).size_bytes))


def strings(tensor: Tensor, rng: np.random.Generator, length: int, text: str | None) -> Values:
    """Make BYTES of random strings, or of one string repeated. Units: `length` in characters."""
    count = math.prod(tensor.shape)
    if text:
        return Values(tensor.shape, serialized([text.encode()] * count))
    letters = np.frombuffer(LETTERS.encode(), np.uint8)
    letters_by_row = rng.choice(letters, (count, length))
    return Values(tensor.shape, serialized([row.tobytes() for row in letters_by_row]))


def serialized(elements: Sequence[bytes]) -> bytes:
    """Serialize BYTES: each element after its length."""
    return b"".join(part for element in elements for part in (_LENGTH.pack(len(element)), element))


def of_json(tensor: Tensor, values: Sequence[Any], where: str) -> bytes:
    """Convert flat JSON values to raw bytes; BF16 truncates. Raises: InputError."""
    kind = datatype_of(tensor)
    letter = "f" if kind.name == "BF16" else kind.dtype.kind
    accepted_types = _ACCEPTED_TYPES[letter]
    for value in values:
        if not isinstance(value, accepted_types) or (isinstance(value, bool) and letter != "b"):
            raise InputError(f"{where}: {kind.name} takes {_WORDS[letter]} in one flat array, got {str(value)[:40]}")
    try:
        if letter == "O":
            return serialized([value.encode() for value in values])
        with np.errstate(over="ignore"):
            if kind.name == "BF16":
                return (np.array(values, "<f4").view("<u4") >> 16).astype("<u2").tobytes()
            return np.array(values, kind.dtype).tobytes()
    except (OverflowError, UnicodeEncodeError) as error:
        raise InputError(f"{where}: a value is out of range for {kind.name}: {error}") from error


def of_base64(text: Any, where: str) -> bytes:
    """Decode raw bytes. Raises: InputError."""
    if not isinstance(text, str):
        raise InputError(f"{where}: its b64 has to be a string")
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(f"{where}: its b64 cannot be read: {error}") from error


def check_size(tensor: Tensor, values: Values, where: str) -> None:
    """Check raw bytes against their shape. Raises: InputError."""
    expected_bytes = nbytes_of(tensor.datatype, values.shape)
    if expected_bytes is None:
        count = len(elements_of(values.raw, where))
        if count != math.prod(values.shape):
            wants = f"{math.prod(values.shape)} strings for shape {text_of(values.shape)}"
            raise InputError(f"{where}: it has {count} strings, expected {wants}")
    elif len(values.raw) != expected_bytes:
        subject = f"for {tensor.datatype} of shape {text_of(values.shape)}"
        raise InputError(f"{where}: it has {len(values.raw)} bytes, expected {expected_bytes} {subject}")


def elements_of(raw: bytes, where: str) -> list[bytes]:
    """Parse BYTES. Raises: InputError."""
    elements, position = [], 0
    while position < len(raw):
        if position + 4 > len(raw):
            raise InputError(f"{where}: the length of a string is cut off; each needs 4 bytes before it")
        (size,) = _LENGTH.unpack_from(raw, position)
        position += 4 + size
        if position > len(raw):
            raise InputError(f"{where}: a string of {size} bytes is cut off")
        elements.append(raw[position - size : position])
    return elements


def to_json(sent: InputTensor) -> bytes:
    """Format an input as one flat JSON array. Raises: InputError if JSON cannot represent it."""
    flag = "--input-tensor-format json"
    if sent.datatype == "BYTES":
        array = np.empty(0, np.object_) if not sent.raw else np.array([*elements_of(sent.raw, sent.name)], np.object_)
    else:
        array = np.frombuffer(sent.raw, DATATYPES[sent.datatype].dtype)
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise InputError(
                f"{flag}: input '{sent.name}' has numbers that are not finite, which JSON cannot represent"
            )
    try:
        return wire.to_json(sent.datatype, sent.name, array)
    except InferError:
        raise InputError(f"{flag}: JSON cannot carry what input '{sent.name}' of {sent.datatype} holds") from None
