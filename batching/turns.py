"""Turns: what the Engine does once per event loop turn: it lets models run and delivers the results."""

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
from .awake import LONE_TURNS, Awake
from .ensembles.passage import add_step_times
from .request import InferRequest
from .running.batch import Batch
from .running.isolation import give_up
from .scheduling.promise import EXPIRED_TEXT
from .sequences.sequences import CANCELED_TEXT
from .sequences.sequences import EXPIRED_TEXT as SEQUENCE_EXPIRED
from .sinks import hand_out, to_sinks
from .statistics import BACKEND, CANCELED, OTHER, REJECTED

if TYPE_CHECKING:
    from .model import Model

logger = logging.getLogger("penstock.batching")

GOES_ON_NS = 500_000
"""A loop turn that has taken less than this continues with models that its own answers gave work to: the next steps of
ensembles. With one turn per step, an ensemble's requests would run in as many smaller batches as it has steps. The turn
also keeps running a model of one row per batch, whose requests would otherwise cost a loop turn each: a fifth of their
CPU time."""
_REASONS = {Code.CANCELLED: CANCELED, Code.EXPIRED: REJECTED}
"""Failure reason by code, for requests taken from the queue; all other codes are OTHER. A timeout is REJECTED, as in
Triton."""


class Turns:
    """Serves the models that have work, once per loop turn however many requests came.

    `left` is told how many requests of a model are done, before they are handed out.
    Threads: the event loop's, except `finished_on_thread`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, left: Callable[[Model, int], None]) -> None:
        self._loop = loop
        self._left = left
        self._begins: list[Callable[[], None]] = []
        self._dirty: list[Model] = []
        self._again: list[Model] = []
        self._turn_due = self._serving = False
        self._finished: deque[tuple[Model, list[Batch]]] = deque()
        self._delivery_due = False
        self._rested, self._rests = True, False
        self._woken_ns = self._turn_ns = self._turn_before_ns = self._share_ns = 0
        self.alarms = Alarms(loop, self._ring)
        self._awake = Awake(loop)
        self.trace: Callable[[Model, Batch, int], None] | None = None

    def arrived_ns(self, now_ns: int) -> int:
        """Return the earliest time at which a request being read now may have reached its socket.

        A loop that is never idle reads in each turn what arrived since the previous one: at 1.3 times the front end's
        capacity, requests wait longer in the socket than in the queue. A loop that had nothing to read has slept, and
        what woke it has just arrived. Call once for each request that has a target, rejected or not: if turns that
        reject everything they read were left out, the next request would be rejected for having waited.
        """
        self._look()
        if self._rested:
            self._rested, self._rests, self._woken_ns = False, True, now_ns
        return max(self._woken_ns, self._turn_before_ns)

    def _rest(self) -> None:
        """Record whether the loop is going to sleep. Called once uvloop has polled all sockets since the turn."""
        if not self._turn_due:
            self._rested, self._rests = True, False

    def begin(self, begin: Callable[[], None]) -> None:
        """Call `begin` once everything that arrived in this loop turn is in, before models are served."""
        self._begins.append(begin)
        if not self._serving:
            self._look()

    def mark(self, model: Model) -> None:
        """Serve a model at the end of this loop turn, once everything that arrived is in."""
        model.dirty = True
        model.gathers = model.looped
        self._dirty.append(model)
        if not self._serving:
            self._look()

    def _look(self) -> None:
        if not self._turn_due:
            self._turn_due = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._turn_before_ns, self._turn_ns = self._turn_ns, time.monotonic_ns()
        self._turn_due, self._serving = False, True
        if self._awake.looking:
            self._awake.came()
        try:
            while self._begins or self._dirty:
                while self._begins:
                    self._begin(self._begins.pop())
                dirty, self._dirty = self._dirty, []
                self._share_ns = GOES_ON_NS // max(len(dirty), 1)
                self._serve_each(dirty)
                if self._dirty and time.monotonic_ns() > self._turn_ns + GOES_ON_NS:
                    break
        finally:
            self._serving = False
            self._dirty += self._again
            self._again.clear()
            if self._begins or self._dirty:
                self._look()
        if self._rests:
            self._loop.call_soon(self._rest)
        if self._awake.lone >= LONE_TURNS:
            self._awake.stay()

    def _serve_each(self, models: list[Model]) -> None:
        for model in models:
            try:
                self._serve(model)
            except Exception as error:  # noqa: BLE001 - the others must still be served, in this turn and the next
                give_up(model, error)
            except BaseException:  # it ends the turn, but the models not yet served keep their place
                self._dirty += models[models.index(model) + 1 :]
                raise

    @staticmethod
    def _begin(begin: Callable[[], None]) -> None:
        try:
            begin()
        except Exception:  # as above
            logger.exception("the requests of this turn of the event loop could not be started")

    def _serve(self, model: Model) -> None:
        """Let a model run once in this turn, and again in the next if it has more to run.

        A model of one row per batch continues for its share of this turn: reading sockets in between would not make its
        next batch bigger.
        """
        model.dirty = model.gathers = False
        now_ns = time.monotonic_ns()
        ran, more = model.dispatch(now_ns)
        while more and ran and model.max_rows == 1 and time.monotonic_ns() < now_ns + self._share_ns:
            self._awake.lone = 0
            self._deliver_between(model, ran)
            ran, more = model.dispatch(time.monotonic_ns())
        model.looped = bool(ran) and not (model.choosy or model.detours or model.closing)
        if more:
            # set before its answers can mark the model again, which would run it twice in this turn
            model.dirty, model.gathers = True, model.looped
            self._again.append(model)
        if model.scheduler.expired:
            self.expire(model)
        if ran:
            self.deliver(model, ran)
            self._awake.lone = self._awake.lone + 1 if len(ran) == 1 and len(ran[0].requests) == 1 else 0
        elif model.scheduler.sizing.may_hold and model.scheduler.request_count:
            self._watch_hold(model, now_ns)

    def _deliver_between(self, model: Model, ran: list[Batch]) -> None:
        """Deliver what a model ran, without marking it dirty: it is served again right away."""
        model.dirty = True
        try:
            self.deliver(model, ran)
        finally:
            model.dirty = False

    def finished_on_thread(self, model: Model, ran: list[Batch]) -> None:
        """Deliver what an Instance ran; an empty `ran` means it left a batch held open. Called on its thread."""
        self._finished.append((model, ran))
        if not self._delivery_due:
            self._delivery_due = True
            with suppress(RuntimeError):  # the loop is closed: the server stopped without waiting for this run
                self._loop.call_soon_threadsafe(self._deliver_finished)

    def finished_on_loop(self, model: Model, ran: list[Batch]) -> None:
        """Deliver what an Outside ran. Called on the event loop, which therefore need not be woken: that costs 2 us."""
        self._finished.append((model, ran))
        if not self._delivery_due:
            self._delivery_due = True
            self._loop.call_soon(self._deliver_finished)

    def _deliver_finished(self) -> None:
        self._delivery_due = False  # first: a batch that finishes while this runs must schedule another call
        finished, began_ns = self._finished, time.monotonic_ns()
        while finished:
            model, ran = finished.popleft()
            try:
                self.deliver(model, ran)
                if not ran and not model.dirty:
                    self.mark(model)
            except Exception:  # the runs queued behind it must still be delivered
                logger.exception("model %s: the answers of a run could not be delivered", model.name)
            if finished and time.monotonic_ns() > began_ns + GOES_ON_NS:
                # large answers take longer to write than to compute: another would always be finished by then
                self._delivery_due = True
                self._loop.call_soon(self._deliver_finished)
                break

    def deliver(self, model: Model, ran: list[Batch]) -> None:
        """Count what ran and hand it out."""
        now_ns = time.monotonic_ns()
        for batch in ran:
            requests = batch.requests
            try:
                self._count(model, batch, now_ns)
            except Exception:  # its requests, and the runs behind it, must still be answered
                logger.exception("model %s: the statistics of a run were lost", model.name)
            self._left(model, len(requests))
            try:
                hand_out(requests)
            except Exception:
                logger.exception("model %s: the answers of a run could not be delivered in order", model.name)
                to_sinks(requests)
            if requests[0].target_ns:
                model.scheduler.record_delivered(requests[0], time.monotonic_ns())
        if model.scheduler.sequences is not None:
            self.watch(model)

    def _count(self, model: Model, batch: Batch, now_ns: int) -> None:
        first = batch.requests[0]
        if model.holds:
            # only then can it be a step's model: an ensemble holds the models of its steps
            add_step_times(batch)
        if first.error is not None:
            model.statistics.record_failure(BACKEND, first.start_ns, now_ns)
        elif batch.runs:
            model.statistics.record_batch(batch, now_ns)
        if self.trace is not None:
            self.trace(model, batch, now_ns)

    def watch(self, model: Model) -> None:
        """Set the alarm for when the model's next request expires or its next sequence has been idle too long."""
        nearest_ns = model.scheduler.nearest_deadline_ns()
        if nearest_ns:
            self.alarms.set(model, nearest_ns)

    def hurry(self, model: Model, *, last: bool) -> None:
        """Close the model's held batches: no more requests will join them. `last`: as in `Sequences.hurry`."""
        with model.lock:
            model.scheduler.expedite(time.monotonic_ns(), last=last)
        self._ring(model)

    def _watch_hold(self, model: Model, now_ns: int) -> None:
        # use the time that found nothing due: whatever became due since must ring, even if that is past
        with model.lock:
            due_ns = model.scheduler.due_ns(now_ns)
        if due_ns:
            self.alarms.set(model, due_ns)

    def _ring(self, model: Model) -> None:
        now_ns = time.monotonic_ns()
        with model.lock:
            nearest_ns = model.scheduler.nearest_deadline_ns()
            if nearest_ns and nearest_ns <= now_ns:
                model.scheduler.expired += model.scheduler.expire(now_ns)
            nearest_ns = model.scheduler.nearest_deadline_ns()
        self.expire(model)
        if nearest_ns:
            self.alarms.set(model, nearest_ns)
        if model.scheduler.request_count and not model.dirty:
            self.mark(model)

    def expire(self, model: Model) -> None:
        """Fail the requests that the Scheduler found past their deadline."""
        with model.lock:
            expired, model.scheduler.expired = model.scheduler.expired, []
        if expired:
            text = EXPIRED_TEXT if model.scheduler.sequences is None else SEQUENCE_EXPIRED
            self.fail(model, expired, Code.EXPIRED, text)

    def cut(self, model: Model) -> None:
        """Fail requests queued behind a withdrawn one of their sequence, and serve those that get its place."""
        with model.lock:
            cut, model.scheduler.orphaned = model.scheduler.orphaned, []
        if cut:
            self.fail(model, cut, Code.CANCELLED, CANCELED_TEXT)
        self.watch(model)
        if model.scheduler.request_count and not model.dirty:
            self.mark(model)

    def fail(self, model: Model, requests: list[InferRequest], code: Code, text: str) -> None:
        """Hand out requests that left the queue unserved."""
        now_ns = time.monotonic_ns()
        reason = _REASONS.get(code, OTHER)
        for request in requests:
            request.error = InferError(code, text)
            model.statistics.record_failure(reason, request.start_ns, now_ns)
        self._left(model, len(requests))
        hand_out(requests)
