"""Nesting: what is traced of an ensemble's steps, gathered until its request is delivered. Used by the Tracer.

What a Python model asks of others for a request, and says so, is a step of that request here.
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
    """Stands for a step, and `parent` for what it is a step of; None: for the request of a client.

    A request is not kept for its trace: its tensors would be kept with it. `span_id` is that of its span, where user
    code was told of it before there is one; 0: it was not.
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
    """That a client's request is traced, and how; `context` is its W3C one. `steps` stand as they have ended.

    `trace_id` is that of a trace which begins with the request, likewise. `count_number` and `last` are as in Trace.
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
    """Give the request that another is made for, by an ensemble or by user code; None: it is a client's own."""
    if type(request.context) is Passage:
        return request.context.parent
    return getattr(request, "caller", None)


def root_of(request: InferRequest) -> InferRequest:
    """Give the request of a client that a step, of an ensemble in an ensemble too, is made for."""
    while (maker := maker_of(request)) is not None:
        request = maker
    return request


def mark_of(request: InferRequest) -> Mark:
    """Give the Mark of a step whose root is chosen, or of the root."""
    try:
        mark: Mark = request.traced
    except AttributeError:
        maker = maker_of(request)
        mark = request.traced = Mark(None if maker is None else mark_of(maker))
    return mark


def nested(trace: Trace, chosen: Chosen, number: int) -> Trace:
    """Give a trace its number and its steps, which are numbered on from it: each after its ensemble."""
    # an ensemble ends after its steps, and begins no later than they do
    ordered = list(reversed(chosen.steps))
    ordered.sort(key=lambda step: step.trace.start_ns)
    numbers: dict[Mark | None, int] = {chosen: number}
    steps = []
    for step in ordered:
        parent = step.mark.parent
        while parent not in numbers and parent is not None:
            # an ensemble within another that has failed was taken back, and is not traced
            parent = parent.parent
        numbers[step.mark] = number + len(numbers)
        its = numbers[step.mark], numbers[parent], step.mark.span_id
        steps.append(step.trace._replace(number=its[0], parent_number=its[1], span_id=its[2]))
    return trace._replace(number=number, steps=tuple(steps), span_id=chosen.span_id, trace_id=chosen.trace_id)


def context_in(chosen: Chosen, mark: Mark) -> tuple[str, str]:
    """Give the `traceparent` and `tracestate` of what is done within the span of a request, which is yet to be made."""
    parent, state = chosen.context
    trace_id = trace_id_of(parent)
    if not trace_id:
        chosen.trace_id = chosen.trace_id or getrandbits(128) or 1
        trace_id, state = f"{chosen.trace_id:032x}", ""
    mark.span_id = mark.span_id or getrandbits(64) or 1
    return f"00-{trace_id}-{mark.span_id:016x}-01", state
