"""Preparing: the sizes and shapes that a model will run, and preparing its Bindings for them.

Called by warmup.py, by opening.py for the loop's Binding, and by an Instance after reloading its model or when idle for
long.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from penstock.backends.backend import supports_preparation
from penstock.backends.errors import Code, InferError
from penstock.backends.signature import Signature
from penstock.batching.devices.memory import trim_heap
from penstock.batching.shapes.padding import bucket, tied_axes

from .dummy_inputs import RowShapes, dummy_fill
from .run_sizes import configured_sizes

if TYPE_CHECKING:
    from penstock.backends.backend import Array, Binding, TrimmableBinding
    from penstock.batching.model import Model
    from penstock.batching.spec import PaddedAxis

logger = logging.getLogger("penstock.batching")

IDLE_RELEASE_S = 10.0
"""After this long without a Batch, an Instance's Bindings release what they keep only for speed (`release_caches`)."""
MAX_SHAPES = 8
DEFAULT_LENGTHS = (1, 64)
"""The lengths of padded axes without configured buckets: the first bucket, and that of a common length."""


def prepare(model: Model, bindings: Sequence[Binding]) -> None:
    """Prepare Bindings for the sizes that they will run. Threads: that which will run them. Raises: InferError.

    Some runtimes record a run for each size, or choose how to run it. The largest size goes first: the others use part
    of its memory. If requests choose a shape that is not padded, nothing can be prepared.
    """
    preparable = [binding for binding in bindings if supports_preparation(binding)]
    if not preparable or not _has_known_shapes(model.signature, model.spec.padding):
        return
    for row_shapes in input_shapes(model.signature, model.spec.padding):
        for rows in reversed(batch_sizes(model)):
            for binding in preparable:
                recorder = _ShapeRecorder(binding)
                dummy_fill(model.spec, recorder, rows, row_shapes)()
                try:
                    binding.prepare(rows, recorder.shapes)
                except InferError:
                    raise
                except Exception as error:
                    text = (
                        f"model '{model.name}' could not be prepared for {rows} rows: {type(error).__name__}: {error}"
                    )
                    raise InferError(Code.INTERNAL, text) from error


def release_caches(model: Model, bindings: Iterable[TrimmableBinding]) -> None:
    """Release what Bindings and the C library keep only for speed. Threads: that which runs them."""
    for binding in bindings:
        try:
            binding.trim_memory()
        except Exception as error:  # noqa: BLE001 - if something is wrong there, the next run finds it
            logger.warning("model %s: the memory that its device caches could not be released: %s", model.name, error)
    trim_heap()


class _ShapeRecorder:
    """A Binding's buffers; it records the shapes that they are acquired with."""

    def __init__(self, binding: Binding) -> None:
        self.shapes: Sequence[tuple[int, ...] | None] = ()
        self._binding = binding

    def acquire_buffers(self, rows: int, shapes: Sequence[tuple[int, ...] | None]) -> list[Array | None]:
        self.shapes = shapes
        return self._binding.acquire_buffers(rows, shapes)


def batch_sizes(model: Model) -> list[int]:
    """Return the sizes to run: the allowed ones, if any, or powers of two and the maximum."""
    max_rows = model.max_rows
    if not model.signature.batched:
        return [1]
    configured = model.spec.policy.allowed_rows or configured_sizes(model.spec)
    allowed = [rows for rows in configured if rows <= max_rows]
    return allowed or [*(1 << power for power in range((max_rows - 1).bit_length())), max_rows]


def input_shapes(signature: Signature, padding: tuple[PaddedAxis, ...]) -> list[RowShapes]:
    """Return the distinct shapes to run: with all padded axes at their smallest, largest, then in between."""
    first = 1 if signature.batched else 0
    lengths = [padded.buckets or tuple(bucket(length, ()) for length in DEFAULT_LENGTHS) for padded in padding]
    max_count = max(map(len, lengths), default=1)
    all_shapes: list[RowShapes] = []
    for step in dict.fromkeys((0, max_count - 1, *range(max_count))):
        row_shapes = [list(spec.shape_with(1)[first:]) for spec in signature.inputs]
        for padded, buckets in zip(padding, lengths, strict=True):
            length = buckets[min(step, len(buckets) - 1)]
            for position, axis in _axes(signature, padded):
                row_shapes[position][axis] = length
        all_shapes.append([tuple(row_shape) for row_shape in row_shapes])
    return all_shapes[:MAX_SHAPES]


def _has_known_shapes(signature: Signature, padding: tuple[PaddedAxis, ...]) -> bool:
    """Whether the shapes that will run are among `input_shapes`: every free axis is padded."""
    first = 1 if signature.batched else 0
    padded = {axes for each in padding for axes in _axes(signature, each)}
    free = {
        (position, axis)
        for position, spec in enumerate(signature.inputs)
        for axis, dim in enumerate(spec.shape[first:])
        if dim < 0
    }
    return free <= padded


def _axes(signature: Signature, padded: PaddedAxis) -> Iterator[tuple[int, int]]:
    """Yield a padded axis and those that must be as long: the position of the input, and the axis after the rows."""
    positions = {spec.name: position for position, spec in enumerate(signature.inputs)}
    yield positions[padded.input], padded.axis
    for spec, axis in tied_axes(signature, padded):
        yield positions[spec.name], axis
