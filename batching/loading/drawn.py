"""Drawn: random rows to test a model with, of several magnitudes, and neighbors that may affect them.

Used by the modules that prove a property of a model by running it: invariance.py, freeing.py and mixing.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.backends.backend import Array, Binding
from penstock.backends.datatypes import bf16_to_fp32, fp32_to_bf16
from penstock.backends.signature import Signature, TensorSpec

SPANS = (100, 1)
"""Upper bounds for drawn integers: if the model uses them as indices, only the smaller may be valid."""
SCALES = (1.0, 0.01, 100.0)
KINDS = ("huge", "zero", "tiny", "first", "other", "nan")

Inputs = list[Array]


def draw(signature: Signature, rows: int, span: int) -> Inputs:
    """Draw rows of several magnitudes; integers from 0 to `span`."""
    rng = np.random.default_rng(7)
    return [_drawn(rng, spec, (rows, *spec.shape[1:]), span) for spec in signature.inputs]


def _drawn(rng: np.random.Generator, spec: TensorSpec, shape: tuple[int, ...], span: int) -> Array:
    dtype = spec.type.dtype
    if spec.datatype != "BF16" and dtype.kind in "iub":
        drawn = rng.integers(0, 2 if dtype.kind == "b" else span + 1, shape)
        drawn.reshape(-1)[:1] = span  # so that the first rows show whether `span` is a valid index
        return drawn.astype(dtype)
    scales = np.resize(np.array(SCALES, np.float32), shape[0]).reshape(-1, *(1,) * (len(shape) - 1))
    values = rng.standard_normal(shape, np.float32) * scales
    return _as(spec, values)


def company(spec: TensorSpec, rows: Array, kind: str, span: int) -> Array:
    """Make neighbors of one kind, as many as there are rows."""
    if kind == "zero":
        return np.zeros_like(rows)
    if kind == "first":
        return np.broadcast_to(rows[:1], rows.shape).copy()
    dtype = rows.dtype
    if spec.datatype == "BF16" or dtype.kind not in "iub":
        return _as(spec, _FLOATS[kind](floats(spec, rows[::-1])))
    top = 1 if dtype.kind == "b" else span
    return (top - rows[::-1].astype(np.int64)).astype(dtype) if kind == "other" else np.full_like(rows, top)


_FLOATS: dict[str, Callable[[Array], Array]] = {
    "huge": lambda rows: rows * 1e30,
    "tiny": lambda rows: rows * 1e-40,
    "other": lambda rows: -rows,
    "nan": lambda rows: np.full_like(rows, np.nan),
}


def floats(spec: TensorSpec, array: Array) -> Array:
    """Return the numbers of a tensor as float64, for comparison."""
    return (bf16_to_fp32(array) if spec.datatype == "BF16" else array).astype(np.float64)


def _as(spec: TensorSpec, values: Array) -> Array:
    """Convert floats to an input's datatype; what it cannot hold becomes infinite or 0."""
    with np.errstate(all="ignore"):
        if spec.datatype == "BF16":
            return fp32_to_bf16(values)
        return values.astype(spec.type.dtype)


def run(binding: Binding, rows: Inputs, wanted: tuple[int, ...]) -> list[Any]:
    """Run rows once. Ownership: the outputs may be the Binding's own memory. Raises: what the Binding does."""
    for buffer, array in zip(binding.acquire_buffers(len(rows[0]), [array.shape for array in rows]), rows, strict=True):
        np.copyto(buffer, array)  # type: ignore[arg-type]
    return binding.run(wanted)
