"""Tensors on the v2 wire: conversion of JSON values and raw bytes to and from numpy arrays."""

from __future__ import annotations

import math
import struct
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from penstock.backends.datatypes import bytes_tensor
from penstock.backends.errors import Code, InferError
from penstock.batching.scheduling.request_checks import format_shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.backends.backend import Array
    from penstock.backends.signature import TensorSpec

_FLOATS: dict[str, np.dtype[Any]] = {"FP32": np.dtype(np.float32), "FP64": np.dtype(np.float64)}
_NUMBERS = {float, int}
_ACCEPTED_TYPES: dict[str, set[type]] = {"f": _NUMBERS, "i": {int}, "u": {int}, "b": {bool, int}}
"""The JSON types accepted for each kind of datatype."""
_LETTER_N = ord("n")
"""No number, true or false contains this letter; a text that does contains a null."""
_LENGTH = struct.Struct("<I")
_MAX_SIZE = 2**63 - 1
MANY_STRINGS = 1 << 14
"""From this many BYTES elements a shape is checked before they are read, each of which takes 0.3 us and an object."""
_NO_JSON = ("FP16", "BF16")
_SMALL_ELEMENTS = 64
"""From this many elements orjson writes an array faster through numpy than through a list (perf/micro.py)."""
_PIECE_ELEMENTS = 1 << 14
"""The number of elements written at a time, half a millisecond: orjson holds the GIL, and the event loop waits for it.
If one element is NaN, each becomes a Python string. Also, orjson crashes instead of raising if its buffer cannot
grow."""
_LONG_STRING = 256
"""From this many bytes the content of a string dominates its cost."""
_SAMPLE_ELEMENTS = 64


def overflow(spec: TensorSpec, shape: list[int], count: int) -> InferError | None:
    """Return an error if the element count or byte size of a shape overflows, None otherwise."""
    if count > _MAX_SIZE:
        text = (
            f"shape {format_shape(shape)} of input '{spec.name}' causes total element count to exceed maximum size of"
        )
        return InferError(Code.INVALID, f"{text} {_MAX_SIZE}")
    if count * spec.type.size_bytes > _MAX_SIZE:
        return InferError(
            Code.INVALID, f"byte size overflow for input '{spec.name}', its shape is {format_shape(shape)}"
        )
    return None


def size_mismatch(model: str, spec: TensorSpec, shape: list[int], count: int, actual_bytes: int) -> InferError:
    """Return the error for a tensor whose byte size does not match its shape."""
    text = f"input byte size mismatch for input '{spec.name}' for model '{model}'."
    text = f"{text} Expected {count * spec.type.size_bytes}, got {actual_bytes}"
    return overflow(spec, shape, count) or InferError(Code.INVALID, text)


def _count_mismatch(spec: TensorSpec, shape: list[int], count: int) -> InferError:
    return overflow(spec, shape, count) or _shape_mismatch()


def _shape_mismatch() -> InferError:
    return InferError(Code.INVALID, "Unable to parse 'data': Shape does not match true shape of 'data' field")


def _json_unsupported(operation: str, datatype: str, location: str) -> InferError:
    text = f"{operation} {datatype} data via JSON is not supported. Please use the binary data format for {location}"
    return InferError(Code.INVALID, text)


def from_json(spec: TensorSpec, shape: list[int], count: int, values: Any) -> Array:
    """Make an array from JSON values, nested or flat, or from the buffer simdjson made of them, never for BYTES.

    Shapes: the result has `shape`, whose product is `count`.
    Raises: InferError (INVALID).
    """
    name = spec.datatype
    if name in _FLOATS and type(values) is list and set(map(type, values)) <= _NUMBERS:
        # the common case, twice as fast as letting numpy detect the type
        if len(shape) == 2 and shape[0] == 1 and shape[1] == len(values):
            # one flat row: 0.44 us, where creating and reshaping takes 0.8
            return np.array([values], _FLOATS[name])
        array: Array = np.array(values, _FLOATS[name])
    elif name in _NO_JSON:
        raise _json_unsupported("receiving", name, f"input '{spec.name}'")
    elif type(values) is list:
        array = _parse_strings(values) if name == "BYTES" else _parse_numbers(spec, _flat(values))
    elif type(values) is np.ndarray:
        array = _convert_buffer(spec, values)
    else:
        raise InferError(Code.INVALID, "Unable to parse 'data': attempt to access JSON non-array as array")
    if array.size != count:
        raise _count_mismatch(spec, shape, count)
    try:
        return array.reshape(shape)
    except (ValueError, OverflowError):
        raise _shape_mismatch() from None


def _flat(values: list[Any]) -> list[Any]:
    """Flatten nested lists of any structure: as in Triton, only the number of elements must match the shape."""
    if list not in set(map(type, values)):
        return values
    flat: list[Any] = []
    open_lists = [iter(values)]
    while open_lists:
        for value in open_lists[-1]:
            if type(value) is list:
                open_lists.append(iter(value))
                break
            flat.append(value)
        else:
            open_lists.pop()
    return flat


def _parse_numbers(spec: TensorSpec, values: list[Any]) -> Array:
    """Make an array from arbitrary JSON values; numpy never guesses their type."""
    dtype = spec.type.dtype
    types = set(map(type, values))
    if not types <= _ACCEPTED_TYPES[dtype.kind] or (dtype.kind == "b" and not set(values) <= {0, 1}):
        raise _wrong_json_type(spec)
    if dtype.kind == "f":
        return _as_floats(np.array(values, np.float64), dtype)
    if dtype.kind != "b" and values:
        _check_range(spec, min(values), max(values))
    return np.array(values, dtype)


def _convert_buffer(spec: TensorSpec, array: Array) -> Array:
    """Convert the buffer that simdjson made of numbers."""
    dtype, kind = spec.type.dtype, array.dtype.kind
    if not array.size:
        return array.astype(dtype)
    if dtype.kind == "f":
        return _as_floats(array.astype(np.float64, copy=False), dtype)
    if kind == "f" or (dtype.kind == "b" and not ((array == 0) | (array == 1)).all()):
        raise _wrong_json_type(spec)
    if dtype.kind != "b" and array.dtype != dtype:
        _check_range(spec, int(array.min()), int(array.max()))
    return array.astype(dtype, copy=False)


def _as_floats(array: Array, dtype: np.dtype[Any]) -> Array:
    # values out of range for FP32 become infinite, as in Triton
    with np.errstate(over="ignore"):
        return array.astype(dtype, copy=False)


def _check_range(spec: TensorSpec, lowest: int, highest: int) -> None:
    bounds = np.iinfo(spec.type.dtype.str)
    if lowest < bounds.min or highest > bounds.max:
        text = f"Unable to parse 'data': a value of input '{spec.name}' is out of range for {spec.datatype}"
        raise InferError(Code.INVALID, text)


def _wrong_json_type(spec: TensorSpec) -> InferError:
    if spec.datatype == "BOOL":
        return InferError(Code.INVALID, "Unable to parse 'data': attempt to access JSON non-boolean as boolean")
    return InferError(Code.INVALID, f"Unable to parse 'data': input '{spec.name}' takes {spec.datatype} values")


def _parse_strings(values: list[Any]) -> Array:
    flat = _flat(values)
    if not set(map(type, flat)) <= {str}:
        raise InferError(Code.INVALID, "Unable to parse 'data': attempt to access JSON non-string as string")
    return bytes_tensor([text.encode() for text in flat])


def from_binary(model: str, spec: TensorSpec, shape: list[int], count: int, raw: memoryview) -> Array:
    """View raw bytes as an array: little-endian, row-major; BYTES elements are length-prefixed and copied out.

    Raises: InferError (INVALID).
    """
    datatype = spec.type
    if not datatype.size_bytes:
        array: Array = _parse_elements(model, spec, count, raw)
    else:
        if count * datatype.size_bytes != len(raw):
            raise size_mismatch(model, spec, shape, count, len(raw))
        array = datatype.view(raw)
    try:
        return array.reshape(shape)
    except (ValueError, OverflowError):
        text = f"unexpected shape for input '{spec.name}' for model '{model}': {format_shape(shape)}"
        raise InferError(Code.INVALID, text) from None


def _parse_elements(model: str, spec: TensorSpec, count: int, raw: memoryview) -> Array:
    elements: list[bytes] = []
    position, end = 0, len(raw)
    # stops at the surplus: 8 MiB can hold two million empty strings
    while position + 4 <= end and len(elements) <= count:
        (size,) = _LENGTH.unpack_from(raw, position)
        position += 4
        if position + size > end:
            text = f"incomplete string data for inference input '{spec.name}' for model '{model}', expecting string of "
            raise InferError(Code.INVALID, f"{text}length {size} but only {end - position} bytes available")
        elements.append(bytes(raw[position : position + size]))
        position += size
    if len(elements) > count:
        text = f"expected {count} strings for inference input '{spec.name}' for model '{model}', got more"
        raise InferError(Code.INVALID, text)
    if position != end:
        text = f"incomplete string length indicator for inference input '{spec.name}' for model '{model}', expecting "
        raise InferError(Code.INVALID, f"{text}4 bytes but only {end - position} bytes available")
    if len(elements) < count:
        text = f"expected {count} strings for inference input '{spec.name}' for model '{model}', got {len(elements)}"
        raise InferError(Code.INVALID, text)
    return bytes_tensor(elements)


def to_json(datatype: str, name: str, array: Array) -> bytes:
    """Write an array as one flat JSON list.

    FP32 is written through double, as Triton does; NaN and infinities are the tokens that Python's json reads.
    Raises: InferError (INVALID) for FP16 and BF16, and for bytes that are not UTF-8.
    """
    return json_writer(datatype, name, array.shape)(array)


def json_writer(datatype: str, name: str, shape: tuple[int, ...]) -> Callable[[Array], bytes]:
    """Return a function that writes arrays of one output and shape like `to_json`."""
    if datatype in _NO_JSON:
        return partial(_reject_json, datatype, name)
    count = math.prod(shape)
    if count > _PIECE_ELEMENTS:
        return lambda array: b"".join(json_pieces(datatype, name, array))
    if datatype == "BYTES":
        return partial(_strings_to_json, name)
    if count < _SMALL_ELEMENTS:
        return _row_to_json if len(shape) == 2 and shape[0] == 1 else _small_to_json
    return _floats_to_json if datatype == "FP32" else _numbers_to_json


def json_pieces(datatype: str, name: str, array: Array) -> Iterator[bytes]:
    """Write an array as `to_json` does, a piece at a time. Raises: as `to_json`."""
    flat = array.ravel()
    write = json_writer(datatype, name, flat[:_PIECE_ELEMENTS].shape)
    for start in range(0, max(flat.size, 1), _PIECE_ELEMENTS):
        yield b"," if start else b"["
        yield write(flat[start : start + _PIECE_ELEMENTS])[1:-1]
    yield b"]"


def _reject_json(datatype: str, name: str, array: Array) -> bytes:
    raise _json_unsupported("sending", datatype, f"output '{name}'")


def _row_to_json(array: Array) -> bytes:
    text = orjson.dumps(array.tolist()[0])  # without the view that `ravel` makes
    return _with_non_finite(array) if _LETTER_N in text else text


def _small_to_json(array: Array) -> bytes:
    text = orjson.dumps(array.ravel().tolist())
    # orjson has no token for non-finite numbers
    return _with_non_finite(array) if _LETTER_N in text else text


def _floats_to_json(array: Array) -> bytes:
    return _numbers_to_json(array.astype(np.float64))


def _numbers_to_json(array: Array) -> bytes:
    text = orjson.dumps(np.ascontiguousarray(array.ravel()), option=orjson.OPT_SERIALIZE_NUMPY)
    return _with_non_finite(array) if _LETTER_N in text else text


def _with_non_finite(array: Array) -> bytes:
    tokens = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
    texts = map(repr, array.ravel().astype(np.float64).tolist())
    return ("[" + ",".join(tokens.get(text, text) for text in texts) + "]").encode()


def _strings_to_json(name: str, array: Array) -> bytes:
    try:
        texts = [e.decode() if type(e) is bytes else str(e) for e in array.ravel().tolist()]
    except UnicodeDecodeError:
        text = f"output '{name}' holds bytes that are not UTF-8. Please use the binary data format"
        raise InferError(Code.INVALID, text) from None
    return orjson.dumps(texts)


def to_binary(datatype: str, array: Array) -> bytes | memoryview:
    """Return an array's raw bytes: little-endian, row-major; BYTES elements are length-prefixed.

    Ownership: a view of the array if it is contiguous.
    """
    if datatype != "BYTES":
        return np.ascontiguousarray(array).data.cast("B") if array.size else b""
    flat = array.ravel()
    if (
        flat.size > _PIECE_ELEMENTS
        and len(to_binary(datatype, flat[:_SAMPLE_ELEMENTS])) < _SAMPLE_ELEMENTS * _LONG_STRING
    ):
        # two million at once take twice as long and hold the GIL for 0.2 s of it; long strings would be copied twice
        return b"".join(
            [
                to_binary(datatype, flat[start : start + _PIECE_ELEMENTS])
                for start in range(0, flat.size, _PIECE_ELEMENTS)
            ]
        )
    parts: list[bytes] = []
    for element in flat.tolist():
        value = element if type(element) is bytes else str(element).encode()
        parts.append(_LENGTH.pack(len(value)))
        parts.append(value)
    return b"".join(parts)
