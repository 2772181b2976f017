"""Converts TensorFlow's TensorProtos to and from numpy, without TensorFlow.

Called by proto_values.py, proto_bytes.py and payloads.py.
Source: tensorflow/python/framework/tensor_util.py, make_tensor_proto and make_ndarray, by observed behavior.
"""

from __future__ import annotations

import importlib
import math
from typing import Any

import numpy as np

from penstock.backends.backend import Array

_DATATYPES: dict[int, tuple[str, str]] = {
    1: ("f4", "float_val"),
    2: ("f8", "double_val"),
    3: ("i4", "int_val"),
    4: ("u1", "int_val"),
    5: ("i2", "int_val"),
    6: ("i1", "int_val"),
    7: ("O", "string_val"),
    8: ("c8", "scomplex_val"),
    9: ("i8", "int64_val"),
    10: ("?", "bool_val"),
    17: ("u2", "int_val"),
    18: ("c16", "dcomplex_val"),
    19: ("f2", "half_val"),
    22: ("u4", "uint32_val"),
    23: ("u8", "uint64_val"),
}
"""By TensorFlow's DataType: numpy's, and the field that has the values if they are not bytes."""
_NUMBERS = {np.dtype(kind): number for number, (kind, _) in _DATATYPES.items()}
_STRING = 7
_MAX_BYTES = 2**31 - 1
"""The limit for a tensor with omitted values: no message could contain more."""


def array_of_tftensor(tensor: Any) -> Array:
    """Return the array of a TensorProto, strings as bytes objects. Raises: ValueError, TypeError."""
    if tensor.dtype not in _DATATYPES:
        raise TypeError(f"Unsupported tensor type: {tensor.dtype}")
    kind, name = _DATATYPES[tensor.dtype]
    shape = [dim.size for dim in tensor.tensor_shape.dim]
    count = math.prod(shape)
    if tensor.tensor_content:
        return np.frombuffer(tensor.tensor_content, np.dtype(kind).newbyteorder("<")).copy().reshape(shape)
    stored_values = getattr(tensor, name)
    if name == "half_val":
        values = np.array(stored_values, np.uint16).view(np.float16)
    elif name in {"scomplex_val", "dcomplex_val"}:
        values = np.array(stored_values, np.float64).view(np.complex128).astype(kind)
    else:
        values = np.array(list(stored_values), kind)
    if len(values) < count:
        if count * values.itemsize > _MAX_BYTES:
            raise ValueError(f"a tensor of shape {shape} is larger than any message")
        # the last value stands for all that are omitted
        padded = np.full(count, values[-1] if len(values) else np.zeros((), kind).item() if kind != "O" else b"", kind)
        padded[: len(values)] = values
        values = padded
    elif len(values) > count and kind != "O":
        raise ValueError("index can't contain negative values")  # the error of numpy's padding there
    return values.reshape(shape)


def tftensor_of_array(array: Array) -> Any:
    """Make a TensorProto of an array. Raises: TypeError for what it cannot hold."""
    if array.dtype.kind in "SUO":
        array = np.array([_bytes(each) for each in array.ravel().tolist()], "O").reshape(array.shape)
    number = _NUMBERS.get(array.dtype.newbyteorder("="))
    if number is None:
        raise TypeError(f"Unrecognized data type: {array.dtype}")
    tensor = importlib.import_module("seldon_core.proto.prediction_pb2").DefaultData().tftensor
    tensor.dtype = number
    tensor.tensor_shape.SetInParent()
    for length in array.shape:
        tensor.tensor_shape.dim.add(size=length)
    if number != _STRING and array.size > 1:
        tensor.tensor_content = array.astype(array.dtype.newbyteorder("<"), order="C").tobytes()
        return tensor
    values = array.ravel()
    if array.dtype.kind == "c":
        values = values.view(values.real.dtype)
    elif array.dtype == np.float16:
        values = values.view(np.uint16)
    getattr(tensor, _DATATYPES[number][1]).extend(values.tolist())
    return tensor


def _bytes(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes):
        return value
    raise TypeError(f"Unrecognized data type: {type(value).__name__}")
