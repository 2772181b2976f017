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
from penstock.server.repository.findings import MistakeError, read_text, resolve_inside

from .identity import TENSORFLOW
from .parse_context import ParseContext, enum_name

HONOURED = (
    "input.name", "input.data_type", "input.dims", "input.optional", "input.reshape", "input.is_shape_tensor",
    "input.allow_ragged_batch", "output.name", "output.data_type", "output.dims", "output.reshape",
    "output.label_filename", "batch_input", "batch_output",
)  # fmt: skip
REFUSED = ("input.is_non_linear_format_io", "output.is_shape_tensor", "output.is_non_linear_format_io")
DOCUMENTATION = ("input.format",)


def read(context: ParseContext) -> None:
    """Read the fields of this module."""
    for kind, tensors in (("input", context.config.input), ("output", context.config.output)):
        specs = [spec for tensor in tensors if (spec := _read_tensor(context, kind, tensor))]
        duplicates = [name for name, count in Counter(spec.name for spec in specs).items() if count > 1]
        for name in sorted(duplicates):
            context.add_mistake(kind, f"{kind} '{name}' is declared more than once")
        if specs:
            context.set_value(f"{kind}s", tuple(specs), kind)
    if context.config.HasField("ensemble_scheduling"):
        _check_ensemble(context)
    for field, kinds in (("batch_input", BATCH_INPUTS), ("batch_output", (SCATTER,))):
        batch_tensors = [
            each
            for declared in getattr(context.config, field)
            for each in _read_batch_tensors(context, field, declared, kinds)
        ]
        if batch_tensors:
            context.set_value(f"{field}s", tuple(batch_tensors), field)
    labels = {output.name: output.label_filename for output in context.config.output if output.label_filename}
    if labels:
        context.set_value(
            "labels", {name: _read_labels(context, file) for name, file in labels.items()}, "output.label_filename"
        )


def _check_ensemble(context: ParseContext) -> None:
    """Reject what only applies to a model that runs, since an ensemble passes requests to its steps unchanged."""
    config = context.config
    set_fields = {"input.allow_ragged_batch": any(tensor.allow_ragged_batch for tensor in config.input)}
    set_fields |= {field: bool(getattr(config, field)) for field in ("batch_input", "batch_output")}
    for field in (field for field, is_set in set_fields.items() if is_set):
        context.add_mistake(field, f"ensemble '{context.name}' cannot have {field}: set it on its models")


def _read_tensor(context: ParseContext, kind: str, tensor: Any) -> TensorSpec | None:
    if not tensor.name:
        context.add_mistake(f"{kind}.name", f"model {kind} must specify 'name' for {context.name}")
        return None
    datatype = BY_CONFIG_NAME.get(enum_name(tensor, "data_type"))
    # a TensorFlow model's tensors are completed (batching/loading/autofill.py)
    completed = context.values.get("model.backend") == TENSORFLOW
    if datatype is None and (tensor.data_type or not completed):
        context.add_mistake(kind, f"model {kind} '{tensor.name}' must specify 'data_type' for {context.name}")
        return None
    if any(dim < 1 and dim != -1 for dim in tensor.dims):
        text = "dimension must be integer >= 1, or -1 to indicate a variable-size dimension"
        context.add_mistake(f"{kind}.dims", f"model {kind} '{tensor.name}' {text} for {context.name}")
    if kind == "input" and tensor.format and len(tensor.dims) != 3 and (tensor.dims or not completed):
        context.add_mistake("input.format", f"model input NHWC/NCHW require 3 dims for {context.name}")
    reshape = tuple(tensor.reshape.shape) if tensor.HasField("reshape") else None
    spec = TensorSpec(tensor.name, datatype.name if datatype else "", tuple(tensor.dims), reshape=reshape)
    if kind == "output":
        return spec
    ragged, is_shape = tensor.allow_ragged_batch, tensor.is_shape_tensor
    return replace(spec, optional=tensor.optional, ragged=ragged, is_shape=is_shape)


def _read_batch_tensors(context: ParseContext, field: str, declared: Any, kinds: tuple[str, ...]) -> list[BatchTensor]:
    """Read one batch_input or batch_output: one tensor for each target. Source: ValidateBatchIO of Triton's core."""
    title, kind = field.replace("_", " "), enum_name(declared, "kind")
    if kind not in kinds:
        context.add_mistake(f"{field}.kind", f"unknown {title} kind '{kind or declared.kind}'")
        return []
    if len(declared.source_input) != 1:
        text = f"{title} kind '{kind}' expects 1 source input, got {len(declared.source_input)}"
        context.add_mistake(f"{field}.source_input", text)
        return []
    datatype = ""
    if field == "batch_input":
        datatype = enum_name(declared, "data_type").removeprefix("TYPE_")
        if datatype not in ("INT32", "FP32"):
            context.add_mistake(f"{field}.data_type", "batch input data type must be TYPE_INT32 or TYPE_FP32")
            return []
    if not declared.target_name:
        context.add_mistake(f"{field}.target_name", f"{title} kind '{kind}' expects a target_name")
    return [BatchTensor(name, kind, datatype, tuple(declared.source_input)) for name in declared.target_name]


def _read_labels(context: ParseContext, name: str) -> tuple[str, ...]:
    path = resolve_inside(context.folder, name)
    if path is None:
        context.add_mistake("output.label_filename", f"'{name}' is outside the model's folder")
        return ()
    try:
        return tuple(line.rstrip() for line in read_text(path).splitlines())
    except MistakeError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            context.add_mistake("output.label_filename", f"'{name}' does not exist")
            return ()
        context.findings.append(error.finding)
        return ()
