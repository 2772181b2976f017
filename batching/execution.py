"""Execution: one run of one Batch: gather its rows, run the model, scatter the outputs. Called by isolation.py."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.backends.backend import Binding
from penstock.backends.errors import Code, InferError

from .batch import Batch

if TYPE_CHECKING:
    from .model import Model


def run_batch(model: Model, binding: Binding, batch: Batch) -> None:
    """Run a Batch once; every request in it has `outputs` afterwards. Raises: whatever the Binding raises."""
    requests, rows = batch.requests, batch.rows
    wanted = requests[0].wanted
    for request in requests:
        if request.wanted is not wanted and request.wanted != wanted:
            wanted = tuple(sorted({position for each in requests for position in each.wanted}))
            break
    batched = model.signature.batched
    shapes = [None if tail is None else (rows, *tail) for tail in batch.key] if batched else list(batch.key)
    for position, buffer in enumerate(binding.lend(rows, shapes)):
        if buffer is None:
            continue
        if len(requests) == 1:
            np.copyto(buffer, requests[0].inputs[position])  # type: ignore[arg-type]
        else:
            np.concatenate([request.inputs[position] for request in requests], out=buffer)  # type: ignore[misc]
    batch.compute_start_ns = time.monotonic_ns()
    outputs = binding.run(wanted)
    batch.compute_end_ns = time.monotonic_ns()
    if batched:
        _scatter(model, batch, wanted, outputs)
    else:
        requests[0].outputs = outputs
    batch.exec_end_ns = time.monotonic_ns()


def _scatter(model: Model, batch: Batch, wanted: tuple[int, ...], outputs: list[Any]) -> None:
    for position, output in zip(wanted, outputs, strict=True):
        if len(output) != batch.rows:
            name = model.signature.outputs[position].name
            text = f"model '{model.name}': output '{name}' has {len(output)} rows for a batch of {batch.rows}"
            raise InferError(Code.INTERNAL, text)
    start = 0
    for request in batch.requests:
        stop = start + request.rows
        if request.wanted == wanted:
            request.outputs = [output[start:stop] for output in outputs]
        else:
            request.outputs = [outputs[wanted.index(position)][start:stop] for position in request.wanted]
        start = stop
