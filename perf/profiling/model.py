"""The model under load, as a v2 server describes it; what a configuration means is as perf_analyzer has it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

NOT_TOLD = -1
"""A `max_batch_size` that nobody has told: rows there are, and any number of them."""


class DescriptionError(Exception):
    """What a server says of a model does not fit together; one line."""


class Describer(Protocol):
    """What is asked of a Control here. Raises: ControlError."""

    def metadata(self, model: str, version: str) -> dict[str, Any]:
        """Give a model's metadata."""
        ...

    def config(self, model: str, version: str) -> dict[str, Any]:
        """Give a model's configuration; empty where the server has no such extension."""
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
class Described:
    """A model's metadata and configuration. `max_batch_size` 0: it has no batch dimension; NOT_TOLD: no limit is known.

    `composing`: names and versions of an ensemble's models, all the way down. `version`: empty, the server's choice.
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
        """Whether a request's tensors begin with rows, shape tensors apart."""
        return self.max_batch_size != 0


def described(
    control: Describer,
    model: str,
    version: str = "",
    bls: Iterable[tuple[str, str]] = (),
    inputs: Iterable[Mapping[str, Any]] = (),
) -> Described:
    """Ask for a model, and for what it is composed of; `bls` are names and versions of what it calls by itself.

    `inputs`: as they would stand in its metadata, where that names none. Raises: ControlError; DescriptionError.
    """
    metadata, config = control.metadata(model, version), control.config(model, version)
    if given := list(inputs):
        if metadata.get("inputs"):
            raise DescriptionError(f"--input: the server names the inputs of model '{model}' itself")
        metadata = {**metadata, "inputs": given}
    taken, outputs = ([_Given.read(model, each) for each in metadata.get(key) or []] for key in ("inputs", "outputs"))
    rows = _most_rows(config, taken)
    below = _Composing(control)
    below.enter(config)
    for name, its_version in bls:
        below.add(name, its_version)
    return Described(
        name=model,
        version=version,
        platform=str(metadata.get("platform") or config.get("platform") or ""),
        inputs=_tensors(model, "input", taken, config, rows),
        outputs=_tensors(model, "output", outputs, config, rows),
        max_batch_size=rows,
        sequences=_has(config, "sequence_batching") or (_has(config, "ensemble_scheduling") and below.sequences),
        decoupled=bool((config.get("model_transaction_policy") or {}).get("decoupled")),
        dynamic_batching=_has(config, "dynamic_batching"),
        response_cache=_cached(config) or below.cached,
        composing=tuple(below.found),
        config=config,
    )


@dataclass(frozen=True, slots=True)
class _Given:
    """A tensor as metadata has it, its rows not yet taken off."""

    name: str
    datatype: str
    shape: tuple[int, ...]

    @staticmethod
    def read(model: str, entry: dict[str, Any]) -> _Given:
        try:
            return _Given(str(entry["name"]), str(entry["datatype"]), tuple(int(dim) for dim in entry["shape"]))
        except (KeyError, TypeError, ValueError) as error:
            raise DescriptionError(
                f"model '{model}': its metadata has a tensor that cannot be read: {entry}"
            ) from error


class _Composing:
    """What an ensemble is made of, found step by step."""

    def __init__(self, control: Describer) -> None:
        self._control = control
        self.found: dict[tuple[str, str], None] = {}
        self.sequences = False
        self.cached = False

    def enter(self, config: dict[str, Any]) -> None:
        """Add what a configuration composes."""
        for step in (config.get("ensemble_scheduling") or {}).get("step") or []:
            version = int(step.get("model_version", -1))
            self.add(str(step["model_name"]), "" if version == -1 else str(version))

    def add(self, name: str, version: str) -> None:
        """Add a model and what it is composed of itself."""
        if (name, version) in self.found:
            return
        self.found[name, version] = None
        config = self._control.config(name, version)
        self.sequences |= _has(config, "sequence_batching")
        self.cached |= _cached(config)
        self.enter(config)


def _has(config: dict[str, Any], member: str) -> bool:
    # an empty object counts, and null does not: it is how some servers write that there is none
    return config.get(member) is not None


def _cached(config: dict[str, Any]) -> bool:
    return bool((config.get("response_cache") or {}).get("enable"))


def _most_rows(config: dict[str, Any], inputs: list[_Given]) -> int:
    if config:
        return int(config.get("max_batch_size") or 0)
    return NOT_TOLD if inputs and all(each.shape[:1] == (-1,) for each in inputs) else 0


def _tensors(model: str, kind: str, given: list[_Given], config: dict[str, Any], rows: int) -> tuple[Tensor, ...]:
    configured = {str(entry.get("name")): entry for entry in config.get(kind) or []}
    if unknown := sorted(configured.keys() - {each.name for each in given}):
        raise DescriptionError(f"model '{model}': no metadata found for {kind} tensor '{unknown[0]}'")
    made = []
    for each in given:
        entry = configured.get(each.name, {})
        shape_tensor = bool(entry.get("is_shape_tensor"))
        shape = each.shape[1:] if rows else each.shape
        made.append(Tensor(each.name, each.datatype, shape, bool(entry.get("optional")), shape_tensor))
    return tuple(made)
