"""ExternalInstance: Instances whose Batches run in other processes, driven on the event loop without a thread.

Made by `external_models.py` for models of user code; the code that runs the Batches is in `server/python_models/`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from penstock.batching.sequences import affinity

from .batch import Batch, split_by_result, sub_batch
from .isolation import fail_queued, fail_requests
from .reload_backoff import FAULT_RETRY_S

if TYPE_CHECKING:
    from penstock.backends.errors import InferError
    from penstock.batching.devices.rate_limiter import Claim, RateLimiter
    from penstock.batching.model import Model
    from penstock.batching.request import InferRequest, Key
    from penstock.batching.spec import InstanceGroup

logger = logging.getLogger("penstock.batching")


class ExecutorCallbacks(Protocol):
    """Receives what happens to the Batches of an ExternalExecutor: an ExternalInstance."""

    def on_free(self, batch: Batch, answered: Sequence[InferRequest]) -> None: ...
    def on_answered(self, batch: Batch, answered: Sequence[InferRequest]) -> None: ...
    def on_not_run(self, batch: Batch) -> None: ...
    def on_down(self, failure: InferError, *, permanent: bool) -> None: ...
    def on_up(self) -> None: ...
    def count_event(self, event: str) -> None: ...


class ExternalExecutor(Protocol):
    """One executor in another process. It runs one Batch at a time.

    For each Batch it must call `on_free` once, with the requests answered by then, and `on_answered` for those answered
    earlier or afterwards. Or else `on_not_run` with the requests that were not started, if any, after `on_answered` for
    the others. Requests that are to run again are in neither: the Batch lists them (`rerun_requests`). `on_down` says
    that it cannot run now, `on_up` that it can again.
    Threads: the event loop's.
    """

    def max_batch_ns(self, key: Key) -> int:
        """Return the longest predicted run of a Batch of a Key, since others could run it; 0: no limit."""

    def attach(self, instance: ExecutorCallbacks) -> None:
        """Set the object to report to."""

    def begin(self, batch: Batch) -> None:
        """Run a Batch; each of its requests gets `outputs` or `error`, the Batch its stamps. Must not raise."""

    def abandon(self, request: InferRequest) -> None:
        """Record that nothing takes a request's answers any more. The request still finishes."""

    async def check_ready(self) -> bool:
        """Whether it can run and, if user code defines a readiness check, that passes."""

    async def close(self) -> None:
        """End it."""


class ExternalInstance:
    """An Instance whose Batches an ExternalExecutor runs.

    It takes a Batch when woken or freed, once it holds what the RateLimiter requires. It does not use Devices: other
    processes run whenever the system lets them. `idle`: wake it when a request arrives. `failure` is why it cannot run
    now; what waits stays queued for it or for another Instance. Once it is `permanently_down` and no Instance of its
    model can run, requests are answered with the failure.
    `state_id` identifies what it remembers of sequences (affinity.py), which is lost whenever it cannot run.
    `undelivered` counts the requests it has taken and not delivered. `number` is its own in the model.
    `retiring`: it is about to end.
    Invariant: each request that it has taken is delivered exactly once, which its ExternalExecutor ensures.
    Threads: the event loop's; `grant` may be called on any.
    """

    binding = None
    overlaps = False
    wake_at_rows = 0

    def __init__(
        self, model: Model, executor: ExternalExecutor, group: InstanceGroup, limiter: RateLimiter | None = None,
        claim: Claim | None = None,
    ) -> None:  # fmt: skip
        self.executor = executor
        self.group = group
        self._loop = asyncio.get_running_loop()
        self._model = model
        self._limiter = limiter
        self._claim: Any = claim
        self._turn_requested = self._has_turn = self._busy = self.stopping = False
        self.pending_batch: Batch | None = None
        self.undelivered = 0
        self._drained: asyncio.Event | None = None
        self.idle = True
        self.permanently_down = False
        self.failure: InferError | None = None
        self.state_id = object()
        self.number = len(model.instances)
        self.retiring = False

    # -- what Model expects of its Instances -----------------------------------------------------------------------

    def start(self) -> None:
        """Do nothing: it runs when woken."""

    def wake(self) -> None:
        """Let it look at the queue in the next loop turn. Call with the model's lock held, when `idle` is set."""
        self.idle = False
        self._loop.call_soon(self._run_step)

    def grant(self) -> None:
        """Grant the turn that it asked for."""
        self._has_turn = True
        self._loop.call_soon_threadsafe(self._run_step)

    def stop(self) -> None:
        """Take nothing more, and leave what was not started to others. Call with the model's lock held."""
        self.stopping, self.idle = True, False
        self._loop.call_soon_threadsafe(self._run_step)

    async def wait_drained(self) -> None:
        """Wait until everything that it has taken is delivered, once it is stopped."""
        self._drained = asyncio.Event()
        self._check_drained()
        await self._drained.wait()

    def _check_drained(self) -> None:
        if self._drained is not None and not self.undelivered and self.pending_batch is None:
            self._drained.set()

    def request_loop_restore(self) -> None:
        """Do nothing: the event loop never runs such a model."""

    def join(self) -> None:
        """Return its resources to the RateLimiter."""
        if self._limiter is None:
            return
        if self._has_turn or (self._turn_requested and not self._limiter.cancel_request(self._claim, self)):
            self._limiter.end_turn(self._claim, 0, 0, more=False)
        self._has_turn = self._turn_requested = False
        self._limiter.leave(self._claim)

    # -- what its executor reports ---------------------------------------------------------------------------------

    def on_free(self, batch: Batch, answered: Sequence[InferRequest]) -> None:
        """Hand out the requests of a Batch that have been answered, and take the next Batch."""
        model, self._busy = self._model, False
        self.undelivered -= len(answered) + len(batch.rerun_requests)
        if batch.rerun_requests:
            self._count_run(batch)
        try:
            with model.lock:
                model.scheduler.record_ended(batch, batch.exec_end_ns)
                if all(request.error is None for request in batch.requests):
                    ns = batch.exec_end_ns - batch.exec_start_ns
                    model.scheduler.learn(batch.key, batch.rows, ns, batch.exec_end_ns)
        except Exception:  # as in Model.learn
            logger.exception("model %s: its run times could not be learned from a run", model.name)
        self._end_turn(more=model.scheduler.request_count > 0 and not self.stopping)
        if answered:
            model.pass_to_loop(split_by_result(batch, answered))
        elif model.scheduler.nearest_deadline_ns():
            model.notify_loop()  # nothing is delivered that would make the loop look at deadlines
        self._run_step()
        self._check_drained()

    def _count_run(self, batch: Batch) -> None:
        """Count a Batch of which some requests run again, before their stamps are overwritten.

        Each run of a request is an inference, and succeeds unless it has failed by now, as in Triton.
        """
        succeeded = [each for each in batch.requests if each.error is None]
        ran = batch if len(succeeded) == len(batch.requests) else sub_batch(batch, succeeded)
        self._model.statistics.record_batch(ran, batch.exec_end_ns)
        batch.run_count = 0

    def on_answered(self, batch: Batch, answered: Sequence[InferRequest]) -> None:
        """Hand out requests that were answered before or after their Batch was freed."""
        self.undelivered -= len(answered)
        self._model.pass_to_loop(split_by_result(batch, answered))
        self._check_drained()

    def count_event(self, event: str) -> None:
        """Count an event of its process, for the metrics page."""
        self._model.count_event(event)

    def on_not_run(self, batch: Batch) -> None:
        """Run a Batch elsewhere, or here later: none of its requests was started."""
        self._busy = False
        self.undelivered -= len(batch.requests)
        self._end_turn(more=False)
        peers = self._peers() if affinity.pin_of(self._model, self) is None else []
        next((each for each in peers if each.free), self).assign(batch)
        self._check_drained()

    def _peers(self) -> list[ExternalInstance]:
        return [each for each in self._model.instances if isinstance(each, ExternalInstance)]

    def _take_pending(self) -> Batch | None:
        """Return a Batch taken from the queue earlier: its own, or one of an Instance that cannot run it now."""
        holder = self
        if self.pending_batch is None and affinity.pin_of(self._model, self) is None:
            holder = next((each for each in self._peers() if each.pending_batch is not None and not each.serving), self)
        batch, holder.pending_batch = holder.pending_batch, None
        holder._check_drained()  # noqa: SLF001 - an object of the same class
        return batch

    @property
    def serving(self) -> bool:
        """Whether it takes Batches and can run them."""
        return self.failure is None and not self.stopping

    @property
    def free(self) -> bool:
        """Whether it would run a Batch at once."""
        return not self._busy and self.pending_batch is None and self.serving

    def assign(self, batch: Batch) -> None:
        """Keep a Batch, taken from the queue by another Instance or by itself, to run it next."""
        self.idle, self.pending_batch = False, batch
        self._loop.call_soon(self._run_step)

    def on_down(self, failure: InferError, *, permanent: bool) -> None:
        """Leave what waits to the others for now; if `permanent` and they cannot run either, answer it."""
        self.failure, self.permanently_down, self.idle = failure, permanent, False
        self.state_id = object()
        affinity.report_availability(self._model, self, can_run=False)
        with self._model.lock:
            self._model.wake_one()
        self._loop.call_soon(self._run_step)

    def on_up(self) -> None:
        """Resume."""
        self.failure, self.permanently_down = None, False
        affinity.report_availability(self._model, self, can_run=True)
        self._run_step()

    # -- taking Batches --------------------------------------------------------------------------------------------

    def _run_step(self) -> None:
        try:
            self._step()
        except Exception as error:  # noqa: BLE001 - otherwise nothing wakes it again, and the model is silent
            self._end_turn(more=False)
            fail_queued(self._model, error)
            self._loop.call_later(FAULT_RETRY_S, self._run_step)

    def _step(self) -> None:
        """Do what is due, and start a Batch if there is one for it."""
        if self._busy:
            return
        if self.stopping:
            self._end_turn(more=False)
            if self.pending_batch is not None:
                self._reassign_pending()
            return
        if self.failure is not None:
            self._end_turn(more=False)
            if self.permanently_down and (affinity.pin_of(self._model, self) is not None or not self._model.healthy):
                self._fail_all(self.failure)
            return
        if not self._acquire_turn():
            return
        batch = self._take_pending() or self._take()
        if batch is None:
            self._end_turn(more=False)
            return
        runnable, rejected = affinity.split_by_state(self._model, self, batch)
        if rejected:
            self._deliver_rejected(rejected)
        if runnable is None:
            self._end_turn(more=False)
            self._loop.call_soon(self._run_step)
            return
        self._begin(runnable)

    def _begin(self, batch: Batch) -> None:
        self._busy = True
        self.undelivered += len(batch.requests)
        if self._limiter is not None:
            self._limiter.begin_batch(self._claim, 0)
        self.executor.begin(batch)

    def _reassign_pending(self) -> None:
        """Pass its kept Batch to an Instance that is free; if none is, the next one that can run takes it."""
        other = next((each for each in self._peers() if each.free), None)
        if other is not None and self.pending_batch is not None:
            batch, self.pending_batch = self.pending_batch, None
            other.assign(batch)
            self._check_drained()

    def _deliver_rejected(self, rejected: list[Batch]) -> None:
        """Answer requests that it has taken and does not run."""
        now_ns = time.monotonic_ns()
        with self._model.lock:
            for each in rejected:
                self._model.scheduler.record_ended(each, now_ns)
        self._model.pass_to_loop(rejected)

    def _acquire_turn(self) -> bool:
        """Whether it may run; if not, ask for a turn, whose grant makes it look again."""
        if self._limiter is None or self._has_turn:
            return True
        if not self._turn_requested:
            self._turn_requested = True
            self._limiter.request_turn(self._claim, self)
        return self._has_turn

    def _end_turn(self, *, more: bool) -> None:
        if self._limiter is not None and self._has_turn:
            self._turn_requested = False
            self._has_turn = self._limiter.end_turn(self._claim, 0, 0, more=more)
        elif self._limiter is not None and not self._turn_requested:
            self._limiter.release_reservation(self._claim)

    def _take(self) -> Batch | None:
        model = self._model
        with model.lock:
            now_ns = time.monotonic_ns()
            lane = model.scheduler.next_lane(now_ns, pin=affinity.pin_of(model, self))
            max_ns = self.executor.max_batch_ns(lane.key) if lane is not None else 0
            # a call that never ran may take long: leave everything else that waits to the others
            batch = model.scheduler.take_from(lane, now_ns, max_ns, 1) if lane is not None else None
            self.idle = batch is None
            has_waiting = model.scheduler.request_count > 0
            if has_waiting:
                affinity.wake_next(model, self, has_taken=batch is not None)
        if batch is None and has_waiting and model.scheduler.sizing.may_hold:
            model.notify_loop()
        return batch

    def _fail_all(self, failure: InferError) -> None:
        model = self._model
        while (batch := self._take_pending() or self._take()) is not None:
            with model.lock:
                model.scheduler.record_ended(batch, time.monotonic_ns())
            model.pass_to_loop(fail_requests(batch, failure))
