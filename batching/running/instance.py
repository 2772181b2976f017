"""Instance: one executor on one device: take a Batch, run it, deliver it.

The work itself is `isolation.execute`, shared by both executors. `ThreadInstance` has its own thread; the event loop
acts as an Instance through `Model.dispatch` for batches that run in less time than a hand-over to a thread takes. If
its Bindings allow it, a ThreadInstance has two Batches under way (overlap.py).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from penstock.backends.backend import supports_trimming
from penstock.backends.errors import Code, DeviceLost, DeviceRemoved, InferError, ProcessLost
from penstock.batching.devices.placement import try_pin_thread
from penstock.batching.loading.preparing import IDLE_RELEASE_S, prepare, release_caches
from penstock.batching.sequences import affinity

from .execution import device_ns
from .isolation import LostBatch, execute, execute_singly, fail_queued, fail_requests, fail_unanswered, slice_batch
from .overlap import Overlap, allocate_bindings
from .reload_backoff import FAULT_RETRY_S, ReloadBackoff

if TYPE_CHECKING:
    from penstock.backends.backend import Backend, Binding
    from penstock.batching.devices.placement import Placement
    from penstock.batching.model import Model
    from penstock.batching.request import InferRequest

    from .batch import Batch

logger = logging.getLogger("penstock.batching")


class ThreadInstance:
    """An Instance on its own thread.

    It takes a Batch as soon as it is awake or free, something is due, and it has a turn from the Device or the
    RateLimiter. It sleeps only when one of these is missing, and starts asleep. `idle`: it sleeps because nothing is
    due, and must be woken. While it waits for a turn it is not idle, since it looks at the queue when it gets one; a
    turn that finds nothing to run is passed on at once.
    `failure` is why it cannot run: its device was lost and reloading the model there failed. It retries from time to
    time. Meanwhile the other Instances serve; if none can run, it answers requests with that failure.
    `state_id` identifies what it remembers of sequences (affinity.py), `number` itself. `retiring`: it is about to end.
    `bindings` has two entries if it `overlaps`, which it does while nothing else waits for a turn. `wake_at_rows`:
    wake it when this many rows wait; 0: do not. `has_turn`: the `arbiter`, in which it has a `share`, granted a turn.
    Threads: others call `wake`, `grant` and `stop`; everything else happens on the Instance's thread. Each of these
    calls releases `wakeup` once, and the sleeper rechecks what it slept for, so an extra release does no harm. Neither
    Device nor RateLimiter ever takes a model's lock.
    """

    def __init__(self, model: Model, placement: Placement, name: str, claim_index: int = 0) -> None:
        self.bindings = allocate_bindings(model, placement)
        self.binding, self.placement = self.bindings[0], placement
        self.overlaps = len(self.bindings) > 1
        self._overlap = Overlap(model, self) if self.overlaps else None
        self._pending_call: tuple[Callable[[], Any], Future[Any]] | None = None
        self._model = model
        self.arbiter, self.share = placement.turn_source(claim_index)
        self.group = placement.single_group
        self._rate_limited = placement.limiter is not None
        self.wakeup = threading.Semaphore(0)
        self.stopping = self.has_turn = self._restores_loop = False
        self._reload_backoff = ReloadBackoff()
        self._lost_backend: Backend | None = None
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self.idle = True
        self.wake_at_rows = 0
        self.failure: InferError | None = None
        self.state_id, self.number, self.retiring = object(), len(model.instances), False

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Wake it. Call with the model's lock held, when `idle` is set or `wake_at_rows` rows wait."""
        self.idle = False
        self.wake_at_rows = 0
        self.wakeup.release()

    def grant(self) -> None:
        """Grant the turn that it asked for."""
        self.has_turn = True
        self.wakeup.release()

    def stop(self) -> None:
        """Let the thread end after its current run. Call with the model's lock held."""
        self.stopping, self.idle, self.wake_at_rows = True, False, 0
        self.wakeup.release()

    def request_loop_restore(self) -> None:
        """Have it call `Model.restore_loop_binding` when it has time. Call with the model's lock held."""
        self._restores_loop = True
        if self.idle:
            self.wake()

    def report_backend_lost(self, backend: Backend) -> None:
        """Report that a Backend, perhaps its own, was lost while nothing ran. Call with the model's lock held."""
        self._lost_backend = backend
        if self.idle:
            self.wake()

    def run_on_thread(self, function: Callable[[], Any]) -> Any:
        """Run `function` on its thread; return or raise what that does. Called by what loads the model."""
        future: Future[Any] = Future()
        self._pending_call = function, future
        self.wakeup.release()
        return future.result()

    def join(self) -> None:
        """Wait for the thread's end."""
        self._thread.join()
        self._overlap = None  # breaks a reference cycle that holds the Bindings

    def _main(self) -> None:
        try_pin_thread(self.placement.cpus)
        self.wakeup.acquire()
        try:
            while not self.stopping:
                try:
                    self._step()
                except Exception as error:  # noqa: BLE001 - otherwise the thread ends and a ready model answers nothing
                    self._release_turn()
                    fail_queued(self._model, error)
                    self.wakeup.acquire(timeout=FAULT_RETRY_S)
        finally:
            self._release_turn()

    def _step(self) -> None:
        """Do what is due, run a Batch if there is one, or sleep."""
        if self._pending_call is not None:
            self._run_pending_call()
        if self._lost_backend is not None and not self._reload_if_lost():
            return
        if (self.failure is not None or self._restores_loop) and not self._try_recovery():
            return
        in_turn = self.has_turn or (self.arbiter.contended and not self.share.exempt)
        batch = self._take_in_turn() if in_turn else self._take(0)
        if batch is None:
            # what woke it may have arrived while it waited for a turn
            if not self.has_other_work and self._pending_call is None:
                self._sleep()
        elif self._overlap is None:
            self.run_and_deliver(batch)
        else:
            self._overlap.run(batch)

    def _sleep(self) -> None:
        """Sleep until something is due; after a while, release memory that the Bindings only keep for speed."""
        if trimmable := [each for each in self.bindings if supports_trimming(each) and each.can_trim]:
            if self.wakeup.acquire(timeout=IDLE_RELEASE_S):
                return
            release_caches(self._model, trimmable)
        self.wakeup.acquire()

    def _run_pending_call(self) -> None:
        (function, future), self._pending_call = self._pending_call, None  # type: ignore[misc]
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - raised again by the waiter
            future.set_exception(error)

    @property
    def has_other_work(self) -> bool:
        """Whether it has other work than taking Batches."""
        return self.stopping or self._restores_loop or self._lost_backend is not None

    def _take(self, max_ns: float) -> Batch | None:
        model = self._model
        with model.lock:
            batch = model.scheduler.take(time.monotonic_ns(), max_ns, pin=affinity.pin_of(model, self))
            self.idle = batch is None and not self.stopping
            has_waiting = model.scheduler.request_count > 0
            if has_waiting:
                affinity.wake_next(model, self, has_taken=batch is not None)
        if batch is None and has_waiting and model.scheduler.sizing.may_hold:
            model.notify_loop()
        return batch

    def _take_in_turn(self) -> Batch | None:
        """Wait for a turn, unless it has one, and take a Batch in it. Returns: None too when told to stop."""
        arbiter, share = self.arbiter, self.share
        if not self.has_turn and not self._wait_for_turn():
            return None
        batch = self._take(arbiter.max_batch_ns(share))
        if batch is None:
            self.end_turn()
        else:
            arbiter.begin_batch(share, batch.cost_ns)
        return batch

    def _wait_for_turn(self) -> bool:
        """Sleep until a turn is granted. Returns: False when told to stop before."""
        self.arbiter.request_turn(self.share, self)
        if self._rate_limited and not self.has_turn:
            with self._model.lock:
                self._model.wake_one()  # another may need the resources that are free
        self.wakeup.acquire()
        while not self.has_turn and not self.stopping:
            self.wakeup.acquire()
        return self.has_turn or not self.arbiter.cancel_request(self.share, self)

    def end_turn(self, predicted_ns: float = 0, real_ns: int = 0, more: bool = False) -> None:
        """End its turn; afterwards, `has_turn` says whether another has begun."""
        self.has_turn = self.arbiter.end_turn(self.share, predicted_ns, real_ns, more)

    def _release_turn(self) -> None:
        """End its turn, or its claim to come back for one."""
        if self.has_turn:
            self.end_turn()
        else:
            self.arbiter.release_reservation(self.share)

    def run_and_deliver(self, batch: Batch, first_error: Exception | None = None) -> None:
        """Run a Batch while nothing else is under way here, and deliver it. `first_error`: as in `execute`."""
        try:
            batches = self._execute(batch, first_error)
        except Exception as error:  # noqa: BLE001 - the requests have left the queue and must be answered
            self._release_turn()
            batches = fail_unanswered(self._model, batch, error)
        self._model.finish_from_thread(batch, batches)

    def _execute(self, batch: Batch, first_error: Exception | None) -> list[Batch]:
        model = self._model
        lost: LostBatch | None = None
        try:
            batches = affinity.execute_with_state(self, model, execute, batch, first_error)
        except LostBatch as error:
            lost = error
        if self.has_turn:
            more = model.scheduler.request_count > 0 and lost is None
            self.end_turn(batch.cost_ns, time.monotonic_ns() - batch.exec_start_ns, more)
        elif self.arbiter.contended:
            self.arbiter.record_run(self.share, time.monotonic_ns() - batch.exec_start_ns)
        if lost is not None:
            self._reload_backoff.losses += lost.started
            batches = lost.finished + self._rerun_after_loss(lost)
        else:
            self._reload_backoff.record_success()
        if self.placement.name != "cpu":
            model.add_device_time(self.placement.name, device_ns(batches, self.binding))
        return batches

    def record_success(self, batch: Batch, binding: Binding) -> None:
        """Record that a Binding has run a Batch."""
        self._reload_backoff.record_success()
        if self.placement.name != "cpu":
            self._model.add_device_time(self.placement.name, device_ns([batch], binding))

    def _rerun_after_loss(self, lost: LostBatch) -> list[Batch]:
        """Reload the model, and run the requests that a device loss left unanswered, one after another.

        A request that kills whatever runs it is thus found without taking others with it: it is answered with the loss,
        and the others continue. If the device was taken from outside, no request is guilty, and each may run once more.
        Only one Instance at a time does this, so that another's guilty request cannot make this one's look guilty.
        """
        finished: list[Batch] = []
        remaining: Batch | None = lost.remaining
        retried: InferRequest | None = None
        with self.placement.rerun_lock:
            while self._reload_backoff.may_retry and self._reload(lost.error):
                if remaining is None:
                    return finished
                if self._rate_limited and not self._wait_for_turn():
                    break
                try:
                    again = affinity.execute_with_state(self, self._model, execute_singly, remaining)
                    return finished + self._reload_backoff.reset_if_successful(again)
                except LostBatch as next_loss:
                    lost = next_loss
                finally:
                    self._release_turn()
                finished += self._reload_backoff.reset_if_successful(lost.finished)
                self._reload_backoff.losses += 1
                remaining = lost.remaining
                if lost.started and isinstance(lost.error, DeviceRemoved) and remaining.requests[0] is not retried:
                    retried = remaining.requests[0]
                elif lost.started:
                    error = DeviceLost(lost.error.code, lost.error.message, -1)
                    finished += fail_requests(slice_batch(remaining, 0, 1), error)
                    remaining = slice_batch(remaining, 1) if len(remaining.requests) > 1 else None
            else:
                if self.failure is None:
                    self._set_failure(lost.error)
        return finished + fail_requests(remaining, lost.error) if remaining is not None else finished

    def _reload(self, cause: InferError) -> bool:
        model = self._model
        logger.warning("model %s lost its device and is being reloaded: %s", model.name, cause.message)
        try:
            self.bindings = model.replace_backend(self.placement, self.bindings)
            self.binding = self.bindings[0]
            prepare(model, self.bindings)
        except Exception as error:  # noqa: BLE001 - whatever the runtime raises, the next attempt may succeed
            self._set_failure(error)
            return False
        self.failure, self.state_id = None, object()
        affinity.report_availability(model, self, can_run=True)
        model.count_event("instances_replaced")
        return True

    def _reload_if_lost(self) -> bool:
        """Reload the model if it was lost while nothing ran here. Returns: False if that failed."""
        lost, self._lost_backend = self._lost_backend, None
        if lost is None or self.failure is not None or not self.placement.is_bound(lost, self.binding):
            return True
        self._release_turn()
        return self._reload(DeviceLost(Code.NOT_READY, "its process has ended"))

    def _restore_loop(self) -> bool:
        try:
            self._model.restore_loop_binding()
        except Exception as error:  # noqa: BLE001 - as above
            self._set_failure(error)
            return False
        self._restores_loop = False
        return True

    def _set_failure(self, error: Exception) -> None:
        text = error.message if isinstance(error, InferError) else type(error).__name__
        self.failure = InferError(Code.NOT_READY, f"model '{self._model.name}' lost its device: {text}")
        if isinstance(error, ProcessLost):
            self._reload_backoff.stop_retrying()
            self.placement.devices.mark_lost(self.failure.message)
            return
        affinity.report_availability(self._model, self, can_run=False)
        wait_ns = self._reload_backoff.record_failure(time.monotonic_ns())
        logger.error("%s; it is reloaded in %.0f s", self.failure.message, wait_ns / 1e9)

    def _try_recovery(self) -> bool:
        """Retry if it is time; until then leave requests to the others, or reject them if there are none."""
        model, failure = self._model, self.failure
        self._release_turn()  # loading takes long, and so may the wait for the next attempt
        if failure is None or (time.monotonic_ns() >= self._reload_backoff.retry_ns and self._reload(failure)):
            return not self._restores_loop or self._restore_loop()
        if model.healthy and affinity.pin_of(model, self) is None:
            with model.lock:
                model.wake_one()
        elif (batch := self._take(0)) is not None:
            model.finish_from_thread(batch, fail_requests(batch, failure))
            return False
        if not self.wakeup.acquire(timeout=max(self._reload_backoff.retry_ns - time.monotonic_ns(), 0) / 1e9):
            with model.lock:
                self.idle = False
        return False
