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
from penstock.batching.scheduling.admission import dims_text

from .course import ADD_ROWS, AS_IS, DROP_ROWS, Linked, Links

if TYPE_CHECKING:
    from penstock.backends.signature import Signature, TensorSpec
    from penstock.batching.model import Model
    from penstock.batching.spec import ModelSpec, Step

Find = Callable[[str, str], "Model"]
"""Finds a served version, "" for the latest. Raises: InferError."""


def check_flow(name: str, inputs: Iterable[str], outputs: Iterable[str], steps: Sequence[Step]) -> None:
    """Check that each tensor of an ensemble is made once, can be made, and is used. Raises: InferError (INVALID)."""
    made = _makers(name, steps)
    used = {tensor for step in steps for tensor in step.inputs.values()}
    there = set(inputs)
    for tensor in sorted(there):
        if tensor in made:
            raise _invalid(f"ensemble input '{tensor}' for ensemble '{name}' is also written by step {made[tensor]}")
        if tensor not in used:
            raise _invalid(f"ensemble input '{tensor}' for ensemble '{name}' is not used")
    left = list(steps)
    while ready := [step for step in left if there.issuperset(step.inputs.values())]:
        left = [step for step in left if step not in ready]
        there.update(tensor for step in ready for tensor in step.outputs.values())
    wanted = set(outputs)
    for tensor in sorted(wanted):
        if tensor not in made and tensor not in used:
            raise _invalid(f"ensemble output '{tensor}' for ensemble '{name}' is not used")
        if tensor not in there:
            raise _invalid(f"output '{tensor}' for ensemble '{name}' is not written{_lack(tensor, left, there)}")
    for tensor in sorted((set(made) | used) - wanted):
        if tensor not in there or tensor not in used:
            raise _invalid(f"ensemble tensor '{tensor}' is unused in ensemble '{name}'")


def _lack(output: str, left: Iterable[Step], there: set[str]) -> str:
    """Say which missing tensor keeps the step that makes an output from running, if there is such a step."""
    making = (step for step in left if output in step.outputs.values())
    lacks = (tensor for step in making for tensor in step.inputs.values() if tensor not in there)
    text = ": at least one of its depending tensors, '{}', is not connected"
    return next(map(text.format, lacks), "")


def _makers(name: str, steps: Sequence[Step]) -> dict[str, int]:
    """Return the step that makes each tensor."""
    if not steps:
        raise _invalid(f"must specify 'step' for ensemble '{name}'")
    made: dict[str, int] = {}
    for number, step in enumerate(steps):
        for what, said in (("model_name", step.model), ("input_map", step.inputs), ("output_map", step.outputs)):
            if not said:
                raise _invalid(f"must specify '{what}' in step {number} of ensemble '{name}'")
        for tensor in step.outputs.values():
            if tensor in made:
                text = f"ensemble tensor '{tensor}' can appear in an output map only once"
                raise _invalid(f"{text} for ensemble '{name}' step {number}")
            made[tensor] = number
    return made


@dataclass(frozen=True, slots=True)
class EnsembleTensor:
    """What one model says about an ensemble tensor. Shapes: `shape` is complete, rows included if `batched`."""

    of: str
    datatype: str
    shape: tuple[int, ...]
    batched: bool

    @classmethod
    def told(cls, of: str, spec: TensorSpec, signature: Signature) -> EnsembleTensor:
        """Make it from one side's Signature."""
        return cls(of, spec.type.config_name, spec.shape, signature.batched)

    @property
    def dims(self) -> tuple[int, ...]:
        """Its shape without rows."""
        return self.shape[1:] if self.batched else self.shape

    def check(self, other: EnsembleTensor, about: str) -> None:
        """Check that another side describes the same tensor. Raises: InferError (INVALID)."""
        if self.datatype != other.datatype:
            raise _invalid(_differs(about, "data type", (self.datatype, self.of), (other.datatype, other.of)))
        if not _agree(self.dims, other.dims) and not _agree(self.shape, other.shape):
            shapes = (dims_text(self.shape), self.of), (dims_text(other.shape), other.of)
            raise _invalid(_differs(about, "shape", *shapes))

    def way_to(self, other: EnsembleTensor) -> int:
        """Return how it is passed to another side."""
        if self.batched == other.batched or len(self.shape) == len(other.shape):
            return AS_IS
        return ADD_ROWS if other.batched else DROP_ROWS


def _differs(about: str, what: str, one: tuple[str, str], other: tuple[str, str]) -> str:
    inferred = f"{one[0]} is inferred from model {one[1]} while {other[0]} is inferred from model {other[1]}"
    return f"{about}: inconsistent {what}: {inferred}"


def _agree(dims: tuple[int, ...], others: tuple[int, ...]) -> bool:
    return len(dims) == len(others) and all(a == b or -1 in (a, b) for a, b in zip(dims, others, strict=True))


def link(spec: ModelSpec, signature: Signature, find: Find) -> Links:
    """Look up an ensemble's models, and check that they fit each other and the ensemble. Raises: InferError."""
    if spec.ensemble is None:
        raise ValueError(f"'{spec.name}' is not an ensemble")
    steps = spec.ensemble.steps
    check_flow(spec.name, signature.input, signature.output, steps)
    known = {each.name: EnsembleTensor.told(spec.name, each, signature) for each in signature.inputs}
    ends = {each.name: EnsembleTensor.told(spec.name, each, signature) for each in signature.outputs}
    told = {**ends, **known}
    models = [_found(spec.name, step, find) for step in steps]
    _check_circle(spec.name, models, find)
    for step, model in zip(steps, models, strict=True):
        _check_model(spec, step, model)
        _compare(f"in ensemble {spec.name}", step, model, told)
    for step, model in zip(steps, models, strict=True):
        for name, tensor in step.outputs.items():
            known[tensor] = EnsembleTensor.told(step.model, model.signature.output[name], model.signature)
    optional = {each.name for each in signature.inputs if each.optional}
    linked = tuple(_linked(spec.name, step, model, known, optional) for step, model in zip(steps, models, strict=True))
    links = Links(spec, signature, linked, {name: known[name].way_to(end) for name, end in ends.items()})
    links.sources()
    return links


def labels_of(links: Links) -> dict[str, tuple[str, ...]]:
    """Return the labels of an ensemble's outputs: its own, or else those of the model that makes the tensor."""
    made = {
        tensor: linked.model.spec.labels.get(linked.model.signature.outputs[position].name, ())
        for linked in links.steps
        for position, tensor in linked.outputs
    }
    return {name: made[name] for name in links.signature.output if made.get(name)} | dict(links.spec.labels)


def _found(ensemble: str, step: Step, find: Find) -> Model:
    lack = "which has no loaded version"
    with suppress(InferError):
        return find(step.model, step.version)
    if step.version:
        with suppress(InferError):
            find(step.model, "")
            lack = f"whose required version {step.version} is not loaded"
    raise InferError(Code.NOT_READY, f"ensemble '{ensemble}' depends on '{step.model}' {lack}")


def _check_circle(name: str, models: Iterable[Model], find: Find) -> None:
    """Check that an ensemble is not part of any of its steps, at any depth."""
    seen, look = set[str](), list(models)
    while look:
        spec = look.pop().spec
        for step in spec.ensemble.steps if spec.ensemble is not None else ():
            if step.model == name:
                raise _invalid(f"circular dependency between ensembles: {name} -> ... -> {spec.name} -> {name}")
            if step.model not in seen:
                seen.add(step.model)
                with suppress(InferError):
                    look.append(find(step.model, step.version))


def _check_model(spec: ModelSpec, step: Step, model: Model) -> None:
    """Check everything but tensors. A model without rows may be a step of a batched ensemble, as in Triton."""
    most, step_most = spec.policy.max_batch_rows or 0, model.spec.policy.max_batch_rows or 0
    if step_most and step_most < most:
        text = f"ensemble {spec.name} allows maximum batch size {most}, but it contains model {step.model}"
        raise _invalid(f"{text} which only allows maximum batch size to be {step_most}")
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


def _compare(about: str, step: Step, model: Model, told: dict[str, EnsembleTensor]) -> None:
    """Compare the tensors of a step's model with those already in `told`, and add new ones."""
    signature = model.signature
    for name, tensor in step.inputs.items():
        if name not in signature.input:
            text = f"{about}, ensemble tensor {tensor} is mapping to non-existing input {name} in model {step.model}"
            raise _invalid(text)
    for name, tensor in step.outputs.items():
        output = signature.output.get(name)
        if output is None or not output.is_tensor:
            text = f"{about}, ensemble tensor {tensor} is mapped from non-existing output {name} in model {step.model}"
            raise _invalid(text)
    for given in signature.inputs:
        if given.name not in step.inputs and not given.optional:
            text = f"{about}, input {given.name} in model {step.model} is not mapped to any ensemble tensors"
            raise _invalid(text)
    sides = [(tensor, signature.input[name]) for name, tensor in sorted(step.inputs.items())]
    sides += [(tensor, signature.output[name]) for name, tensor in sorted(step.outputs.items())]
    for tensor, spec in sides:
        side = EnsembleTensor.told(step.model, spec, signature)
        told.setdefault(tensor, side).check(side, f"{about}, ensemble tensor {tensor}")


def _linked(ensemble: str, step: Step, model: Model, known: Mapping[str, EnsembleTensor], optional: set[str]) -> Linked:
    signature = model.signature
    inputs: list[str | None] = []
    ways: list[int] = []
    for given in signature.inputs:
        tensor = step.inputs.get(given.name)
        inputs.append(tensor)
        if tensor is None:
            ways.append(AS_IS)
            continue
        if tensor in optional and not given.optional:
            text = (
                f"in ensemble {ensemble}, input {given.name} in model {step.model} is not optional, but ensemble input"
            )
            raise _invalid(f"{text} {tensor} is")
        side = EnsembleTensor.told(step.model, given, signature)
        known[tensor].check(side, f"in ensemble {ensemble}, ensemble tensor {tensor}")
        ways.append(known[tensor].way_to(side))
    positions = {output.name: position for position, output in enumerate(signature.outputs)}
    outputs = tuple((positions[name], tensor) for name, tensor in step.outputs.items())
    return Linked(model, tuple(inputs), tuple(ways), outputs)


def _invalid(text: str) -> InferError:
    return InferError(Code.INVALID, text)
