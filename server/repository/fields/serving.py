"""Settings around a run: `model_warmup`, `response_cache`, `model_transaction_policy`."""

from __future__ import annotations

from typing import Any

from penstock.backends.datatypes import BY_CONFIG_NAME
from penstock.batching.spec import Sample, SampleInput
from penstock.server.repository.findings import inside

from .notes import Notes, enum_name

HONOURED = ("model_warmup", "model_transaction_policy.decoupled", "response_cache.enable")

FILES = "warmup"
"""The folder beside a model's versions that holds the data of its samples."""
_MOST_ROWS = 1 << 20


def read(notes: Notes) -> None:
    """Read the fields of this module."""
    config = notes.config
    if config.model_transaction_policy.decoupled:
        notes.say("decoupled", True, "model_transaction_policy.decoupled")
    if config.response_cache.enable:
        _cache(notes)
    if config.model_warmup:
        # a sample without rows is not run, as in Triton
        samples = [_sample(notes, sample) for sample in config.model_warmup if sample.batch_size]
        notes.say("samples", tuple(samples), "model_warmup")


def _cache(notes: Notes) -> None:
    """Read `response_cache`. Source of what cannot be cached: Triton's docs/user_guide/response_cache.md."""
    field, config = "response_cache.enable", notes.config
    text = f"Response Cache does not currently support model {notes.name} with"
    if config.model_transaction_policy.decoupled:
        notes.mistake(field, f"{text} 'Decoupled' transaction policy. Please disable the response cache.")
    if config.HasField("sequence_batching"):
        notes.mistake(field, f"{text} sequence batching scheduler. Please disable the response cache.")
    notes.say("cached", True, field)


def _sample(notes: Notes, sample: Any) -> Sample:
    if sample.batch_size > _MOST_ROWS:
        notes.mistake("model_warmup.batch_size", f"warmup sample '{sample.name}' has {sample.batch_size} rows")
    inputs = {name: _input(notes, name, given) for name, given in sorted(sample.inputs.items())}
    return Sample(sample.name, sample.batch_size, sample.count or 1, inputs)


def _input(notes: Notes, name: str, given: Any) -> SampleInput:
    field = "model_warmup.inputs"
    datatype = BY_CONFIG_NAME.get(enum_name(given, "data_type"))
    if datatype is None:
        notes.mistake(field, f"warmup setting expects input '{name}' to have data_type set")
    if any(dim < 1 for dim in given.dims):
        text = "warmup setting expects all variable-size dimensions are specified for input"
        notes.mistake(field, f"{text} '{name}'")
    return SampleInput(datatype.name if datatype else "", tuple(given.dims), _source(notes, name, given))


def _source(notes: Notes, name: str, given: Any) -> Any:
    """Return "zero", "random", or the file that holds the values."""
    kind = given.WhichOneof("input_data_type")
    if kind in {"zero_data", "random_data"}:  # whatever its value: in Triton `false` counts as `true`
        return str(kind).removesuffix("_data")
    if kind == "input_data_file" and given.input_data_file:
        path = inside(notes.folder / FILES, given.input_data_file)
        if path is None:
            text = f"'{given.input_data_file}' is outside the model's folder {FILES}"
            notes.mistake("model_warmup.inputs.input_data_file", text)
        return path or "zero"
    notes.mistake("model_warmup.inputs", f"warmup setting expects input '{name}' to have input_data_type set")
    return "zero"
