"""States: the tensors that a sequence has between its requests, kept here and not by the model.

Made by derived.py for models whose configuration says `sequence_batching.state`; called by execution.py.
Source: implicit state management of Triton's core, sequence_state.cc.
"""

from __future__ import annotations

from collections.abc import Collection
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.backends.datatypes import DATATYPES, strings, strings_in
from penstock.backends.errors import Code, InferError
from penstock.batching.request import NO_SEQUENCE
from penstock.batching.shapes.derived import zero

if TYPE_CHECKING:
    from penstock.backends.backend import Array
    from penstock.backends.signature import TensorSpec
    from penstock.batching.request import InferRequest
    from penstock.batching.running.batch import Batch
    from penstock.batching.spec import State


def begin(state: State) -> Array:
    """Make what a state is before its sequence has run: zeros, or what its file has, without rows.

    Raises: InferError (INVALID) where the file has too few bytes.
    """
    shape, datatype = state.begin, DATATYPES[state.datatype]
    if state.initial is None:
        return np.full(shape, b"", object) if not datatype.size_bytes else np.zeros(shape, datatype.dtype)
    content, count = state.initial.read_bytes(), prod(shape)
    if datatype.size_bytes:
        wanted = count * datatype.size_bytes
        if len(content) < wanted:
            text = f"initial_state setting expects {wanted} bytes, but the data provided from {state.initial.name}"
            raise InferError(Code.INVALID, f"{text} only has {len(content)} bytes.")
        return datatype.view(content, count).reshape(shape)
    texts, end = strings_in(content, count)
    if len(texts) < count or end > len(content):
        text = f"initial_state of '{state.input}' has {count} elements, and its file fewer"
        raise InferError(Code.INVALID, text)
    return strings(texts).reshape(shape)


class StateInput:
    """The input that a state goes in by. What shares a batch has states of one shape (Sequences.take)."""

    def __init__(self, state: State, spec: TensorSpec) -> None:
        self.spec = spec
        self._name = state.output
        self._begin = begin(state)
        self._batched = len(spec.shape) > len(state.shape)

    def shape(self, batch: Batch, ran_rows: int) -> tuple[int, ...]:
        """Give its whole shape in a run of so many rows."""
        dims = self._of(batch.requests[0]).shape
        return (ran_rows, *dims) if self._batched else dims

    def fill(self, buffer: Array, batch: Batch) -> None:
        """Write each sequence's state at its row; empty rows are as a sequence begins."""
        if not self._batched:
            buffer[...] = self._of(batch.requests[0])
            return
        places = batch.places or range(len(batch.requests))
        if len(buffer) != len(batch.requests):
            buffer[...] = self._begin if self._begin.shape == buffer.shape[1:] else zero(buffer)
        for place, request in zip(places, batch.requests, strict=True):
            buffer[place] = self._of(request)

    def _of(self, request: InferRequest) -> Array:
        states = request.under_way.states
        if (request.sequence or NO_SEQUENCE).start:
            # whatever comes of this request, the sequence before it is over
            states.clear()
        return states.get(self._name, self._begin)


class StatesKept:
    """The outputs that are the next request's states.

    Ownership: a sequence has an array of its own, no view of a whole batch's, nor of what its client gets, `shown` by
    name: a hook may write in that. They stay in the host's memory.
    """

    def __init__(
        self, states: tuple[State, ...], specs: tuple[TensorSpec, ...], shown: Collection[str] = frozenset()
    ) -> None:
        self._shown = shown
        self._kept = [
            (state.output, len(spec.shape) > len(state.shape)) for state, spec in zip(states, specs, strict=True)
        ]

    def keep(self, batch: Batch, outputs: list[Any]) -> None:
        """Give each sequence its row. Raises: InferError (INTERNAL) where an output has too few."""
        places = batch.places or range(len(batch.requests))
        for (name, batched), output in zip(self._kept, outputs, strict=True):
            if batched and len(output) <= places[-1]:
                text = f"state '{name}' has {len(output)} rows for a batch of {places[-1] + 1}"
                raise InferError(Code.INTERNAL, text)
        for (name, batched), output in zip(self._kept, outputs, strict=True):
            shared = name in self._shown or (batched and len(output) > 1)
            for place, request in zip(places, batch.requests, strict=True):
                row = output[place, ...] if batched else output
                request.under_way.states[name] = row.copy() if shared else row
