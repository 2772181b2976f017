"""WorkerReplica: one instance of a model's hook file, in its own process. Made by `worker_replicas.py`."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from penstock.backends.backend import Array
from penstock.backends.errors import Code, InferError
from penstock.batching.model import Model
from penstock.batching.spec import HookSpec
from penstock.server.ipc.errors import read_error
from penstock.server.workers.order import NotStartedError, Order
from penstock.server.workers.watch import LimitExtension
from penstock.server.workers.worker import Worker

from .call import (
    STATISTICS_NAMES,
    HookCall,
    ReplicaGoneError,
    error_for_message,
    log_context,
    log_traceback,
    log_warning,
)
from .generator_call import MAX_AHEAD
from .packing import ANSWER, DISCARD_PARAMETERS, DONE, INFER_ERROR, PREEMPT, REPLY_HEADER
from .worker_generator_call import WorkerGeneratorCall

if TYPE_CHECKING:
    from .worker_replicas import WorkerReplicas

MAX_QUEUED_NS = 1_000_000
"""The work queued at a worker besides its current call: enough for this long, so that it need not be woken for each
call, and no call waits there that another worker could take."""
MAX_QUEUED = 32
_QUICK_NS = MAX_QUEUED_NS / MAX_QUEUED
_REPLY_HEADER_BYTES = REPLY_HEADER.size

logger = logging.getLogger("penstock.hooks")


class WorkerReplica:
    """One process with one instance of the user's module, with a Replica's interface: its hooks run one at a time.

    Invariants: every call's future is completed exactly once: by the hook's result or error, by WorkerLost if the
    process ended while it ran, by `ReplicaGoneError` if it had not begun, or by its own cancellation. A call that
    exceeds its limit ends the process. `pending_calls` counts the calls queued here and those sent; `free_slots` is how
    many more may be sent, not counting turns of generators, which give way to any call. `keeps_parameters`: what
    pre_inference leaves in the parameters stays in the process for the request's post_inference. `has_answered`: a call
    has been answered.
    Threads: the event loop's.
    """

    is_hanging = False

    def __init__(self, model: Model, spec: HookSpec, order: Order, owner: WorkerReplicas) -> None:
        self._model = model
        self._owner = owner
        self._count_hook = model.statistics.record_hook
        self._limit_ns = int(spec.timeout_s * 1e9)
        self._loop = asyncio.get_running_loop()
        self._queue: deque[HookCall] = deque()
        self._sent: deque[HookCall] = deque()
        self._generators: dict[int, WorkerGeneratorCall] = {}
        self._last_turn = self._turns_in_flight = 0
        self._mean_ns = float(MAX_QUEUED_NS)
        self.free_slots = self._max_sent = 2
        self._timer: asyncio.TimerHandle | None = None
        self._release_when_idle = self._stopping = False
        self._doubt = LimitExtension(0.001)
        self._check_due_ns = 0
        self._accepts_parameters: tuple[bool, ...] = (False, False)
        self.has_pre = self.has_post = self.yields = self.keeps_parameters = False
        self.has_answered = False
        self.pending_calls = 0
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self.ready.add_done_callback(lambda ready: ready.exception())
        self._worker = Worker(order, self._on_worker_ended, self._on_notification)
        self._worker.ready.add_done_callback(self._on_opened)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._worker.pid

    @property
    def ended(self) -> asyncio.Future[None]:
        """Done once the process is gone and reaped."""
        return self._worker.ended

    @property
    def is_serving(self) -> bool:
        """Whether a call given to it will run."""
        return self._worker.serving and not self._stopping

    def has_generator(self, generator_call: WorkerGeneratorCall) -> bool:
        """Return whether the generator is active in the process."""
        return generator_call.request_number in self._generators

    def submit(self, call: HookCall) -> asyncio.Future[Any]:
        """Run a hook here; if its future is cancelled, a running hook continues, and a waiting one is skipped.

        Raises: ReplicaGoneError.
        """
        future = call.future = self._loop.create_future()
        self.dispatch(call)
        return future

    def dispatch(self, call: HookCall) -> None:
        """Run a hook whose future already exists. Raises: ReplicaGoneError."""
        if not self.is_serving:
            raise ReplicaGoneError
        self.pending_calls += 1
        self._queue.append(call)
        self._send_queued()

    def send(self, call: HookCall) -> None:
        """Run a call that already has its future. Only if there is room, so that none is queued here."""
        self.pending_calls += 1
        self._send(call)

    def notify(self, kind: int, number: int) -> None:
        """Send the worker a notification."""
        self._worker.send_message(kind, number)

    def release(self) -> None:
        """Give the replica back to its owner, once none of its hooks is running."""
        if self.pending_calls:
            self._release_when_idle = True
        else:
            self._owner.on_released(self)

    def stop(self) -> None:
        """End the process once it has done what it was sent, without waiting for that."""
        self._stopping = True
        if self.ready.done():
            self._worker.stop()
        else:
            self.kill()
        self._return_queued()

    def kill(self) -> None:
        """Kill the process now."""
        self._worker.kill(f"{self._worker.order.label} were stopped before they had finished")

    def enforce_limits(self, now_ns: int) -> int:
        """End the process if its hook has exceeded the limit at `now_ns`.

        Returns: in how many nanoseconds to check again; 0 means not before the next call.
        """
        if not self._sent or not self.ready.done():
            return 0
        running = self._sent[0]
        remaining_ns = running.limit_start_ns + self._limit_ns - now_ns
        if remaining_ns > 0:
            return remaining_ns
        limit_s = self._limit_ns / 1e9
        if more_s := self._doubt.extra_s(running.limit_start_ns, -remaining_ns / 1e9, limit_s):
            return int(more_s * 1e9)
        text = f"{running.hook} of model '{self._model.name}' took longer than its limit of {limit_s:g} s"
        log_warning(text, log_context(self._model, running))
        self._worker.kill(text, Code.EXPIRED, "time")
        return 0

    # -- sending -----------------------------------------------------------------------------------------------

    def _send_queued(self) -> None:
        while self._queue and self.free_slots > 0:
            self._send(self._queue.popleft())

    def _send(self, call: HookCall) -> None:
        now_ns = time.monotonic_ns() if call.deadline_ns or not self._sent else 0
        error: Exception | None = None
        if call.future.done():
            self._discard_parameters(call)
        elif call.deadline_ns and now_ns >= call.deadline_ns:
            error = InferError(Code.EXPIRED, "Request timeout expired")
        else:
            try:
                self._transmit(call, now_ns)
            except NotStartedError:
                error = ReplicaGoneError()
            except Exception as unsendable:  # noqa: BLE001 - cannot be encoded, or is nested too deeply
                error = InferError(Code.INTERNAL, str(unsendable))
            else:
                return
        self.pending_calls -= 1
        if error is not None:
            call.future.set_exception(error)

    def _transmit(self, call: HookCall, now_ns: int) -> None:
        if self._turns_in_flight:
            self.notify(PREEMPT, self._last_turn)
        generator_call = call if isinstance(call, WorkerGeneratorCall) else None
        if generator_call is not None:
            self._last_turn += 1
            generator_call.turn = self._last_turn
            generator_call.max_steps = MAX_AHEAD if self.pending_calls == 1 else 1
        kind, body, arrays = call.encode(self._accepts_parameters)
        self._worker.send_call(self._on_answer, kind, body, arrays)
        if generator_call is not None:
            self._turns_in_flight += 1
            self._generators[generator_call.request_number] = generator_call
        else:
            self.free_slots -= 1
        call.replica = self
        if not self._sent:
            call.limit_start_ns = now_ns
        self._sent.append(call)
        if self._timer is None:
            self._schedule_check(self._limit_ns)

    # -- events ------------------------------------------------------------------------------------------------

    def _on_opened(self, opened: asyncio.Future[Any]) -> None:
        if self.ready.done():
            return
        error = opened.exception()
        if error is not None:
            self.ready.set_exception(error)
            return
        try:
            description = json.loads(opened.result()[0])
            self.has_pre, self.has_post, self.yields = description["pre"], description["post"], description["yields"]
            self._accepts_parameters, self.keeps_parameters = tuple(description["takes"]), description["keeps"]
        except (ValueError, TypeError, LookupError) as problem:
            self.kill()
            self.ready.set_exception(InferError(Code.INTERNAL, f"{self._worker.order.label}: {problem!r}"))
            return
        self.ready.set_result(None)

    def _on_answer(self, body: bytes, arrays: list[Array | None], error: Exception | None) -> None:
        """Handle the end of the call that was sent first."""
        call = self._sent.popleft()
        self.pending_calls -= 1
        if self._sent:
            self._sent[0].limit_start_ns = time.monotonic_ns()
        generator_call = call if isinstance(call, WorkerGeneratorCall) else None
        if generator_call is not None:
            self._turns_in_flight -= 1
        else:
            self.free_slots += 1
        if error is None:
            try:
                error = self._handle_reply(call, body, arrays)
            except Exception as problem:
                text = f"{call.hook} of model '{self._model.name}' returned an answer that cannot be read"
                logger.exception("%s", text)
                error = InferError(Code.INTERNAL, f"{text}: {problem!r}")
                self._worker.kill(text)
        elif isinstance(error, NotStartedError):
            error = ReplicaGoneError()
        if error is not None and not call.future.done():
            call.future.set_exception(error)
        if generator_call is not None and (error is not None or generator_call.exhausted_ns >= 0):
            self._generators.pop(generator_call.request_number, None)
        self._send_queued()
        if self._release_when_idle and not self.pending_calls:
            self._release_when_idle = False
            if self.is_serving:
                self._owner.on_released(self)
        self._owner.dispatch_queued()

    def _handle_reply(self, call: HookCall, body: bytes, arrays: list[Array | None]) -> InferError | None:
        outcome, duration_ns, exhausted_ns = REPLY_HEADER.unpack_from(body)
        text = body[_REPLY_HEADER_BYTES:]
        self.has_answered = True
        name = STATISTICS_NAMES.get(call.hook)
        if name is not None:
            self._mean_ns = mean_ns = self._mean_ns + (duration_ns - self._mean_ns) / 8
            max_sent = MAX_QUEUED if mean_ns <= _QUICK_NS else 1 + int(MAX_QUEUED_NS / mean_ns)
            if max_sent != self._max_sent:
                self.free_slots += max_sent - self._max_sent
                self._max_sent = max_sent
            self._count_hook(name, duration_ns)
        if outcome == DONE:
            result = call.decode_answer(text, arrays, exhausted_ns - 1)
            if call.future.done():
                self._discard_parameters(call)
            else:
                call.future.set_result(result)
            return None
        if outcome == INFER_ERROR:
            error = read_error(text)
            if error.code is Code.INTERNAL:
                log_warning(f"{call.hook}: {error.message}", log_context(self._model, call))
            return error
        exception_text, is_exception, traceback_text, dialect_error = json.loads(text)
        error = (
            read_error(dialect_error)
            if dialect_error
            else error_for_message(call, exception_text, sample_at_fault=is_exception)
        )
        log_traceback(f"{call.hook} raised {exception_text}", log_context(self._model, call), traceback_text)
        return error

    def _discard_parameters(self, call: HookCall) -> None:
        """Have the worker discard what it keeps for a request that nobody waits for."""
        if self.keeps_parameters:
            self.notify(DISCARD_PARAMETERS, call.request_number)

    def _on_notification(self, kind: int, number: int, body: bytes, arrays: list[Array | None]) -> None:
        generator_call = self._generators.get(number)
        if kind == ANSWER and generator_call is not None:
            if self._sent:
                self._sent[0].limit_start_ns = time.monotonic_ns()  # the limit is per step
            generator_call.on_answer(body, arrays)

    def _on_worker_ended(self, worker: Worker) -> None:
        if self.ready.done() and not self._stopping:
            self._stopping = True
            self._return_queued()
            self._owner.on_failed(self)

    def _return_queued(self) -> None:
        """Hand back the calls that have not been sent."""
        if self._timer is not None and not self._sent:
            self._timer.cancel()
        queue, self._queue = self._queue, deque()
        for call in queue:
            self.pending_calls -= 1
            if not call.future.done():
                call.future.set_exception(ReplicaGoneError())

    def _check(self) -> None:
        """Check the running hook. One timer for any number of calls, which fires at intervals."""
        self._timer = None
        now_ns = time.monotonic_ns()
        if self._sent:
            self._doubt.record_check(self._sent[0].limit_start_ns, (now_ns - self._check_due_ns) / 1e9)
        remaining_ns = self.enforce_limits(now_ns)
        if remaining_ns:
            self._schedule_check(remaining_ns)

    def _schedule_check(self, after_ns: int) -> None:
        self._check_due_ns = time.monotonic_ns() + after_ns
        self._timer = self._loop.call_later(after_ns / 1e9, self._check)
