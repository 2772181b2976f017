"""Coded: the answers of a user-code model that may give any number of them, as dialects take them from Hooks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.backends.backend import Array
from penstock.backends.errors import InferError
from penstock.batching.request import DEFAULT_OPTIONS, RequestOptions
from penstock.batching.scheduling.admission import request_for
from penstock.batching.stream import open_stream

from .convert import to_inputs
from .pull import Answer

if TYPE_CHECKING:
    from penstock.batching.answer_statistics import AnswerStatistics
    from penstock.batching.model import Model


class HookRequest(NamedTuple):
    """A request as dialects pass it to Hooks. `wanted`: the requested outputs, None for all."""

    inputs: Mapping[str, Array]
    id: str = ""
    terms: RequestOptions = DEFAULT_OPTIONS
    parameters: Mapping[str, Any] | None = None
    wanted: tuple[int, ...] | None = None


async def told(
    engine: Any, model: Model, asked: HookRequest, counted: AnswerStatistics
) -> AsyncGenerator[Answer, None]:
    """Submit a request, and yield and count its answers. Close it if not all are taken. Raises: InferError."""
    inputs = to_inputs(asked.inputs, model.signature)
    wanted = model.all_outputs if asked.wanted is None else asked.wanted
    request = request_for(model, inputs, wanted, asked.terms, asked.parameters)
    request.id = asked.id
    start_ns = since_ns = time.monotonic_ns()
    number = 0
    try:
        with open_stream(engine, request) as answers:
            while (each := await answers.next()) is not None:
                if not number:
                    model.statistics.record_first_response(time.monotonic_ns() - start_ns)
                counted.record(number, each.infer_ns, 0, failed=each.error is not None)
                number += 1
                since_ns = time.monotonic_ns()
                yield Answer(
                    each.outputs, each.error, each.final, each.infer_ns, 0, 0, each.parameters, answers.has_next
                )  # fmt: skip
        counted.record_empty(number, time.monotonic_ns() - since_ns)
    except InferError:
        counted.record(number, time.monotonic_ns() - since_ns, 0, failed=True)
        raise
    except (asyncio.CancelledError, GeneratorExit):
        counted.record_cancelled(number, time.monotonic_ns() - since_ns)
        raise
