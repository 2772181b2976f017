"""Arrivals: requests that arrive in one event loop turn are queued together, at the end of the turn.

This applies to models whose batches the loop runs: nothing reads their queues before then, so no request waits longer.
Queued one by one, each takes the queue's lock and repeats checks that all have in common: a tenth of all Python work
for a small request. An Instance with a thread may look at any time, and must not find only the first of many. Called by
the Engine, whose `submit_soon` this is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from penstock.backends.errors import Code, InferError
from penstock.batching.sinks import deliver_unordered
from penstock.batching.statistics import CANCELED

if TYPE_CHECKING:
    from penstock.batching.engine import Engine
    from penstock.batching.model import Model
    from penstock.batching.request import InferRequest
    from penstock.batching.spec import BatchPolicy

logger = logging.getLogger("penstock.batching")

MAX_ARRIVALS = 64
"""This many are queued at once without waiting for more: a full queue rejects requests before decoding, which needs an
up-to-date count."""
LARGE_BYTES = 1 << 16
"""A request that holds this much of the server's memory is queued at once as well."""


def needs_own_checks(policy: BatchPolicy) -> bool:
    """Whether accepting a request takes more than a check for room."""
    return bool(policy.latency_target_us or policy.priority_levels or policy.preserve_ordering)


class Arrivals:
    """The requests that arrived in this turn, kept in each model's `arrivals`. Threads: the event loop's.

    `call_at_turn_end` schedules a call for the end of the turn, before models are served. `on_removed` is told when
    requests leave their model, as one does here that the queue rejects after all.
    """

    def __init__(
        self,
        engine: Engine,
        call_at_turn_end: Callable[[Callable[[], None]], None],
        on_removed: Callable[[Model, int], None],
    ) -> None:
        self._engine = engine
        self._call_at_turn_end = call_at_turn_end
        self._on_removed = on_removed
        self._models: list[Model] = []

    def add(self, request: InferRequest) -> None:
        """Accept a request; if its queue rejects it at the end of the turn, its sink receives the error.

        Raises: as `Engine.submit`, which takes the first request of a turn and those that need individual decisions.
        """
        model, engine = request.model, self._engine
        if not model.collects_arrivals or request.deadline_ns or request.nbytes >= LARGE_BYTES or engine.stopping:
            engine.submit(request)
            return
        request.start_ns = request.enqueued_ns = time.monotonic_ns()
        model.inflight += 1
        arrivals = model.arrivals
        arrivals.append(request)
        if len(arrivals) == 1:
            if not self._models:
                self._call_at_turn_end(self.flush)
            self._models.append(model)
        elif len(arrivals) == MAX_ARRIVALS:
            self._flush_model(model)

    def withdraw(self, request: InferRequest) -> bool:
        """Withdraw a request that is not yet in a queue. Returns: False for any other."""
        model = request.model
        if request not in model.arrivals:
            return False
        model.arrivals.remove(request)
        self._on_removed(model, 1)
        model.statistics.record_failure(CANCELED, request.start_ns, time.monotonic_ns())
        return True

    def flush(self) -> None:
        """Queue everything that arrived."""
        models, self._models = self._models, []
        for model in models:
            self._flush_model(model)

    def _flush_model(self, model: Model) -> None:
        requests, model.arrivals = model.arrivals, []
        try:
            enqueued = not requests or enqueue_all(model, requests, requests[0].enqueued_ns)
        except Exception:  # each is submitted alone instead, and gets its own error if it fails
            logger.exception("model %s: a group of requests could not be queued", model.name)
            enqueued = False
        if not enqueued:
            self._submit_each(model, requests)

    def _submit_each(self, model: Model, requests: list[InferRequest]) -> None:
        """Submit requests one by one, making room in between, as a transport does that decodes each in turn."""
        engine = self._engine
        for request in requests:
            try:
                if model.scheduler.is_full():
                    engine.make_room(model)
                engine.submit(request)
            except InferError as error:
                request.error = error
            except Exception:  # the requests after it must still be queued
                logger.exception("model %s: a request could not be queued", model.name)
                request.error = InferError(Code.INTERNAL, f"model '{model.name}': the request could not be scheduled")
            # `add` already counted it as accepted
            self._on_removed(model, 1)
            if request.error is not None:
                deliver_unordered([request])


def enqueue_all(model: Model, requests: Sequence[InferRequest], now_ns: int) -> bool:
    """Queue requests of one model that were admitted, or belong to others accepted before: all or none.

    This saves the checks of `Engine.submit` for each: for those that came in one turn, and for the next steps of an
    ensemble's requests. One by one, a pair of small models took 18% longer, without sockets, at 32 requests a turn.
    Returns: False if any needs its own checks, or there is no room for all.
    """
    if not requests or model.intercepts or model.max_request_rows != model.max_rows:
        return False
    key, rows, nbytes = requests[0].key, 0, 0
    for request in requests:
        if request.deadline_ns or request.target_ns or (request.key is not key and request.key != key):
            return False
        if not request.start_ns:
            request.start_ns = request.enqueued_ns = now_ns
        rows += request.rows
        nbytes += request.nbytes
    with model.lock:
        return model.scheduler.add_all(requests, rows, nbytes)
