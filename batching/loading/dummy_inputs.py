"""Dummy inputs: what a run needs before there are requests: inputs of zeros, gathered as a batch would be.

Used by the modules that measure a model before it is ready: warmup.py and counting.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.backends.backend import Array, BufferSource
from penstock.backends.signature import TensorSpec
from penstock.batching.request import InferRequest, Key
from penstock.batching.running.batch import Batch
from penstock.batching.shapes.derived import zero
from penstock.batching.shapes.forms import forms_of
from penstock.batching.shapes.ragged import RAGGED

if TYPE_CHECKING:
    from penstock.batching.spec import ModelSpec

RowShapes = Sequence[tuple[int, ...]]
"""The shapes of all inputs that clients send, without rows."""


class _NoSink:
    """The sink of requests that nothing waits for."""

    def deliver(self, requests: Sequence[InferRequest]) -> None:
        raise ValueError("dummy inputs produce no answers")


def smallest_row_shapes(spec: ModelSpec) -> list[tuple[int, ...]]:
    """Return the tails of a completed spec with free axes taken as 1."""
    signature = spec.signature
    if signature is None:
        raise ValueError("the spec must be completed first")
    first = 1 if signature.batched else 0
    return [each.shape_with(1)[first:] for each in signature.inputs]


def dummy_key(spec: ModelSpec, row_shapes: RowShapes) -> Key:
    """Return the Key of requests with these tails. The values of a shape tensor are taken as 1."""
    signature = spec.signature
    if signature is None or not signature.batched:
        return tuple(row_shapes)
    return tuple(
        RAGGED if each.ragged else (1,) * row_shape[0] if each.is_shape else row_shape
        for each, row_shape in zip(signature.inputs, row_shapes, strict=True)
    )


def dummy_fill(spec: ModelSpec, binding: BufferSource, rows: int, row_shapes: RowShapes) -> Callable[[], None]:
    """Make a function that borrows a Binding's buffers for a batch of `rows` rows and fills them with zeros."""
    signature, forms = spec.signature, forms_of(spec)
    if signature is None:
        raise ValueError("the spec must be completed first")
    if forms is not None:
        gather, batch = forms.without_requests().gather, _batch(spec, rows, row_shapes)
        return lambda: gather(binding, batch, rows)
    shapes = [(rows, *row_shape) if signature.batched else row_shape for row_shape in row_shapes]
    inputs = [_zeros(each, shape) for each, shape in zip(signature.inputs, shapes, strict=True)]

    def fill() -> None:
        for buffer, array in zip(binding.acquire_buffers(rows, shapes), inputs, strict=True):
            if buffer is not None:
                np.copyto(buffer, array)

    return fill


def _batch(spec: ModelSpec, rows: int, row_shapes: RowShapes) -> Batch:
    """Make a batch of requests of one row each."""
    batched, specs = spec.signature.batched, spec.signature.inputs  # type: ignore[union-attr]
    key, sink, model = dummy_key(spec, row_shapes), _NoSink(), _no_model()
    shapes = [(1, *row_shape) if batched else row_shape for row_shape in row_shapes]
    inputs: list[Array | None] = [_zeros(each, shape) for each, shape in zip(specs, shapes, strict=True)]
    requests = [InferRequest(model, inputs, 1, key, (), sink) for _ in range(rows)]
    return Batch(requests, rows, key, 0)


def _no_model() -> Any:
    return None


def _zeros(spec: TensorSpec, shape: tuple[int, ...]) -> Array:
    zeros = np.empty(shape, spec.type.dtype)
    zeros[...] = zero(zeros)
    return zeros
