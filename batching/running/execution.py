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
from .in_place import DirectOutputs, collect_in_place, read_in_place, write_in_place

if TYPE_CHECKING:
    from penstock.batching.model import Model
    from penstock.batching.request import InferRequest, Key
    from penstock.batching.shapes.forms import Forms


GatheredRun = tuple[tuple[int, ...], int, DirectOutputs | None]
"""What a gathered Batch runs as: the positions of the outputs that the run must make, how many rows run, and the
outputs written in place on a device."""


def run_batch(model: Model, binding: Binding, batch: Batch) -> None:
    """Run a Batch once; every request in it has `outputs` afterwards. Raises: whatever the Binding raises."""
    gathered = gather(model, binding, batch)
    batch.compute_start_ns = time.monotonic_ns()
    outputs = binding.run(gathered[0])
    batch.compute_end_ns = time.monotonic_ns()
    scatter(model, batch, gathered, outputs)


def gather(model: Model, binding: Binding, batch: Batch) -> GatheredRun:
    """Borrow a Binding's buffers for a Batch and fill them. Raises: whatever the Binding raises."""
    requests, rows = batch.requests, batch.rows
    output_positions = requests[0].output_positions
    for request in requests:
        if request.output_positions is not output_positions and request.output_positions != output_positions:
            output_positions = tuple(sorted({position for each in requests for position in each.output_positions}))
            break
    if model.forms is not None:
        return _gather_formed(model, model.forms, binding, batch, output_positions)
    run_rows = smallest_fit(rows, model.allowed_rows) if model.allowed_rows else rows
    batched = model.signature.batched
    shapes = _shapes(batch.key, run_rows) if batched else list(batch.key)
    buffers = binding.acquire_buffers(run_rows, shapes)
    direct_outputs: DirectOutputs | None = None
    if model.in_place_devices:
        buffers = _host_buffers(binding, requests, buffers)
        direct_outputs = write_in_place(binding, requests, output_positions)
    if run_rows != rows or model.padding is not None:
        _gather_padded(model, batch, buffers, run_rows)
    else:
        for position, buffer in enumerate(buffers):
            if buffer is not None:
                gather_rows(_input_arrays(requests, position), buffer)
    return output_positions, run_rows, direct_outputs


def _shapes(key: Key, rows: int) -> list[tuple[int, ...] | None]:
    return [None if tail is None else (rows, *tail) for tail in key]


def _host_buffers(
    binding: Binding, requests: Sequence[InferRequest], buffers: Sequence[Array | None]
) -> list[Array | None]:
    """Leave out the buffers of inputs that are read in place."""
    return [
        None if buffer is None or read_in_place(binding, position, requests) else buffer
        for position, buffer in enumerate(buffers)
    ]


def scatter(model: Model, batch: Batch, gathered: GatheredRun, outputs: list[Any]) -> None:
    """Give each request of a Batch that has run its outputs. Raises: InferError (INTERNAL)."""
    output_positions, run_rows, direct_outputs = gathered
    if model.forms is not None:
        model.forms.scatter(model.name, batch, run_rows, dict(zip(output_positions, outputs, strict=True)))
    elif model.signature.batched:
        for position, output in zip(output_positions, outputs, strict=True):
            if row_count(output) != run_rows:
                raise row_count_error(model.name, model.signature.outputs[position].name, output, run_rows)
        padding = model.padding
        if padding is not None:
            padding.check_lengths(batch, output_positions, outputs)
        if len(batch.requests) == 1 and run_rows == batch.rows:
            batch.requests[0].outputs = outputs
        else:
            _split_outputs(batch.requests, output_positions, outputs)
        if padding is not None:
            padding.trim(batch.requests)
    else:
        batch.requests[0].outputs = outputs
    if direct_outputs:
        collect_in_place(direct_outputs)
    batch.exec_end_ns = time.monotonic_ns()


def _split_outputs(requests: list[InferRequest], output_positions: tuple[int, ...], outputs: list[Any]) -> None:
    start, only = 0, outputs[0] if len(outputs) == 1 else None
    for request in requests:
        stop = start + request.rows
        if request.output_positions is not output_positions and request.output_positions != output_positions:
            request.outputs = _slice_rows(
                map(outputs.__getitem__, map(output_positions.index, request.output_positions)), start, stop
            )
        elif only is not None:  # a comprehension would cost as much as the slice itself
            request.outputs = [only[start:stop]]
        else:
            request.outputs = _slice_rows(outputs, start, stop)
        start = stop


def _slice_rows(outputs: Iterable[Any], start: int, stop: int) -> list[Any]:
    """Slice some outputs. A separate function: a comprehension that captures loop variables is slower."""
    return [output[start:stop] for output in outputs]


def device_ns(batches: Sequence[Batch], binding: Binding) -> int:
    """Return the device time of Batches: what the Binding reports for a single run, or else their time on the device.

    Units: nanoseconds; excludes what ran before them.
    """
    reported_ns: int = getattr(binding, "device_ns", 0)
    if reported_ns and len(batches) == 1 and batches[0].requests[0].error is None:
        return reported_ns
    spans = [batch.compute_end_ns - (batch.device_free_ns or batch.compute_start_ns) for batch in batches]
    return sum([ns for ns in spans if ns > 0])


def _gather_formed(
    model: Model, forms: Forms, binding: Binding, batch: Batch, output_positions: tuple[int, ...]
) -> GatheredRun:
    """Gather a Batch of a model whose tensors are not plain concatenated rows."""
    rows = batch.rows
    if batch.row_positions is not None:
        rows = max(batch.span_rows, batch.row_positions[-1] + batch.requests[-1].rows)
    run_rows = smallest_fit(rows, model.allowed_rows) if model.allowed_rows else rows
    forms.gather(binding, batch, run_rows)
    if run_rows != rows:
        model.count_event("rows_padded", run_rows - rows)
    return forms.run_positions(output_positions), run_rows, None


def _input_arrays(requests: list[InferRequest], position: int) -> list[Array]:
    return [request.inputs[position] for request in requests]  # type: ignore[misc]


def _gather_padded(model: Model, batch: Batch, buffers: Sequence[Array | None], run_rows: int) -> None:
    """Gather with axes padded to the lengths that run, and rows to the number that run."""
    rows, padding = batch.rows, model.padding
    real_elements = padded_elements = 0
    for position, buffer in enumerate(buffers):
        if buffer is None:
            continue
        if padding is not None and padding.is_padded(position):
            more_real, more_added = padding.fill(position, buffer[:rows], batch.requests)
            real_elements, padded_elements = real_elements + more_real, padded_elements + more_added
        else:
            gather_rows(_input_arrays(batch.requests, position), buffer[:rows])
        fill_padding_rows(buffer, rows)
    if run_rows != rows:
        model.count_event("rows_padded", run_rows - rows)
    if real_elements or padded_elements:
        model.count_event("elements_real", real_elements)
        model.count_event("elements_padded", padded_elements)
