"""Models made of models: `ensemble_scheduling`.

Source of the texts: Triton core, ValidateEnsembleSchedulingConfig in model_config_utils.cc.
"""

from __future__ import annotations

from typing import Any

from penstock.backends.errors import InferError
from penstock.batching.ensembles.steps import check_dataflow
from penstock.batching.spec import EnsembleSpec, Step

from .notes import Notes

HONOURED = (
    "ensemble_scheduling.step.model_name", "ensemble_scheduling.step.model_version",
    "ensemble_scheduling.step.input_map", "ensemble_scheduling.step.output_map",
    "ensemble_scheduling.max_inflight_requests",
)  # fmt: skip
REFUSED = ("ensemble_scheduling.step.model_namespace",)

PLATFORM = "ensemble"
_NOT_ITS_OWN = {
    "instance_group": "instance group should not be specified for ensemble '{}'",
    "optimization": "optimization should not be specified for ensemble '{}'",
    "model_warmup": "model_warmup can not be specified for ensemble '{}'",
    "backend": "Ensemble model '{}' must have platform type 'ensemble' and empty backend type",
    "default_model_filename": "default_model_filename should not be specified for ensemble '{}'",
    "model_operations": "model_operations should not be specified for ensemble '{}'",
    "batch_input": "batch_input should not be specified for ensemble '{}'",
    "batch_output": "batch_output should not be specified for ensemble '{}'",
}
"""Fields that do not apply to a model that runs nothing itself. The first four are Triton's, which ignores the rest."""
_SAID = frozenset(
    ("inputs", "outputs", "labels", "ensemble", "cached", "batching.max_batch_size", "model.versions", "metrics.tags")
)


def read(notes: Notes) -> None:
    """Read the fields of this module."""
    config, name = notes.config, notes.name
    field, is_one = "ensemble_scheduling", config.HasField("ensemble_scheduling")
    if is_one and config.platform != PLATFORM:
        notes.mistake(field, f"ensemble scheduling cannot be set for model '{name}' whose platform is not {PLATFORM}")
    elif is_one:
        _read_ensemble(notes, field)
    elif config.platform == PLATFORM:
        text = f"ensemble scheduling must be set for ensemble {name} whose platform is {PLATFORM}"
        notes.mistake("platform", text)


def _read_ensemble(notes: Notes, field: str) -> None:
    config, name = notes.config, notes.name
    _check_others(notes)
    steps = tuple(_step(notes, number, step) for number, step in enumerate(config.ensemble_scheduling.step))
    try:
        check_dataflow(name, [each.name for each in config.input], [each.name for each in config.output], steps)
    except InferError as error:
        notes.mistake(field, error.message)
    notes.say("ensemble", EnsembleSpec(steps, config.ensemble_scheduling.max_inflight_requests), field)


def _check_others(notes: Notes) -> None:
    """Reject what an ensemble cannot have, since it runs nothing itself."""
    config, name = notes.config, notes.name
    for other, text in _NOT_ITS_OWN.items():
        present = config.DESCRIPTOR.fields_by_name[other].has_presence
        if config.HasField(other) if present else getattr(config, other):
            notes.mistake(other, text.format(name))
    for kind, tensors in (("input", config.input), ("output", config.output)):
        for tensor in tensors:
            if tensor.is_shape_tensor:
                text = f"{kind} '{tensor.name}' of ensemble '{name}' cannot be a shape tensor"
                notes.mistake(f"{kind}.is_shape_tensor", text)


def _step(notes: Notes, number: int, step: Any) -> Step:
    version = step.model_version
    if version != -1 and version < 1:
        text = f"step {number} of ensemble '{notes.name}': model_version must be -1, for the latest, or above 0"
        notes.mistake("ensemble_scheduling.step.model_version", text)
    said = "" if version == -1 else str(version)
    return Step(step.model_name, said, dict(step.input_map), dict(step.output_map))


def is_foreign(name: str) -> bool:
    """Return whether a key of penstock.toml has no effect on an ensemble."""
    return name not in _SAID and not name.startswith("hooks.")
