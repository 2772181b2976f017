"""Free rows: frees the first axis of an ONNX model whose graph fixes it to 1 in every tensor.

Used by `onnx.py` for the option FREE_ROWS. The caller must find out whether the answers stay the same: a graph may have
the 1 in its nodes as well (batching/loading/freeing.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from google.protobuf.message import DecodeError

from .errors import Code, InferError
from .onnx_file import model_class

ROWS_AXIS = "penstock_rows"
"""The name of the freed axis."""


def with_free_rows(model: bytes) -> tuple[bytes, frozenset[str]]:
    """Free the first axis of every input and output that has it fixed to 1.

    Returns: the model, and the names of those tensors.
    Raises: InferError (INVALID) if that is impossible: an axis is missing or fixed to more, or none is fixed.
    """
    parsed = model_class()()
    try:
        parsed.ParseFromString(model)
    except DecodeError as error:
        raise InferError(Code.INVALID, f"not an ONNX model: {error}") from error
    weights = {tensor.name for tensor in parsed.graph.initializer}
    values = [value for value in parsed.graph.input if value.name not in weights]
    freed = frozenset(_free_first_axes([*values, *parsed.graph.output]))
    if not freed:
        raise InferError(Code.INVALID, "no tensor has a first axis fixed at 1")
    parsed.graph.ClearField("seen")  # shapes inside the graph, which are no longer true, and which nothing needs
    return parsed.SerializeToString(), freed


def _free_first_axes(values: Iterable[Any]) -> Iterable[str]:
    for value in values:
        if not value.type.HasField("tensor"):
            continue  # a sequence type has no length
        dims = value.type.tensor.shape.dim
        first = dims[0].value if dims else 0
        if not dims or first > 1:
            raise InferError(Code.INVALID, f"'{value.name}' has no first axis of length 1")
        if first == 1:
            dims[0].param = ROWS_AXIS
            yield value.name
