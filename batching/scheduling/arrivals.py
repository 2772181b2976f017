"""Arrivals: requests that come in one turn of the event loop go to their queues together, at its end.

That is for models whose batches the loop runs: nothing looks at their queues before, so requests wait no longer for it.
One by one each takes the queue's lock, and is asked what all of them have in common: a tenth of all that is done in
Python for a small request. An Instance with a thread may look at any time, and is not to find one request of many.
Called by the Engine, whose `submit_soon` this is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.backends.errors import Code, InferError
from penstock.batching.sinks import to_sinks
from penstock.batching.statistics import CANCELED

from .together import add_together

if TYPE_CHECKING:
    from penstock.batching.engine import Engine
    from penstock.batching.model import Model
    from penstock.batching.request import InferRequest
    from penstock.batching.spec import BatchPolicy

logger = logging.getLogger("penstock.batching")

MOST = 64
"""So many do not wait for more: a full queue refuses who comes before he is decoded, and has to know of them."""
LARGE_BYTES = 1 << 16
"""Nor does one that holds so much of the server's memory."""


def is_choosy(policy: BatchPolicy) -> bool:
    """Tell whether more is decided about each request than whether there is room for it."""
    return bool(policy.latency_target_us or policy.priority_levels or policy.preserve_ordering)


class Arrivals:
    """What has come in this turn, to each model `came`. Threads: the event loop's.

    `begin` has something done at the end of the turn, before models are looked at; `left` is told of who has left his
    model, as a request does here that its queue refuses after all.
    """

    def __init__(
        self, engine: Engine, begin: Callable[[Callable[[], None]], None], left: Callable[[Model, int], None]
    ) -> None:
        self._engine = engine
        self._begin = begin
        self._left = left
        self._models: list[Model] = []

    def add(self, request: InferRequest) -> None:
        """Accept a request; if its queue refuses it at the end of the turn, its sink is told.

        Raises: as `Engine.submit`, which takes the first of a turn, and those about which more is to be decided.
        """
        model, engine = request.model, self._engine
        if not model.gathers or request.deadline_ns or request.nbytes >= LARGE_BYTES or engine.stopping:
            engine.submit(request)
            return
        request.start_ns = request.queue_ns = time.monotonic_ns()
        model.inflight += 1
        came = model.came
        came.append(request)
        if len(came) == 1:
            if not self._models:
                self._begin(self.admit)
            self._models.append(model)
        elif len(came) == MOST:
            self._admit(model)

    def take_back(self, request: InferRequest) -> bool:
        """Take a request back that is in no queue yet. Returns: False for any other."""
        model = request.model
        if request not in model.came:
            return False
        model.came.remove(request)
        self._left(model, 1)
        model.statistics.record_failure(CANCELED, request.start_ns, time.monotonic_ns())
        return True

    def admit(self) -> None:
        """Put what has come in the queues."""
        models, self._models = self._models, []
        for model in models:
            self._admit(model)

    def _admit(self, model: Model) -> None:
        requests, model.came = model.came, []
        try:
            together = not requests or add_together(model, requests, requests[0].queue_ns)
        except Exception:  # each is told what has failed, or is taken in after all
            logger.exception("model %s: requests could not be put in their queue together", model.name)
            together = False
        if not together:
            self._submit(model, requests)

    def _submit(self, model: Model, requests: list[InferRequest]) -> None:
        """Submit requests one by one, as a transport does that has each decoded when the one before is in."""
        engine = self._engine
        for request in requests:
            try:
                if model.scheduler.full():
                    engine.make_room(model)
                engine.submit(request)
            except InferError as error:
                request.error = error
            except Exception:  # those behind it are still to come in
                logger.exception("model %s: a request could not be put in its queue", model.name)
                request.error = InferError(Code.INTERNAL, f"model '{model.name}': the request could not be scheduled")
            # it counts as accepted since it came
            self._left(model, 1)
            if request.error is not None:
                to_sinks([request])
