"""Splitting: a request of more rows than a batch may have runs in parts, and returns whole. Called by the Engine.

Each part is its own request in the queue and in the statistics; only the whole is delivered to the caller's sink.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.backends.errors import Code, InferError
from penstock.batching.request import InferRequest
from penstock.batching.sinks import deliver_requests, remove_from_ordering

if TYPE_CHECKING:
    from penstock.batching.model import Model


def add_parts(model: Model, original: InferRequest, cancel: Callable[[InferRequest], None]) -> int:
    """Queue a request that is too large for a batch, all of its parts or none.

    Returns: the number of parts. Raises: InferError.
    """
    with model.lock:
        max_nbytes = model.scheduler.limits.adapt_max_nbytes(original)
    if original.nbytes > max_nbytes:
        text = f"request of {original.nbytes} bytes for '{model.name}' exceeds the {max_nbytes} bytes"
        raise InferError(Code.INVALID, f"{text} that its queue may hold")
    parts = split(original, model.max_rows, cancel)
    try:
        with model.lock:
            _add_all(model, parts)
    except InferError:
        original.parts = None
        for part in parts:
            remove_from_ordering(part)
        raise
    return len(parts)


def _add_all(model: Model, parts: Sequence[InferRequest]) -> None:
    for number, part in enumerate(parts):
        try:
            model.scheduler.add(part)
        except InferError:
            for added in parts[:number]:
                model.scheduler.remove(added)
            raise


def split(original: InferRequest, max_rows: int, cancel: Callable[[InferRequest], None]) -> list[InferRequest]:
    """Divide a request into parts of at most `max_rows` each, and store them in it.

    `cancel` withdraws a waiting part, as `Engine.cancel`. Ownership: the parts' inputs are views of the whole's.
    """
    sink = _PartsSink(original, cancel)
    parts = []
    for start in range(0, original.rows, max_rows):
        rows = min(max_rows, original.rows - start)
        inputs = [None if array is None else array[start : start + rows] for array in original.inputs]
        part = InferRequest(original.model, inputs, rows, original.key, original.output_positions, sink)
        part.id, part.context = original.id, original.context
        part.start_ns, part.enqueued_ns = original.start_ns, original.enqueued_ns
        part.deadline_ns, part.target_ns, part.priority = original.deadline_ns, original.target_ns, original.priority
        part.nbytes = original.nbytes * rows // original.rows
        parts.append(part)
    original.parts = parts
    sink.pending_count = len(parts)
    return parts


class _PartsSink:
    """The sink of one whole's parts: it delivers the whole when the last has run, or the first has failed.

    Invariant: the whole is delivered once, and not at all if it was cancelled: it has no parts then.
    """

    def __init__(self, original: InferRequest, cancel: Callable[[InferRequest], None]) -> None:
        self._original = original
        self._cancel = cancel
        self.pending_count = 0

    def deliver(self, parts: Sequence[InferRequest]) -> None:
        """Take finished parts."""
        original = self._original
        all_parts = original.parts
        if all_parts is None:
            return
        self.pending_count -= len(parts)
        original.error = next((part.error for part in parts if part.error is not None), None)
        if self.pending_count and original.error is None:
            return
        original.parts = None
        if original.error is None:
            _join_outputs(original, all_parts)
        deliver_requests([original])
        if original.error is not None:
            # afterwards: cancelling may hand out requests that were kept behind these parts
            for part in all_parts:
                self._cancel(part)


def _join_outputs(original: InferRequest, parts: Sequence[InferRequest]) -> None:
    """Concatenate the parts' outputs, in order: one copy of each."""
    try:
        original.outputs = [
            _concatenate(pieces) for pieces in zip(*[part.outputs or [] for part in parts], strict=True)
        ]
    except ValueError as error:
        text = f"the outputs of '{original.model.name}' for the parts of {original.rows} rows cannot be joined: {error}"
        original.error = InferError(Code.INTERNAL, text)


def _concatenate(pieces: Sequence[Any]) -> Any:
    if isinstance(pieces[0], np.ndarray):
        return np.concatenate(pieces)
    return [row for piece in pieces for row in piece]
