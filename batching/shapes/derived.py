"""Derived inputs: inputs that no client sends, made from the batch when it is gathered.

These are the controls and states of sequences, and the counts and shapes of ragged batches. Used by execution.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from penstock.backends.backend import Array
    from penstock.backends.signature import TensorSpec
    from penstock.batching.running.batch import Batch
    from penstock.batching.spec import ModelSpec


class DerivedInput(Protocol):
    """One input that is made from the batch. Among the model's inputs, it follows those that clients send."""

    spec: TensorSpec
    """The input as the model has it, rows included."""

    def shape(self, batch: Batch, ran_rows: int) -> tuple[int, ...]:
        """Return its whole shape in a run of `ran_rows` rows, padding rows included."""

    def fill(self, buffer: Array, batch: Batch) -> None:
        """Write it. The buffer holds garbage."""


class OutputStore(Protocol):
    """Outputs kept in the server, which follow the others among the model's outputs.

    One that the configuration also lists among its outputs goes to clients too, and is listed among theirs.
    """

    def store(self, batch: Batch, outputs: list[Any]) -> None:
        """Take them after a successful run. Ownership: the taker's, except for those that clients get too."""


def zero(array: Array) -> Any:
    """Return the zero value of an array: an empty string for strings."""
    return b"" if array.dtype.hasobject else 0


class ZeroInput:
    """Stands in for a derived input while there are no requests to derive it from."""

    def __init__(self, spec: TensorSpec, *, batched: bool) -> None:
        self.spec = spec
        self._batched = batched

    def shape(self, batch: Batch, ran_rows: int) -> tuple[int, ...]:
        """Return its whole shape; free axes other than the rows are 1."""
        dims = [max(dim, 1) for dim in self.spec.shape]
        if self._batched and self.spec.shape[0] < 0:
            dims[0] = ran_rows
        return tuple(dims)

    def fill(self, buffer: Array, batch: Batch) -> None:
        """Write zeros, or empty strings."""
        buffer[...] = zero(buffer)


def derived_names(spec: ModelSpec) -> tuple[str, ...]:
    """List the derived inputs in order: controls and states of sequences, then batch inputs."""
    sequence = spec.sequence
    names = [] if sequence is None else [each.name for each in sequence.controls]
    names += [] if sequence is None else [each.input for each in sequence.states]
    return (*names, *(each.name for each in spec.batch_inputs))


def stored_names(spec: ModelSpec) -> tuple[str, ...]:
    """List the kept outputs, in the order of the states."""
    return () if spec.sequence is None else tuple(state.output for state in spec.sequence.states)


def make_derived(spec: ModelSpec) -> tuple[tuple[DerivedInput, ...], OutputStore | None]:
    """Make what derives the inputs of a completed spec, in its `binding_signature`, and what keeps its outputs."""
    bound, sequence = spec.binding_signature, spec.sequence
    if bound is None:
        return (), None
    inputs: list[DerivedInput] = []
    store: OutputStore | None = None
    if sequence is not None:
        from penstock.batching.sequences.controls import ControlInput
        from penstock.batching.sequences.states import StateInput, StateOutputs

        inputs += [ControlInput(control, bound.input[control.name]) for control in sequence.controls]
        inputs += [StateInput(state, bound.input[state.input]) for state in sequence.states]
        if sequence.states:
            client_outputs = spec.signature.output if spec.signature is not None else {}
            store = StateOutputs(
                sequence.states, tuple(bound.output[state.output] for state in sequence.states), client_outputs
            )
    if spec.batch_inputs:
        from .ragged import BatchInput

        inputs += [BatchInput(each, spec) for each in spec.batch_inputs]
    return tuple(inputs), store
