"""WorkerSlot: runs Batches of calls in a worker, one Batch at a time. Created by hosts.py.

The worker runs the calls of a Batch one after another and answers each as it finishes. With two slots, it has its next
calls while the answers to the last are on their way.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING

from penstock.backends.errors import Code, InferError
from penstock.server.workers.order import NotStartedError, WorkerLost

from .calls import RawCall
from .messages import CALL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.backends.backend import Array
    from penstock.batching.request import InferRequest, Key
    from penstock.batching.running.batch import Batch
    from penstock.batching.running.external import ExecutorCallbacks

    from .hosts import CarryingHost

MAX_BATCH_NS = 1_000_000
"""The maximum predicted time of a Batch's calls: further calls would wait at one worker while another is idle, and
could be neither taken back nor expired. A worker that does 30,000 calls/s gets 30 of them."""


class WorkerSlot:
    """An ExternalExecutor. Invariant: each request that it has taken is answered once, or returned unstarted.

    `_in_flight` is the number of calls in flight. Answers are reported once per wake-up of the loop.
    Threads: the event loop's.
    """

    def __init__(self, host: CarryingHost) -> None:
        self.instance: ExecutorCallbacks | None = None
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._batch: Batch | None = None
        self._awaiting_first_answer = False
        self._started_ns = 0
        self._in_flight = 0
        self._answered: list[InferRequest] = []
        self._unstarted: list[InferRequest] = []
        self._report_scheduled = False

    @property
    def busy(self) -> bool:
        """Whether it has a Batch."""
        return self._batch is not None

    def attach(self, instance: ExecutorCallbacks) -> None:
        """Set the receiver of results."""
        self.instance = instance
        self._host.restarting_worker.set_event_counter(instance.count_event)

    def max_batch_ns(self, key: Key) -> int:
        """Limit the predicted time: calls run one after another."""
        return MAX_BATCH_NS

    def abandon(self, request: InferRequest) -> None:
        """Do nothing: a call that has begun in user code cannot be taken back."""

    async def check_ready(self) -> bool:
        """Return True: readiness of the code is checked elsewhere."""
        return True

    async def close(self) -> None:
        """Detach from the worker, which ends with its last WorkerSlot."""
        await self._host.on_slot_closed()

    # -- to the worker -----------------------------------------------------------------------------------------

    def begin(self, batch: Batch) -> None:
        """Send the requests of a Batch."""
        self._batch, self._awaiting_first_answer = batch, True
        calls = self._separate_calls(batch)
        batch.run_count = max(1, self._in_flight + len(calls))  # 1 if none could be sent
        for request in calls:
            self._send(request)

    def _separate_calls(self, batch: Batch) -> Sequence[InferRequest]:
        """Return the requests of a Batch that are sent as separate calls."""
        return batch.requests

    def _send(self, request: InferRequest) -> None:
        """Send a request as a separate call."""
        self._in_flight += 1
        try:
            worker = self._host.restarting_worker.worker
            if worker is None:
                raise NotStartedError
            if not isinstance(request, RawCall):
                raise InferError(Code.UNSUPPORTED, f"{self._host.order.label} does not accept tensors")
            body = request.body
            worker.send_call(partial(self._on_reply, request), CALL, body, None, self._host.crew.limit_s)
        except Exception as error:  # noqa: BLE001 - any error in sending fails only this call
            self._on_reply(request, b"", [], error)

    # -- from the worker ---------------------------------------------------------------------------------------

    def _on_reply(
        self, request: InferRequest, body: bytes, arrays: list[Array | None], error: Exception | None
    ) -> None:
        """Handle the end of a call."""
        self._in_flight -= 1
        if error is None:
            request.reply = body  # type: ignore[attr-defined]
            request.outputs = []
            self._answered.append(request)
        else:
            self._fail(request, error)
        self._schedule_report()

    def _fail(self, request: InferRequest, error: Exception) -> None:
        if isinstance(error, NotStartedError):
            self._unstarted.append(request)
            return
        if isinstance(error, WorkerLost):
            request.error = WorkerLost(error.message, error.code)
        elif isinstance(error, InferError):
            # a new error object: one that is raised keeps the frames it has passed through
            request.error = InferError(error.code, error.message, error.retry_after_ns)
        else:
            request.error = InferError(Code.INTERNAL, f"{self._host.order.label}: {error}")
        self._answered.append(request)

    # -- to its Instance ---------------------------------------------------------------------------------------

    def suspend(self, failure: InferError) -> None:
        """Suspend: there is no worker."""
        if self.instance is not None and not self._host.restarting_worker.closing:
            self.instance.on_down(failure, permanent=False)
        self._report()

    def _schedule_report(self) -> None:
        if not self._report_scheduled:
            self._report_scheduled = True
            self._loop.call_soon(self._report_now)

    def _report_now(self) -> None:
        self._report_scheduled = False
        self._report()

    def _report(self) -> None:
        """Report what has arrived since the last report."""
        batch, instance = self._batch, self.instance
        if batch is None or instance is None:
            return
        answered, self._answered = self._answered, []
        if answered:
            self._stamp(batch)
            if answered[0].error is None:
                self._host.restarting_worker.reset_backoff()  # if a later call ends it, the restart is immediate
            self._host.crew.on_answered(answered)
        if self._in_flight or self._unstarted:
            if answered:
                instance.on_answered(batch, answered)
                batch.exec_start_ns = batch.compute_start_ns = batch.exec_end_ns  # when the others have begun
            if not self._in_flight:
                self._return_unstarted(batch, instance)
            return
        self._batch = None
        self._host.idle_since_ns = batch.exec_end_ns
        self._host.crew.update_call_time((batch.exec_end_ns - self._started_ns) / batch.run_count)
        if batch.exec_start_ns > self._started_ns:  # it was reported in parts, and these are the last
            instance.on_answered(batch, answered)
            answered, batch.exec_start_ns = [], self._started_ns
        instance.on_free(batch, answered)
        self._host.count_served(len(batch.requests))

    def _stamp(self, batch: Batch) -> None:
        """Set a Batch's run times. It starts no earlier than the end of the worker's previous calls."""
        if self._awaiting_first_answer:
            self._awaiting_first_answer = False
            self._started_ns = max(batch.exec_start_ns, self._host.idle_since_ns)
            batch.exec_start_ns = batch.compute_start_ns = self._started_ns
        batch.compute_end_ns = batch.exec_end_ns = time.monotonic_ns()

    def _return_unstarted(self, batch: Batch, instance: ExecutorCallbacks) -> None:
        """Give back the calls that the worker has not begun. It has ended, or is about to."""
        unstarted, self._unstarted, self._batch = self._unstarted, [], None
        if self._host.restarting_worker.closing:
            for request in unstarted:
                request.error = InferError(
                    Code.NOT_READY, f"{self._host.order.label} is stopped: the server is stopping"
                )
            self._host.crew.on_answered(unstarted)
            instance.on_free(batch, unstarted)
            return
        worker = self._host.restarting_worker.worker
        if worker is not None:  # its end has not been noticed yet
            instance.on_down(InferError(Code.NOT_READY, f"{self._host.order.label} has ended"), permanent=False)
        batch.requests, batch.rows = unstarted, sum(request.rows for request in unstarted)
        instance.on_not_run(batch)
