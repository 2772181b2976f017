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

from .messages import ANSWER, CANCEL, EXECUTE, GO_ON, HOLD, READY
from .open_request import OpenRequest
from .readiness import ModelReadiness
from .requests import Names, error_of

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
    """An Outside. It has one worker at a time, restarted when it ends: at once, then with growing delays.

    `upcalls_of` makes the Upcalls of each worker. Units: `limit_s`, the limit of a Batch in seconds, 0 for none.
    Invariant: the end of each accepted request is reported once: with its Batch, after it, or when the worker has
    ended. A request that is to run again keeps its number. Threads: the event loop's.
    """

    def __init__(self, order: Order, names: Names, upcalls_of: MakeUpcalls, limit_s: float = 0.0) -> None:
        self._order = order
        self._kept = RestartingWorker(order, self)
        self._names = names
        self._upcalls_of = upcalls_of
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self._takes: ExecutorCallbacks | None = None
        self._upcalls: Upcalls | None = None
        self._last = 0
        self._open: dict[int, OpenRequest] = {}
        self._numbers: dict[InferRequest, int] = {}
        self._unbegun: Batch | None = None
        self._readiness = ModelReadiness()

    @property
    def pid(self) -> int:
        """The worker's process id; 0 for none."""
        return self._kept.pid

    async def start(self) -> None:
        """Start the worker, which initializes the model. Raises: InferError."""
        body, _ = await self._kept.start()
        self._readiness.asked = orjson.loads(body)["asked"]

    async def check_ready(self) -> bool:
        """Ask the model whether it is ready, if it defines that."""
        return await self._readiness.ask(self._kept.worker)

    def attach(self, instance: ExecutorCallbacks) -> None:
        """Set the receiver of results."""
        self._takes = instance
        self._kept.set_event_counter(instance.count_event)

    async def close(self) -> None:
        """Have the worker finalize the model and end."""
        await self._kept.close(kill=bool(self._open))

    # -- requests ----------------------------------------------------------------------------------------------

    def begin(self, batch: Batch) -> None:
        """Run a Batch."""
        opened = [self._opened(request, batch) for request in batch.requests]
        try:
            body, arrays = self._names.packed(batch, [each.number for each in opened])
            if self._kept.worker is None:
                raise NotStartedError
            self._kept.worker.send_call(partial(self._called, batch, opened), EXECUTE, body, arrays, self._limit_s)
        except NotStartedError:
            self._unbegun = batch
            if self._kept.worker is None:
                self._loop.call_soon(self._hand_back)
            return
        except Exception as error:  # noqa: BLE001 - a tensor that cannot be sent, whatever raises
            failure = InferError(Code.INTERNAL, f"{self._order.label}: {error}")
            batch.compute_start_ns = batch.compute_end_ns = time.monotonic_ns()
            self._loop.call_soon(self._free, batch, opened, failure)
            return
        for each in opened:
            self._open[each.number] = each
            self._numbers[each.request] = each.number
        batch.compute_start_ns = time.monotonic_ns()

    def _opened(self, request: InferRequest, batch: Batch) -> OpenRequest:
        number = self._numbers.get(request)
        if number is None:
            self._last += 1
            return OpenRequest(request, batch, self._last)
        each = self._open[number]
        each.runs_in(batch)
        return each

    def max_batch_ns(self, key: Key) -> int:
        """Return 0: no limit."""
        return 0

    def abandon(self, request: InferRequest) -> None:
        """Tell the worker that the answers of a request are no longer wanted."""
        number = self._numbers.get(request)
        if number is None:
            return
        if self._kept.worker is not None:
            self._kept.worker.send_message(CANCEL, number)
        each = self._open[number]
        each.left = True
        if each.waits:
            self._forget(each)

    def _called(
        self, batch: Batch, opened: list[OpenRequest], body: bytes, arrays: list[Array | None], error: Exception | None
    ) -> None:
        """Handle the end of a call, before anything that follows it, such as the worker's end; a future is later."""
        batch.compute_end_ns = time.monotonic_ns()
        if isinstance(error, NotStartedError):
            for each in opened:
                self._forget(each)
            self._unbegun = batch
            self._hand_back()
            return
        if error is not None:
            failure = error if isinstance(error, InferError) else InferError(Code.INTERNAL, str(error))
            self._free(batch, opened, failure)
            return
        try:
            self._take_answers(opened, body, arrays)
        except InferError as wrong:
            self._free(batch, opened, wrong)
        except Exception as wrong:
            logger.exception("%s: an answer that cannot be read", self._order.label)
            self._free(batch, opened, InferError(Code.INTERNAL, f"{self._order.label}: {wrong!r}"))
            if self._kept.worker is not None:
                self._kept.worker.kill(f"{self._order.label} gave an answer that cannot be read")
        else:
            self._kept.reset_backoff()
            self._free(batch, opened, None)

    def _take_answers(self, opened: list[OpenRequest], body: bytes, arrays: list[Array | None]) -> None:
        """Handle the answers of a call. Raises: InferError; any exception for a reply that cannot be read."""
        said_of_all = orjson.loads(body)
        answers, again = said_of_all["answers"], frozenset(said_of_all.get("again", ()))
        if len(answers) != len(opened):
            raise InferError(Code.INTERNAL, _wrong_count(len(opened), len(answers)))
        tensors = iter(arrays)
        for each, said in zip(opened, answers, strict=True):
            if said is not None:
                self._answer(each, said, tensors)
            if said is not None or each.final:
                self._end(each)
            elif each.number in again and not each.ended:
                self._wait(each)

    def _wait(self, each: OpenRequest) -> None:
        """Keep a request to run again, unless it was abandoned."""
        if each.left:
            self._end(each, InferError(Code.CANCELLED, "the request was cancelled while it ran"))
        else:
            each.waits = True

    def _free(self, batch: Batch, opened: Sequence[OpenRequest], failure: InferError | None) -> None:
        """Return a Batch, with those of its requests that are answered, or all of them with the failure."""
        if failure is not None:
            for each in opened:
                self._end(each, failure)
        for each in opened:
            each.later = not each.ended
        batch.rerun_requests = [each.request for each in opened if each.waits]
        batch.exec_end_ns = time.monotonic_ns()
        if self._takes is not None:
            self._takes.on_free(batch, [each.request for each in opened if each.ended])

    def _hand_back(self) -> None:
        batch, self._unbegun = self._unbegun, None
        if batch is not None and self._takes is not None:
            self._takes.on_not_run(batch)

    # -- answers -----------------------------------------------------------------------------------------------

    def on_message(self, kind: int, number: int, body: bytes, arrays: list[Array | None]) -> None:
        """Handle an answer, or another message from the worker."""
        if kind == READY:
            self._readiness.answer(ready=orjson.loads(body)["ready"])
            return
        if kind != ANSWER:
            if self._upcalls is not None:
                self._upcalls.take(kind, number, body, arrays)
            return
        each = self._open.get(number)
        if each is None:
            return
        said = orjson.loads(body)
        if said["outputs"] is not None or said.get("error"):
            self._answer(each, said, iter(arrays))
        if said["final"] and each.waits:
            each.final = True
        elif said["final"]:
            self._end(each)

    def _answer(self, each: OpenRequest, said: dict[str, Any], tensors: Iterator[Array | None]) -> None:
        """Handle one answer; a fault in it becomes its error."""
        request, names = each.request, said["outputs"]
        taken = [next(tensors, None) for _ in names]
        error: InferError | None = None
        found: dict[str, Array] = {}
        wrong = ""
        try:
            if said.get("error"):
                raise error_of(said["error"])
            found, wrong = self._names.outputs_of(names, taken)
        except InferError as failed:
            error = without_traceback(failed)
        each.count += 1
        answers = getattr(request, "answer_sink", None)
        if answers is None:
            if each.count == 1:  # the only answer counts, whatever follows, also in Triton's stream
                request.error = error
                each.answer = found, said.get("parameters") or {}, wrong
            elif request.error is None and request.model.spec.decoupled:
                request.error = InferError(Code.INTERNAL, NOT_SINGLE_MESSAGE)
            return
        now_ns = time.monotonic_ns()
        told = StreamedAnswer(
            found, error, said["final"], said.get("parameters") or None, now_ns - each.since_ns, wrong
        )
        each.since_ns = now_ns
        try:
            room = answers.send(told)
        except InferError as full:
            request.error = without_traceback(full)
            self.abandon(request)
            return
        if room is not None and not each.held:
            self._hold(each, HOLD)
            room(partial(self._hold, each, GO_ON))

    def _hold(self, each: OpenRequest, kind: int) -> None:
        """Have the model wait before the next answer of a request, or resume."""
        each.held = kind == HOLD
        if self._kept.worker is not None:
            self._kept.worker.send_message(kind, each.number)

    def _end(self, each: OpenRequest, failure: InferError | None = None) -> None:
        """Record a request's last answer; deliver it here if its Batch has already been returned."""
        if each.ended:
            return
        each.ended = True
        self._forget(each)
        request = each.request
        if failure is not None:
            # a new error object: one that is raised keeps the frames it has passed through
            request.error = InferError(failure.code, failure.message, failure.retry_after_ns)
        elif request.error is None:
            self._complete(each, request)
        if each.later and self._takes is not None:
            self._takes.on_answered(each.batch, [request])

    def _complete(self, each: OpenRequest, request: InferRequest) -> None:
        if getattr(request, "answer_sink", None) is not None:
            request.outputs = []
            return
        try:
            if not each.count:
                raise InferError(Code.INTERNAL, NOT_SINGLE_MESSAGE)
            request.outputs = self._names.in_order(request, *each.answer)
        except InferError as wrong:
            request.error = without_traceback(wrong)

    def _request(self, number: int) -> InferRequest | None:
        each = self._open.get(number)
        return None if each is None else each.request

    def _forget(self, each: OpenRequest) -> None:
        self._open.pop(each.number, None)
        self._numbers.pop(each.request, None)

    # -- the Tenant of the RestartingWorker -----------------------------------------------------------------------

    def on_worker_starting(self, worker: Worker) -> None:
        """Make the Upcalls of a new worker."""
        self._upcalls = self._upcalls_of(worker, self._request)

    def on_worker_gone(self) -> None:
        """End the Upcalls."""
        self._readiness.answer(ready=False)
        if self._upcalls is not None:
            self._upcalls.end()
            self._upcalls = None

    def on_worker_lost(self, failure: InferError) -> None:
        """Leave waiting requests to other Instances, and fail those in flight."""
        if self._takes is not None and not self._kept.closing:
            self._takes.on_down(failure, hopeless=False)
        self._hand_back()
        for each in list(self._open.values()):
            if each.waits:
                self._forget(each)
            elif each.later:
                self._end(each, failure)

    def on_restart_failed(self, failure: InferError) -> None:
        """Fail the waiting requests if no other Instance can run them."""
        if self._takes is not None:
            self._takes.on_down(failure, hopeless=True)

    def on_worker_restarted(self) -> None:
        """Accept Batches again."""
        if self._takes is not None:
            self._takes.on_up()


def _wrong_count(requests: int, answers: int) -> str:
    return (
        "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
        f"InferenceRequest(s) size is:{requests}, and InferenceResponse(s) size is:{answers}\n"
    )
