"""The inputs and outputs: `input`, `output`, `batch_input`, `batch_output`."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from penstock.backends.datatypes import BY_CONFIG_NAME
from penstock.backends.signature import TensorSpec
from penstock.batching.shapes.ragged import KINDS as BATCH_INPUTS
from penstock.batching.shapes.ragged import SCATTER
from penstock.batching.spec import BatchTensor
from penstock.server.repository.findings import MistakeError, inside, read_text

from .identity import TENSORFLOW
from .notes import Notes, enum_name

HONOURED = (
    "input.name", "input.data_type", "input.dims", "input.optional", "input.reshape", "input.is_shape_tensor",
    "input.allow_ragged_batch", "output.name", "output.data_type", "output.dims", "output.reshape",
    "output.label_filename", "batch_input", "batch_output",
)  # fmt: skip
REFUSED = ("input.is_non_linear_format_io", "output.is_shape_tensor", "output.is_non_linear_format_io")
DOCUMENTATION = ("input.format",)


def read(notes: Notes) -> None:
    """Read the fields of this module."""
    for kind, tensors in (("input", notes.config.input), ("output", notes.config.output)):
        specs = [spec for tensor in tensors if (spec := _tensor(notes, kind, tensor))]
        twice = [name for name, times in Counter(spec.name for spec in specs).items() if times > 1]
        for name in sorted(twice):
            notes.mistake(kind, f"{kind} '{name}' is declared more than once")
        if specs:
            notes.say(f"{kind}s", tuple(specs), kind)
    if notes.config.HasField("ensemble_scheduling"):
        _check_ensemble(notes)
    for field, kinds in (("batch_input", BATCH_INPUTS), ("batch_output", (SCATTER,))):
        about = [each for said in getattr(notes.config, field) for each in _batch_tensors(notes, field, said, kinds)]
        if about:
            notes.say(f"{field}s", tuple(about), field)
    labels = {output.name: output.label_filename for output in notes.config.output if output.label_filename}
    if labels:
        notes.say("labels", {name: _labels(notes, file) for name, file in labels.items()}, "output.label_filename")


def _check_ensemble(notes: Notes) -> None:
    """Reject what only applies to a model that runs, since an ensemble passes requests to its steps unchanged."""
    config = notes.config
    given = {"input.allow_ragged_batch": any(tensor.allow_ragged_batch for tensor in config.input)}
    given |= {field: bool(getattr(config, field)) for field in ("batch_input", "batch_output")}
    for field in (field for field, there in given.items() if there):
        notes.mistake(field, f"ensemble '{notes.name}' cannot have {field}: set it on its models")


def _tensor(notes: Notes, kind: str, tensor: Any) -> TensorSpec | None:
    if not tensor.name:
        notes.mistake(f"{kind}.name", f"model {kind} must specify 'name' for {notes.name}")
        return None
    datatype = BY_CONFIG_NAME.get(enum_name(tensor, "data_type"))
    # a TensorFlow model's tensors are completed (batching/loading/autofill.py)
    completed = notes.values.get("model.backend") == TENSORFLOW
    if datatype is None and (tensor.data_type or not completed):
        notes.mistake(kind, f"model {kind} '{tensor.name}' must specify 'data_type' for {notes.name}")
        return None
    if any(dim < 1 and dim != -1 for dim in tensor.dims):
        text = "dimension must be integer >= 1, or -1 to indicate a variable-size dimension"
        notes.mistake(f"{kind}.dims", f"model {kind} '{tensor.name}' {text} for {notes.name}")
    if kind == "input" and tensor.format and len(tensor.dims) != 3 and (tensor.dims or not completed):
        notes.mistake("input.format", f"model input NHWC/NCHW require 3 dims for {notes.name}")
    reshape = tuple(tensor.reshape.shape) if tensor.HasField("reshape") else None
    spec = TensorSpec(tensor.name, datatype.name if datatype else "", tuple(tensor.dims), reshape=reshape)
    if kind == "output":
        return spec
    ragged, is_shape = tensor.allow_ragged_batch, tensor.is_shape_tensor
    return replace(spec, optional=tensor.optional, ragged=ragged, is_shape=is_shape)


def _batch_tensors(notes: Notes, field: str, said: Any, kinds: tuple[str, ...]) -> list[BatchTensor]:
    """Read one batch_input or batch_output: one tensor for each target. Source: ValidateBatchIO of Triton's core."""
    words, kind = field.replace("_", " "), enum_name(said, "kind")
    if kind not in kinds:
        notes.mistake(f"{field}.kind", f"unknown {words} kind '{kind or said.kind}'")
        return []
    if len(said.source_input) != 1:
        text = f"{words} kind '{kind}' expects 1 source input, got {len(said.source_input)}"
        notes.mistake(f"{field}.source_input", text)
        return []
    datatype = ""
    if field == "batch_input":
        datatype = enum_name(said, "data_type").removeprefix("TYPE_")
        if datatype not in ("INT32", "FP32"):
            notes.mistake(f"{field}.data_type", "batch input data type must be TYPE_INT32 or TYPE_FP32")
            return []
    if not said.target_name:
        notes.mistake(f"{field}.target_name", f"{words} kind '{kind}' expects a target_name")
    return [BatchTensor(name, kind, datatype, tuple(said.source_input)) for name in said.target_name]


def _labels(notes: Notes, name: str) -> tuple[str, ...]:
    path = inside(notes.folder, name)
    if path is None:
        notes.mistake("output.label_filename", f"'{name}' is outside the model's folder")
        return ()
    try:
        return tuple(line.rstrip() for line in read_text(path).splitlines())
    except MistakeError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            notes.mistake("output.label_filename", f"'{name}' does not exist")
            return ()
        notes.findings.append(error.finding)
        return ()
