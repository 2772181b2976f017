"""States: the tensors that a sequence keeps between its requests, stored here rather than in the model.

Made by derived.py for models configured with `sequence_batching.state`; used by execution.py.
Source: implicit state management of Triton's core, sequence_state.cc.
"""

from __future__ import annotations

from collections.abc import Collection
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.backends.datatypes import DATATYPES, bytes_tensor, parse_bytes_elements
from penstock.backends.errors import Code, InferError
from penstock.batching.request import NO_SEQUENCE
from penstock.batching.shapes.derived import zero

if TYPE_CHECKING:
    from penstock.backends.backend import Array
    from penstock.backends.signature import TensorSpec
    from penstock.batching.request import InferRequest
    from penstock.batching.running.batch import Batch
    from penstock.batching.spec import State


def initial_value(state: State) -> Array:
    """Make the initial value of a state: zeros, or the contents of its file, without rows.

    Raises: InferError (INVALID) if the file has too few bytes.
    """
    shape, datatype = state.first_shape, DATATYPES[state.datatype]
    if state.initial is None:
        return np.full(shape, b"", object) if not datatype.size_bytes else np.zeros(shape, datatype.dtype)
    content, count = state.initial.read_bytes(), prod(shape)
    if datatype.size_bytes:
        required_bytes = count * datatype.size_bytes
        if len(content) < required_bytes:
            text = (
                f"initial_state setting expects {required_bytes} bytes, but the data provided from {state.initial.name}"
            )
            raise InferError(Code.INVALID, f"{text} only has {len(content)} bytes.")
        return datatype.view(content, count).reshape(shape)
    texts, end = parse_bytes_elements(content, count)
    if len(texts) < count or end > len(content):
        text = f"initial_state of '{state.input}' needs {count} elements, but its file has fewer"
        raise InferError(Code.INVALID, text)
    return bytes_tensor(texts).reshape(shape)


class StateInput:
    """The input that a state is passed in. All states in a batch have the same shape (Sequences.take)."""

    def __init__(self, state: State, spec: TensorSpec) -> None:
        self.spec = spec
        self._name = state.output
        self._initial_value = initial_value(state)
        self._batched = len(spec.shape) > len(state.shape)

    def shape(self, batch: Batch, ran_rows: int) -> tuple[int, ...]:
        """Return its whole shape in a run of `ran_rows` rows."""
        dims = self._state_of(batch.requests[0]).shape
        return (ran_rows, *dims) if self._batched else dims

    def fill(self, buffer: Array, batch: Batch) -> None:
        """Write each sequence's state at its row; empty rows have the initial state."""
        if not self._batched:
            buffer[...] = self._state_of(batch.requests[0])
            return
        positions = batch.row_positions or range(len(batch.requests))
        if len(buffer) != len(batch.requests):
            buffer[...] = self._initial_value if self._initial_value.shape == buffer.shape[1:] else zero(buffer)
        for position, request in zip(positions, batch.requests, strict=True):
            buffer[position] = self._state_of(request)

    def _state_of(self, request: InferRequest) -> Array:
        states = request.active_sequence.states
        if (request.sequence or NO_SEQUENCE).start:
            # whatever comes of this request, the sequence before it is over
            states.clear()
        return states.get(self._name, self._initial_value)


class StateOutputs:
    """The outputs that are the next request's states.

    Ownership: each sequence has its own array, not a view of a whole batch's, nor of what its client gets,
    `client_outputs` by name: a hook may write to that. They stay in host memory.
    """

    def __init__(
        self, states: tuple[State, ...], specs: tuple[TensorSpec, ...], client_outputs: Collection[str] = frozenset()
    ) -> None:
        self._client_outputs = client_outputs
        self._outputs = [
            (state.output, len(spec.shape) > len(state.shape)) for state, spec in zip(states, specs, strict=True)
        ]

    def store(self, batch: Batch, outputs: list[Any]) -> None:
        """Give each sequence its row. Raises: InferError (INTERNAL) if an output has too few."""
        positions = batch.row_positions or range(len(batch.requests))
        for (name, batched), output in zip(self._outputs, outputs, strict=True):
            if batched and len(output) <= positions[-1]:
                text = f"state '{name}' has {len(output)} rows for a batch of {positions[-1] + 1}"
                raise InferError(Code.INTERNAL, text)
        for (name, batched), output in zip(self._outputs, outputs, strict=True):
            must_copy = name in self._client_outputs or (batched and len(output) > 1)
            for position, request in zip(positions, batch.requests, strict=True):
                row = output[position, ...] if batched else output
                request.active_sequence.states[name] = row.copy() if must_copy else row
