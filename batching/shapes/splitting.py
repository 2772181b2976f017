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


def add_parts(model: Model, whole: InferRequest, cancel: Callable[[InferRequest], None]) -> int:
    """Queue a request that is too large for a batch, all of its parts or none.

    Returns: the number of parts. Raises: InferError.
    """
    with model.lock:
        most_bytes = model.scheduler.room.bytes_for(whole)
    if whole.nbytes > most_bytes:
        text = (
            f"request of {whole.nbytes} bytes for '{model.name}' exceeds the {most_bytes} bytes that its queue may hold"
        )
        raise InferError(Code.INVALID, text)
    parts = split(whole, model.max_rows, cancel)
    try:
        with model.lock:
            _add_all(model, parts)
    except InferError:
        whole.parts = None
        for part in parts:
            remove_from_ordering(part)
        raise
    whole.promised_ns = max(part.promised_ns for part in parts)
    return len(parts)


def _add_all(model: Model, parts: Sequence[InferRequest]) -> None:
    for number, part in enumerate(parts):
        try:
            model.scheduler.add(part)
        except InferError:
            for added in parts[:number]:
                model.scheduler.remove(added)
            raise


def split(whole: InferRequest, most_rows: int, cancel: Callable[[InferRequest], None]) -> list[InferRequest]:
    """Divide a request into parts of at most `most_rows` each, and store them in it.

    `cancel` withdraws a waiting part, as `Engine.cancel`. Ownership: the parts' inputs are views of the whole's.
    """
    sink = _Joining(whole, cancel)
    parts = []
    for start in range(0, whole.rows, most_rows):
        rows = min(most_rows, whole.rows - start)
        inputs = [None if array is None else array[start : start + rows] for array in whole.inputs]
        part = InferRequest(whole.model, inputs, rows, whole.key, whole.output_positions, sink)
        part.id, part.context = whole.id, whole.context
        part.start_ns, part.enqueued_ns = whole.start_ns, whole.enqueued_ns
        part.deadline_ns, part.target_ns, part.priority = whole.deadline_ns, whole.target_ns, whole.priority
        part.nbytes = whole.nbytes * rows // whole.rows
        parts.append(part)
    whole.parts = parts
    sink.missing = len(parts)
    return parts


class _Joining:
    """The sink of one whole's parts: it delivers the whole when the last has run, or the first has failed.

    Invariant: the whole is delivered once, and not at all if it was cancelled: it has no parts then.
    """

    def __init__(self, whole: InferRequest, cancel: Callable[[InferRequest], None]) -> None:
        self._whole = whole
        self._cancel = cancel
        self.missing = 0

    def deliver(self, parts: Sequence[InferRequest]) -> None:
        """Take finished parts."""
        whole = self._whole
        every = whole.parts
        if every is None:
            return
        self.missing -= len(parts)
        whole.error = next((part.error for part in parts if part.error is not None), None)
        if self.missing and whole.error is None:
            return
        whole.parts = None
        if whole.error is None:
            _join(whole, every)
        deliver_requests([whole])
        if whole.error is not None:
            # afterwards: cancelling may hand out requests that were kept behind these parts
            for part in every:
                self._cancel(part)


def _join(whole: InferRequest, parts: Sequence[InferRequest]) -> None:
    """Concatenate the parts' outputs, in order: one copy of each."""
    try:
        whole.outputs = [_joined(pieces) for pieces in zip(*[part.outputs or [] for part in parts], strict=True)]
    except ValueError as error:
        text = f"the outputs of '{whole.model.name}' for the parts of {whole.rows} rows cannot be joined: {error}"
        whole.error = InferError(Code.INTERNAL, text)


def _joined(pieces: Sequence[Any]) -> Any:
    if isinstance(pieces[0], np.ndarray):
        return np.concatenate(pieces)
    return [row for piece in pieces for row in piece]
