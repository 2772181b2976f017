"""Datatypes: one table from the v2 protocol's names to numpy, model_config and ONNX.

Called by every layer that names a type. BF16 has no numpy type: a BF16 tensor is carried as its bit patterns in
`uint16`. BYTES is carried as `object`, each element a `bytes`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

ALIGNMENT_BYTES = 64
"""For vector instructions; and TensorFlow copies an array that does not begin at a multiple of this."""


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

    def aligned(self, size: int) -> np.ndarray[Any, Any]:
        """Allocate `size` elements where runtimes read them in place. Pages are touched when they are first filled."""
        if self.dtype.hasobject:
            return np.empty(size, self.dtype)
        raw = np.empty(size * self.dtype.itemsize + ALIGNMENT_BYTES, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT_BYTES
        return raw[start : start + size * self.dtype.itemsize].view(self.dtype)


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
