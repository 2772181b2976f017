"""Padding: free axes are padded to a few lengths, so that requests of different lengths share a Lane.

A request's Key has the padded lengths (request_checks.py). Its rows are padded when a batch is gathered, and its
outputs are trimmed when it is scattered (execution.py). completion.py checks the configuration.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.backends.errors import Code, InferError
from penstock.batching.request import Key

if TYPE_CHECKING:
    from penstock.backends.backend import Array
    from penstock.backends.signature import Signature, TensorSpec
    from penstock.batching.request import InferRequest
    from penstock.batching.running.batch import Batch
    from penstock.batching.spec import ModelSpec, PaddedAxis

MIN_STEP = 16


def bucket(length: int, buckets: Sequence[int]) -> int:
    """Return the padded length for `length`, which is unchanged beyond the last bucket.

    The default buckets are 16, 32, 48, ... 128, 160, 192, 224, 256, 320, ...: four per doubling. For lengths spread
    evenly over 1 to 128 they add 12%, powers of two a third, and steps of 8 below 64 8%, with fewer requests per batch.
    Relative to the throughput of a single length that is 0.75 to 0.85, 0.62 to 0.72 and 0.69 to 0.83, and 0.30 to 0.49
    without padding (perf/padding.py). Filling batches up from Lanes of other lengths, where the learned times predicted
    savings, gave 0.54 to 0.64: the added elements cost more than the batches saved.
    """
    if buckets:
        index = bisect_left(buckets, length)
        return buckets[index] if index < len(buckets) else length
    step = max(MIN_STEP, (1 << (length - 1).bit_length()) >> 3) if length else 1
    return -(-length // step) * step


def smallest_fit(rows: int, allowed_rows: Sequence[int]) -> int:
    """Return the smallest allowed size that holds this many rows; `rows` itself beyond the last."""
    index = bisect_left(allowed_rows, rows)
    return allowed_rows[index] if index < len(allowed_rows) else rows


def tied_axes(signature: Signature, padded: PaddedAxis) -> Iterator[tuple[TensorSpec, int]]:
    """Yield the input axes that must be as long as a padded one: those of the same name, and its mask's.

    Shapes: axes count from 0 after the rows.
    """
    spec = signature.input[padded.input]
    name = axis_name(spec, padded.axis)
    for other in signature.inputs:
        for axis in range(len(other.shape) - 1):
            if other is spec and axis == padded.axis:
                continue
            if (name and axis_name(other, axis) == name) or (other.name == padded.mask and other.shape[axis + 1] < 0):
                yield other, axis


def axis_name(spec: TensorSpec, axis: int) -> str:
    """Return the model's name for an axis, counted from 0 after the rows; "" if it has none."""
    return spec.axes[axis + 1] if axis + 1 < len(spec.axes) else ""


class Padding:
    """What is padded in one model, by position in its Signature.

    Shapes: axes include the rows here, so 1 is the first that can be padded. Threads: read-only.
    """

    def __init__(self, spec: ModelSpec, signature: Signature) -> None:
        self._signature = signature
        positions = {tensor.name: tensor_position for tensor_position, tensor in enumerate(signature.inputs)}
        # per input: its padded axes with their buckets, and the fill value
        self._axes: dict[int, dict[int, tuple[int, ...]]] = {}
        self._fill_values: dict[int, Any] = {}
        self._tied: list[tuple[int, int, int, int]] = []
        # per mask: its axis, and the input and axis that it belongs to
        self._masks: dict[int, tuple[int, int, int]] = {}
        self._trims: dict[int, list[tuple[int, int, int]]] = {}
        for padded in spec.padding:
            position, axis = positions[padded.input], padded.axis + 1
            self._axes.setdefault(position, {})[axis] = padded.buckets
            self._fill_values[position] = typed_fill(signature.inputs[position], padded.value)
            for other, other_axis in tied_axes(signature, padded):
                tensor_position = positions[other.name]
                self._tied.append((position, axis, tensor_position, other_axis + 1))
                if other.name == padded.mask:
                    self._masks[tensor_position] = (other_axis + 1, position, axis)
                    self._axes.setdefault(tensor_position, {}).setdefault(other_axis + 1, padded.buckets)
                    self._fill_values.setdefault(tensor_position, typed_fill(other, 0.0))
            for tensor_position, output_axis in _trimmed_axes(signature, padded):
                trims = self._trims.setdefault(tensor_position, [])
                if all(output_axis != known for known, _, _ in trims):
                    trims.append((output_axis, position, axis))

    def key(self, name: str, key: Sequence[tuple[int, ...] | None]) -> Key:
        """Make a request's Key from its shapes without rows: the padded lengths, and a mask even if not sent.

        Raises: InferError (INVALID) if lengths differ that must be equal: padding would hide the difference.
        """
        for position, axis, other, other_axis in self._tied:
            mine, theirs = key[position], key[other]
            if mine is not None and theirs is not None and mine[axis - 1] != theirs[other_axis - 1]:
                first, second = self._signature.inputs[position], self._signature.inputs[other]
                text = f"input '{first.name}' has {mine[axis - 1]} on axis {axis} and input '{second.name}' has"
                text += f" {theirs[other_axis - 1]} on axis {other_axis}, but model '{name}' requires equal lengths"
                raise InferError(Code.INVALID, text)
        padded = list(key)
        for position, axes in self._axes.items():
            tail = key[position]
            if tail is not None:
                sizes = enumerate(tail, 1)
                padded[position] = tuple(bucket(size, axes[axis]) if axis in axes else size for axis, size in sizes)
        for position, (axis, source, source_axis) in self._masks.items():
            tail = padded[source]
            if padded[position] is None and tail is not None:
                sizes = enumerate(self._signature.inputs[position].shape[1:], 1)
                padded[position] = tuple(tail[source_axis - 1] if index == axis else size for index, size in sizes)
        return tuple(padded)

    def is_padded(self, position: int) -> bool:
        """Whether an input has anything to pad."""
        return position in self._axes

    def fill(self, position: int, buffer: Array, requests: Sequence[InferRequest]) -> tuple[int, int]:
        """Write the requests' rows to a buffer, padded, or the mask if a request sends none.

        Returns: how many elements are real and how many are padding; (0, 0) for a mask.
        """
        buffer[...] = self._fill_values[position]
        mask = self._masks.get(position)
        real = start = 0
        for request in requests:
            stop = start + request.rows
            array = request.inputs[position]
            if array is not None:
                buffer[(slice(start, stop), *map(slice, array.shape[1:]))] = array
                real += array.size
            elif mask is not None:
                axis, source, source_axis = mask
                length = request.inputs[source].shape[source_axis]  # type: ignore[union-attr]
                buffer[(slice(start, stop), *(slice(None),) * (axis - 1), slice(length))] = 1
            start = stop
        return (0, 0) if mask is not None else (real, buffer.size - real)

    def check_lengths(self, batch: Batch, wanted: Sequence[int], outputs: Sequence[Any]) -> None:
        """Check a batch's outputs against the lengths that ran, before anything is trimmed.

        Raises: InferError (INTERNAL).
        """
        for position, output in zip(wanted, outputs, strict=True):
            shape = getattr(output, "shape", ())
            for axis, source, source_axis in self._trims.get(position, ()):
                expected = (batch.key[source] or ())[source_axis - 1]
                if axis >= len(shape) or shape[axis] != expected:
                    name, model = self._signature.outputs[position].name, batch.requests[0].model.name
                    text = (
                        f"model '{model}': output '{name}' has shape {list(shape)}, expected {expected} on axis {axis}"
                    )
                    raise InferError(Code.INTERNAL, f"{text}, the length of its padded input")

    def trim(self, requests: Sequence[InferRequest]) -> None:
        """Trim the outputs of each request to its own lengths. Ownership: trimmed outputs are copies."""
        for request in requests:
            outputs = request.outputs or []
            for index, position in enumerate(request.output_positions):
                for axis, source, source_axis in self._trims.get(position, ()):
                    length = request.inputs[source].shape[source_axis]  # type: ignore[union-attr]
                    if length != outputs[index].shape[axis]:
                        trimmed = outputs[index][(slice(None),) * axis + (slice(length),)]
                        outputs[index] = np.ascontiguousarray(trimmed)


def _trimmed_axes(signature: Signature, padded: PaddedAxis) -> Iterator[tuple[int, int]]:
    name = axis_name(signature.input[padded.input], padded.axis)
    for position, output in enumerate(signature.outputs):
        if padded.outputs is not None:
            if output.name in padded.outputs:
                yield position, padded.outputs[output.name] + 1
            continue
        for axis in range(len(output.shape) - 1):
            if name and axis_name(output, axis) == name:
                yield position, axis + 1


def typed_fill(spec: TensorSpec, value: float) -> Any:
    """Return the fill value of an input, in its own datatype.

    Raises: ValueError if the datatype cannot hold it.
    """
    if spec.datatype == "BYTES":
        if value:
            raise ValueError("BYTES can only be padded with empty strings")
        return b""
    if spec.datatype == "BF16":
        return np.array(value, np.float32).view(np.uint32).item() >> 16
    dtype = spec.type.dtype
    if dtype.kind in "iub":
        low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype.str).min, np.iinfo(dtype.str).max)
        if value % 1 or not low <= value <= high:
            raise ValueError(f"{spec.datatype} cannot represent {value:g}")
        return int(value)
    return value
