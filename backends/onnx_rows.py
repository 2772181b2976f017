"""Free rows: an ONNX model whose graph fixes the first axis of every tensor to 1, with that axis made free.

Called by `onnx.py` for the option FREE_ROWS. Whether the answers stay the same is for the caller to find out: a graph
may have the 1 in its nodes as well (batching/freeing.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from .errors import Code, InferError

ROWS = "penstock_rows"
"""What the axis is named."""
_FIELD = descriptor_pb2.FieldDescriptorProto
_MESSAGES: Mapping[str, tuple[tuple[str, int, str], ...]] = {
    "Model": (("graph", 7, "Graph"),),
    "Graph": (("initializer", 5, "*Tensor"), ("input", 11, "*Value"), ("output", 12, "*Value"), ("seen", 13, "*Value")),
    "Tensor": (("name", 8, "string"),),
    "Value": (("name", 1, "string"), ("type", 2, "Type")),
    "Type": (("tensor", 1, "TensorType"),),
    "TensorType": (("shape", 2, "Shape"),),
    "Shape": (("dim", 1, "*Dim"),),
    "Dim": (("value", 1, "int64"), ("param", 2, "string")),
}
"""What is read of a ModelProto; all else is kept as it is. Source: onnx.proto of the ONNX IR specification."""


def with_free_rows(model: bytes) -> tuple[bytes, frozenset[str]]:
    """Free the first axis of every input and output that has it fixed to 1.

    Returns: the model, and the names of those tensors.
    Raises: InferError (INVALID) where that cannot be: an axis is missing or fixed to more, or none is fixed.
    """
    made = _model_class()()
    try:
        made.ParseFromString(model)
    except DecodeError as error:
        raise InferError(Code.INVALID, f"not an ONNX model: {error}") from error
    weights = {tensor.name for tensor in made.graph.initializer}
    values = [value for value in made.graph.input if value.name not in weights]
    freed = frozenset(_freed([*values, *made.graph.output]))
    if not freed:
        raise InferError(Code.INVALID, "no tensor has its first axis fixed to 1")
    made.graph.ClearField("seen")  # shapes inside the graph, that are no longer true, and that nobody needs
    return made.SerializeToString(), freed


def _freed(values: Iterable[Any]) -> Iterable[str]:
    for value in values:
        if not value.type.HasField("tensor"):
            continue  # a sequence says nothing of its length
        dims = value.type.tensor.shape.dim
        first = dims[0].value if dims else 0
        if not dims or first > 1:
            raise InferError(Code.INVALID, f"'{value.name}' has no first axis of length 1")
        if first == 1:
            dims[0].param = ROWS
            yield value.name


@cache
def _model_class() -> Any:
    """Make the message class, in a pool of its own. `value` and `param` are one choice, as in the original."""
    file = descriptor_pb2.FileDescriptorProto(name="penstock_rows.proto", package="penstock.rows", syntax="proto2")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        if name == "Dim":
            message.oneof_decl.add(name="choice")
        for field, number, kind in fields:
            _add(message, field, number, kind)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("penstock.rows.Model"))


def _add(message: Any, name: str, number: int, kind: str) -> None:
    label = _FIELD.LABEL_REPEATED if kind.startswith("*") else _FIELD.LABEL_OPTIONAL
    added = message.field.add(name=name, number=number, label=label)
    kind = kind.removeprefix("*")
    scalar = {"string": _FIELD.TYPE_STRING, "int64": _FIELD.TYPE_INT64}.get(kind)
    if scalar is None:
        added.type, added.type_name = _FIELD.TYPE_MESSAGE, f".penstock.rows.{kind}"
    else:
        added.type = scalar
    if message.name == "Dim":
        added.oneof_index = 0
