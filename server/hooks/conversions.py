"""Conversions: how a model's hooks and their callers represent values, and what a client is told of a failure.

`native.py` has Penstock's own; dialects of other component formats have theirs in their folders. Made where hooks are
loaded: in the server for its replicas and for steps without a hook, and in a worker process for its replica.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from penstock.backends.backend import Array
from penstock.backends.errors import InferError
from penstock.backends.node import Node
from penstock.backends.signature import Signature

from .convert import to_tensors
from .loading import HookFunction, HookModule

if TYPE_CHECKING:
    from penstock.batching.model import Model

DIALECTS = {"": "penstock.server.hooks.native", "cortex": "penstock.server.cortex.conversions"}
"""The module of each dialect's `conversions`. It and its imports need only numpy and orjson."""

Converter = Callable[[Any, Mapping[str, Any]], Any]
"""Converts a value by the rules of the model, given the request's parameters."""


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What is known of a model where its hooks run.

    `inputs` and `outputs` are Nodes, or, for a dialect's hooks in the server, the runtime's `onnxruntime.NodeArg`;
    `runtime_metadata` is the Backend's, `settings` is `HookSpec.dialect_settings`.
    """

    signature: Signature
    inputs: Sequence[Any]
    outputs: Sequence[Any]
    runtime_metadata: Mapping[str, Any]
    settings: Mapping[str, Any]


class Conversions(Protocol):
    """The rules of one model. `parameters` are the request's own (hooks/runner.py), as passed to hooks.

    Threads: a replica's, and the event loop's if a model lacks the hook.
    """

    signatures: tuple[Any, Any]
    """The `signature` arguments of pre_inference and post_inference: owned by the replica, since user code may
    modify them."""

    def to_inputs(self, value: Any, parameters: Mapping[str, Any]) -> list[Array | None]:
        """Convert a sample, or the result of pre_inference, to the model's inputs, in order. Raises: InferError."""

    def to_prediction(self, outputs: Sequence[Any], parameters: Mapping[str, Any]) -> Any:
        """Convert the model's outputs, in order, to the argument of post_inference. Raises: InferError."""

    def encode_answer(self, result: Any, parameters: Mapping[str, Any]) -> bytes:
        """Convert the result of post_inference, or a prediction, to a `predict` answer's body. Raises: InferError."""

    def error_for(self, hook: str, error: BaseException) -> InferError | None:
        """Return the client's error for an exception of user code, even for InferError; None for the default."""


def make_conversions(dialect: str, description: ModelDescription) -> Conversions:
    """Make the Conversions of a model. Raises: InferError if the dialect cannot represent the model's inputs."""
    conversions: Conversions = importlib.import_module(DIALECTS[dialect]).conversions(description)
    return conversions


def conversions_for(model: Model, *, for_hooks: bool) -> Conversions:
    """Make the Conversions of a loaded model, for a replica's hooks or for steps without a hook. Raises: InferError."""
    spec = model.spec.hooks
    dialect, settings = (spec.dialect, spec.dialect_settings) if spec is not None else ("", {})
    inputs, outputs = model.node_inputs, model.node_outputs
    if not (dialect and for_hooks):
        # the runtime's own descriptions hold the session, which may be replaced later, and JSON cannot represent them:
        # native hooks get copies, as in a worker; steps without a hook need none
        inputs, outputs = (
            list(map(Node.from_runtime, side)) if dialect or for_hooks else [] for side in (inputs, outputs)
        )
    return make_conversions(
        dialect, ModelDescription(model.signature, inputs, outputs, model.runtime_description, settings)
    )


class BoundHooks(NamedTuple):
    """The hooks with their constant arguments, and the rules for their values.

    `converters` convert a result, indexed by packing.INPUTS, JSON and TENSORS.
    """

    functions: Mapping[str, HookFunction | None]
    conversions: Conversions
    converters: tuple[Converter, Converter, Converter]

    def dialect_error(self, hook: str, error: BaseException) -> InferError | None:
        """Return the dialect's error for an exception of user code; None for the default one."""
        try:
            return self.conversions.error_for(hook, error)
        except Exception:  # noqa: BLE001 - __str__ is user code
            return None


def bind(module: HookModule, conversions: Conversions, signature: Signature, metadata: Any) -> BoundHooks:
    """Bind each hook to its constant arguments; tensors of an infer answer are made the same way in all dialects."""
    converters = conversions.to_inputs, conversions.encode_answer, lambda result, _: to_tensors(result, signature)
    return BoundHooks(module.bind_all(*conversions.signatures, metadata), conversions, converters)
