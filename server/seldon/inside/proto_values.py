"""Decodes messages of seldon.protos to numpy and plain Python. Called by protobuf.py, in the server by batching.py.

Numbers are read as bytes if the result is the same, since a message object for each number takes far longer than the
rest of a call. Nothing here depends on a component or makes a message; any classes for the messages will do.
"""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np
from google.protobuf import json_format

from penstock.backends.backend import Array

from .tftensors import array_of_tftensor

NUMBER_PREFIX = b"\x0a\x09\x11"
"""The bytes before a number's 8 bytes in a ListValue: its field 1, 9 bytes long, and the Value's field 2. Before a list
there, it is the Value's field 6."""
_MANY_BYTES = 512
"""Lists of at least this size are examined as a whole for numbers only, in a regular shape."""
METRIC_TYPES = ("COUNTER", "GAUGE", "TIMER")
"""The types of metrics, by number."""


def payload_of(message: Any, *, exact: bool = True) -> Any:
    """Return the payload of a SeldonMessage: an array, bytes, a text, a JSON value, or an Any.

    `exact`: as the original, see `value_of`. Raises: LookupError if there is none; ValueError, TypeError.
    """
    kind = message.WhichOneof("data_oneof")
    if kind == "data":
        return array_of(message.data, exact=exact)
    if kind is None:
        raise LookupError("Unknown data in SeldonMessage")
    return value_of(message.jsonData, exact=exact) if kind == "jsonData" else getattr(message, kind)


def array_of(data: Any, *, exact: bool = True) -> Array:
    """Return the array of a DefaultData, an empty one if it has none. Raises: ValueError, TypeError."""
    kind = data.WhichOneof("data_oneof")
    if kind == "tensor":
        return _tensor(data.tensor, exact=exact)
    if kind == "ndarray":
        packed = data.ndarray.SerializeToString()
        found = _regular_numbers(packed) if len(packed) >= _MANY_BYTES else None
        # if `exact`, NaN and infinities become texts, see value_of
        if found is not None and (not exact or np.isfinite(found).all()):
            return found
        return np.array(_list_of(data.ndarray, exact=exact))
    return array_of_tftensor(data.tftensor) if kind == "tftensor" else np.array([])


def value_of(value: Any, *, exact: bool = True) -> Any:
    """Return the content of a Value. `exact`: NaN and infinities become texts, as in protobuf's JSON."""
    kind = value.WhichOneof("kind")
    if kind == "number_value":
        number = value.number_value
        return number if not exact or math.isfinite(number) else _nonfinite_text(number)
    if kind == "string_value":
        return value.string_value
    if kind == "list_value":
        return _list_of(value.list_value, exact=exact)
    if kind == "struct_value":
        return {key: value_of(each, exact=exact) for key, each in value.struct_value.fields.items()}
    return value.bool_value if kind == "bool_value" else None


def meta_of(meta: Any, *, exact: bool = True) -> dict[str, Any]:
    """Return a Meta as a dict. Source: protobuf's JSON, without the fields that have their default."""
    found: dict[str, Any] = {}
    if meta.puid:
        found["puid"] = meta.puid
    if meta.tags:
        found["tags"] = {key: value_of(each, exact=exact) for key, each in meta.tags.items()}
    if meta.routing:
        found["routing"] = dict(meta.routing)
    if meta.requestPath:
        found["requestPath"] = dict(meta.requestPath)
    if meta.metrics:
        found["metrics"] = [_metric(each) for each in meta.metrics]
    return found


def json_of(message: Any) -> dict[str, Any]:
    """Return a SeldonMessage as JSON, without empty fields and enums' zero values."""
    found: dict[str, Any] = {}
    kind = message.WhichOneof("data_oneof")
    if message.HasField("status"):
        found["status"] = json_format.MessageToDict(message.status)
    if message.HasField("meta"):
        found["meta"] = meta_of(message.meta)
    if kind == "data":
        found["data"] = _data_json(message.data)
    elif kind == "jsonData":
        found["jsonData"] = value_of(message.jsonData)
    elif kind == "binData":
        found["binData"] = base64.b64encode(message.binData).decode()
    elif kind == "strData":
        found["strData"] = message.strData
    elif kind is not None:
        found[kind] = json_format.MessageToDict(message.customData)
    return found


def _data_json(data: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"names": list(data.names)} if data.names else {}
    kind = data.WhichOneof("data_oneof")
    if kind == "tensor":
        tensor = data.tensor
        parts = {"shape": list(tensor.shape), "values": [_json_number(each) for each in tensor.values]}
        found["tensor"] = {name: part for name, part in parts.items() if part}
    elif kind == "ndarray":
        found["ndarray"] = _list_of(data.ndarray, exact=True)
    elif kind is not None:
        found[kind] = json_format.MessageToDict(getattr(data, kind))
    return found


def _metric(metric: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"key": metric.key} if metric.key else {}
    if metric.type:
        found["type"] = METRIC_TYPES[metric.type] if metric.type < len(METRIC_TYPES) else metric.type
    if metric.value:
        found["value"] = _json_number(shortest_float(metric.value))
    if metric.tags:
        found["tags"] = dict(metric.tags)
    return found


def shortest_float(number: float) -> float:
    """Return the float with the fewest digits that equals a float32."""
    return float(str(np.float32(number))) if math.isfinite(number) else number


def _json_number(number: float) -> Any:
    return number if math.isfinite(number) else _nonfinite_text(number)


def _nonfinite_text(number: float) -> str:
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def _list_of(values: Any, *, exact: bool) -> list[Any]:
    found = []
    for each in values.values:
        if each.WhichOneof("kind") == "number_value":
            number = each.number_value
            # only nonfinite numbers differ from themselves here
            found.append(number if number - number == 0 or not exact else _nonfinite_text(number))
        else:
            found.append(value_of(each, exact=exact))
    return found


def _tensor(tensor: Any, *, exact: bool) -> Array:
    """Return a Tensor's array, float64. Raises: ValueError, TypeError for a shape that does not fit the values."""
    shape, value_count = tensor.shape[:], len(tensor.values)
    count = math.prod(shape)
    if count != value_count or not shape:
        _check_shape(shape, count, value_count, exact=exact)
    # a Tensor ends with its packed values; a bytearray, so that the array is writable like those of REST
    packed = bytearray(tensor.SerializeToString())
    return np.frombuffer(packed, np.float64, count, len(packed) - 8 * count).reshape(shape)


def _check_shape(shape: list[int], count: int, value_count: int, *, exact: bool) -> None:
    """Report a wrong shape of a Tensor. If `exact`, excess values are allowed: the original takes the last ones."""
    if not shape and exact:
        raise TypeError("slice indices must be integers or None or have an __index__ method")
    if count < 0:
        raise ValueError("buffer size must be a multiple of element size")
    if count > value_count:
        raise ValueError("buffer is smaller than requested size")
    if count < value_count and not exact:
        raise ValueError(f"tensor of shape {shape} has {value_count} values")


def _regular_numbers(packed: bytes) -> Array | None:
    """Decode a ListValue of numbers only, in a regular shape; None for any other.

    In such a list, all elements of one level have the same bytes before their content; only the numbers differ.
    """
    cells = np.frombuffer(packed, np.uint8).reshape(1, -1)
    shape = []
    while True:
        start, step, is_list = _measure_element(cells[0, :24].tobytes())
        if not step or cells.shape[1] % step:
            return None
        shape.append(cells.shape[1] // step)
        cells = cells.reshape(-1, step)
        if not (cells[:, :start] == cells[0, :start]).all():
            return None
        cells = cells[:, start:]
        if not is_list:
            return np.ascontiguousarray(cells).view(np.float64).reshape(shape)


def _measure_element(packed: bytes) -> tuple[int, int, bool]:
    """Measure the first element of a ListValue. Returns: the start and end of its content, and whether it is a list.

    Both are 0 if it is neither a number nor a list.
    """
    if packed[:3] == NUMBER_PREFIX:
        return 3, 11, False
    if packed[:1] != b"\x0a":
        return 0, 0, False
    length, at = _read_varint(packed, 1)
    if packed[at : at + 1] != b"\x32":
        return 0, 0, False
    inner, start = _read_varint(packed, at + 1)
    return (start, start + inner, True) if at + length == start + inner and inner else (0, 0, False)


def _read_varint(packed: bytes, at: int) -> tuple[int, int]:
    number = 0
    for count, byte in enumerate(packed[at : at + 10]):
        number |= (byte & 0x7F) << 7 * count
        if byte < 0x80:
            return number, at + count + 1
    return 0, at
