"""Batches: joins rows into the tensors of requests. A batch takes consecutive steps, wrapping around its stream."""

from __future__ import annotations

from penstock.perf.profiling.model import UNKNOWN_BATCH_SIZE, ModelDescription, Tensor

from .inputs import Row
from .tensors import InputError, InputTensor, Step, Values, text_of


def check_batch(model: ModelDescription, batch: int) -> None:
    """Check a client batch against the model's limits. Raises: InputError."""
    max_rows = model.max_batch_size
    if batch < 1:
        raise InputError(f"-b {batch}: a request has one row at least")
    if batch > 1 and not model.batched:
        raise InputError(f"-b {batch}: model '{model.name}' does not batch (its max_batch_size is 0)")
    if max_rows != UNKNOWN_BATCH_SIZE and 0 < max_rows < batch:
        raise InputError(f"-b {batch}: model '{model.name}' takes {max_rows} rows at most (its max_batch_size)")


def alone(model: ModelDescription, rows: tuple[Row, ...], batch: int) -> tuple[Step, ...]:
    """Return the requests that use up a stream's rows: each begins where the previous ended, until they repeat."""
    starts: dict[int, None] = {}
    start_row = 0
    while start_row not in starts:
        starts[start_row] = None
        start_row = (start_row + batch) % len(rows)
    return tuple(_request(model, rows, start, batch) for start in starts)


def in_order(model: ModelDescription, rows: tuple[Row, ...], batch: int) -> tuple[Step, ...]:
    """Return the requests of a sequence: one beginning with each of a stream's rows."""
    return tuple(_request(model, rows, start, batch) for start in range(len(rows)))


def _request(model: ModelDescription, rows: tuple[Row, ...], start: int, batch: int) -> Step:
    chosen = [rows[(start + number) % len(rows)] for number in range(batch)]
    tensors = []
    for each in model.inputs:
        values = [row[each.name] for row in chosen if each.name in row]
        if values and len(values) < batch:
            raise InputError(f"-b {batch}: optional input '{each.name}' is in some steps of a batch and not in others")
        if values:
            tensors.append(_joined(model, each, values))
    return tuple(tensors)


def _joined(model: ModelDescription, tensor: Tensor, values: list[Values]) -> InputTensor:
    first_values, location = values[0], f"-b {len(values)}: input '{tensor.name}'"
    for other in values:
        if other.shape != first_values.shape:
            differ = f"{text_of(first_values.shape)} and {text_of(other.shape)}"
            raise InputError(f"{location} has steps of the shapes {differ}, which cannot share a batch")
        if tensor.shape_tensor and other.raw != first_values.raw:
            raise InputError(f"{location} is a shape tensor, whose values have to be the same in a batch")
    if tensor.shape_tensor or not model.batched:
        return InputTensor(tensor.name, tensor.datatype, first_values.shape, first_values.raw)
    raw = b"".join(each.raw for each in values)
    return InputTensor(tensor.name, tensor.datatype, (len(values), *first_values.shape), raw)
