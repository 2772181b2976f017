"""Execution: one run of one Batch: gather its rows, run the model, scatter the outputs.

Called by isolation.py; overlap.py calls its two halves separately, with another run in between.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from penstock.backends.backend import Array, Binding
from penstock.backends.gathering import gather as gather_rows
from penstock.batching.shapes.forms import fill_padding_rows, row_count, row_count_error
from penstock.batching.shapes.padding import smallest_fit

from .batch import Batch
from .in_place import Aimed, aim, placed, take

if TYPE_CHECKING:
    from penstock.batching.model import Model
    from penstock.batching.request import InferRequest, Key
    from penstock.batching.shapes.forms import Forms


Filled = tuple[tuple[int, ...], int, Aimed | None]
"""What a gathered Batch runs as: the positions of the outputs that the run must make, how many rows run, and the
outputs written in place on a device."""


def run_batch(model: Model, binding: Binding, batch: Batch) -> None:
    """Run a Batch once; every request in it has `outputs` afterwards. Raises: whatever the Binding raises."""
    filled = gather(model, binding, batch)
    batch.compute_start_ns = time.monotonic_ns()
    outputs = binding.run(filled[0])
    batch.compute_end_ns = time.monotonic_ns()
    scatter(model, batch, filled, outputs)


def gather(model: Model, binding: Binding, batch: Batch) -> Filled:
    """Borrow a Binding's buffers for a Batch and fill them. Raises: whatever the Binding raises."""
    requests, rows = batch.requests, batch.rows
    wanted = requests[0].wanted
    for request in requests:
        if request.wanted is not wanted and request.wanted != wanted:
            wanted = tuple(sorted({position for each in requests for position in each.wanted}))
            break
    if model.forms is not None:
        return _gather_formed(model, model.forms, binding, batch, wanted)
    ran = smallest_fit(rows, model.allowed_rows) if model.allowed_rows else rows
    batched = model.signature.batched
    shapes = _shapes(batch.key, ran) if batched else list(batch.key)
    buffers = binding.acquire_buffers(ran, shapes)
    aimed: Aimed | None = None
    if model.in_place:
        buffers = _to_fill(binding, requests, buffers)
        aimed = aim(binding, requests, wanted)
    if ran != rows or model.padding is not None:
        _gather_padded(model, batch, buffers, ran)
    else:
        for position, buffer in enumerate(buffers):
            if buffer is not None:
                gather_rows(_parts(requests, position), buffer)
    return wanted, ran, aimed


def _shapes(key: Key, rows: int) -> list[tuple[int, ...] | None]:
    return [None if tail is None else (rows, *tail) for tail in key]


def _to_fill(binding: Binding, requests: Sequence[InferRequest], buffers: Sequence[Array | None]) -> list[Array | None]:
    """Leave out the buffers of inputs that are read in place."""
    return [
        None if buffer is None or placed(binding, position, requests) else buffer
        for position, buffer in enumerate(buffers)
    ]


def scatter(model: Model, batch: Batch, filled: Filled, outputs: list[Any]) -> None:
    """Give each request of a Batch that has run its outputs. Raises: InferError (INTERNAL)."""
    wanted, ran, aimed = filled
    if model.forms is not None:
        model.forms.scatter(model.name, batch, ran, dict(zip(wanted, outputs, strict=True)))
    elif model.signature.batched:
        for position, output in zip(wanted, outputs, strict=True):
            if row_count(output) != ran:
                raise row_count_error(model.name, model.signature.outputs[position].name, output, ran)
        padding = model.padding
        if padding is not None:
            padding.check_lengths(batch, wanted, outputs)
        if len(batch.requests) == 1 and ran == batch.rows:
            batch.requests[0].outputs = outputs
        else:
            _cut(batch.requests, wanted, outputs)
        if padding is not None:
            padding.trim(batch.requests)
    else:
        batch.requests[0].outputs = outputs
    if aimed:
        take(aimed)
    batch.exec_end_ns = time.monotonic_ns()


def _cut(requests: list[InferRequest], wanted: tuple[int, ...], outputs: list[Any]) -> None:
    start, only = 0, outputs[0] if len(outputs) == 1 else None
    for request in requests:
        stop = start + request.rows
        if request.wanted is not wanted and request.wanted != wanted:
            request.outputs = _rows(map(outputs.__getitem__, map(wanted.index, request.wanted)), start, stop)
        elif only is not None:  # a comprehension would cost as much as the slice itself
            request.outputs = [only[start:stop]]
        else:
            request.outputs = _rows(outputs, start, stop)
        start = stop


def _rows(outputs: Iterable[Any], start: int, stop: int) -> list[Any]:
    """Slice some outputs. A separate function: a comprehension that captures loop variables is slower."""
    return [output[start:stop] for output in outputs]


def device_ns(ran: Sequence[Batch], binding: Binding) -> int:
    """Return the device time of Batches: what the Binding reports for a single run, or else their time on the device.

    Units: nanoseconds; excludes what ran before them.
    """
    said: int = getattr(binding, "device_ns", 0)
    if said and len(ran) == 1 and ran[0].requests[0].error is None:
        return said
    spans = [batch.compute_end_ns - (batch.free_ns or batch.compute_start_ns) for batch in ran]
    return sum([ns for ns in spans if ns > 0])


def _gather_formed(model: Model, forms: Forms, binding: Binding, batch: Batch, wanted: tuple[int, ...]) -> Filled:
    """Gather a Batch of a model whose tensors are not plain concatenated rows."""
    rows = batch.rows
    if batch.places is not None:
        rows = max(batch.span_rows, batch.places[-1] + batch.requests[-1].rows)
    ran = smallest_fit(rows, model.allowed_rows) if model.allowed_rows else rows
    forms.gather(binding, batch, ran)
    if ran != rows:
        model.count("rows_padded", ran - rows)
    return forms.run_positions(wanted), ran, None


def _parts(requests: list[InferRequest], position: int) -> list[Array]:
    return [request.inputs[position] for request in requests]  # type: ignore[misc]


def _gather_padded(model: Model, batch: Batch, buffers: Sequence[Array | None], ran: int) -> None:
    """Gather with axes padded to the lengths that run, and rows to the number that run."""
    rows, padding = batch.rows, model.padding
    real = added = 0
    for position, buffer in enumerate(buffers):
        if buffer is None:
            continue
        if padding is not None and padding.is_padded(position):
            more_real, more_added = padding.fill(position, buffer[:rows], batch.requests)
            real, added = real + more_real, added + more_added
        else:
            gather_rows(_parts(batch.requests, position), buffer[:rows])
        fill_padding_rows(buffer, rows)
    if ran != rows:
        model.count("rows_padded", ran - rows)
    if real or added:
        model.count("elements_real", real)
        model.count("elements_padded", added)
