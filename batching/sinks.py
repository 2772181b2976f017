"""Sinks: handing out finished requests, and awaiting one, as `Engine.infer` and front ends do."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from .request import InferRequest, SoonSubmitter

if TYPE_CHECKING:
    from .model import Model

logger = logging.getLogger("penstock.batching")


class FutureSink:
    """Delivers to the asyncio future that is a request's `context`."""

    def deliver(self, requests: Sequence[InferRequest]) -> None:
        """Resolve each request's future, unless it is already done."""
        for request in requests:
            future: asyncio.Future[list[Any]] = request.context
            if future.done():
                continue
            if request.error is not None:
                future.set_exception(request.error)
            else:
                future.set_result(request.outputs or [])


FUTURES = FutureSink()


async def submit_and_wait(engine: SoonSubmitter, request: InferRequest) -> list[Any]:
    """Submit a request that has no sink yet and await its outputs; cancelling the awaiting task cancels it.

    Raises: InferError. Threads: the event loop's.
    """
    future: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
    request.sink, request.context = FUTURES, future
    engine.submit_soon(request)
    try:
        return await future
    except asyncio.CancelledError:
        engine.cancel(request)
        raise


def deliver_requests(requests: list[InferRequest]) -> None:
    """Give each request of a model to its sink; in one call if they share one, which is nearly always so.

    If the model preserves order, requests that still have an unfinished one before them are kept back.
    """
    ordering = requests[0].model.scheduler.ordering
    if ordering is not None:
        with requests[0].model.lock:  # requests of sequences enter the Ordering from an Instance's thread
            ready = ordering.record_ended(requests)
        _deliver_in_order(ready)
        return
    deliver_unordered(requests)


def deliver_unordered(requests: list[InferRequest]) -> None:
    """Give each request to its sink, of whatever model; in one call if they share one, which is nearly always so."""
    sink = requests[0].sink
    for request in requests:
        if request.sink is not sink:
            break
    else:
        _deliver_to_sink(requests)
        return
    by_sink: dict[int, list[InferRequest]] = {}
    for request in requests:
        by_sink.setdefault(id(request.sink), []).append(request)
    for group in by_sink.values():
        _deliver_to_sink(group)


def _deliver_to_sink(requests: Sequence[InferRequest]) -> None:
    try:
        requests[0].sink.deliver(requests)
    except Exception:  # a violation of its contract; the other sinks of this turn must still be called
        logger.exception("model %s: answers could not be delivered", requests[0].model.name)


def remove_from_ordering(request: InferRequest) -> None:
    """Hand out the requests that were only waiting behind this one, which was withdrawn and gets no answer."""
    ordering = request.model.scheduler.ordering
    if ordering is not None:
        with request.model.lock:
            ready = ordering.discard(request)
        _deliver_in_order(ready)


def flush_ordering(model: Model) -> None:
    """Hand out everything that has ended, regardless of order, because the server is stopping."""
    ordering = model.scheduler.ordering
    if ordering is not None:
        with model.lock:
            ready = ordering.stop()
        _deliver_in_order(ready)


def _deliver_in_order(requests: list[InferRequest]) -> None:
    """Give requests to their sinks without changing their order."""
    for _, group in groupby(requests, key=lambda request: id(request.sink)):
        _deliver_to_sink(list(group))
