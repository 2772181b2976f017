"""Reshape: a tensor has one shape for clients and another for the model, with the same elements in the same order.

bound.py and tensor_checks.py use the rules, forms.py the shapes of a run. Nothing is copied: inputs are gathered into
the buffer viewed in the clients' shape, and scattered outputs are views.
Source: ModelTensorReshape of model_config.proto; ValidateIOShape of Triton's core for rules and texts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from penstock.backends.errors import Code, InferError
from penstock.backends.signature import TensorSpec

Dims = tuple[int, ...]


class Reshape:
    """The clients' dims and the model's, without rows: their free dims correspond in order."""

    def __init__(self, client_dims: Dims, model_dims: Dims) -> None:
        self._client_dims = client_dims
        self._model_dims = model_dims

    def to_model(self, dims: Sequence[int]) -> Dims:
        """Return the model's dims for a client's."""
        return _map_dims(self._client_dims, dims, self._model_dims)

    def to_client(self, dims: Sequence[int]) -> Dims:
        """Return the clients' dims for the model's. Raises: ValueError if the number of dims differs."""
        return _map_dims(self._model_dims, dims, self._client_dims)


def _map_dims(source_dims: Dims, dims: Sequence[int], target_dims: Dims) -> Dims:
    free = iter([dim for each, dim in zip(source_dims, dims, strict=True) if each < 0])
    return tuple(next(free) if dim < 0 else dim for dim in target_dims)


def check_reshape(spec: TensorSpec, kind: str, model: str, *, batched: bool) -> None:
    """Check a declared reshape against the declared dims.

    Shapes: `spec.shape` is without rows. Raises: InferError (INVALID).
    """
    dims, reshape = spec.shape, spec.reshape
    if reshape is None:
        return
    problem = ""
    if not reshape and not batched:
        problem = "cannot have empty reshape for non-batching model as scalar tensors are not supported"
    elif any(dim < 1 and dim != -1 for dim in reshape):
        problem = "reshape dimensions must be integer >= 1, or -1 to indicate a variable-size dimension"
    elif (-1 in dims) != (-1 in reshape):
        problem = "has different size for dims and reshape"
    elif dims.count(-1) != reshape.count(-1):
        problem = "has different number of variable-size dimensions for dims and reshape"
    elif _sizes(dims) != _sizes(reshape):
        problem = "has different size for dims and reshape"
    if problem:
        raise InferError(Code.INVALID, f"model {kind} '{spec.name}' {problem} for {model}")


def _sizes(dims: Dims) -> list[int]:
    """Count the elements before, between and after the free dims."""
    sizes: list[Any] = [1]
    for dim in dims:
        if dim < 0:
            sizes.append(1)
        else:
            sizes[-1] = math.prod((sizes[-1], dim))
    return sizes
