"""Inputs of the client tests: awkward values of every datatype, and short constructors for tritonclient's objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from tritonclient.http import InferInput, InferRequestedOutput

from penstock.backends.backend import Array

_INTEGERS = {f"{sign}INT{bits}": np.dtype(f"{sign}int{bits}".lower()) for sign in ("", "U") for bits in (8, 16, 32, 64)}
_BOUNDS = {name: (np.iinfo(dtype).min, np.iinfo(dtype).max) for name, dtype in _INTEGERS.items()}
_LEAST = float(np.nextafter(np.float32(0), np.float32(1)))

VALUES: dict[str, Array] = {
    "BOOL": np.array([[True, False, True], [False, False, True]]),
    **{name: np.array([[low, 0, 1], [2, 7, high]], _INTEGERS[name]) for name, (low, high) in _BOUNDS.items()},
    "FP16": np.array([[0.1, -65504, 6e-8], [1, -0.0, 3.14]], np.float16),
    "FP32": np.array([[0.1, 3.4028235e38, _LEAST], [-1, -0.0, 1 / 3]], np.float32),
    "FP64": np.array([[0.1, 1.7976931348623157e308, 5e-324], [-1, -0.0, 1 / 3]], np.float64),
    "BF16": np.array([[0.1, -3.3e38, 1e-40], [1, -0.0, 3.14]], ml_dtypes.bfloat16),
    "BYTES": np.array([["", "ascii", "naïve"], ["日本", '🙂\u0000\n"\\', "x" * 300]], np.object_),
}
"""Two rows of three of each datatype, its extremes among them."""
ONLY_BINARY = {"FP16", "BF16"}


def input_of(name: str, array: Array, *, binary: bool = True, datatype: str = "") -> Any:
    """Make an InferInput."""
    tensor = InferInput(name, list(array.shape), datatype or _datatype(array))
    return tensor.set_data_from_numpy(array, binary_data=binary)


def output_of(name: str, *, binary: bool = True) -> Any:
    """Make an InferRequestedOutput."""
    return InferRequestedOutput(name, binary_data=binary)


def pair(first: Array, second: Array, *, binary: tuple[bool, bool] = (True, True)) -> list[Any]:
    """Make the inputs of NVIDIA's `simple` models."""
    return [
        input_of(f"INPUT{i}", array, binary=way)
        for i, (array, way) in enumerate(zip((first, second), binary, strict=True))
    ]


def texts(array: Array) -> list[str]:
    """Give the elements of a BYTES tensor, which arrive as `bytes` when binary and as `str` in JSON."""
    return [each.decode() if isinstance(each, bytes) else each for each in array.ravel().tolist()]


def same(datatype: str, found: Array | None, sent: Array) -> bool:
    """Tell whether a tensor was returned unchanged, to the last bit."""
    if found is None or found.shape != sent.shape:
        return False
    if datatype == "BYTES":
        return texts(found) == texts(sent)
    return found.dtype == sent.dtype and found.tobytes() == sent.tobytes()


def document(array: Array, name: str = "x", **members: Any) -> Mapping[str, Any]:
    """Make the JSON of a request with one input."""
    data = {"name": name, "datatype": _datatype(array), "shape": list(array.shape), "data": array.ravel().tolist()}
    return {"inputs": [data], **members}


def _datatype(array: Array) -> str:
    return next(name for name, values in VALUES.items() if values.dtype == array.dtype)
