"""Ragged batches: requests whose shapes of one input differ share a run, in which that input is flat.

Defines what the model is told about such a batch, and how its flat outputs are divided. Used by derived.py and
forms.py.
Source: `allow_ragged_batch`, BatchInput and BatchOutput of model_config.proto; BackendInputCollector and
BackendOutputResponder of Triton's backend library.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.backends.errors import Code, InferError
from penstock.backends.signature import Signature, TensorSpec

from .reshape import Reshape

if TYPE_CHECKING:
    from penstock.backends.backend import Array
    from penstock.batching.request import InferRequest
    from penstock.batching.running.batch import Batch
    from penstock.batching.spec import BatchTensor, ModelSpec

RAGGED = (-1,)
"""A Key's entry for a ragged input, whatever its shape."""
SCATTER = "BATCH_SCATTER_WITH_INPUT_SHAPE"


class RaggedSource:
    """The input that a batch tensor describes or is divided by: its shape in each request.

    Shapes: as the model has them, which is after a reshape; rows in front.
    """

    def __init__(self, signature: Signature, name: str) -> None:
        self._position = [spec.name for spec in signature.inputs].index(name)
        spec = signature.inputs[self._position]
        self._reshape = None if spec.reshape is None else Reshape(spec.shape[1:], spec.reshape)

    def shape(self, request: InferRequest) -> tuple[int, ...]:
        """Return its shape in a request."""
        rows, *dims = request.inputs[self._position].shape  # type: ignore[union-attr]
        return (rows, *(dims if self._reshape is None else self._reshape.to_model(dims)))

    def counts(self, batch: Batch) -> list[int]:
        """Count its elements in each request."""
        return [request.inputs[self._position].size for request in batch.requests]  # type: ignore[union-attr]

    def item_shapes(self, batch: Batch) -> list[tuple[int, ...]]:
        """List the shape of each item, without rows: a request has one item per row."""
        shapes = [self.shape(request) for request in batch.requests]
        return [dims for rows, *dims in shapes for _ in range(rows)]  # type: ignore[misc]


Values = Callable[[RaggedSource, "Batch"], Any]

_VALUES: dict[str, Values] = {
    "BATCH_ELEMENT_COUNT": lambda source, batch: source.counts(batch),
    "BATCH_ACCUMULATED_ELEMENT_COUNT": lambda source, batch: np.cumsum(source.counts(batch)),
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": lambda source, batch: np.cumsum([0, *source.counts(batch)]),
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE": lambda source, batch: np.zeros(max(source.counts(batch))),
    "BATCH_ITEM_SHAPE": lambda source, batch: source.item_shapes(batch),
    "BATCH_ITEM_SHAPE_FLATTEN": lambda source, batch: source.item_shapes(batch),
}
KINDS = tuple(_VALUES)


class BatchInput:
    """An input that describes its source's elements in each request: a DerivedInput."""

    def __init__(self, batch_tensor: BatchTensor, spec: ModelSpec) -> None:
        signature, bound = spec.signature, spec.binding_signature
        if signature is None or bound is None:
            raise ValueError("the spec must be completed first")
        self.spec: TensorSpec = bound.input[batch_tensor.name]
        self._kind = batch_tensor.kind
        self._values = _VALUES[batch_tensor.kind]
        self._source = RaggedSource(signature, batch_tensor.sources[0])

    def shape(self, batch: Batch, ran_rows: int) -> tuple[int, ...]:
        """Return its shape for a batch."""
        requests = len(batch.requests)
        match self._kind:
            case "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO":
                return (requests + 1,)
            case "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE":
                return (max(self._source.counts(batch)),)
            case "BATCH_ITEM_SHAPE":
                return (batch.rows, len(self._source.shape(batch.requests[0])) - 1)
            case "BATCH_ITEM_SHAPE_FLATTEN":
                return (batch.rows * (len(self._source.shape(batch.requests[0])) - 1),)
        return (requests,)

    def fill(self, buffer: Array, batch: Batch) -> None:
        """Write it."""
        buffer[...] = np.asarray(self._values(self._source, batch)).reshape(buffer.shape)


class ScatterForm:
    """An output that is divided by the shape that its source has in each request.

    Shapes: `dims` are the clients', rows in front; its free ones are those of the source at the same places.
    """

    def __init__(self, name: str, dims: tuple[int, ...], source: RaggedSource) -> None:
        self._name = name
        self._dims = dims
        self._source = source

    def split(self, model: str, output: Any, batch: Batch) -> list[Any]:
        """Return each request's part. Ownership: views. Raises: InferError (INTERNAL)."""
        shapes = list(self._shapes(batch))
        size = sum(math.prod(shape) for shape in shapes)
        if getattr(output, "size", -1) != size:
            text = f"model '{model}': output '{self._name}' has {getattr(output, 'size', 'no')} elements"
            raise InferError(Code.INTERNAL, f"{text} for a batch whose inputs have {size}")
        flat, start, parts = output.reshape(-1), 0, []
        for shape in shapes:
            stop = start + math.prod(shape)
            parts.append(flat[start:stop].reshape(shape))
            start = stop
        return parts

    def _shapes(self, batch: Batch) -> Iterator[tuple[int, ...]]:
        for request in batch.requests:
            source = self._source.shape(request)
            yield tuple(source[axis] if dim < 0 else dim for axis, dim in enumerate(self._dims))
