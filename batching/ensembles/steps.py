"""Steps: looks up the models of an ensemble and checks them against each other and the ensemble.

Pure: nothing runs here. Used by ensembles.py, and by code that reads configurations. Source of rules and texts: Triton
core, ensemble_utils.cc, model_config_utils.cc (ValidateEnsembleSchedulingConfig), CheckNode and, for labels,
model_lifecycle.cc.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.backends.errors import Code, InferError
from penstock.batching.scheduling.request_checks import format_shape

from .course import ADD_ROWS, AS_IS, DROP_ROWS, LinkedStep, Links

if TYPE_CHECKING:
    from penstock.backends.signature import Signature, TensorSpec
    from penstock.batching.model import Model
    from penstock.batching.spec import ModelSpec, Step

FindModel = Callable[[str, str], "Model"]
"""Finds a served version, "" for the latest. Raises: InferError."""


def check_dataflow(name: str, inputs: Iterable[str], outputs: Iterable[str], steps: Sequence[Step]) -> None:
    """Check that each tensor of an ensemble is made once, can be made, and is used. Raises: InferError (INVALID)."""
    makers = _makers(name, steps)
    used = {tensor for step in steps for tensor in step.inputs.values()}
    available = set(inputs)
    for tensor in sorted(available):
        if tensor in makers:
            raise _invalid(f"ensemble input '{tensor}' for ensemble '{name}' is also written by step {makers[tensor]}")
        if tensor not in used:
            raise _invalid(f"ensemble input '{tensor}' for ensemble '{name}' is not used")
    remaining = list(steps)
    while ready := [step for step in remaining if available.issuperset(step.inputs.values())]:
        remaining = [step for step in remaining if step not in ready]
        available.update(tensor for step in ready for tensor in step.outputs.values())
    output_names = set(outputs)
    for tensor in sorted(output_names):
        if tensor not in makers and tensor not in used:
            raise _invalid(f"ensemble output '{tensor}' for ensemble '{name}' is not used")
        if tensor not in available:
            raise _invalid(
                f"output '{tensor}' for ensemble '{name}' is not written{_missing_text(tensor, remaining, available)}"
            )
    for tensor in sorted((set(makers) | used) - output_names):
        if tensor not in available or tensor not in used:
            raise _invalid(f"ensemble tensor '{tensor}' is unused in ensemble '{name}'")


def _missing_text(output: str, remaining: Iterable[Step], available: set[str]) -> str:
    """Say which missing tensor keeps the step that makes an output from running, if there is such a step."""
    producers = (step for step in remaining if output in step.outputs.values())
    missing = (tensor for step in producers for tensor in step.inputs.values() if tensor not in available)
    text = ": at least one of its depending tensors, '{}', is not connected"
    return next(map(text.format, missing), "")


def _makers(name: str, steps: Sequence[Step]) -> dict[str, int]:
    """Return the step that makes each tensor."""
    if not steps:
        raise _invalid(f"must specify 'step' for ensemble '{name}'")
    makers: dict[str, int] = {}
    for number, step in enumerate(steps):
        for field, value in (("model_name", step.model), ("input_map", step.inputs), ("output_map", step.outputs)):
            if not value:
                raise _invalid(f"must specify '{field}' in step {number} of ensemble '{name}'")
        for tensor in step.outputs.values():
            if tensor in makers:
                text = f"ensemble tensor '{tensor}' can appear in an output map only once"
                raise _invalid(f"{text} for ensemble '{name}' step {number}")
            makers[tensor] = number
    return makers


@dataclass(frozen=True, slots=True)
class EnsembleTensor:
    """What one model says about an ensemble tensor. Shapes: `shape` is complete, rows included if `batched`."""

    model: str
    datatype: str
    shape: tuple[int, ...]
    batched: bool

    @classmethod
    def from_spec(cls, model: str, spec: TensorSpec, signature: Signature) -> EnsembleTensor:
        """Make it from one side's Signature."""
        return cls(model, spec.type.config_name, spec.shape, signature.batched)

    @property
    def dims(self) -> tuple[int, ...]:
        """Its shape without rows."""
        return self.shape[1:] if self.batched else self.shape

    def check(self, other: EnsembleTensor, context: str) -> None:
        """Check that another side describes the same tensor. Raises: InferError (INVALID)."""
        if self.datatype != other.datatype:
            raise _invalid(
                _inconsistency(context, "data type", (self.datatype, self.model), (other.datatype, other.model))
            )
        if not _dims_match(self.dims, other.dims) and not _dims_match(self.shape, other.shape):
            shapes = (format_shape(self.shape), self.model), (format_shape(other.shape), other.model)
            raise _invalid(_inconsistency(context, "shape", *shapes))

    def row_mode_to(self, other: EnsembleTensor) -> int:
        """Return how it is passed to another side."""
        if self.batched == other.batched or len(self.shape) == len(other.shape):
            return AS_IS
        return ADD_ROWS if other.batched else DROP_ROWS


def _inconsistency(context: str, property_name: str, one: tuple[str, str], other: tuple[str, str]) -> str:
    inferred = f"{one[0]} is inferred from model {one[1]} while {other[0]} is inferred from model {other[1]}"
    return f"{context}: inconsistent {property_name}: {inferred}"


def _dims_match(dims: tuple[int, ...], others: tuple[int, ...]) -> bool:
    return len(dims) == len(others) and all(a == b or -1 in (a, b) for a, b in zip(dims, others, strict=True))


def link_steps(spec: ModelSpec, signature: Signature, find: FindModel) -> Links:
    """Look up an ensemble's models, and check that they fit each other and the ensemble. Raises: InferError."""
    if spec.ensemble is None:
        raise ValueError(f"'{spec.name}' is not an ensemble")
    steps = spec.ensemble.steps
    check_dataflow(spec.name, signature.input, signature.output, steps)
    produced = {each.name: EnsembleTensor.from_spec(spec.name, each, signature) for each in signature.inputs}
    outputs = {each.name: EnsembleTensor.from_spec(spec.name, each, signature) for each in signature.outputs}
    declared = {**outputs, **produced}
    models = [_find_model(spec.name, step, find) for step in steps]
    _check_cycle(spec.name, models, find)
    for step, model in zip(steps, models, strict=True):
        _check_model(spec, step, model)
        _check_tensors(f"in ensemble {spec.name}", step, model, declared)
    for step, model in zip(steps, models, strict=True):
        for name, tensor in step.outputs.items():
            produced[tensor] = EnsembleTensor.from_spec(step.model, model.signature.output[name], model.signature)
    optional = {each.name for each in signature.inputs if each.optional}
    linked = tuple(
        _link_step(spec.name, step, model, produced, optional) for step, model in zip(steps, models, strict=True)
    )
    links = Links(spec, signature, linked, {name: produced[name].row_mode_to(end) for name, end in outputs.items()})
    links.streaming_sources()
    return links


def labels_of(links: Links) -> dict[str, tuple[str, ...]]:
    """Return the labels of an ensemble's outputs: its own, or else those of the model that makes the tensor."""
    labels = {
        tensor: linked.model.spec.labels.get(linked.model.signature.outputs[position].name, ())
        for linked in links.steps
        for position, tensor in linked.outputs
    }
    return {name: labels[name] for name in links.signature.output if labels.get(name)} | dict(links.spec.labels)


def _find_model(ensemble: str, step: Step, find: FindModel) -> Model:
    reason = "which has no loaded version"
    with suppress(InferError):
        return find(step.model, step.version)
    if step.version:
        with suppress(InferError):
            find(step.model, "")
            reason = f"whose required version {step.version} is not loaded"
    raise InferError(Code.NOT_READY, f"ensemble '{ensemble}' depends on '{step.model}' {reason}")


def _check_cycle(name: str, models: Iterable[Model], find: FindModel) -> None:
    """Check that an ensemble is not part of any of its steps, at any depth."""
    visited, pending = set[str](), list(models)
    while pending:
        spec = pending.pop().spec
        for step in spec.ensemble.steps if spec.ensemble is not None else ():
            if step.model == name:
                raise _invalid(f"circular dependency between ensembles: {name} -> ... -> {spec.name} -> {name}")
            if step.model not in visited:
                visited.add(step.model)
                with suppress(InferError):
                    pending.append(find(step.model, step.version))


def _check_model(spec: ModelSpec, step: Step, model: Model) -> None:
    """Check everything but tensors. A model without rows may be a step of a batched ensemble, as in Triton."""
    max_rows, step_max_rows = spec.policy.max_batch_rows or 0, model.spec.policy.max_batch_rows or 0
    if step_max_rows and step_max_rows < max_rows:
        text = f"ensemble {spec.name} allows maximum batch size {max_rows}, but it contains model {step.model}"
        raise _invalid(f"{text} which only allows maximum batch size to be {step_max_rows}")
    if model.spec.hooks is not None and model.spec.hooks.has_file:
        text = f"in ensemble {spec.name}, model {step.model} has hooks, which run around whole calls and not in a step"
        raise InferError(Code.UNSUPPORTED, f"{text}: give them to the ensemble, or take them from the model")
    if spec.cached and model.spec.decoupled:
        text = f"Response Cache does not currently support ensemble {spec.name}: step {step.model} is decoupled"
        raise InferError(Code.UNSUPPORTED, text)
    if spec.hooks is not None and spec.hooks.has_file and model.spec.decoupled:
        text = f"ensemble {spec.name} cannot have hooks: its step {step.model} is decoupled"
        raise InferError(Code.UNSUPPORTED, text)
    if spec.cached and model.spec.sequence is not None:
        text = f"Response Cache does not currently support ensemble {spec.name}: step {step.model} has sequences"
        raise InferError(Code.UNSUPPORTED, text)


def _check_tensors(context: str, step: Step, model: Model, declared: dict[str, EnsembleTensor]) -> None:
    """Compare the tensors of a step's model with those already in `declared`, and add new ones."""
    signature = model.signature
    for name, tensor in step.inputs.items():
        if name not in signature.input:
            text = f"{context}, ensemble tensor {tensor} is mapping to non-existing input {name} in model {step.model}"
            raise _invalid(text)
    for name, tensor in step.outputs.items():
        output = signature.output.get(name)
        if output is None or not output.is_tensor:
            text = (
                f"{context}, ensemble tensor {tensor} is mapped from non-existing output {name} in model {step.model}"
            )
            raise _invalid(text)
    for input_spec in signature.inputs:
        if input_spec.name not in step.inputs and not input_spec.optional:
            text = f"{context}, input {input_spec.name} in model {step.model} is not mapped to any ensemble tensors"
            raise _invalid(text)
    sides = [(tensor, signature.input[name]) for name, tensor in sorted(step.inputs.items())]
    sides += [(tensor, signature.output[name]) for name, tensor in sorted(step.outputs.items())]
    for tensor, spec in sides:
        side = EnsembleTensor.from_spec(step.model, spec, signature)
        declared.setdefault(tensor, side).check(side, f"{context}, ensemble tensor {tensor}")


def _link_step(
    ensemble: str, step: Step, model: Model, produced: Mapping[str, EnsembleTensor], optional: set[str]
) -> LinkedStep:
    signature = model.signature
    inputs: list[str | None] = []
    row_modes: list[int] = []
    for input_spec in signature.inputs:
        tensor = step.inputs.get(input_spec.name)
        inputs.append(tensor)
        if tensor is None:
            row_modes.append(AS_IS)
            continue
        if tensor in optional and not input_spec.optional:
            text = f"in ensemble {ensemble}, input {input_spec.name} in model {step.model} is not optional"
            raise _invalid(f"{text}, but ensemble input {tensor} is")
        side = EnsembleTensor.from_spec(step.model, input_spec, signature)
        produced[tensor].check(side, f"in ensemble {ensemble}, ensemble tensor {tensor}")
        row_modes.append(produced[tensor].row_mode_to(side))
    positions = {output.name: position for position, output in enumerate(signature.outputs)}
    outputs = tuple((positions[name], tensor) for name, tensor in step.outputs.items())
    return LinkedStep(model, tuple(inputs), tuple(row_modes), outputs)


def _invalid(text: str) -> InferError:
    return InferError(Code.INVALID, text)
