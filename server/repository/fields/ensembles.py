"""Models made of models: `ensemble_scheduling`.

Source of the texts: Triton core, ValidateEnsembleSchedulingConfig in model_config_utils.cc.
"""

from __future__ import annotations

from typing import Any

from penstock.backends.errors import InferError
from penstock.batching.ensembles.steps import check_dataflow
from penstock.batching.spec import EnsembleSpec, Step

from .parse_context import ParseContext

HONOURED = (
    "ensemble_scheduling.step.model_name", "ensemble_scheduling.step.model_version",
    "ensemble_scheduling.step.input_map", "ensemble_scheduling.step.output_map",
    "ensemble_scheduling.max_inflight_requests",
)  # fmt: skip
REFUSED = ("ensemble_scheduling.step.model_namespace",)

PLATFORM = "ensemble"
_INAPPLICABLE = {
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
_APPLICABLE_KEYS = frozenset(
    ("inputs", "outputs", "labels", "ensemble", "cached", "batching.max_batch_size", "model.versions", "metrics.tags")
)


def read(context: ParseContext) -> None:
    """Read the fields of this module."""
    config, name = context.config, context.name
    field, is_ensemble = "ensemble_scheduling", config.HasField("ensemble_scheduling")
    if is_ensemble and config.platform != PLATFORM:
        context.add_mistake(
            field, f"ensemble scheduling cannot be set for model '{name}' whose platform is not {PLATFORM}"
        )
    elif is_ensemble:
        _read_ensemble(context, field)
    elif config.platform == PLATFORM:
        text = f"ensemble scheduling must be set for ensemble {name} whose platform is {PLATFORM}"
        context.add_mistake("platform", text)


def _read_ensemble(context: ParseContext, field: str) -> None:
    config, name = context.config, context.name
    _check_others(context)
    steps = tuple(_read_step(context, number, step) for number, step in enumerate(config.ensemble_scheduling.step))
    try:
        check_dataflow(name, [each.name for each in config.input], [each.name for each in config.output], steps)
    except InferError as error:
        context.add_mistake(field, error.message)
    context.set_value("ensemble", EnsembleSpec(steps, config.ensemble_scheduling.max_inflight_requests), field)


def _check_others(context: ParseContext) -> None:
    """Reject what an ensemble cannot have, since it runs nothing itself."""
    config, name = context.config, context.name
    for other, text in _INAPPLICABLE.items():
        present = config.DESCRIPTOR.fields_by_name[other].has_presence
        if config.HasField(other) if present else getattr(config, other):
            context.add_mistake(other, text.format(name))
    for kind, tensors in (("input", config.input), ("output", config.output)):
        for tensor in tensors:
            if tensor.is_shape_tensor:
                text = f"{kind} '{tensor.name}' of ensemble '{name}' cannot be a shape tensor"
                context.add_mistake(f"{kind}.is_shape_tensor", text)


def _read_step(context: ParseContext, number: int, step: Any) -> Step:
    version = step.model_version
    if version != -1 and version < 1:
        text = f"step {number} of ensemble '{context.name}': model_version must be -1, for the latest, or above 0"
        context.add_mistake("ensemble_scheduling.step.model_version", text)
    wanted_version = "" if version == -1 else str(version)
    return Step(step.model_name, wanted_version, dict(step.input_map), dict(step.output_map))


def is_inapplicable(name: str) -> bool:
    """Return whether a key of penstock.toml has no effect on an ensemble."""
    return name not in _APPLICABLE_KEYS and not name.startswith("hooks.")
