"""Coded: the answers of a user-code model that may give any number of them, as dialects take them from Hooks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.backends.backend import Array
from penstock.backends.errors import InferError
from penstock.batching.request import DEFAULT_REQUEST_OPTIONS, RequestOptions, Submitter
from penstock.batching.scheduling.request_checks import make_request
from penstock.batching.stream import open_stream

from .convert import to_inputs
from .generator_call import Answer

if TYPE_CHECKING:
    from penstock.batching.answer_statistics import AnswerStatistics
    from penstock.batching.model import Model


class DecoupledRequest(NamedTuple):
    """A request as dialects pass it to Hooks. `requested_outputs`: the requested outputs, None for all."""

    inputs: Mapping[str, Array]
    id: str = ""
    terms: RequestOptions = DEFAULT_REQUEST_OPTIONS
    parameters: Mapping[str, Any] | None = None
    requested_outputs: tuple[int, ...] | None = None


async def stream_answers(
    engine: Submitter, model: Model, decoupled_request: DecoupledRequest, statistics: AnswerStatistics
) -> AsyncGenerator[Answer, None]:
    """Submit a request, and yield and count its answers. Close it if not all are taken. Raises: InferError."""
    inputs = to_inputs(decoupled_request.inputs, model.signature)
    requested_outputs = (
        model.all_outputs if decoupled_request.requested_outputs is None else decoupled_request.requested_outputs
    )
    request = make_request(model, inputs, requested_outputs, decoupled_request.terms, decoupled_request.parameters)
    request.id = decoupled_request.id
    start_ns = since_ns = time.monotonic_ns()
    number = 0
    try:
        with open_stream(engine, request) as answers:
            while (each := await answers.next()) is not None:
                if not number:
                    model.statistics.record_first_response(time.monotonic_ns() - start_ns)
                statistics.record(number, each.infer_ns, 0, failed=each.error is not None)
                number += 1
                since_ns = time.monotonic_ns()
                yield Answer(
                    each.outputs, each.error, each.final, each.infer_ns, 0, 0, each.parameters, answers.has_next
                )  # fmt: skip
        statistics.record_empty(number, time.monotonic_ns() - since_ns)
    except InferError:
        statistics.record(number, time.monotonic_ns() - since_ns, 0, failed=True)
        raise
    except (asyncio.CancelledError, GeneratorExit):
        statistics.record_cancelled(number, time.monotonic_ns() - since_ns)
        raise
