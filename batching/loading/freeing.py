"""Freeing: adds rows to a model whose graph takes one at a time, if running it shows that its answers stay the same.

Many models were exported with a first axis fixed to 1. If that axis is made free (backends/onnx_rows.py), requests can
share batches; but a graph may reshape to 1 inside, or mix values along that axis. So batches of drawn rows are compared
with the original model, row by row. Called by opening.py for a spec that asks for it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from penstock.backends.backend import FREE_ROWS, Array, Backend, Binding, Loader
from penstock.backends.datatypes import bf16_to_fp32
from penstock.backends.errors import InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.spec import ModelSpec

from .drawn import KINDS, SPANS, Inputs, company, draw, run

logger = logging.getLogger("penstock.batching")

SIZES = (2, 3, 8)
LENGTHS = (1, 3)
"""The lengths tried for axes that are already free."""
NEAR = 1e-4
"""How far a number may be from that of its row alone, as a fraction of the largest of that output: other shapes use
other kernels, which round differently."""


def freed(spec: ModelSpec, loader: Loader, device: str, backend: Backend) -> tuple[ModelSpec, Backend]:
    """Load a model with its rows freed, if it takes one row at a time and its answers provably stay the same.

    Returns: the spec with the option that frees rows and the new Backend, with `backend` closed; or both unchanged.
    """
    if not _takes_one(backend.graph):
        return spec, backend
    options = {**spec.options, FREE_ROWS: "1"}
    try:
        other = loader(spec.path, device, options)
    except InferError as error:
        _log(spec, error.message)
        return spec, backend
    try:
        reason = obstacle(backend, other)
    except BaseException:
        other.close()
        raise
    if reason:
        other.close()
        _log(spec, reason)
        return spec, backend
    backend.close()
    logger.info(
        "model %s: its graph is fixed to one row, but requests can share batches without changing any answer", spec.name
    )
    return replace(spec, options=options), other


def _log(spec: ModelSpec, reason: str) -> None:
    logger.info("model %s: its graph is fixed to one row, and requests run one at a time: %s", spec.name, reason)


def _takes_one(graph: Signature) -> bool:
    tensors = [each for each in (*graph.inputs, *graph.outputs) if each.is_tensor]
    firsts = [each.shape[0] if each.shape else 0 for each in tensors]
    return bool(graph.inputs) and all(first in {1, -1} for first in firsts) and 1 in firsts


def obstacle(alone: Backend, together: Backend) -> str:
    """Say why rows may not share a run of `together`; "" if all trials gave the answers of `alone`."""
    for spec in alone.graph.inputs:
        if spec.datatype == "BYTES":
            return f"input '{spec.name}' is BYTES, for which no random values can be generated"
    reason = "it does not run on random rows"
    compared = False
    for length in LENGTHS if _has_free_axes(alone.graph) else LENGTHS[:1]:
        found = _compared(alone, together, length)
        if found is None:
            continue
        if found:
            return found
        compared = True
    return "" if compared else reason


def _has_free_axes(graph: Signature) -> bool:
    return any(-1 in spec.shape[1:] for spec in graph.inputs)


def _compared(alone: Backend, together: Backend, length: int) -> str | None:
    """Compare with axes of one length. Returns: the difference, "" for equal answers, None if nothing could be run."""
    one, many = (_of_length(backend.graph, length) for backend in (alone, together))
    lender, sharer = alone.bind(one, 1), together.bind(replace(many, batched=True), max(SIZES))
    for span in SPANS:
        rows = draw(many, max(SIZES), span)
        try:
            _run(one, lender, [array[:1] for array in rows])
        except Exception:  # noqa: BLE001, S112 - drawn numbers may not be valid indices
            continue
        for batch in _batches(many, rows, span):
            if reason := _differs(one, lender, sharer, batch):
                return reason
        return ""
    return None


def _of_length(graph: Signature, length: int) -> Signature:
    """Return a graph's inputs with all free axes but the first fixed."""
    inputs = [replace(spec, shape=(spec.shape[0], *(_fixed(spec.shape[1:], length)))) for spec in graph.inputs]
    return replace(graph, inputs=tuple(inputs))


def _fixed(dims: Sequence[int], length: int) -> list[int]:
    return [length if dim < 0 else dim for dim in dims]


def _batches(signature: Signature, rows: Inputs, span: int) -> Iterator[Inputs]:
    """Yield batches of known rows: of several sizes, rotated, and among neighbors that may affect them."""
    for size in SIZES:
        yield [array[:size] for array in rows]
    yield [np.roll(array, 1, axis=0) for array in rows]
    for at, kind in enumerate(KINDS):
        others = [company(spec, array, kind, span) for spec, array in zip(signature.inputs, rows, strict=True)]
        for array, known in zip(others, rows, strict=True):
            array[at % 2 :: 2] = known[at % 2 :: 2]
        yield others


def _differs(one: Signature, lender: Binding, sharer: Binding, batch: Inputs) -> str:
    """Say how a batch differs from its rows alone; "" if it does not."""
    size = len(batch[0])
    try:
        shared = _run(one, sharer, batch)
    except Exception as error:  # noqa: BLE001 - usually the graph fixes its rows inside
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        return f"a run of {size} rows fails: {first:.200}"
    for row in range(size):
        try:
            single = _run(one, lender, [array[row : row + 1] for array in batch])
        except Exception:  # noqa: BLE001, S112 - a row that fails alone says nothing about sharing
            continue
        for spec, found, wanted in zip(one.outputs, shared, single, strict=True):
            if len(found) != size or not _same(spec, found[row : row + 1], wanted):
                return f"output '{spec.name}' of a row changes in a batch of {size}"
    return ""


def _run(signature: Signature, binding: Binding, rows: Inputs) -> list[Any]:
    return run(binding, rows, tuple(range(len(signature.outputs))))


def _same(spec: TensorSpec, found: Any, wanted: Any) -> bool:
    """Compare one row of an output: numbers within tolerance, everything else exactly."""
    if not isinstance(wanted, np.ndarray):
        return len(found) == len(wanted) and all(map(_same_entry, found, wanted))
    if spec.datatype == "BF16":
        found, wanted = bf16_to_fp32(found), bf16_to_fp32(wanted)
    if found.shape != wanted.shape:
        return False
    return _near(found, wanted) if wanted.dtype.kind == "f" else bool(np.array_equal(found, wanted))


def _near(found: Array, wanted: Array) -> bool:
    wanted = wanted.astype(np.float64)
    finite = wanted[np.isfinite(wanted)]
    largest = float(np.max(np.abs(finite))) if finite.size else 0.0
    return bool(np.allclose(found.astype(np.float64), wanted, rtol=NEAR, atol=NEAR * largest, equal_nan=True))


def _same_entry(found: Any, wanted: Any) -> bool:
    """Compare a non-tensor value: maps of names to numbers."""
    if not isinstance(wanted, dict):
        return bool(found == wanted)
    return found.keys() == wanted.keys() and all(
        _near(np.asarray(found[key]), np.asarray(value)) if isinstance(value, float) else found[key] == value
        for key, value in wanted.items()
    )
