"""Nesting: the traces of an ensemble's steps, collected until its request is delivered. Used by the Tracer.

A request that a Python model makes on behalf of another request, and declares as such, is a step of that request here.
Source: Triton core, infer_trace.cc (a step's trace is a child of its ensemble's, and sampled with it), and
python_backend, request_executor.cc.
"""

from __future__ import annotations

from random import getrandbits
from typing import TYPE_CHECKING, NamedTuple

from penstock.batching.ensembles.passage import Passage

from .config import Sampling
from .trace import Trace, trace_id_of

if TYPE_CHECKING:
    from penstock.batching.request import InferRequest


class SpanNode:
    """Represents a step, and `parent` the request it belongs to; None for a client's request.

    Requests are not kept for tracing, because that would keep their tensors. `span_id` is the id of its span, if user
    code was given it before the span exists; 0 if not.
    """

    __slots__ = ("parent", "span_id")

    def __init__(self, parent: SpanNode | None = None) -> None:
        self.parent = parent
        self.span_id = 0


class TracedStep(NamedTuple):
    """A step that has ended."""

    node: SpanNode
    trace: Trace


class SampledRequest(SpanNode):
    """A client's request that is traced; `context` is its W3C context. `steps` are in order of their end.

    `trace_id` is the id of a trace that begins with the request, if it was given out early. `count_number` and `last`
    are as in Trace.
    """

    __slots__ = ("context", "count_number", "last", "sampling", "steps", "trace_id")

    def __init__(
        self, sampling: Sampling, context: tuple[str, str] = ("", ""), count_number: int = 0, *, last: bool = False
    ) -> None:
        super().__init__()
        self.sampling = sampling
        self.context = context
        self.steps: list[TracedStep] = []
        self.trace_id = 0
        self.count_number = count_number
        self.last = last


def caller_of(request: InferRequest) -> InferRequest | None:
    """Return the request for which an ensemble or user code made this one; None if it is a client's own."""
    if type(request.context) is Passage:
        return request.context.parent
    caller: InferRequest | None = getattr(request, "caller", None)
    return caller


def root_of(request: InferRequest) -> InferRequest:
    """Return the client's request that a step is made for, also through nested ensembles."""
    while (caller := caller_of(request)) is not None:
        request = caller
    return request


def node_of(request: InferRequest) -> SpanNode:
    """Return the SpanNode of a step whose root is chosen, or of the root."""
    try:
        node: SpanNode = request.traced
    except AttributeError:
        caller = caller_of(request)
        node = request.traced = SpanNode(None if caller is None else node_of(caller))
    return node


def with_steps(trace: Trace, sampled: SampledRequest, number: int) -> Trace:
    """Return a trace with its number and its steps, which get the following numbers: each after its ensemble."""
    # an ensemble ends after its steps, and begins no later than they do
    ordered = list(reversed(sampled.steps))
    ordered.sort(key=lambda step: step.trace.start_ns)
    numbers: dict[SpanNode | None, int] = {sampled: number}
    steps = []
    for step in ordered:
        parent = step.node.parent
        while parent not in numbers and parent is not None:
            # a failed ensemble within another was withdrawn, and is not traced
            parent = parent.parent
        numbers[step.node] = number + len(numbers)
        ids = numbers[step.node], numbers[parent], step.node.span_id
        steps.append(step.trace._replace(number=ids[0], parent_number=ids[1], span_id=ids[2]))
    return trace._replace(number=number, steps=tuple(steps), span_id=sampled.span_id, trace_id=sampled.trace_id)


def child_context(sampled: SampledRequest, node: SpanNode) -> tuple[str, str]:
    """Return the `traceparent` and `tracestate` for work within a request's span, which does not exist yet."""
    parent, state = sampled.context
    trace_id = trace_id_of(parent)
    if not trace_id:
        sampled.trace_id = sampled.trace_id or getrandbits(128) or 1
        trace_id, state = f"{sampled.trace_id:032x}", ""
    node.span_id = node.span_id or getrandbits(64) or 1
    return f"00-{trace_id}-{node.span_id:016x}-01", state
