"""Settings around a run: `model_warmup`, `response_cache`, `model_transaction_policy`."""

from __future__ import annotations

from typing import Any

from penstock.backends.datatypes import BY_CONFIG_NAME
from penstock.batching.spec import Sample, SampleInput
from penstock.server.repository.findings import resolve_inside

from .parse_context import ParseContext, enum_name

HONOURED = ("model_warmup", "model_transaction_policy.decoupled", "response_cache.enable")

WARMUP_FOLDER = "warmup"
"""The folder beside a model's versions that holds the data of its samples."""
_MAX_ROWS = 1 << 20


def read(context: ParseContext) -> None:
    """Read the fields of this module."""
    config = context.config
    if config.model_transaction_policy.decoupled:
        context.set_value("decoupled", True, "model_transaction_policy.decoupled")
    if config.response_cache.enable:
        _read_cache(context)
    if config.model_warmup:
        # a sample without rows is not run, as in Triton
        samples = [_read_sample(context, sample) for sample in config.model_warmup if sample.batch_size]
        context.set_value("samples", tuple(samples), "model_warmup")


def _read_cache(context: ParseContext) -> None:
    """Read `response_cache`. Source of what cannot be cached: Triton's docs/user_guide/response_cache.md."""
    field, config = "response_cache.enable", context.config
    text = f"Response Cache does not currently support model {context.name} with"
    if config.model_transaction_policy.decoupled:
        context.add_mistake(field, f"{text} 'Decoupled' transaction policy. Please disable the response cache.")
    if config.HasField("sequence_batching"):
        context.add_mistake(field, f"{text} sequence batching scheduler. Please disable the response cache.")
    context.set_value("cached", True, field)


def _read_sample(context: ParseContext, sample: Any) -> Sample:
    if sample.batch_size > _MAX_ROWS:
        context.add_mistake("model_warmup.batch_size", f"warmup sample '{sample.name}' has {sample.batch_size} rows")
    inputs = {name: _read_input(context, name, declared) for name, declared in sorted(sample.inputs.items())}
    return Sample(sample.name, sample.batch_size, sample.count or 1, inputs)


def _read_input(context: ParseContext, name: str, declared: Any) -> SampleInput:
    field = "model_warmup.inputs"
    datatype = BY_CONFIG_NAME.get(enum_name(declared, "data_type"))
    if datatype is None:
        context.add_mistake(field, f"warmup setting expects input '{name}' to have data_type set")
    if any(dim < 1 for dim in declared.dims):
        text = "warmup setting expects all variable-size dimensions are specified for input"
        context.add_mistake(field, f"{text} '{name}'")
    return SampleInput(datatype.name if datatype else "", tuple(declared.dims), _read_source(context, name, declared))


def _read_source(context: ParseContext, name: str, declared: Any) -> Any:
    """Return "zero", "random", or the file that holds the values."""
    kind = declared.WhichOneof("input_data_type")
    if kind in {"zero_data", "random_data"}:  # whatever its value: in Triton `false` counts as `true`
        return str(kind).removesuffix("_data")
    if kind == "input_data_file" and declared.input_data_file:
        path = resolve_inside(context.folder / WARMUP_FOLDER, declared.input_data_file)
        if path is None:
            text = f"'{declared.input_data_file}' is outside the model's folder {WARMUP_FOLDER}"
            context.add_mistake("model_warmup.inputs.input_data_file", text)
        return path or "zero"
    context.add_mistake("model_warmup.inputs", f"warmup setting expects input '{name}' to have input_data_type set")
    return "zero"
