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


class Mark:
    """Represents a step, and `parent` the request it belongs to; None for a client's request.

    Requests are not kept for tracing, because that would keep their tensors. `span_id` is the id of its span, if user
    code was given it before the span exists; 0 if not.
    """

    __slots__ = ("parent", "span_id")

    def __init__(self, parent: Mark | None = None) -> None:
        self.parent = parent
        self.span_id = 0


class TracedStep(NamedTuple):
    """A step that has ended."""

    mark: Mark
    trace: Trace


class Chosen(Mark):
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


def maker_of(request: InferRequest) -> InferRequest | None:
    """Return the request for which an ensemble or user code made this one; None if it is a client's own."""
    if type(request.context) is Passage:
        return request.context.parent
    return getattr(request, "caller", None)


def root_of(request: InferRequest) -> InferRequest:
    """Return the client's request that a step is made for, also through nested ensembles."""
    while (maker := maker_of(request)) is not None:
        request = maker
    return request


def mark_of(request: InferRequest) -> Mark:
    """Return the Mark of a step whose root is chosen, or of the root."""
    try:
        mark: Mark = request.traced
    except AttributeError:
        maker = maker_of(request)
        mark = request.traced = Mark(None if maker is None else mark_of(maker))
    return mark


def nested(trace: Trace, chosen: Chosen, number: int) -> Trace:
    """Return a trace with its number and its steps, which get the following numbers: each after its ensemble."""
    # an ensemble ends after its steps, and begins no later than they do
    ordered = list(reversed(chosen.steps))
    ordered.sort(key=lambda step: step.trace.start_ns)
    numbers: dict[Mark | None, int] = {chosen: number}
    steps = []
    for step in ordered:
        parent = step.mark.parent
        while parent not in numbers and parent is not None:
            # a failed ensemble within another was withdrawn, and is not traced
            parent = parent.parent
        numbers[step.mark] = number + len(numbers)
        its = numbers[step.mark], numbers[parent], step.mark.span_id
        steps.append(step.trace._replace(number=its[0], parent_number=its[1], span_id=its[2]))
    return trace._replace(number=number, steps=tuple(steps), span_id=chosen.span_id, trace_id=chosen.trace_id)


def context_in(chosen: Chosen, mark: Mark) -> tuple[str, str]:
    """Return the `traceparent` and `tracestate` for work within a request's span, which does not exist yet."""
    parent, state = chosen.context
    trace_id = trace_id_of(parent)
    if not trace_id:
        chosen.trace_id = chosen.trace_id or getrandbits(128) or 1
        trace_id, state = f"{chosen.trace_id:032x}", ""
    mark.span_id = mark.span_id or getrandbits(64) or 1
    return f"00-{trace_id}-{mark.span_id:016x}-01", state
