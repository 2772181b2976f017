"""The model under load, as a v2 server describes it. Configurations are interpreted as perf_analyzer does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

UNKNOWN_BATCH_SIZE = -1
"""The `max_batch_size` if it is unknown: requests have rows, and any number of them."""


class DescriptionError(Exception):
    """A server's description of a model is inconsistent. The text is one line."""


class Describer(Protocol):
    """The methods of a Control that are needed here. Raises: ControlError."""

    def metadata(self, model: str, version: str) -> dict[str, Any]:
        """Return a model's metadata."""
        ...

    def config(self, model: str, version: str) -> dict[str, Any]:
        """Return a model's configuration; empty if the server lacks the extension."""
        ...


@dataclass(frozen=True, slots=True)
class Tensor:
    """One input or output. `shape`: without the batch dimension, -1 where it is free."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    optional: bool = False
    shape_tensor: bool = False


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """A model's metadata and configuration. `max_batch_size` 0: no batch dimension; UNKNOWN_BATCH_SIZE: no limit known.

    `composing`: names and versions of an ensemble's models, at all levels. `version`: if empty, the server's choice.
    """

    name: str
    version: str
    platform: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    max_batch_size: int = 0
    sequences: bool = False
    decoupled: bool = False
    dynamic_batching: bool = False
    response_cache: bool = False
    composing: tuple[tuple[str, str], ...] = ()
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def batched(self) -> bool:
        """Whether the tensors of a request begin with rows, except for shape tensors."""
        return self.max_batch_size != 0


def describe_model(
    control: Describer,
    model: str,
    version: str = "",
    bls: Iterable[tuple[str, str]] = (),
    inputs: Iterable[Mapping[str, Any]] = (),
) -> ModelDescription:
    """Query a model and those it is composed of. `bls` are names and versions of the models that it calls itself.

    `inputs`: metadata entries for the inputs, if the model's metadata has none. Raises: ControlError; DescriptionError.
    """
    metadata, config = control.metadata(model, version), control.config(model, version)
    if declared_inputs := list(inputs):
        if metadata.get("inputs"):
            raise DescriptionError(f"--input: the server names the inputs of model '{model}' itself")
        metadata = {**metadata, "inputs": declared_inputs}
    reported_inputs, outputs = (
        [_ReportedTensor.read(model, each) for each in metadata.get(key) or []] for key in ("inputs", "outputs")
    )
    rows = _max_batch_size(config, reported_inputs)
    composed = _Composing(control)
    composed.enter(config)
    for name, its_version in bls:
        composed.add(name, its_version)
    return ModelDescription(
        name=model,
        version=version,
        platform=str(metadata.get("platform") or config.get("platform") or ""),
        inputs=_tensors(model, "input", reported_inputs, config, rows),
        outputs=_tensors(model, "output", outputs, config, rows),
        max_batch_size=rows,
        sequences=_has(config, "sequence_batching") or (_has(config, "ensemble_scheduling") and composed.sequences),
        decoupled=bool((config.get("model_transaction_policy") or {}).get("decoupled")),
        dynamic_batching=_has(config, "dynamic_batching"),
        response_cache=_cached(config) or composed.cached,
        composing=tuple(composed.found),
        config=config,
    )


@dataclass(frozen=True, slots=True)
class _ReportedTensor:
    """A tensor as in the metadata, including its batch dimension."""

    name: str
    datatype: str
    shape: tuple[int, ...]

    @staticmethod
    def read(model: str, entry: dict[str, Any]) -> _ReportedTensor:
        try:
            return _ReportedTensor(
                str(entry["name"]), str(entry["datatype"]), tuple(int(dim) for dim in entry["shape"])
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DescriptionError(
                f"model '{model}': its metadata has a tensor that cannot be read: {entry}"
            ) from error


class _Composing:
    """The models of an ensemble, collected recursively."""

    def __init__(self, control: Describer) -> None:
        self._control = control
        self.found: dict[tuple[str, str], None] = {}
        self.sequences = False
        self.cached = False

    def enter(self, config: dict[str, Any]) -> None:
        """Add the models that a configuration composes."""
        for step in (config.get("ensemble_scheduling") or {}).get("step") or []:
            version = int(step.get("model_version", -1))
            self.add(str(step["model_name"]), "" if version == -1 else str(version))

    def add(self, name: str, version: str) -> None:
        """Add a model and those that it is composed of."""
        if (name, version) in self.found:
            return
        self.found[name, version] = None
        config = self._control.config(name, version)
        self.sequences |= _has(config, "sequence_batching")
        self.cached |= _cached(config)
        self.enter(config)


def _has(config: dict[str, Any], member: str) -> bool:
    # an empty object counts; null does not, since some servers write it for "none"
    return config.get(member) is not None


def _cached(config: dict[str, Any]) -> bool:
    return bool((config.get("response_cache") or {}).get("enable"))


def _max_batch_size(config: dict[str, Any], inputs: list[_ReportedTensor]) -> int:
    if config:
        return int(config.get("max_batch_size") or 0)
    return UNKNOWN_BATCH_SIZE if inputs and all(each.shape[:1] == (-1,) for each in inputs) else 0


def _tensors(
    model: str, kind: str, reported: list[_ReportedTensor], config: dict[str, Any], rows: int
) -> tuple[Tensor, ...]:
    configured = {str(entry.get("name")): entry for entry in config.get(kind) or []}
    if unknown := sorted(configured.keys() - {each.name for each in reported}):
        raise DescriptionError(f"model '{model}': no metadata found for {kind} tensor '{unknown[0]}'")
    tensors = []
    for each in reported:
        entry = configured.get(each.name, {})
        shape_tensor = bool(entry.get("is_shape_tensor"))
        shape = each.shape[1:] if rows else each.shape
        tensors.append(Tensor(each.name, each.datatype, shape, bool(entry.get("optional")), shape_tensor))
    return tuple(tensors)
