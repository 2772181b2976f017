"""Controls: the inputs that tell a model about its sequences, and the checks of a sequence configuration.

derived.py makes a `ControlInput` and execution.py calls it; completion.py calls `check_sequence`, and sequences.py
`check_id`.
Source of rules and texts: Triton's core (model_config_utils.cc) and its ONNX Runtime backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.backends.errors import Code, InferError
from penstock.batching.request import NO_SEQUENCE, InSequence
from penstock.batching.scheduling.request_checks import format_shape
from penstock.batching.shapes.derived import zero

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.backends.backend import Array
    from penstock.backends.signature import Signature, TensorSpec
    from penstock.batching.running.batch import Batch
    from penstock.batching.spec import Control, ModelSpec, State

CORRID_DATATYPES = ("UINT64", "INT64", "UINT32", "INT32", "BYTES")
"""The datatypes that an id may have."""


class ControlInput:
    """One control. A row without a request is not ready, neither first nor last, and of sequence 0."""

    def __init__(self, control: Control, spec: TensorSpec) -> None:
        self.spec = spec
        self._kind = control.kind
        false, true = control.false_true
        self._value = {False: false, True: true}

    def shape(self, batch: Batch, ran_rows: int) -> tuple[int, ...]:
        """Return its whole shape in a run of `ran_rows` rows."""
        return (ran_rows, *self.spec.shape[1:]) if self.spec.shape[0] == -1 else self.spec.shape

    def fill(self, buffer: Array, batch: Batch) -> None:
        """Write it."""
        if len(buffer) != len(batch.requests):
            buffer[...] = self._empty_value(buffer)
        rows = buffer.reshape(len(buffer))
        positions = batch.row_positions or range(len(batch.requests))
        for position, request in zip(positions, batch.requests, strict=True):
            rows[position] = self._value_for(request.sequence or NO_SEQUENCE, rows)

    def _empty_value(self, rows: Array) -> object:
        if self._kind == "corrid":
            return zero(rows)
        return self._value[False]

    def _value_for(self, in_sequence: InSequence, rows: Array) -> object:
        if self._kind == "ready":
            return self._value[True]
        if self._kind == "start":
            return self._value[in_sequence.start]
        if self._kind == "end":
            return self._value[in_sequence.end]
        if isinstance(in_sequence.id, str):
            return in_sequence.id.encode()
        # an id that is too long for the model's type loses its upper bits, as in Triton
        return np.uint64(in_sequence.id).astype(rows.dtype)


def check_id(model: str, control: Control, sequence_id: int | str) -> None:
    """Check that a client's sequence id has the type of the model's control. Raises: InferError (INVALID)."""
    if isinstance(sequence_id, str) != (control.datatype == "BYTES"):
        datatype = "BYTES" if isinstance(sequence_id, str) else "UINT64"
        text = f"sequence batching control '{control.name}' data-type is '{datatype}', but model '{model}' expects"
        raise _invalid(f"{text} '{control.datatype}'")


def check_sequence(spec: ModelSpec, graph: Signature) -> None:
    """Check a sequence configuration against the model. `policy.max_batch_rows` must be completed.

    Raises: InferError (INVALID) if controls or states are not in the model or differ from it, or if a setting is
    incompatible with sequences.
    """
    sequence = spec.sequence
    if sequence is None:
        return
    _check_compatibility(spec)
    batched = bool(spec.policy.max_batch_rows)
    for control in sequence.controls:
        _check_control(spec.name, control, graph.input.get(control.name), batched=batched)
    for state in sequence.states:
        _check_state(spec.name, state, "input", graph.input.get(state.input), batched=batched)
        _check_state(spec.name, state, "output", graph.output.get(state.output), batched=batched)
    client_inputs = {each.name for each in spec.inputs}
    for name in (*(control.name for control in sequence.controls), *(state.input for state in sequence.states)):
        if name in client_inputs:
            raise _invalid(f"model '{spec.name}', input '{name}' is a control or a state, which clients must not send")


def _check_compatibility(spec: ModelSpec) -> None:
    policy = spec.policy
    if spec.cached:
        text = f"Response Cache does not currently support model {spec.name} with sequence batching scheduler."
        raise _invalid(f"{text} Please disable the response cache.")
    for name, is_set in _incompatible_settings(spec):
        if is_set:
            raise _invalid(f"model '{spec.name}', {name}: cannot be combined with sequence_batching")
    sizes = policy.preferred_rows
    if sizes and max(sizes) > (policy.max_batch_rows or 0):
        raise _invalid(f"sequence batching preferred batch size must be <= max batch size for {spec.name}")


def _incompatible_settings(spec: ModelSpec) -> Iterator[tuple[str, bool]]:
    """List settings that would let requests of a sequence overtake each other, be rejected in between, or run apart."""
    policy = spec.policy
    yield "padding", bool(spec.padding)
    yield "batching.split", policy.split
    yield "batching.invariance", policy.invariant
    yield "batching.latency_target_ms", policy.latency_target_us > 0
    yield "batching.allowed_sizes", bool(policy.allowed_rows)
    yield "instances.count = 'auto'", any(not group.count for group in spec.instances)


def _check_control(model: str, control: Control, tensor: TensorSpec | None, *, batched: bool) -> None:
    if tensor is None:
        text = f"configuration specified sequence control '{control.name}', but model does not provide that input"
        raise _invalid(text)
    prefix = f"unable to load model '{model}', sequence control '{control.name}'"
    dims = tensor.shape[1:] if batched else tensor.shape
    rows_only = batched and tensor.shape == (-1,)
    if dims != (1,) and not rows_only:
        raise _invalid(f"{prefix} in model has dims {format_shape(dims)} but dims [1] is expected")
    if tensor.datatype != control.datatype:
        text = f"{prefix}, the model expects data-type {_config_type(tensor.datatype)}"
        raise _invalid(f"{text} but the model configuration specifies data-type {_config_type(control.datatype)}")


def _check_state(model: str, state: State, kind: str, tensor: TensorSpec | None, *, batched: bool) -> None:
    name = state.input if kind == "input" else state.output
    prefix = f"unable to load model '{model}', state {kind} '{name}'"
    if tensor is None:
        raise _invalid(f"{prefix}: the model does not provide that {kind}")
    if tensor.datatype != state.datatype:
        text = f"the model expects data-type {_config_type(tensor.datatype)}"
        raise _invalid(
            f"{prefix}: {text} but the model configuration specifies data-type {_config_type(state.datatype)}"
        )
    full_shape = (-1, *state.shape) if batched else state.shape
    matches = len(full_shape) == len(tensor.shape) and all(
        mine == theirs or -1 in (mine, theirs) for mine, theirs in zip(tensor.shape, full_shape, strict=True)
    )
    if not matches or (batched and tensor.shape[0] != -1):
        text = f"the model has shape {format_shape(tensor.shape)} but the model configuration specifies shape"
        raise _invalid(f"{prefix}: {text} {format_shape(full_shape)}")


def _config_type(datatype: str) -> str:
    return "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"


def _invalid(text: str) -> InferError:
    return InferError(Code.INVALID, text)
