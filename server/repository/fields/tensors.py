"""The inputs and outputs: `input`, `output`, `batch_input`, `batch_output`."""

from __future__ import annotations

from typing import Any

from penstock.backends.datatypes import BY_CONFIG_NAME
from penstock.backends.signature import TensorSpec
from penstock.server.repository.findings import MistakeError, inside, read_text

from .notes import Notes, enum_name

HONOURED = (
    "input.name", "input.data_type", "input.dims", "input.optional", "output.name", "output.data_type", "output.dims",
    "output.label_filename",
)  # fmt: skip
REFUSED = (
    "input.reshape", "input.is_shape_tensor", "input.allow_ragged_batch", "input.is_non_linear_format_io",
    "output.reshape", "output.is_shape_tensor", "output.is_non_linear_format_io", "batch_input", "batch_output",
)  # fmt: skip
DOCUMENTATION = ("input.format",)


def read(notes: Notes) -> None:
    """Read them."""
    for kind, tensors in (("input", notes.config.input), ("output", notes.config.output)):
        specs = [spec for tensor in tensors if (spec := _tensor(notes, kind, tensor))]
        twice = {spec.name for spec in specs if sum(other.name == spec.name for other in specs) > 1}
        for name in sorted(twice):
            notes.mistake(kind, f"{kind} '{name}' is declared more than once")
        if specs:
            notes.say(f"{kind}s", tuple(specs), kind)
    labels = {output.name: output.label_filename for output in notes.config.output if output.label_filename}
    if labels:
        notes.say("labels", {name: _labels(notes, file) for name, file in labels.items()}, "output.label_filename")


def _tensor(notes: Notes, kind: str, tensor: Any) -> TensorSpec | None:
    if not tensor.name:
        notes.mistake(f"{kind}.name", f"model {kind} must specify 'name' for {notes.name}")
        return None
    datatype = BY_CONFIG_NAME.get(enum_name(tensor, "data_type"))
    if datatype is None:
        notes.mistake(kind, f"model {kind} '{tensor.name}' must specify 'data_type' for {notes.name}")
        return None
    if any(dim < 1 and dim != -1 for dim in tensor.dims):
        text = "dimension must be integer >= 1, or -1 to indicate a variable-size dimension"
        notes.mistake(f"{kind}.dims", f"model {kind} '{tensor.name}' {text} for {notes.name}")
    if kind == "input" and tensor.format and len(tensor.dims) != 3:
        notes.mistake("input.format", f"model input NHWC/NCHW require 3 dims for {notes.name}")
    return TensorSpec(tensor.name, datatype.name, tuple(tensor.dims), kind == "input" and tensor.optional)


def _labels(notes: Notes, name: str) -> tuple[str, ...]:
    path = inside(notes.folder, name)
    if path is None:
        notes.mistake("output.label_filename", f"'{name}' lies outside the model's folder")
        return ()
    try:
        return tuple(line.rstrip() for line in read_text(path).splitlines())
    except MistakeError as error:
        notes.findings.append(error.finding)
        return ()
