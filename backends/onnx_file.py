"""The parts of an .onnx file that Penstock reads itself: names, shapes, and which other files hold weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

_FIELD = descriptor_pb2.FieldDescriptorProto
_MESSAGES: Mapping[str, tuple[tuple[str, int, str], ...]] = {
    "Model": (("graph", 7, "Graph"),),
    "Graph": (("initializer", 5, "*Tensor"), ("input", 11, "*Value"), ("output", 12, "*Value"), ("seen", 13, "*Value")),
    "Tensor": (("name", 8, "string"), ("external", 13, "*Entry")),
    "Entry": (("key", 1, "string"), ("value", 2, "string")),
    "Value": (("name", 1, "string"), ("type", 2, "Type")),
    "Type": (("tensor", 1, "TensorType"),),
    "TensorType": (("shape", 2, "Shape"),),
    "Shape": (("dim", 1, "*Dim"),),
    "Dim": (("value", 1, "int64"), ("param", 2, "string")),
}
"""The fields read of a ModelProto; everything else is kept as it is. Source: onnx.proto of the ONNX IR
specification."""

_POINTER = b"version https://git-lfs.github.com/spec/"
"""The beginning of a pointer file, which Git LFS leaves in a file's place. Source: docs/spec.md of git-lfs."""


def file_advice(path: Path) -> str:
    """Return what about a file may explain why it could not be loaded, to append to ONNX Runtime's text; else "".

    Its text has neither the size nor, if the file may not be read, the meaning of error 13.
    """
    try:
        with path.open("rb") as file:
            if file.read(len(_POINTER)) == _POINTER:
                return " The file is a Git LFS pointer: fetch the model with `git lfs pull`"
            size = file.seek(0, os.SEEK_END)
    except PermissionError:
        return f": {path}: permission denied for user id {os.geteuid()}"
    except OSError:
        return ""
    return (
        "" if _parse(path) is not None and size else f" {path} has {size} bytes: it is truncated or not an ONNX model"
    )


def weight_bytes(path: Path) -> int:
    """Return the size of a model's file and of the weight files beside it; 0 if it cannot be read."""
    try:
        size = path.stat().st_size
        siblings = [file for file in path.parent.iterdir() if file != path and file.is_file()]
        if siblings:
            size += sum(file.stat().st_size for file in _external_weights(path))
    except OSError:
        return 0
    return size


def row_shapes(path: Path) -> dict[str, tuple[int, ...]] | None:
    """Return the shapes, without rows, of inputs that have rows; None if another axis is free or unknown."""
    model = _parse(path)
    if model is None:
        return None
    weights = {tensor.name for tensor in model.graph.initializer}
    shapes = {}
    for value in model.graph.input:
        if value.name in weights:
            continue
        dims = value.type.tensor.shape.dim
        if not value.type.HasField("tensor") or any(dim.value <= 0 for dim in dims[1:]):
            return None
        if dims and dims[0].value <= 0:
            shapes[value.name] = tuple(dim.value for dim in dims[1:])
    return shapes


def _external_weights(path: Path) -> list[Path]:
    model = _parse(path)
    weights = () if model is None else model.graph.initializer
    names = {entry.value for tensor in weights for entry in tensor.external if entry.key == "location"}
    return [file for name in sorted(names) if (file := path.parent / name).is_file()]


def _parse(path: Path) -> Any:
    model = model_class()()
    try:
        model.ParseFromString(path.read_bytes())
    except (OSError, DecodeError):
        return None  # the loader reports why
    return model


@cache
def model_class() -> Any:
    """Make the class of a ModelProto, in its own pool; it keeps fields that it does not name.

    `value` and `param` are one choice, as in the original.
    """
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
    field = message.field.add(name=name, number=number, label=label)
    kind = kind.removeprefix("*")
    scalar = {"string": _FIELD.TYPE_STRING, "int64": _FIELD.TYPE_INT64}.get(kind)
    if scalar is None:
        field.type, field.type_name = _FIELD.TYPE_MESSAGE, f".penstock.rows.{kind}"
    else:
        field.type = scalar
    if message.name == "Dim":
        field.oneof_index = 0
