"""Sinks: handing finished requests out, and the sink behind `Engine.infer`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from .request import InferRequest


class FutureSink:
    """Delivers to the asyncio future that is a request's `context`."""

    def deliver(self, requests: Sequence[InferRequest]) -> None:
        """Resolve each request's future, unless its waiter has gone."""
        for request in requests:
            future: asyncio.Future[list[Any]] = request.context
            if future.done():
                continue
            if request.error is not None:
                future.set_exception(request.error)
            else:
                future.set_result(request.outputs or [])


def hand_out(requests: list[InferRequest]) -> None:
    """Give each request to its sink: one call when they share one, as nearly always."""
    sink = requests[0].sink
    for request in requests:
        if request.sink is not sink:
            break
    else:
        sink.deliver(requests)
        return
    by_sink: dict[int, list[InferRequest]] = {}
    for request in requests:
        by_sink.setdefault(id(request.sink), []).append(request)
    for group in by_sink.values():
        group[0].sink.deliver(group)
