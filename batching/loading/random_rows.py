"""Random rows: rows to test a model with, of several magnitudes, and neighbors that may affect them.

Used by the modules that prove a property of a model by running it: invariance.py, freeing.py and mixing.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.backends.backend import Array, Binding
from penstock.backends.datatypes import bf16_to_fp32, fp32_to_bf16
from penstock.backends.signature import Signature, TensorSpec

MAX_INTEGERS = (100, 1)
"""Upper bounds for random integers: if the model uses them as indices, only the smaller may be valid."""
SCALES = (1.0, 0.01, 100.0)
NEIGHBOR_KINDS = ("huge", "zero", "tiny", "first", "other", "nan")

Inputs = list[Array]


def draw_inputs(signature: Signature, rows: int, max_integer: int) -> Inputs:
    """Draw rows of several magnitudes; integers from 0 to `max_integer`."""
    rng = np.random.default_rng(7)
    return [_draw_array(rng, spec, (rows, *spec.shape[1:]), max_integer) for spec in signature.inputs]


def _draw_array(rng: np.random.Generator, spec: TensorSpec, shape: tuple[int, ...], max_integer: int) -> Array:
    dtype = spec.type.dtype
    if spec.datatype != "BF16" and dtype.kind in "iub":
        integers = rng.integers(0, 2 if dtype.kind == "b" else max_integer + 1, shape)
        integers.reshape(-1)[:1] = max_integer  # so that the first rows show whether `max_integer` is a valid index
        return integers.astype(dtype)
    scales = np.resize(np.array(SCALES, np.float32), shape[0]).reshape(-1, *(1,) * (len(shape) - 1))
    values = rng.standard_normal(shape, np.float32) * scales
    return _to_datatype(spec, values)


def make_neighbors(spec: TensorSpec, rows: Array, kind: str, max_integer: int) -> Array:
    """Make neighbors of one kind, as many as there are rows."""
    if kind == "zero":
        return np.zeros_like(rows)
    if kind == "first":
        return np.broadcast_to(rows[:1], rows.shape).copy()
    dtype = rows.dtype
    if spec.datatype == "BF16" or dtype.kind not in "iub":
        return _to_datatype(spec, _FLOAT_NEIGHBORS[kind](as_float64(spec, rows[::-1])))
    top = 1 if dtype.kind == "b" else max_integer
    return (top - rows[::-1].astype(np.int64)).astype(dtype) if kind == "other" else np.full_like(rows, top)


_FLOAT_NEIGHBORS: dict[str, Callable[[Array], Array]] = {
    "huge": lambda rows: rows * 1e30,
    "tiny": lambda rows: rows * 1e-40,
    "other": lambda rows: -rows,
    "nan": lambda rows: np.full_like(rows, np.nan),
}


def as_float64(spec: TensorSpec, array: Array) -> Array:
    """Return the numbers of a tensor as float64, for comparison."""
    return (bf16_to_fp32(array) if spec.datatype == "BF16" else array).astype(np.float64)


def _to_datatype(spec: TensorSpec, values: Array) -> Array:
    """Convert floats to an input's datatype; what it cannot hold becomes infinite or 0."""
    with np.errstate(all="ignore"):
        if spec.datatype == "BF16":
            return fp32_to_bf16(values)
        return values.astype(spec.type.dtype)


def run_rows(binding: Binding, rows: Inputs, wanted: tuple[int, ...]) -> list[Any]:
    """Run rows once. Ownership: the outputs may be the Binding's own memory. Raises: what the Binding does."""
    for buffer, array in zip(binding.acquire_buffers(len(rows[0]), [array.shape for array in rows]), rows, strict=True):
        np.copyto(buffer, array)  # type: ignore[arg-type]
    return binding.run(wanted)
