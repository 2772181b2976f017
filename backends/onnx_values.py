"""Tensors that ONNX Runtime's Python API represents differently from numpy: bfloat16, and strings.

Used by onnx_binding.py.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
import onnxruntime

from .backend import Array
from .errors import Code, InferError
from .signature import TensorSpec


def ort_value(array: Array, spec: TensorSpec) -> Any:
    """Wrap an array without a copy. Ownership: the array must outlive the result."""
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, spec.type.onnx_code)


def bf16_bits(value: Any) -> Array:
    """Copy a two-byte tensor out of an OrtValue as its bit patterns."""
    shape = tuple(value.shape())
    size = math.prod(shape)
    if not size:
        return np.empty(shape, np.uint16)
    memory = (ctypes.c_uint16 * size).from_address(value.data_ptr())
    return np.array(memory, np.uint16).reshape(shape)


def decode_strings(name: str, array: Array) -> Array:
    """Decode string inputs: ONNX Runtime would convert `bytes` to their repr.

    Raises: InferError (INVALID) for strings that are not UTF-8, which its Python API does not accept in any form.
    """
    text = np.empty(array.size, np.object_)
    try:
        text[:] = [item.decode() if isinstance(item, bytes) else str(item) for item in array.flat]
    except UnicodeDecodeError as error:
        raise InferError(Code.INVALID, f"input '{name}': a string is not UTF-8 ({error.reason})") from error
    return text.reshape(array.shape)


def encode_strings(array: Array) -> Array:
    """Encode string outputs as UTF-8."""
    raw = np.empty(array.size, np.object_)
    raw[:] = [item.encode() for item in array.flat]
    return raw.reshape(array.shape)
