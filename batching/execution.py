"""Execution: one run of one Batch: gather its rows, run the model, scatter the outputs. Called by isolation.py."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.backends.backend import Array, Binding

from .batch import Batch
from .derived import zero
from .forms import rows_of, wrong_rows
from .padding import smallest_fit

if TYPE_CHECKING:
    from .forms import Forms
    from .model import Model
    from .request import InferRequest


def run_batch(model: Model, binding: Binding, batch: Batch) -> None:
    """Run a Batch once; every request in it has `outputs` afterwards. Raises: whatever the Binding raises."""
    requests, rows = batch.requests, batch.rows
    wanted = requests[0].wanted
    for request in requests:
        if request.wanted is not wanted and request.wanted != wanted:
            wanted = tuple(sorted({position for each in requests for position in each.wanted}))
            break
    if model.forms is not None:
        _run_formed(model, model.forms, binding, batch, wanted)
        return
    batched = model.signature.batched
    ran = smallest_fit(rows, model.allowed_rows) if model.allowed_rows else rows
    shapes = [None if tail is None else (ran, *tail) for tail in batch.key] if batched else list(batch.key)
    buffers = binding.lend(ran, shapes)
    if ran != rows or model.padding is not None:
        _gather_padded(model, batch, buffers, ran)
    else:
        for position, buffer in enumerate(buffers):
            if buffer is not None:
                _gather(requests, position, buffer)
    batch.compute_start_ns = time.monotonic_ns()
    outputs = binding.run(wanted)
    batch.compute_end_ns = time.monotonic_ns()
    if batched:
        _scatter(model, batch, ran, wanted, outputs)
    else:
        requests[0].outputs = outputs
    batch.exec_end_ns = time.monotonic_ns()


def _run_formed(model: Model, forms: Forms, binding: Binding, batch: Batch, wanted: tuple[int, ...]) -> None:
    """Run a Batch of a model whose tensors are more than rows one after another."""
    rows = batch.rows
    if batch.places is not None:
        rows = max(batch.span_rows, batch.places[-1] + batch.requests[-1].rows)
    ran = smallest_fit(rows, model.allowed_rows) if model.allowed_rows else rows
    forms.gather(binding, batch, ran)
    if ran != rows:
        model.count("rows_padded", ran - rows)
    batch.compute_start_ns = time.monotonic_ns()
    positions = forms.positions(wanted)
    outputs = binding.run(positions)
    batch.compute_end_ns = time.monotonic_ns()
    forms.scatter(model.name, batch, ran, dict(zip(positions, outputs, strict=True)))
    batch.exec_end_ns = time.monotonic_ns()


def _gather(requests: list[InferRequest], position: int, buffer: Array) -> None:
    if len(requests) == 1:
        np.copyto(buffer, requests[0].inputs[position])  # type: ignore[arg-type]
    else:
        np.concatenate([request.inputs[position] for request in requests], out=buffer)  # type: ignore[misc]


def _gather_padded(model: Model, batch: Batch, buffers: Sequence[Array | None], ran: int) -> None:
    """Gather with axes filled up to the lengths that run, and rows up to how many run.

    The rows added are copies of the last one: a model that divides by a row's norm, or looks a row up, does with them
    what it does anyway. Zeros stand where there is no row to copy.
    """
    rows, padding = batch.rows, model.padding
    real = added = 0
    for position, buffer in enumerate(buffers):
        if buffer is None:
            continue
        if padding is not None and padding.fills(position):
            more_real, more_added = padding.fill(position, buffer[:rows], batch.requests)
            real, added = real + more_real, added + more_added
        else:
            _gather(batch.requests, position, buffer[:rows])
        if ran != rows:
            buffer[rows:] = buffer[rows - 1] if rows else zero(buffer)
    if ran != rows:
        model.count("rows_padded", ran - rows)
    if real or added:
        model.count("elements_real", real)
        model.count("elements_padded", added)


def _scatter(model: Model, batch: Batch, ran: int, wanted: tuple[int, ...], outputs: list[Any]) -> None:
    for position, output in zip(wanted, outputs, strict=True):
        if rows_of(output) != ran:
            raise wrong_rows(model.name, model.signature.outputs[position].name, output, ran)
    padding = model.padding
    if padding is not None:
        padding.check(batch, wanted, outputs)
    start = 0
    for request in batch.requests:
        stop = start + request.rows
        if request.wanted == wanted:
            request.outputs = [output[start:stop] for output in outputs]
        else:
            request.outputs = [outputs[wanted.index(position)][start:stop] for position in request.wanted]
        start = stop
    if padding is not None:
        padding.trim(batch.requests)
