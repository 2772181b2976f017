"""Finishing: what is done to a request's outputs before encoding, according to its Plan.

An output is converted to classes, written to shared memory, or left as it is. Called by both transports, for models
with and without hooks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.backends.device_array import DeviceArray
from penstock.backends.errors import Code, InferError
from penstock.batching.running.custom_outputs import CustomOutputs, actual_datatype
from penstock.server.listening.mapped_buffer import raise_if_abandoned

from .call_parameters import BINARY, JSON, MAX_CLASSES, Classes, PerOutputPlan
from .regions import Lease
from .tensors import to_binary

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.backends.backend import Array
    from penstock.batching.model import Model
    from penstock.batching.request import InferRequest

    from .call_parameters import OutputMode, Plan

_CLASSIFIED = frozenset(("UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP32", "FP64"))
LARGE_ELEMENTS = 16 << 10
"""From this many elements, per-element work is done on a thread: as JSON about 256 KiB, half a millisecond or more."""
_LARGE_CLASSES = 4096
_PARTITION_RATIO = 8
"""If there are more values than this per requested class, the candidates are selected before sorting."""


class Finished(NamedTuple):
    """One output as it is answered. `array` is None if the data is in shared memory; `binary` is for HTTP."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    array: Array | None
    binary: bool


def modes_of(plan: Plan, count: int) -> tuple[OutputMode, ...]:
    """Expand a plan to one way for each of `count` outputs."""
    if plan is None:
        return (JSON,) * count
    return plan.modes if isinstance(plan, PerOutputPlan) else plan


def finish_all(model: Model, wanted: Sequence[int], plan: Plan, outputs: Sequence[Any]) -> list[Finished]:
    """Finish a request's outputs, and release its shared memory.

    Each output of user code keeps its own datatype, and those it did not return are left out.
    Raises: InferError (INVALID).
    """
    custom = type(outputs) is CustomOutputs
    try:
        specs = [model.signature.outputs[position] for position in wanted]
        return [
            finish(model, (spec.name, actual_datatype(spec.datatype, array) if custom else spec.datatype), mode, array)
            for spec, mode, array in zip(specs, modes_of(plan, len(specs)), outputs, strict=True)
            if array is not None
        ]
    finally:
        if isinstance(plan, PerOutputPlan):
            plan.release()


def store_all(request: InferRequest, plan: PerOutputPlan) -> tuple[tuple[int, ...], ...]:
    """Finish outputs that all go into shared memory, release it, and return their shapes. Raises: as `finish_all`."""
    specs, outputs = request.model.signature.outputs, request.outputs or []
    try:
        for position, lease, array in zip(request.output_positions, plan.modes, outputs, strict=True):
            if type(lease) is Lease and (type(array) is not DeviceArray or not lease.is_same_memory(array)):
                spec = specs[position]
                store(spec.name, spec.datatype, array, lease)
    finally:
        plan.release()
    return tuple([array.shape for array in outputs])


def finish(model: Model, output: tuple[str, str], mode: OutputMode, array: Array) -> Finished:
    """Finish one output, given by name and datatype. Raises: InferError (INVALID)."""
    name, datatype = output
    if type(mode) is Lease:
        if not mode.is_same_memory(array):
            store(name, datatype, array, mode)
        return Finished(name, datatype, array.shape, None, False)
    if type(mode) is Classes:
        classes = classify(
            datatype, array, mode.count, model.spec.labels.get(name, ()), batched=model.signature.batched
        )
        return Finished(name, "BYTES", classes.shape, classes, mode.binary)
    return Finished(name, datatype, array.shape, array, mode is BINARY)


def store(name: str, datatype: str, array: Array, lease: Lease) -> None:
    """Write an output into the requested shared memory, unless its client has disconnected.

    Raises: InferError (INVALID), AbandonedError.
    """
    raw = to_binary(datatype, array)
    raise_if_abandoned()  # a client whose call has ended may be reusing its memory
    if len(raw) > lease.byte_size:
        text = (
            f"shared memory size specified with the request for output '{name}' ({lease.byte_size} bytes) should be at "
            f"least {len(raw)} bytes to hold the results"
        )
        raise InferError(Code.INVALID, text)
    lease.write(raw)


def classify(datatype: str, array: Array, count: int, labels: Sequence[str], *, batched: bool) -> Array:
    """Return the `count` highest values as BYTES, highest first: `value:index`, plus `:label` if there is one.

    Shapes: [rows, count] for a batched model, [count] otherwise; count is at most the number of values. Ties keep the
    order of the values; NaN comes last.
    Raises: InferError (INVALID).
    """
    if datatype not in _CLASSIFIED:
        text = f"class result not available for output due to unsupported type '{datatype}'"
        raise InferError(Code.INVALID, text)
    rows = array.shape[0] if batched and array.ndim else 1
    values = array.reshape(rows, array.size // rows if rows else 0)
    count = min(count, values.shape[1])
    if max(rows * count, values.shape[1]) > MAX_CLASSES:
        text = f"classification output tensor too large: {rows * count} classes out of {values.shape[1]} values"
        text += f", the maximum is {MAX_CLASSES}"
        raise InferError(Code.INVALID, text)
    texts = np.empty((rows, count), np.object_)
    for row in range(rows):
        best = _highest(values[row], count)
        texts[row] = _texts(values[row][best].tolist(), best.tolist(), labels)
    return texts if batched and array.ndim else texts.reshape(count)


def is_slow_to_classify(count: int, array: Array) -> bool:
    """Return whether converting an output to `count` classes per row would block the event loop."""
    rows = array.shape[0] if array.ndim else 1
    return array.size >= LARGE_ELEMENTS or min(count * rows, array.size) >= _LARGE_CLASSES


def _texts(values: list[Any], indices: list[int], labels: Sequence[str]) -> list[bytes]:
    texts = []
    for value, index in zip(values, indices, strict=True):
        text = f"{value:f}:{index}" if type(value) is float else f"{value}:{index}"
        if index < len(labels) and labels[index]:
            text += ":" + labels[index]
        texts.append(text.encode())
    return texts


def _highest(values: Array, count: int) -> Array:
    """Return the indices of the `count` highest values, highest first, ties in order, NaN last."""
    # both invert the order, so that sorting puts the highest first, and ties and NaN in the right place
    keys: Array = -values if values.dtype.kind == "f" else ~values
    size = len(keys)
    if not 0 < count < size // _PARTITION_RATIO:
        return np.argsort(keys, kind="stable")[:count]
    last = np.partition(keys, count - 1)[count - 1]
    candidates = np.flatnonzero(~(keys > last))
    return candidates[np.argsort(keys[candidates], kind="stable")][:count]
