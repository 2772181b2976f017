"""The values that TensorFlow's make_tensor_proto accepts for each type, and its error texts for others.

Called by `tensor_values.py`. It needs no TensorFlow. Source: TensorFlow 1.14.0, by its observed behavior.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.backends.backend import Array
from penstock.backends.errors import Code, InferError
from penstock.server.hooks.convert import map_elements

from .casting import CastError, as_array, cast, to_bfloat16

_INTEGERS = (int, np.integer, numbers.Integral)  # checked in this order, since checks of an abstract class are slow
_REALS = (float, int, np.integer, np.floating, numbers.Real)
_NUMPY_TYPES = (np.ndarray, np.generic)


@dataclass(frozen=True, slots=True)
class TensorType:
    """One type: TensorFlow's name, numpy's, and the types allowed for elements of a list."""

    name: str
    dtype: np.dtype[Any]
    accepted_types: tuple[type, ...]


def _tensor_types() -> Iterator[tuple[str, TensorType]]:
    for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"):
        yield f"DT_{name.upper()}", TensorType(name, np.dtype(name), _INTEGERS)
    for type_name, name in (("HALF", "float16"), ("FLOAT", "float32"), ("DOUBLE", "float64")):
        yield f"DT_{type_name}", TensorType(name, np.dtype(name), _REALS)
    yield "DT_BFLOAT16", TensorType("bfloat16", np.dtype("float32"), _REALS)
    yield "DT_BOOL", TensorType("bool", np.dtype("bool"), (bool,))
    yield "DT_STRING", TensorType("string", np.dtype("object"), (str, bytes))


TENSOR_TYPES: Mapping[str, TensorType] = dict(_tensor_types())


def tensor_type_of(type_name: str) -> TensorType:
    """Return the type that a signature names. Raises: InferError (UNSUPPORTED)."""
    try:
        return TENSOR_TYPES[type_name.removesuffix("_REF")]  # of a variable in TensorFlow 1
    except KeyError:
        raise InferError(Code.UNSUPPORTED, f"an input of type {type_name or 'unknown'} is not supported") from None


def make_array(value: Any, tensor_type: TensorType) -> Array:
    """Make an array of a value. Shapes: the value's own. BYTES are `bytes`, BF16 its bits. Raises: CastError."""
    if isinstance(value, _NUMPY_TYPES):
        if tensor_type.name == "string" and not isinstance(value, np.ndarray):
            raise CastError(f"'{type(value.item()).__name__}' object has no attribute 'dtype'")
        return _cast_array(np.asarray(value), tensor_type)
    if hasattr(value, "__array__"):
        # pandas' and similar types, which make_tensor_proto intended to accept but failed on
        return _cast_array(as_array(value, np.dtype("object")), tensor_type)
    if value is None:
        raise CastError("None values not supported.")
    mismatch = _mismatch(value, tensor_type.accepted_types)
    if mismatch:
        (found,) = mismatch
        raise CastError(
            f"Expected {tensor_type.name}, got {_format_value(found)} of type '{_type_name(found)}' instead."
        )
    array = as_array(value, tensor_type.dtype)
    expected = _dense_shape(value)
    if list(array.shape) != expected:
        text = f"Argument must be a dense tensor: {value} - got shape {list(array.shape)}, but wanted {expected}."
        raise CastError(text)
    if tensor_type.name == "string":
        # an element that is a list counts as one in the shape, and is as many strings as it has
        flat = np.empty(array.size, np.object_)
        flat[:] = list(_leaves(value))[: array.size]
        return map_elements(flat.reshape(array.shape), _bytes)
    return to_bfloat16(array) if tensor_type.name == "bfloat16" else array


def _cast_array(array: Array, tensor_type: TensorType) -> Array:
    """Cast an array. All its numbers are cast, while those of a list may be rejected."""
    if tensor_type.name == "bfloat16":
        return array if array.dtype == np.uint16 else to_bfloat16(array)
    if tensor_type.name == "string":
        return map_elements(array.astype(np.object_), _bytes)
    return cast(array, tensor_type.dtype)


def _bytes(element: Any) -> bytes:
    if isinstance(element, str):
        try:
            return element.encode()
        except UnicodeEncodeError as error:
            raise CastError(str(error)) from error
    if isinstance(element, bytes | bytearray):
        return bytes(element)
    raise CastError(f"Expected binary or unicode string, got {_format_value(element)}")


def _mismatch(value: Any, accepted_types: tuple[type, ...]) -> tuple[Any] | None:
    """Return the first element of none of these types."""
    if not isinstance(value, list | tuple):
        return None if isinstance(value, accepted_types) else (value,)
    if all(issubclass(each, accepted_types) for each in set(map(type, value))):
        return None
    return next((found for each in value if (found := _mismatch(each, accepted_types))), None)


def _dense_shape(value: Any) -> list[int]:
    """Return the shape of nested lists along their first elements."""
    shape: list[int] = []
    while isinstance(value, list | tuple):
        shape.append(len(value))
        if not value:
            break
        value = value[0]
    return shape


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _type_name(value: Any) -> str:
    if isinstance(value, np.bool_):
        return "bool_"  # numpy 2 has another name for it
    # the type that messages named for None
    return "_Message" if value is None else type(value).__name__


def _format_value(value: Any) -> str:
    """Return a value as the numpy of that time formatted it."""
    if isinstance(value, np.generic):
        return repr(value.item()) if value.dtype.kind in "US" else str(value)
    return repr(value)
