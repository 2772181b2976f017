"""Trace: the record of one traced request, and how its parent is found. Made by the Tracer, read by its sinks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from penstock.backends.errors import InferError

from .config import TENSORS

if TYPE_CHECKING:
    from penstock.backends.signature import TensorSpec
    from penstock.batching.model import Model
    from penstock.batching.request import InferRequest
    from penstock.batching.running.batch import Batch

QUEUE_INPUT, BACKEND_OUTPUT = "TENSOR_QUEUE_INPUT", "TENSOR_BACKEND_OUTPUT"

# Source: W3C Trace Context, level 1: version, trace id, parent id, flags; later versions may append more.
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]([0-9a-f])(?:-.*)?")


class TracedTensor(NamedTuple):
    """One tensor of a traced request: a copy of its values."""

    activity: str
    name: str
    datatype: str
    values: Any


class Trace(NamedTuple):
    """One traced request. Units: `stamps` are monotonic nanoseconds, in order of time.

    `failed`: it was not served, and has no compute stamps. `parent` and `state` are the request's `traceparent` and
    `tracestate`, "" if absent. `steps` are those of an ensemble's request and of nested ensembles: each follows the one
    whose `number` is its `parent_number`, and has no steps itself. `span_id` and `trace_id` are set if they were given
    out before the span exists; 0 if not. `count_number` is the count that it is part of, 0 for none; `last` if it
    completes that count.
    """

    number: int
    model: str
    version: str
    request_id: str
    failed: bool
    stamps: tuple[tuple[str, int], ...]
    level: tuple[str, ...]
    log_frequency: int
    parent: str
    state: str
    tensors: tuple[TracedTensor, ...]
    parent_number: int = 0
    steps: tuple[Trace, ...] = ()
    span_id: int = 0
    trace_id: int = 0
    count_number: int = 0
    last: bool = False

    @property
    def start_ns(self) -> int:
        """When the request began."""
        return self.stamps[0][1]

    @property
    def nbytes(self) -> int:
        """The size of its tensors, including those of its steps."""
        return sum(tensor.values.nbytes for trace in (self, *self.steps) for tensor in trace.tensors)


class TraceSink(Protocol):
    """A destination of traces. Threads: the Tracer's only."""

    def write(self, traces: Sequence[Trace]) -> None:
        """Write traces."""

    def close(self) -> None:
        """Send what is left."""


def stamps_of(batch: Batch, request: InferRequest, end_ns: int) -> tuple[tuple[str, int], ...]:
    """Return a request's stamps, under Triton's names."""
    start = (("REQUEST_START", request.start_ns), ("QUEUE_START", request.enqueued_ns))
    if request.error is not None or request.model.ensemble is not None or not batch.exec_end_ns:
        # an ensemble runs nothing itself, its steps do; and a cache hit does not run
        return (*start, ("REQUEST_END", end_ns))
    return (
        *start,
        ("COMPUTE_START", batch.exec_start_ns),
        ("COMPUTE_INPUT_END", batch.compute_start_ns),
        ("COMPUTE_OUTPUT_START", batch.compute_end_ns),
        ("COMPUTE_END", batch.exec_end_ns),
        ("REQUEST_END", end_ns),
    )


def context_of(carrier: Any) -> tuple[str, str]:
    """Return the W3C context of the HTTP connection or gRPC call that a request came on."""
    head = getattr(carrier, "head", None)
    if head is not None:
        header = head.header
        parent = header.get(b"traceparent")
        if parent is None:
            return "", ""
        return parent.decode("latin-1"), header.get(b"tracestate", b"").decode("latin-1")
    metadata = getattr(carrier, "metadata", None)
    if metadata is None:
        metadata = getattr(getattr(carrier, "call", None), "metadata", None)
    if metadata is None:
        return "", ""
    return metadata.get("traceparent", ""), metadata.get("tracestate", "")


def is_sampled(parent: str) -> bool:
    """Return whether a `traceparent` is valid and marks its trace as recorded."""
    match = _TRACEPARENT.fullmatch(parent)
    return match is not None and int(match[2], 16) & 1 == 1


def trace_id_of(parent: str) -> str:
    """Return the trace id in a `traceparent`, "" if there is none."""
    match = _TRACEPARENT.fullmatch(parent)
    return "" if match is None else match[1]


def tensors_of(model: Model, request: InferRequest, level: Sequence[str]) -> tuple[TracedTensor, ...]:
    """Copy inputs and outputs if the level includes them: their buffers may be reused a moment later."""
    if TENSORS not in level:
        return ()
    inputs = zip(model.signature.inputs, request.inputs, strict=True)
    outputs: Iterator[tuple[TensorSpec, Any]] = zip(
        [model.signature.outputs[position] for position in request.output_positions],
        request.outputs or (),
        strict=False,
    )
    tensors = []
    for activity, pairs in ((QUEUE_INPUT, inputs), (BACKEND_OUTPUT, outputs)):
        for spec, values in pairs:
            if values is None or not spec.is_tensor:
                continue
            with suppress(InferError):  # shared device memory may be gone; the answer is not affected
                tensors.append(TracedTensor(activity, spec.name, spec.datatype, np.array(values)))
    return tuple(tensors)
