"""Datatypes: one table from the v2 protocol's names to numpy, model_config and ONNX.

Used by every layer that names a type. BF16 has no numpy type: a BF16 tensor is carried as its bit patterns in `uint16`.
BYTES is carried as `object`, each element a `bytes`.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_LENGTH = struct.Struct("<I")
ALIGNMENT_BYTES = 64
"""For vector instructions; also, TensorFlow copies an array that does not begin at a multiple of this."""


@dataclass(frozen=True, slots=True)
class Datatype:
    """One tensor element type.

    Units: `size_bytes` per element; 0 for BYTES, whose elements differ in length.
    """

    name: str
    dtype: np.dtype[np.generic]
    size_bytes: int
    config_name: str
    onnx_name: str
    onnx_code: int

    def allocate_aligned(self, size: int) -> np.ndarray[Any, Any]:
        """Allocate `size` elements, aligned so that runtimes read them in place. Pages are touched on first write."""
        if self.dtype.hasobject:
            return np.empty(size, self.dtype)
        raw = np.empty(size * self.dtype.itemsize + ALIGNMENT_BYTES, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT_BYTES
        return raw[start : start + size * self.dtype.itemsize].view(self.dtype)

    def view(self, raw: bytes | memoryview, count: int = -1) -> np.ndarray[Any, Any]:
        """View raw bytes, in wire format, as `count` elements; -1 means all. Not for BYTES.

        Ownership: a view of `raw`, except for BOOL, where every nonzero byte is true. Raises: ValueError.
        """
        if self.dtype.kind == "b":
            booleans: np.ndarray[Any, Any] = np.frombuffer(raw, np.uint8, count) != 0
            return booleans
        return np.frombuffer(raw, self.dtype, count)


def _row(name: str, dtype: object, config_name: str, onnx_name: str, onnx_code: int) -> Datatype:
    numpy_type: np.dtype[np.generic] = np.dtype(dtype)  # type: ignore[call-overload]
    size = 0 if numpy_type.hasobject else numpy_type.itemsize
    return Datatype(name, numpy_type, size, config_name, onnx_name, onnx_code)


# onnx_code: onnx.TensorProto.DataType. Source: the ONNX IR specification; KServe v2 "Tensor Data Types".
DATATYPES: dict[str, Datatype] = {
    row.name: row
    for row in (
        _row("BOOL", np.bool_, "TYPE_BOOL", "tensor(bool)", 9),
        _row("UINT8", "<u1", "TYPE_UINT8", "tensor(uint8)", 2),
        _row("UINT16", "<u2", "TYPE_UINT16", "tensor(uint16)", 4),
        _row("UINT32", "<u4", "TYPE_UINT32", "tensor(uint32)", 12),
        _row("UINT64", "<u8", "TYPE_UINT64", "tensor(uint64)", 13),
        _row("INT8", "<i1", "TYPE_INT8", "tensor(int8)", 3),
        _row("INT16", "<i2", "TYPE_INT16", "tensor(int16)", 5),
        _row("INT32", "<i4", "TYPE_INT32", "tensor(int32)", 6),
        _row("INT64", "<i8", "TYPE_INT64", "tensor(int64)", 7),
        _row("FP16", "<f2", "TYPE_FP16", "tensor(float16)", 10),
        _row("FP32", "<f4", "TYPE_FP32", "tensor(float)", 1),
        _row("FP64", "<f8", "TYPE_FP64", "tensor(double)", 11),
        _row("BF16", "<u2", "TYPE_BF16", "tensor(bfloat16)", 16),
        _row("BYTES", np.object_, "TYPE_STRING", "tensor(string)", 8),
    )
}
BY_CONFIG_NAME: dict[str, Datatype] = {row.config_name: row for row in DATATYPES.values()}
BY_ONNX_NAME: dict[str, Datatype] = {row.onnx_name: row for row in DATATYPES.values()}
BY_DTYPE: dict[np.dtype[Any], Datatype] = {row.dtype: row for row in DATATYPES.values() if row.name != "BF16"}
"""The type of an array without further information: the bit patterns of BF16 then count as UINT16."""


def bf16_to_fp32(bit_patterns: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Convert bit patterns of BF16 to FP32."""
    return (bit_patterns.astype("<u4") << 16).view("<f4")


def fp32_to_bf16(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Convert numbers to bit patterns of BF16, truncating."""
    return (np.asarray(values, "<f4", "C").view("<u4") >> 16).astype("<u2")


def bytes_tensor(elements: Sequence[bytes]) -> np.ndarray[Any, Any]:
    """Make a flat array of BYTES."""
    array = np.empty(len(elements), np.object_)
    array[:] = elements
    return array


def parse_bytes_elements(raw: bytes, max_count: int = sys.maxsize) -> tuple[list[bytes], int]:
    """Read at most `max_count` elements of BYTES, each prefixed with its length in 4 bytes.

    Returns: the elements, and where they end: beyond the end of `raw` if the last is cut off.
    """
    elements: list[bytes] = []
    offset = 0
    while len(elements) < max_count and offset + _LENGTH.size <= len(raw):
        (size,) = _LENGTH.unpack_from(raw, offset)
        offset += _LENGTH.size + size
        elements.append(raw[offset - size : offset])
    return elements, offset
