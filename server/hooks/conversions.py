"""Conversions: how one model's hooks, and those who call them, hold values, and what a client is told of a failure.

`native.py` has our own; a dialect of another component format has its own in its folder. Made where hooks are loaded:
in the server for a replica there and for what no hook does, and in a worker process for a replica that is there.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from penstock.backends.backend import Array
from penstock.backends.errors import InferError
from penstock.backends.node import Node
from penstock.backends.signature import Signature

if TYPE_CHECKING:
    from penstock.batching.model import Model

DIALECTS = {"": "penstock.server.hooks.native", "cortex": "penstock.server.cortex.conversions"}
"""The module of each dialect's `conversions`. It and all it imports need no more than numpy and orjson."""


@dataclass(frozen=True, slots=True)
class Described:
    """What is known of a model where its hooks run.

    `inputs` and `outputs` are Nodes, or, for a dialect's hooks in the server, the runtime's own `onnxruntime.NodeArg`;
    `described` is `Backend.described`, `settings` is `HookSpec.dialect_settings`.
    """

    signature: Signature
    inputs: Sequence[Any]
    outputs: Sequence[Any]
    described: Mapping[str, Any]
    settings: Mapping[str, Any]


class Conversions(Protocol):
    """The rules of one model. `parameters` are the request's own (hooks/runner.py), as hooks may be given them.

    Threads: a replica's, and the event loop's where a model lacks the hook.
    """

    signatures: tuple[Any, Any]
    """What pre_inference and post_inference are given as `signature`: the replica's own objects, as user code may
    write to them."""

    def inputs(self, value: Any, parameters: Mapping[str, Any]) -> list[Array | None]:
        """Make the model's inputs, in its order, of what pre_inference returned, or of a sample. Raises: InferError."""

    def prediction(self, outputs: Sequence[Any], parameters: Mapping[str, Any]) -> Any:
        """Make what post_inference is given of the model's outputs, in its order. Raises: InferError."""

    def answer(self, result: Any, parameters: Mapping[str, Any]) -> bytes:
        """Make the body of a `predict` answer of what post_inference returned, or a prediction. Raises: InferError."""

    def failure(self, hook: str, error: BaseException) -> InferError | None:
        """Give what the client is told when user code has raised, be it InferError; None: what our own hooks say."""


def make(dialect: str, described: Described) -> Conversions:
    """Make the Conversions of a model. Raises: InferError, where the dialect cannot carry what the model takes."""
    made: Conversions = importlib.import_module(DIALECTS[dialect]).conversions(described)
    return made


def of_model(model: Model, *, for_hooks: bool) -> Conversions:
    """Make the Conversions of a loaded model, for a replica's hooks or for what no hook does. Raises: InferError."""
    spec = model.spec.hooks
    dialect, settings = (spec.dialect, spec.dialect_settings) if spec is not None else ("", {})
    inputs, outputs = model.node_inputs, model.node_outputs
    if not (dialect and for_hooks):
        # the runtime's own descriptions hold the session, which may be another one later, and JSON cannot carry them:
        # our own hooks are given copies, as in a worker; our own rules need none
        inputs, outputs = (list(map(Node.of, side)) if dialect or for_hooks else [] for side in (inputs, outputs))
    return make(dialect, Described(model.signature, inputs, outputs, model.described, settings))
