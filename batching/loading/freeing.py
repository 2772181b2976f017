"""Freeing: adds rows to a model whose graph takes one at a time, if running it shows that its answers stay the same.

Many models were exported with a first axis fixed to 1. If that axis is made free (backends/onnx_rows.py), requests can
share batches; but a graph may reshape to 1 inside, or mix values along that axis. So batches of random rows are
compared with the original model, row by row. Called by opening.py for a spec that asks for it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from penstock.backends.backend import FREE_ROWS, Array, Backend, Binding, Loader
from penstock.backends.datatypes import bf16_to_fp32
from penstock.backends.errors import InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.spec import ModelSpec

from .random_rows import MAX_INTEGERS, NEIGHBOR_KINDS, Inputs, draw_inputs, make_neighbors, run_rows

logger = logging.getLogger("penstock.batching")

SIZES = (2, 3, 8)
LENGTHS = (1, 3)
"""The lengths tried for axes that are already free."""
TOLERANCE = 1e-4
"""How far a number may be from that of its row alone, as a fraction of the largest of that output: other shapes use
other kernels, which round differently."""


def free_rows(spec: ModelSpec, loader: Loader, device: str, backend: Backend) -> tuple[ModelSpec, Backend]:
    """Load a model with its rows freed, if it takes one row at a time and its answers provably stay the same.

    Returns: the spec with the option that frees rows and the new Backend, with `backend` closed; or both unchanged.
    """
    if not _is_fixed_to_one_row(backend.graph):
        return spec, backend
    options = {**spec.options, FREE_ROWS: "1"}
    try:
        freed_backend = loader(spec.path, device, options)
    except InferError as error:
        _log(spec, error.message)
        return spec, backend
    try:
        reason = sharing_obstacle(backend, freed_backend)
    except BaseException:
        freed_backend.close()
        raise
    if reason:
        freed_backend.close()
        _log(spec, reason)
        return spec, backend
    backend.close()
    logger.info(
        "model %s: its graph is fixed to one row, but requests can share batches without changing any answer", spec.name
    )
    return replace(spec, options=options), freed_backend


def _log(spec: ModelSpec, reason: str) -> None:
    logger.info("model %s: its graph is fixed to one row, and requests run one at a time: %s", spec.name, reason)


def _is_fixed_to_one_row(graph: Signature) -> bool:
    tensors = [each for each in (*graph.inputs, *graph.outputs) if each.is_tensor]
    row_dims = [each.shape[0] if each.shape else 0 for each in tensors]
    return bool(graph.inputs) and all(dim in {1, -1} for dim in row_dims) and 1 in row_dims


def sharing_obstacle(original: Backend, freed: Backend) -> str:
    """Say why rows may not share a run of `freed`; "" if all trials gave the answers of `original`."""
    for spec in original.graph.inputs:
        if spec.datatype == "BYTES":
            return f"input '{spec.name}' is BYTES, for which no random values can be generated"
    reason = "it does not run on random rows"
    compared = False
    for length in LENGTHS if _has_free_axes(original.graph) else LENGTHS[:1]:
        difference = _compare(original, freed, length)
        if difference is None:
            continue
        if difference:
            return difference
        compared = True
    return "" if compared else reason


def _has_free_axes(graph: Signature) -> bool:
    return any(-1 in spec.shape[1:] for spec in graph.inputs)


def _compare(original: Backend, freed: Backend, length: int) -> str | None:
    """Compare with axes of one length. Returns: the difference, "" for equal answers, None if nothing could be run."""
    single_graph, batch_graph = (_with_length(backend.graph, length) for backend in (original, freed))
    single_binding = original.bind(single_graph, 1)
    batch_binding = freed.bind(replace(batch_graph, batched=True), max(SIZES))
    for max_integer in MAX_INTEGERS:
        rows = draw_inputs(batch_graph, max(SIZES), max_integer)
        try:
            _run(single_graph, single_binding, [array[:1] for array in rows])
        except Exception:  # noqa: BLE001, S112 - random numbers may not be valid indices
            continue
        for batch in _batches(batch_graph, rows, max_integer):
            if reason := _find_difference(single_graph, single_binding, batch_binding, batch):
                return reason
        return ""
    return None


def _with_length(graph: Signature, length: int) -> Signature:
    """Return a graph's inputs with all free axes but the first fixed."""
    inputs = [replace(spec, shape=(spec.shape[0], *spec.shape_with(length)[1:])) for spec in graph.inputs]
    return replace(graph, inputs=tuple(inputs))


def _batches(signature: Signature, rows: Inputs, max_integer: int) -> Iterator[Inputs]:
    """Yield batches of known rows: of several sizes, rotated, and among neighbors that may affect them."""
    for size in SIZES:
        yield [array[:size] for array in rows]
    yield [np.roll(array, 1, axis=0) for array in rows]
    for index, kind in enumerate(NEIGHBOR_KINDS):
        others = [
            make_neighbors(spec, array, kind, max_integer) for spec, array in zip(signature.inputs, rows, strict=True)
        ]
        for array, known in zip(others, rows, strict=True):
            array[index % 2 :: 2] = known[index % 2 :: 2]
        yield others


def _find_difference(signature: Signature, single_binding: Binding, batch_binding: Binding, batch: Inputs) -> str:
    """Say how a batch differs from its rows alone; "" if it does not."""
    size = len(batch[0])
    try:
        shared = _run(signature, batch_binding, batch)
    except Exception as error:  # noqa: BLE001 - usually the graph fixes its rows inside
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        return f"a run of {size} rows fails: {first_line:.200}"
    for row in range(size):
        try:
            single = _run(signature, single_binding, [array[row : row + 1] for array in batch])
        except Exception:  # noqa: BLE001, S112 - a row that fails alone says nothing about sharing
            continue
        for spec, actual, expected in zip(signature.outputs, shared, single, strict=True):
            if len(actual) != size or not _is_same(spec, actual[row : row + 1], expected):
                return f"output '{spec.name}' of a row changes in a batch of {size}"
    return ""


def _run(signature: Signature, binding: Binding, rows: Inputs) -> list[Any]:
    return run_rows(binding, rows, tuple(range(len(signature.outputs))))


def _is_same(spec: TensorSpec, actual: Any, expected: Any) -> bool:
    """Compare one row of an output: numbers within tolerance, everything else exactly."""
    if not isinstance(expected, np.ndarray):
        return len(actual) == len(expected) and all(map(_is_same_entry, actual, expected))
    if spec.datatype == "BF16":
        actual, expected = bf16_to_fp32(actual), bf16_to_fp32(expected)
    if actual.shape != expected.shape:
        return False
    return _is_close(actual, expected) if expected.dtype.kind == "f" else bool(np.array_equal(actual, expected))


def _is_close(actual: Array, expected: Array) -> bool:
    expected = expected.astype(np.float64)
    finite = expected[np.isfinite(expected)]
    largest = float(np.max(np.abs(finite))) if finite.size else 0.0
    return bool(
        np.allclose(actual.astype(np.float64), expected, rtol=TOLERANCE, atol=TOLERANCE * largest, equal_nan=True)
    )


def _is_same_entry(actual: Any, expected: Any) -> bool:
    """Compare a non-tensor value: maps of names to numbers."""
    if not isinstance(expected, dict):
        return bool(actual == expected)
    return actual.keys() == expected.keys() and all(
        _is_close(np.asarray(actual[key]), np.asarray(value)) if isinstance(value, float) else actual[key] == value
        for key, value in expected.items()
    )
