"""Encodes messages of seldon.protos from numpy and plain Python. Called by protobuf.py.

Arrays of numbers are encoded without a message object for each number, to the same bytes as protobuf's.
"""

from __future__ import annotations

import importlib
import struct
from typing import Any, cast

import numpy as np
from google.protobuf import json_format, struct_pb2

from penstock.backends.backend import Array
from penstock.server.v2.rpc.wire import field, varint

from . import seldon_core_classes  # noqa: F401 - it makes seldon_core importable
from .proto_values import METRIC_TYPES, NUMBER_PREFIX
from .tftensors import tftensor_of_array

pb: Any = importlib.import_module("seldon_core.proto.prediction_pb2")
"""The classes that user code sees: the original's if installed, else ours."""

_DOUBLE = 8
_METRIC_KEYS = {"key", "type", "value", "tags"}
_MAX_FLOAT32 = float(np.finfo(np.float32).max)
_NON_NUMBERS = {"c": "complex", "m": "datetime.timedelta"}
"""Types that numpy counts as numbers and a Tensor cannot hold, by dtype kind. A timedelta of nanoseconds is an int."""
_FEW_COUNT = 16
"""Up to this many numbers are encoded one by one, more as a whole."""
_CACHED_NAMES: dict[tuple[Any, ...], bytes] = {}
_MAX_CACHED_NAMES = 1024
_pack = struct.Struct("<d").pack


def data_bytes(kind: str | None, array: Array, names: Any) -> bytes:
    """Encode a DefaultData. Raises: TypeError, ValueError for what it cannot hold."""
    if kind == "tensor":
        return _names_bytes(names) + field(2, _tensor_bytes(array))
    if kind == "tftensor":
        return cast(bytes, pb.DefaultData(names=names, tftensor=tftensor_of_array(array)).SerializeToString())
    return _names_bytes(names) + field(3, list_bytes(array))


def datadef_of(kind: str | None, array: Array, names: Any = ()) -> Any:
    """Make a DefaultData of an array and its columns' names. Raises: TypeError, ValueError."""
    return pb.DefaultData.FromString(data_bytes(kind, array, names))


def list_value_of(array: Array) -> Any:
    """Make a ListValue of an array. Raises: TypeError, ValueError."""
    return struct_pb2.ListValue.FromString(list_bytes(array))


def list_bytes(array: Array) -> bytes:
    """Encode an array as a ListValue. Raises: TypeError, ValueError."""
    if not array.ndim:
        raise TypeError("iteration over a 0-d array")
    if array.dtype.kind in "fiu" and array.itemsize <= _DOUBLE:
        return _encode_few(array.tolist()) if array.size <= _FEW_COUNT else _encode_many(array)
    try:
        return _elements_bytes(array.tolist())
    except MisfitError:
        raise ValueError("Unexpected type") from None


def _encode_few(values: list[Any]) -> bytes:
    return b"".join(
        [
            NUMBER_PREFIX + _pack(each) if type(each) is not list else field(1, field(6, _encode_few(each)))
            for each in values
        ]
    )


def _encode_many(array: Array) -> bytes:
    cells = np.empty((*array.shape, 11), np.uint8)
    cells[..., :3] = np.frombuffer(NUMBER_PREFIX, np.uint8)
    numbers = np.ascontiguousarray(array, np.float64)
    cells[..., 3:] = numbers.reshape(*array.shape, 1).view(np.uint8)
    size = 11 * array.shape[-1]
    rows = cells.reshape(*array.shape[:-1], size)
    while rows.ndim > 1:
        inner = b"\x32" + varint(size)
        prefix = b"\x0a" + varint(len(inner) + size) + inner
        joined = np.empty((*rows.shape[:-1], len(prefix) + size), np.uint8)
        joined[..., : len(prefix)] = np.frombuffer(prefix, np.uint8)
        joined[..., len(prefix) :] = rows
        size = joined.shape[-1] * joined.shape[-2]
        rows = joined.reshape(*joined.shape[:-2], size)
    return rows.tobytes()


def _tensor_bytes(array: Array) -> bytes:
    if array.dtype.kind in _NON_NUMBERS and array.size and not isinstance(first := array.flat[0].item(), int):
        raise TypeError(f"{first!r} has type {_NON_NUMBERS[array.dtype.kind]}, but expected one of: int, float")
    shape = b"".join(map(varint, array.shape))
    values = array.astype("<f8", order="C", copy=False).tobytes() if array.size else b""
    return (field(1, shape) if shape else b"") + (field(2, values) if values else b"")


def _names_bytes(names: Any) -> bytes:
    key = tuple(names) if names is not None else ()
    try:
        encoded = _CACHED_NAMES.get(key)
    except TypeError:  # an unhashable element is not text, which protobuf reports
        encoded = None
    if encoded is None:
        encoded = pb.DefaultData(names=_checked_names(key)).SerializeToString()
        if len(_CACHED_NAMES) >= _MAX_CACHED_NAMES:
            _CACHED_NAMES.clear()
        _CACHED_NAMES[key] = encoded
    return encoded


# -- JSON values -----------------------------------------------------------------------------------------------


def _checked_names(names: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the names. Raises: TypeError for a non-text, with a message that current protobuf no longer has."""
    for name in names:
        if not isinstance(name, (str, bytes)):
            raise TypeError(f"{name!r} has type {type(name).__name__}, but expected one of: bytes, unicode")
    return names


class MisfitError(Exception):
    """A value that JSON cannot represent, and its place within another."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.value = value
        self.path = ""

    def as_parse_error(self, root: str) -> json_format.ParseError:
        """Return it as an error of protobuf's JSON."""
        return json_format.ParseError(f"Value {self.value} has unexpected type {type(self.value)} at {root}{self.path}")


def json_bytes(value: Any, *, exact: bool = True) -> bytes:
    """Encode a JSON value as a Value; unless `exact`, numpy's numbers too. Raises: ParseError, TypeError."""
    try:
        return _value_bytes(value if exact else to_plain_python(value))
    except MisfitError as misfit:
        raise misfit.as_parse_error("Value") from None


def meta_bytes(meta: dict[str, Any], puid: str = "", *, exact: bool = True) -> bytes:
    """Encode a Meta from a dict with `tags`, `requestPath` and `metrics`. Raises: ParseError."""
    tags, path, metrics = meta.get("tags"), meta.get("requestPath"), meta.get("metrics")
    if not exact:
        tags, metrics = to_plain_python(tags), to_plain_python(metrics)
    packed = field(1, puid.encode()) if puid else b""
    for key, value in (tags or {}).items():
        try:
            packed += _entry_bytes(2, key, _value_bytes(value))
        except MisfitError as misfit:
            raise json_format.ParseError(
                f"Failed to parse tags field: {misfit.as_parse_error(f'Meta.tags[{key}]')}."
            ) from None
        except UnicodeEncodeError as error:
            raise json_format.ParseError(f"Failed to parse tags field: {error}.") from None
        except AttributeError:
            raise json_format.ParseError("Failed to parse tags field: expected string or bytes-like object.") from None
    for key, value in (path or {}).items():
        packed += _entry_bytes(4, key, value.encode())
    return packed + _metrics_bytes(metrics) if metrics else packed


def to_plain_python(value: Any) -> Any:
    """Return a value with numpy's numbers and arrays replaced by plain Python."""
    if isinstance(value, dict):
        return {str(key): to_plain_python(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain_python(each) for each in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return to_plain_python(value.tolist())
    return value


def _value_bytes(value: Any) -> bytes:
    if isinstance(value, str):
        return field(3, value.encode())
    if value is None:
        return b"\x08\x00"
    if isinstance(value, bool):
        return b"\x20\x01" if value else b"\x20\x00"
    if isinstance(value, (float, int)):
        return b"\x11" + _pack(float(value))
    if isinstance(value, list):
        return field(6, _elements_bytes(value))
    if isinstance(value, dict):
        return field(5, _struct_bytes(value))
    raise MisfitError(value)


def _elements_bytes(values: list[Any]) -> bytes:
    parts = []
    for index, each in enumerate(values):
        try:
            parts.append(field(1, _value_bytes(each)))
        except MisfitError as misfit:
            misfit.path = f"[{index}]{misfit.path}"
            raise
    return b"".join(parts)


def _struct_bytes(values: dict[Any, Any]) -> bytes:
    parts = []
    for key, each in values.items():
        if not isinstance(key, str):
            raise TypeError(f"{key} has type {type(key).__name__}, but expected one of: bytes, unicode")
        try:
            parts.append(_entry_bytes(1, key, _value_bytes(each)))
        except MisfitError as misfit:
            misfit.path = f".{key}{misfit.path}"
            raise
    return b"".join(parts)


def _entry_bytes(number: int, key: str, packed: bytes) -> bytes:
    return field(number, field(1, key.encode()) + field(2, packed))


def _metrics_bytes(metrics: list[dict[str, Any]]) -> bytes:
    """Encode metrics: usual ones here, others through protobuf's JSON. Raises: ParseError."""
    try:
        return b"".join([field(5, _metric_bytes(each)) for each in metrics])
    except (ValueError, TypeError, AttributeError):
        message = pb.Meta()
        json_format.ParseDict({"metrics": metrics}, message)
        return cast(bytes, message.SerializeToString())


def _metric_bytes(metric: dict[str, Any]) -> bytes:
    key, value, kind = (
        metric.get("key", ""),
        metric.get("value", 0.0),
        METRIC_TYPES.index(metric.get("type", "COUNTER")),
    )
    if not metric.keys() <= _METRIC_KEYS or not isinstance(key, str) or type(value) not in {int, float}:
        raise ValueError
    if not -_MAX_FLOAT32 < value < _MAX_FLOAT32:
        raise ValueError
    packed = (field(1, key.encode()) if key else b"") + (bytes((0x10, kind)) if kind else b"")
    if value:
        packed += b"\x1d" + struct.pack("<f", value)
    for name, text in metric.get("tags", {}).items():
        packed += _entry_bytes(4, name, text.encode())
    return packed
