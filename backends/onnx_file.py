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
    "Tensor": (("name", 8, "string"), ("outside", 13, "*Entry")),
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


def remark(path: Path) -> str:
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
    return "" if _read(path) is not None and size else f" {path} has {size} bytes: it is truncated or not an ONNX model"


def weight_bytes(path: Path) -> int:
    """Return the size of a model's file and of the weight files beside it; 0 if it cannot be read."""
    try:
        size = path.stat().st_size
        beside = [each for each in path.parent.iterdir() if each != path and each.is_file()]
        if beside:
            size += sum(each.stat().st_size for each in _outside(path))
    except OSError:
        return 0
    return size


def row_shapes(path: Path) -> dict[str, tuple[int, ...]] | None:
    """Return the shapes, without rows, of inputs that have rows; None if another axis is free or unknown."""
    made = _read(path)
    if made is None:
        return None
    weights = {tensor.name for tensor in made.graph.initializer}
    shapes = {}
    for value in made.graph.input:
        if value.name in weights:
            continue
        dims = value.type.tensor.shape.dim
        if not value.type.HasField("tensor") or any(dim.value <= 0 for dim in dims[1:]):
            return None
        if dims and dims[0].value <= 0:
            shapes[value.name] = tuple(dim.value for dim in dims[1:])
    return shapes


def _outside(path: Path) -> list[Path]:
    made = _read(path)
    weights = () if made is None else made.graph.initializer
    names = {entry.value for tensor in weights for entry in tensor.outside if entry.key == "location"}
    return [each for name in sorted(names) if (each := path.parent / name).is_file()]


def _read(path: Path) -> Any:
    made = model_class()()
    try:
        made.ParseFromString(path.read_bytes())
    except (OSError, DecodeError):
        return None  # the loader reports why
    return made


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
    added = message.field.add(name=name, number=number, label=label)
    kind = kind.removeprefix("*")
    scalar = {"string": _FIELD.TYPE_STRING, "int64": _FIELD.TYPE_INT64}.get(kind)
    if scalar is None:
        added.type, added.type_name = _FIELD.TYPE_MESSAGE, f".penstock.rows.{kind}"
    else:
        added.type = scalar
    if message.name == "Dim":
        added.oneof_index = 0
