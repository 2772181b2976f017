"""SeldonCrew: the workers of a component, and SeldonSlots, which run Batches on them.

Requests may share a batch (`--batching`), or be of the v2 protocol. Requests that share a batch are one call; if it
fails, each of them is called alone. Made by loading.py. What all carried calls have in common is in carrying/.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.backends.errors import Code, InferError
from penstock.server.carrying.calls import RAW
from penstock.server.carrying.hosts import Crew
from penstock.server.carrying.worker_slots import WorkerSlot
from penstock.server.workers.order import NotStartedError, WorkerLost

from .calls import SeldonCall
from .messages import APART, ROWS, TENSORS, Endpoint

if TYPE_CHECKING:
    from penstock.backends.backend import Array
    from penstock.batching.request import InferRequest, Key
    from penstock.batching.running.batch import Batch
    from penstock.server.carrying.hosts import CarryingHost

    from .batching import Sharing
    from .tensors import TensorCodec

logger = logging.getLogger("penstock.seldon")


@dataclass
class SeldonCrew(Crew):
    """A Crew whose calls may share batches. `count_metrics` is called with the metrics of v2 requests.

    `run_alone` are requests that run alone because a batch they shared failed.
    """

    count_metrics: Callable[[Endpoint, bytes], None] = lambda _endpoint, _metrics: None
    tensors: TensorCodec | None = None
    sharing: Sharing | None = None
    run_alone: set[InferRequest] = field(default_factory=set)

    @property
    def shares_batches(self) -> bool:
        """Whether calls share batches."""
        return self.sharing is not None and self.sharing.allowed

    def make_slot(self, host: CarryingHost) -> WorkerSlot:
        """Make a WorkerSlot of a CarryingHost."""
        return SeldonSlot(host, self)

    def on_answered(self, requests: Sequence[InferRequest]) -> None:
        """Forget which of these were to run alone."""
        if self.run_alone:
            self.run_alone.difference_update(requests)

    def on_restart_failed(self) -> None:
        """Forget all that were to run alone: requests answered this way do not come back here."""
        self.run_alone.clear()


class SeldonSlot(WorkerSlot):
    """A WorkerSlot that also makes one call of several requests. Threads: the event loop's."""

    def __init__(self, host: CarryingHost, crew: SeldonCrew) -> None:
        super().__init__(host)
        self._crew = crew

    def max_batch_ns(self, key: Key) -> int:
        """Limit calls that run one after another; those that share a batch are one call, and have no limit."""
        return 0 if key != RAW and self._crew.shares_batches else super().max_batch_ns(key)

    def _separate_calls(self, batch: Batch) -> Sequence[InferRequest]:
        """Send those that share the Batch as one call. Returns: the others."""
        requests, crew = batch.requests, self._crew
        if len(requests) > 1 and requests[0].inputs and crew.shares_batches:
            shared = [request for request in requests if request not in crew.run_alone]
            if len(shared) > 1:
                alone = [request for request in requests if request in crew.run_alone]
                self._send_batch(shared)
                return alone
        return requests

    def _send(self, request: InferRequest) -> None:
        """Send a request as a call of its own."""
        if type(request) is SeldonCall:
            super()._send(request)
        else:
            self._send_batch((request,))

    def _send_batch(self, requests: Sequence[InferRequest]) -> None:
        """Send requests as one call."""
        self._in_flight += 1
        try:
            worker = self._host.restarting_worker.worker
            if worker is None:
                raise NotStartedError
            if type(requests[0]) is SeldonCall:
                kind, (body, arrays) = ROWS, self._sharing.pack(requests)  # type: ignore[arg-type]
            else:
                kind, (body, arrays) = TENSORS, self._tensors.pack(requests)
            worker.send_call(partial(self._end_batch, requests), kind, body, arrays, self._host.crew.limit_s)
        except Exception as error:  # noqa: BLE001 - as above
            self._end_batch(requests, b"", [], error)

    @property
    def _tensors(self) -> TensorCodec:
        if self._crew.tensors is None:
            raise InferError(Code.UNSUPPORTED, f"{self._host.order.label} does not accept tensors")
        return self._crew.tensors

    @property
    def _sharing(self) -> Sharing:
        if self._crew.sharing is None:
            raise InferError(Code.UNSUPPORTED, f"{self._host.order.label} does not run batches")
        return self._crew.sharing

    def _end_batch(
        self, requests: Sequence[Any], body: bytes, arrays: list[Array | None], error: Exception | None
    ) -> None:
        """Handle the end of a call of ROWS or TENSORS, of one request or several."""
        self._in_flight -= 1
        ran_together = False
        if error is None:
            try:
                ran_together = len(requests) == 1 or self._sharing.record_outcome(body[0])
                if ran_together:
                    self._distribute(requests, body[1:], arrays)
            except Exception as decode_error:
                logger.exception("%s: the worker sent an answer that cannot be read", self._host.order.label)
                ran_together, error = False, decode_error
        if ran_together:
            self._answered += requests
        else:
            self._run_separately(requests, error)
        self._schedule_report()

    def _distribute(self, requests: Sequence[Any], body: bytes, arrays: list[Array | None]) -> None:
        """Distribute the results of requests that ran together. Raises: any exception that decoding them causes."""
        if type(requests[0]) is SeldonCall:
            self._sharing.distribute(requests, body)
            for call in requests:
                call.outputs = []
            return
        for metrics in self._tensors.distribute(requests, body, arrays):
            if metrics:
                self._crew.count_metrics(Endpoint.PREDICT, metrics.encode())

    def _run_separately(self, requests: Sequence[InferRequest], error: Exception | None) -> None:
        """Run the requests of a failed batch alone; a request that was alone has failed."""
        if len(requests) == 1 and error is not None:
            self._fail(requests[0], error)
        elif isinstance(error, NotStartedError):
            self._unstarted += requests
        else:
            self._crew.run_alone.update(requests)
            if isinstance(error, WorkerLost):
                self._sharing.record_outcome(APART)
                self._unstarted += requests
                return
            if self._batch is not None:
                self._batch.run_count += len(requests) - 1  # the shared call does not count as a run
            for request in requests:
                self._send(request)
