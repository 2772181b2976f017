"""Dispatcher: what the Engine does once per event loop turn: it lets models run and delivers the results."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from penstock.backends.errors import Code, InferError

from .alarms import Alarms
from .busy_poller import MIN_SINGLES, BusyPoller
from .ensembles.passage import add_step_times
from .request import InferRequest
from .running.batch import Batch
from .running.isolation import fail_queued
from .scheduling.promise import EXPIRED_TEXT
from .sequences.sequences import CANCELED_TEXT
from .sequences.sequences import EXPIRED_TEXT as SEQUENCE_EXPIRED
from .sinks import deliver_requests, deliver_unordered
from .statistics import BACKEND, CANCELED, OTHER, REJECTED

if TYPE_CHECKING:
    from .model import Model

logger = logging.getLogger("penstock.batching")

TURN_BUDGET_NS = 500_000
"""A loop turn that has taken less than this continues with models that its own answers gave work to: the next steps of
ensembles. With one turn per step, an ensemble's requests would run in as many smaller batches as it has steps. The turn
also keeps running a model of one row per batch, whose requests would otherwise cost a loop turn each: a fifth of their
CPU time."""
_FAILURE_REASONS = {Code.CANCELLED: CANCELED, Code.EXPIRED: REJECTED}
"""Failure reason by code, for requests taken from the queue; all other codes are OTHER. A timeout is REJECTED, as in
Triton."""


class Dispatcher:
    """Serves the models that have work, once per loop turn however many requests came.

    `on_requests_done` is called with the number of finished requests of a model, before they are delivered.
    Threads: the event loop's, except `deliver_from_thread`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_requests_done: Callable[[Model, int], None]) -> None:
        self._loop = loop
        self._on_requests_done = on_requests_done
        self._before_dispatch: list[Callable[[], None]] = []
        self._scheduled: list[Model] = []
        self._rescheduled: list[Model] = []
        self._turn_scheduled = self._serving = False
        self._finished: deque[tuple[Model, list[Batch]]] = deque()
        self._delivery_scheduled = False
        self._was_idle, self._detects_idle = True, False
        self._woken_ns = self._turn_started_ns = self._previous_turn_ns = self._time_slice_ns = 0
        self.alarms = Alarms(loop, self._on_alarm)
        self._busy_poller = BusyPoller(loop)
        self.trace: Callable[[Model, Batch, int], None] | None = None

    def earliest_arrival_ns(self, now_ns: int) -> int:
        """Return the earliest time at which a request being read now may have reached its socket.

        A loop that is never idle reads in each turn what arrived since the previous one: at 1.3 times the front end's
        capacity, requests wait longer in the socket than in the queue. A loop that had nothing to read has slept, and
        what woke it has just arrived. Call once for each request that has a target, rejected or not: if turns that
        reject everything they read were left out, the next request would be rejected for having waited.
        """
        self._schedule_turn()
        if self._was_idle:
            self._was_idle, self._detects_idle, self._woken_ns = False, True, now_ns
        return max(self._woken_ns, self._previous_turn_ns)

    def _note_idle(self) -> None:
        """Record whether the loop is going to sleep. Called once uvloop has polled all sockets since the turn."""
        if not self._turn_scheduled:
            self._was_idle, self._detects_idle = True, False

    def call_before_dispatch(self, callback: Callable[[], None]) -> None:
        """Call `callback` once everything that arrived in this loop turn is in, before models are served."""
        self._before_dispatch.append(callback)
        if not self._serving:
            self._schedule_turn()

    def schedule(self, model: Model) -> None:
        """Serve a model at the end of this loop turn, once everything that arrived is in."""
        model.scheduled = True
        model.collects_arrivals = model.ran_on_loop
        self._scheduled.append(model)
        if not self._serving:
            self._schedule_turn()

    def _schedule_turn(self) -> None:
        if not self._turn_scheduled:
            self._turn_scheduled = True
            self._loop.call_soon(self._run_turn)

    def _run_turn(self) -> None:
        self._previous_turn_ns, self._turn_started_ns = self._turn_started_ns, time.monotonic_ns()
        self._turn_scheduled, self._serving = False, True
        if self._busy_poller.polling:
            self._busy_poller.on_arrival()
        try:
            while self._before_dispatch or self._scheduled:
                while self._before_dispatch:
                    self._call(self._before_dispatch.pop())
                scheduled, self._scheduled = self._scheduled, []
                self._time_slice_ns = TURN_BUDGET_NS // max(len(scheduled), 1)
                self._dispatch_all(scheduled)
                if self._scheduled and time.monotonic_ns() > self._turn_started_ns + TURN_BUDGET_NS:
                    break
        finally:
            self._serving = False
            self._scheduled += self._rescheduled
            self._rescheduled.clear()
            if self._before_dispatch or self._scheduled:
                self._schedule_turn()
        if self._detects_idle:
            self._loop.call_soon(self._note_idle)
        if self._busy_poller.consecutive_singles >= MIN_SINGLES:
            self._busy_poller.start()

    def _dispatch_all(self, models: list[Model]) -> None:
        for model in models:
            try:
                self._dispatch(model)
            except Exception as error:  # noqa: BLE001 - the others must still be served, in this turn and the next
                fail_queued(model, error)
            except BaseException:  # it ends the turn, but the models not yet served keep their place
                self._scheduled += models[models.index(model) + 1 :]
                raise

    @staticmethod
    def _call(callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception:  # as above
            logger.exception("the requests of this turn of the event loop could not be started")

    def _dispatch(self, model: Model) -> None:
        """Let a model run once in this turn, and again in the next if it has more to run.

        A model of one row per batch continues for its share of this turn: reading sockets in between would not make its
        next batch bigger.
        """
        model.scheduled = model.collects_arrivals = False
        now_ns = time.monotonic_ns()
        batches, has_more = model.dispatch(now_ns)
        while has_more and batches and model.max_rows == 1 and time.monotonic_ns() < now_ns + self._time_slice_ns:
            self._busy_poller.consecutive_singles = 0
            self._deliver_between(model, batches)
            batches, has_more = model.dispatch(time.monotonic_ns())
        model.ran_on_loop = bool(batches) and not (model.admits_singly or model.intercepts or model.closing)
        if has_more:
            # set before its answers can mark the model again, which would run it twice in this turn
            model.scheduled, model.collects_arrivals = True, model.ran_on_loop
            self._rescheduled.append(model)
        if model.scheduler.expired:
            self.expire(model)
        if batches:
            self.deliver(model, batches)
            self._busy_poller.consecutive_singles = (
                self._busy_poller.consecutive_singles + 1 if len(batches) == 1 and len(batches[0].requests) == 1 else 0
            )
        elif model.scheduler.sizing.may_hold and model.scheduler.request_count:
            self._set_hold_alarm(model, now_ns)

    def _deliver_between(self, model: Model, batches: list[Batch]) -> None:
        """Deliver what a model ran, without scheduling it: it is served again right away."""
        model.scheduled = True
        try:
            self.deliver(model, batches)
        finally:
            model.scheduled = False

    def deliver_from_thread(self, model: Model, batches: list[Batch]) -> None:
        """Deliver what an Instance ran; an empty `batches` means it left a batch held open. Called on its thread."""
        self._finished.append((model, batches))
        if not self._delivery_scheduled:
            self._delivery_scheduled = True
            with suppress(RuntimeError):  # the loop is closed: the server stopped without waiting for this run
                self._loop.call_soon_threadsafe(self._deliver_finished)

    def deliver_soon(self, model: Model, batches: list[Batch]) -> None:
        """Deliver what an ExternalExecutor ran. Called on the event loop, which saves waking it, 2 us."""
        self._finished.append((model, batches))
        if not self._delivery_scheduled:
            self._delivery_scheduled = True
            self._loop.call_soon(self._deliver_finished)

    def _deliver_finished(self) -> None:
        self._delivery_scheduled = False  # first: a batch that finishes while this runs must schedule another call
        finished, began_ns = self._finished, time.monotonic_ns()
        while finished:
            model, batches = finished.popleft()
            try:
                self.deliver(model, batches)
                if not batches and not model.scheduled:
                    self.schedule(model)
            except Exception:  # the runs queued behind it must still be delivered
                logger.exception("model %s: the answers of a run could not be delivered", model.name)
            if finished and time.monotonic_ns() > began_ns + TURN_BUDGET_NS:
                # large answers take longer to write than to compute: another would always be finished by then
                self._delivery_scheduled = True
                self._loop.call_soon(self._deliver_finished)
                break

    def deliver(self, model: Model, batches: list[Batch]) -> None:
        """Count what ran and hand it out."""
        now_ns = time.monotonic_ns()
        for batch in batches:
            requests = batch.requests
            try:
                self._count(model, batch, now_ns)
            except Exception:  # its requests, and the runs behind it, must still be answered
                logger.exception("model %s: the statistics of a run were lost", model.name)
            self._on_requests_done(model, len(requests))
            try:
                deliver_requests(requests)
            except Exception:
                logger.exception("model %s: the answers of a run could not be delivered in order", model.name)
                deliver_unordered(requests)
            if requests[0].target_ns:
                model.scheduler.record_delivered(requests[0], time.monotonic_ns())
        if model.scheduler.sequences is not None:
            self.set_alarm(model)

    def _count(self, model: Model, batch: Batch, now_ns: int) -> None:
        first = batch.requests[0]
        if model.hold_count:
            # only then can it be a step's model: an ensemble holds the models of its steps
            add_step_times(batch)
        if first.error is not None:
            model.statistics.record_failure(BACKEND, first.start_ns, now_ns)
        elif batch.run_count:
            model.statistics.record_batch(batch, now_ns)
        if self.trace is not None:
            self.trace(model, batch, now_ns)

    def set_alarm(self, model: Model) -> None:
        """Set the alarm for when the model's next request expires or its next sequence has been idle too long."""
        nearest_ns = model.scheduler.nearest_deadline_ns()
        if nearest_ns:
            self.alarms.set(model, nearest_ns)

    def flush(self, model: Model, *, end_idle: bool) -> None:
        """Close the model's held batches: no more requests will join them. `end_idle`: as in `Sequences.expedite`."""
        with model.lock:
            model.scheduler.expedite(time.monotonic_ns(), end_idle=end_idle)
        self._on_alarm(model)

    def _set_hold_alarm(self, model: Model, now_ns: int) -> None:
        # use the time that found nothing due: whatever became due since must ring, even if that is past
        with model.lock:
            due_ns = model.scheduler.due_ns(now_ns)
        if due_ns:
            self.alarms.set(model, due_ns)

    def _on_alarm(self, model: Model) -> None:
        now_ns = time.monotonic_ns()
        with model.lock:
            nearest_ns = model.scheduler.nearest_deadline_ns()
            if nearest_ns and nearest_ns <= now_ns:
                model.scheduler.expired += model.scheduler.expire(now_ns)
            nearest_ns = model.scheduler.nearest_deadline_ns()
        self.expire(model)
        if nearest_ns:
            self.alarms.set(model, nearest_ns)
        if model.scheduler.request_count and not model.scheduled:
            self.schedule(model)

    def expire(self, model: Model) -> None:
        """Fail the requests that the Scheduler found past their deadline."""
        with model.lock:
            expired, model.scheduler.expired = model.scheduler.expired, []
        if expired:
            text = EXPIRED_TEXT if model.scheduler.sequences is None else SEQUENCE_EXPIRED
            self.fail(model, expired, Code.EXPIRED, text)

    def cancel_followers(self, model: Model) -> None:
        """Fail requests queued behind a withdrawn one of their sequence, and serve those that get its place."""
        with model.lock:
            cancelled, model.scheduler.orphaned = model.scheduler.orphaned, []
        if cancelled:
            self.fail(model, cancelled, Code.CANCELLED, CANCELED_TEXT)
        self.set_alarm(model)
        if model.scheduler.request_count and not model.scheduled:
            self.schedule(model)

    def fail(self, model: Model, requests: list[InferRequest], code: Code, text: str) -> None:
        """Hand out requests that left the queue unserved."""
        now_ns = time.monotonic_ns()
        reason = _FAILURE_REASONS.get(code, OTHER)
        for request in requests:
            request.error = InferError(code, text)
            model.statistics.record_failure(reason, request.start_ns, now_ns)
        self._on_requests_done(model, len(requests))
        deliver_requests(requests)
