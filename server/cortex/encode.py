"""JSON as Cortex encodes it: sorted keys, no spaces, everything beyond ASCII escaped, NaN and infinities bare.

Called by `conversions.py`. Source: Cortex 0.9 and 0.10, that is Flask 1.1's jsonify with json_tricks 3.13.2, by its
observed behavior.
"""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import fractions
import json
import re
import sys
import types
import uuid
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

import numpy as np
import orjson

from penstock.backends.backend import Array
from penstock.backends.errors import Code, InferError

_MIN_FAST_COUNT = 64
"""The count of numbers from which orjson is faster: 1,000 float32s take 60 us, in Python's encoder 500."""
_DIFFERENT_FLOATS = re.compile(rb"(?<![\d.-])(?:-?0\.0000\d*|-?\d(?:\.\d+)?e-?\d+)")
"""Numbers that Python writes differently from orjson: 1e-05, 1e+16."""


def to_json(value: Any) -> bytes:
    """Encode a value, with a final newline. Raises: InferError (UNKNOWN), naming what JSON cannot represent."""
    try:
        return (_encode_in_parts(value) or _ENCODER.encode(value).encode()) + b"\n"
    except RecursionError as error:
        raise InferError(Code.UNKNOWN, "maximum recursion depth exceeded while encoding a JSON object") from error
    except Exception as error:
        # also exceptions of a user's __json_encode__
        text = str(error)
        # the text of Python 3.6
        text = "keys must be a string" if text.startswith("keys must be str, ") else text
        raise InferError(Code.UNKNOWN, text) from error


def _has_many_numbers(value: Any) -> bool:
    kind = type(value)
    return (kind is list and len(value) > _MIN_FAST_COUNT) or (kind is np.ndarray and value.size > _MIN_FAST_COUNT)


def _encode_in_parts(value: Any) -> bytes | None:
    """Encode a value that has many numbers in one place; None for any other."""
    kind = type(value)
    if kind is dict:
        if any(map(_has_many_numbers, value.values())) and all(type(key) is str for key in value):
            parts = [_ENCODER.encode(key).encode() + b":" + _encode_part(value[key]) for key in sorted(value)]
            return b"{%b}" % b",".join(parts)
    elif kind is list and len(value) <= _MIN_FAST_COUNT:
        if any(map(_has_many_numbers, value)):
            return b"[%b]" % b",".join(map(_encode_part, value))
    elif _has_many_numbers(value):
        return _encode_part(value)
    return None


def _encode_part(value: Any) -> bytes:
    text = None
    if type(value) is np.ndarray and value.dtype.kind == "f" and value.dtype.itemsize <= 8:
        text = _encode_floats(value.astype(np.float64))
    elif type(value) is list and set(map(type, value)) == {float}:
        text = _encode_floats(np.array(value))
    return _ENCODER.encode(value).encode() if text is None else text


def _encode_floats(array: Array) -> bytes | None:
    """Encode an array of float64; None if it has NaN or infinities."""
    magnitude = np.abs(array)
    if not np.isfinite(magnitude).all():
        return None
    text = orjson.dumps(np.ascontiguousarray(array).reshape(array.shape), option=orjson.OPT_SERIALIZE_NUMPY)
    if ((magnitude < 1e-4) & (magnitude > 0)).any() or (magnitude >= 1e16).any():
        return _DIFFERENT_FLOATS.sub(lambda found: repr(float(found[0])).encode(), text)
    return text


def _to_json_type(value: Any) -> Any:
    """Return a JSON type for another one: one level only, since the encoder calls again for nested values."""
    if isinstance(value, np.generic):
        found = value.item()
        # a type that Python lacks, such as longdouble, is returned unchanged
        if type(found) is type(value):
            return _raise_unsupported(value)
        if found is None or isinstance(found, str | int | float | tuple):
            return found
        value = found
    for types_of, convert in _CONVERTERS:
        if isinstance(value, types_of):
            return convert(value)
    frame = _pandas_fields(value)
    return _attributes(value) if frame is None else frame


def _sorted_list(value: set[Any]) -> list[Any]:
    try:
        return sorted(value)
    except Exception:  # noqa: BLE001 - whatever their comparison raises
        return list(value)


def _pandas_fields(value: Any) -> dict[Any, Any] | None:
    """Return the index and columns of a frame or series, if pandas is loaded."""
    pandas = sys.modules.get("pandas")
    if pandas is None or not isinstance(value, (pandas.DataFrame, pandas.Series)):
        return None
    frame: dict[Any, Any] = {"index": tuple(value.index.values)}
    if isinstance(value, pandas.Series):
        return frame | {"data": tuple(value.values)}
    return frame | {name: tuple(value.iloc[:, at].values) for at, name in enumerate(value.columns.values)}


def _attributes(value: Any) -> Any:
    """Return the attributes of an instance of any class that has some."""
    kind = type(value)
    if not (hasattr(value, "__dict__") or hasattr(value, "__slots__")) or kind.__module__ == "threading":
        return _raise_unsupported(value)
    text = f'instance "{value}" of class "{kind}" cannot be encoded'
    if isinstance(value, types.FunctionType):
        raise TypeError(f"{text} because it appears to be a lambda or function.")
    try:
        # json_tricks recognizes data by whether an instance can be created without arguments
        if isinstance(value, type) or _is_python_new(value.__new__):
            value.__new__(value.__class__)
    except TypeError as error:
        more = "perhaps because it's __new__ method cannot be called because it requires extra parameters"
        raise TypeError(f"{text}, {more}") from error
    if hasattr(value, "__json_encode__"):
        return value.__json_encode__()
    attributes = dict(getattr(value, "__dict__", {}))
    slots = getattr(value, "__slots__", ())
    for name in [slots] if isinstance(slots, str) else slots:
        if name != "__dict__":
            attributes[name] = getattr(value, name)
    return attributes


def _is_python_new(make: Any) -> bool:
    """Return whether a `__new__` is Python's or a user's.

    An object that compiled code creates without arguments may crash the process when it is freed, as one of numpy's
    function type does.
    """
    owner = getattr(make, "__self__", None)
    return not isinstance(owner, type) or owner.__module__ == "builtins"


def _raise_unsupported(value: Any) -> Any:
    raise TypeError(f"Object of type {type(value)} could not be encoded")


_CONVERTERS: tuple[tuple[type | tuple[type, ...], Callable[[Any], Any]], ...] = (
    (np.ndarray, lambda value: value.tolist()),
    (PurePath, str),
    (enum.Enum, lambda value: {value.name: value.value}),
    ((dt.date, dt.time), lambda value: value.isoformat()),
    (dt.timedelta, dt.timedelta.total_seconds),
    (complex, lambda value: [value.real, value.imag]),
    (set, _sorted_list),
    ((decimal.Decimal, fractions.Fraction), float),
    (uuid.UUID, lambda value: {"int": value.int}),
)
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=_to_json_type)
