"""PythonModelHost: one Instance of a Python model, as seen by the Engine: a worker that runs Batches and answers.

Created by loading.py. The worker's other messages go to its Upcalls (upcalls.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson

from penstock.backends.errors import Code, InferError, without_traceback
from penstock.batching.stream import NOT_SINGLE_MESSAGE, StreamedAnswer
from penstock.server.workers.order import NotStartedError, Order
from penstock.server.workers.restarting import RestartingWorker

from .batch_codec import BatchCodec, decode_error
from .messages import ANSWER, CANCEL, EXECUTE, PAUSE, READY, RESUME
from .open_request import OpenRequest
from .readiness import ModelReadiness

if TYPE_CHECKING:
    from penstock.backends.backend import Array
    from penstock.batching.request import InferRequest, Key
    from penstock.batching.running.batch import Batch
    from penstock.batching.running.external import ExecutorCallbacks
    from penstock.server.workers.worker import Worker

    from .upcalls import Upcalls

logger = logging.getLogger("penstock.python_models")


MakeUpcalls = Callable[["Worker", Callable[[int], "InferRequest | None"]], "Upcalls"]
"""Makes the Upcalls of a worker; they find the worker's requests by number."""


class PythonModelHost:
    """An ExternalExecutor. It has one worker at a time, restarted when it ends: at once, then with growing delays.

    `make_upcalls` makes the Upcalls of each worker. Units: `limit_s`, the limit of a Batch in seconds, 0 for none.
    Invariant: the end of each accepted request is reported once: with its Batch, after it, or when the worker has
    ended. A request that is to run again keeps its number. Threads: the event loop's.
    """

    def __init__(self, order: Order, codec: BatchCodec, make_upcalls: MakeUpcalls, limit_s: float) -> None:
        self._order = order
        self._restarting_worker = RestartingWorker(order, self)
        self._codec = codec
        self._make_upcalls = make_upcalls
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self._instance: ExecutorCallbacks | None = None
        self._upcalls: Upcalls | None = None
        self._last_number = 0
        self._open_requests: dict[int, OpenRequest] = {}
        self._numbers: dict[InferRequest, int] = {}
        self._unstarted: Batch | None = None
        self._readiness = ModelReadiness()

    @property
    def pid(self) -> int:
        """The worker's process id; 0 for none."""
        return self._restarting_worker.pid

    async def start(self) -> None:
        """Start the worker, which initializes the model. Raises: InferError."""
        body, _ = await self._restarting_worker.start()
        self._readiness.has_is_ready = orjson.loads(body)["has_is_ready"]

    async def check_ready(self) -> bool:
        """Ask the model whether it is ready, if it defines that."""
        return await self._readiness.check(self._restarting_worker.worker)

    def attach(self, instance: ExecutorCallbacks) -> None:
        """Set the receiver of results."""
        self._instance = instance
        self._restarting_worker.set_event_counter(instance.count_event)

    async def close(self) -> None:
        """Have the worker finalize the model and end."""
        await self._restarting_worker.close(kill=bool(self._open_requests))

    # -- requests ----------------------------------------------------------------------------------------------

    def begin(self, batch: Batch) -> None:
        """Run a Batch."""
        entries = [self._open_request(request, batch) for request in batch.requests]
        try:
            body, arrays = self._codec.encode_batch(batch, [entry.number for entry in entries])
            if self._restarting_worker.worker is None:
                raise NotStartedError
            on_reply = partial(self._on_reply, batch, entries)
            self._restarting_worker.worker.send_call(on_reply, EXECUTE, body, arrays, self._limit_s)
        except NotStartedError:
            self._unstarted = batch
            if self._restarting_worker.worker is None:
                self._loop.call_soon(self._return_unstarted)
            return
        except Exception as error:  # noqa: BLE001 - a tensor that cannot be sent, whatever raises
            failure = InferError(Code.INTERNAL, f"{self._order.label}: {error}")
            batch.compute_start_ns = batch.compute_end_ns = time.monotonic_ns()
            self._loop.call_soon(self._finish_batch, batch, entries, failure)
            return
        for entry in entries:
            self._open_requests[entry.number] = entry
            self._numbers[entry.request] = entry.number
        batch.compute_start_ns = time.monotonic_ns()

    def _open_request(self, request: InferRequest, batch: Batch) -> OpenRequest:
        number = self._numbers.get(request)
        if number is None:
            self._last_number += 1
            return OpenRequest(request, batch, self._last_number)
        entry = self._open_requests[number]
        entry.start_run(batch)
        return entry

    def max_batch_ns(self, key: Key) -> int:
        """Return 0: no limit."""
        return 0

    def abandon(self, request: InferRequest) -> None:
        """Tell the worker that the answers of a request are no longer wanted."""
        number = self._numbers.get(request)
        if number is None:
            return
        if self._restarting_worker.worker is not None:
            self._restarting_worker.worker.send_message(CANCEL, number)
        entry = self._open_requests[number]
        entry.abandoned = True
        if entry.rescheduled:
            self._remove(entry)

    def _on_reply(
        self, batch: Batch, entries: list[OpenRequest], body: bytes, arrays: list[Array | None], error: Exception | None
    ) -> None:
        """Handle the end of a call, before anything that follows it, such as the worker's end; a future is later."""
        batch.compute_end_ns = time.monotonic_ns()
        if isinstance(error, NotStartedError):
            for entry in entries:
                self._remove(entry)
            self._unstarted = batch
            self._return_unstarted()
            return
        if error is not None:
            failure = error if isinstance(error, InferError) else InferError(Code.INTERNAL, str(error))
            self._finish_batch(batch, entries, failure)
            return
        try:
            self._handle_answers(entries, body, arrays)
        except InferError as invalid:
            self._finish_batch(batch, entries, invalid)
        except Exception as invalid:
            logger.exception("%s: unreadable answer from the worker", self._order.label)
            self._finish_batch(batch, entries, InferError(Code.INTERNAL, f"{self._order.label}: {invalid!r}"))
            if self._restarting_worker.worker is not None:
                self._restarting_worker.worker.kill(f"{self._order.label} sent an unreadable answer")
        else:
            self._restarting_worker.reset_backoff()
            self._finish_batch(batch, entries, None)

    def _handle_answers(self, entries: list[OpenRequest], body: bytes, arrays: list[Array | None]) -> None:
        """Handle the answers of a call. Raises: InferError; any exception for a reply that cannot be read."""
        reply = orjson.loads(body)
        answers, rescheduled = reply["answers"], frozenset(reply.get("rescheduled", ()))
        if len(answers) != len(entries):
            raise InferError(Code.INTERNAL, _count_mismatch(len(entries), len(answers)))
        tensors = iter(arrays)
        for entry, answer in zip(entries, answers, strict=True):
            if answer is not None:
                self._handle_answer(entry, answer, tensors)
            if answer is not None or entry.final:
                self._finish_request(entry)
            elif entry.number in rescheduled and not entry.ended:
                self._reschedule(entry)

    def _reschedule(self, entry: OpenRequest) -> None:
        """Keep a request to run again, unless it was abandoned."""
        if entry.abandoned:
            self._finish_request(entry, InferError(Code.CANCELLED, "the request was cancelled while it ran"))
        else:
            entry.rescheduled = True

    def _finish_batch(self, batch: Batch, entries: Sequence[OpenRequest], failure: InferError | None) -> None:
        """Return a Batch, with those of its requests that are answered, or all of them with the failure."""
        if failure is not None:
            for entry in entries:
                self._finish_request(entry, failure)
        for entry in entries:
            entry.batch_returned = not entry.ended
        batch.rerun_requests = [entry.request for entry in entries if entry.rescheduled]
        batch.exec_end_ns = time.monotonic_ns()
        if self._instance is not None:
            self._instance.on_free(batch, [entry.request for entry in entries if entry.ended])

    def _return_unstarted(self) -> None:
        batch, self._unstarted = self._unstarted, None
        if batch is not None and self._instance is not None:
            self._instance.on_not_run(batch)

    # -- answers -----------------------------------------------------------------------------------------------

    def on_message(self, kind: int, number: int, body: bytes, arrays: list[Array | None]) -> None:
        """Handle an answer, or another message from the worker."""
        if kind == READY:
            self._readiness.answer(ready=orjson.loads(body)["ready"])
            return
        if kind != ANSWER:
            if self._upcalls is not None:
                self._upcalls.on_message(kind, number, body, arrays)
            return
        entry = self._open_requests.get(number)
        if entry is None:
            return
        answer = orjson.loads(body)
        if answer["outputs"] is not None or answer.get("error"):
            self._handle_answer(entry, answer, iter(arrays))
        if answer["final"] and entry.rescheduled:
            entry.final = True
        elif answer["final"]:
            self._finish_request(entry)

    def _handle_answer(self, entry: OpenRequest, answer: dict[str, Any], tensors: Iterator[Array | None]) -> None:
        """Handle one answer; a fault in it becomes its error."""
        request, output_names = entry.request, answer["outputs"]
        answer_arrays = [next(tensors, None) for _ in output_names]
        error: InferError | None = None
        outputs: dict[str, Array] = {}
        contradiction = ""
        try:
            if answer.get("error"):
                raise decode_error(answer["error"])
            outputs, contradiction = self._codec.decode_outputs(output_names, answer_arrays)
        except InferError as invalid:
            error = without_traceback(invalid)
        entry.answer_count += 1
        answers = getattr(request, "answer_sink", None)
        if answers is None:
            if entry.answer_count == 1:  # the only answer counts, whatever follows, also in Triton's stream
                request.error = error
                entry.answer = outputs, answer.get("parameters") or {}, contradiction
            elif request.error is None and request.model.spec.decoupled:
                request.error = InferError(Code.INTERNAL, NOT_SINGLE_MESSAGE)
            return
        now_ns = time.monotonic_ns()
        infer_ns, parameters = now_ns - entry.last_answer_ns, answer.get("parameters") or None
        streamed = StreamedAnswer(outputs, error, answer["final"], parameters, infer_ns, contradiction)
        entry.last_answer_ns = now_ns
        try:
            register_resume = answers.send(streamed)
        except InferError as overflow:
            request.error = without_traceback(overflow)
            self.abandon(request)
            return
        if register_resume is not None and not entry.paused:
            self._set_paused(entry, PAUSE)
            register_resume(partial(self._set_paused, entry, RESUME))

    def _set_paused(self, entry: OpenRequest, kind: int) -> None:
        """Have the model wait before the next answer of a request, or resume."""
        entry.paused = kind == PAUSE
        if self._restarting_worker.worker is not None:
            self._restarting_worker.worker.send_message(kind, entry.number)

    def _finish_request(self, entry: OpenRequest, failure: InferError | None = None) -> None:
        """Record a request's last answer; deliver it here if its Batch has already been returned."""
        if entry.ended:
            return
        entry.ended = True
        self._remove(entry)
        request = entry.request
        if failure is not None:
            # a new error object: one that is raised keeps the frames it has passed through
            request.error = InferError(failure.code, failure.message, failure.retry_after_ns)
        elif request.error is None:
            self._set_outputs(entry, request)
        if entry.batch_returned and self._instance is not None:
            self._instance.on_answered(entry.batch, [request])

    def _set_outputs(self, entry: OpenRequest, request: InferRequest) -> None:
        if getattr(request, "answer_sink", None) is not None:
            request.outputs = []
            return
        try:
            if not entry.answer_count:
                raise InferError(Code.INTERNAL, NOT_SINGLE_MESSAGE)
            request.outputs = self._codec.select_outputs(request, *entry.answer)
        except InferError as invalid:
            request.error = without_traceback(invalid)

    def _find_request(self, number: int) -> InferRequest | None:
        entry = self._open_requests.get(number)
        return None if entry is None else entry.request

    def _remove(self, entry: OpenRequest) -> None:
        self._open_requests.pop(entry.number, None)
        self._numbers.pop(entry.request, None)

    # -- the WorkerOwner of the RestartingWorker -----------------------------------------------------------------------

    def on_worker_starting(self, worker: Worker) -> None:
        """Make the Upcalls of a new worker."""
        self._upcalls = self._make_upcalls(worker, self._find_request)

    def on_worker_gone(self) -> None:
        """Cancel the Upcalls."""
        self._readiness.answer(ready=False)
        if self._upcalls is not None:
            self._upcalls.cancel_all()
            self._upcalls = None

    def on_worker_lost(self, failure: InferError) -> None:
        """Leave waiting requests to other Instances, and fail those in flight."""
        if self._instance is not None and not self._restarting_worker.closing:
            self._instance.on_down(failure, permanent=False)
        self._return_unstarted()
        for entry in list(self._open_requests.values()):
            if entry.rescheduled:
                self._remove(entry)
            elif entry.batch_returned:
                self._finish_request(entry, failure)

    def on_restart_failed(self, failure: InferError) -> None:
        """Fail the waiting requests if no other Instance can run them."""
        if self._instance is not None:
            self._instance.on_down(failure, permanent=True)

    def on_worker_restarted(self) -> None:
        """Accept Batches again."""
        if self._instance is not None:
            self._instance.on_up()


def _count_mismatch(requests: int, answers: int) -> str:
    return (
        "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
        f"InferenceRequest(s) size is:{requests}, and InferenceResponse(s) size is:{answers}\n"
    )
