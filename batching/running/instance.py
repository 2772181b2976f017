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

from penstock.backends.errors import Code, DeviceLost, DeviceRemoved, InferError, ProcessLost
from penstock.batching.devices.placement import keep_if_there
from penstock.batching.loading.preparing import IDLE_RELEASE_S, prepare, release_caches
from penstock.batching.sequences import homes

from .attempts import FAULT_S, Attempts
from .execution import device_ns
from .isolation import LostBatch, cut, execute, execute_alone, give_up, refuse, settled
from .overlap import Overlap, bind

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
    `home` is its identity for the sequences it remembers (homes.py), `seat` its number. `leaving`: it is about to end.
    `bindings` has two entries if it `overlaps`, which it does while nothing else waits for a turn. `wakes_at_rows`:
    wake it when this many rows wait; 0: do not. `turn`: the `giver`, in which it has a `share`, granted a turn.
    Threads: others call `wake`, `grant` and `stop`; everything else happens on the Instance's thread. Each of these
    calls releases the alarm once, and the sleeper rechecks what it slept for, so an extra release does no harm. Neither
    Device nor RateLimiter ever takes a model's lock.
    """

    def __init__(self, model: Model, place: Placement, name: str, number: int = 0) -> None:
        self.bindings = bind(model, place)
        self.binding, self.place = self.bindings[0], place
        self.overlaps = len(self.bindings) > 1
        self._overlap = Overlap(model, self) if self.overlaps else None
        self._rests = hasattr(self.binding, "trim_memory")
        self._errand: tuple[Callable[[], Any], Future[Any]] | None = None
        self._model = model
        self.giver, self.share = place.seat(number)
        self.group = place.single
        self._limited = place.limiter is not None
        self.alarm = threading.Semaphore(0)
        self.stopping = self.turn = self._mends = False
        self._attempts = Attempts()
        self._doubted: Backend | None = None
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self.idle = True
        self.wakes_at_rows = 0
        self.failure: InferError | None = None
        self.home, self.seat, self.leaving = object(), len(model.instances), False

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Wake it. Call with the model's lock held, when `idle` is set or `wakes_at_rows` rows wait."""
        self.idle = False
        self.wakes_at_rows = 0
        self.alarm.release()

    def grant(self) -> None:
        """Grant the turn that it asked for."""
        self.turn = True
        self.alarm.release()

    def stop(self) -> None:
        """Let the thread end after its current run. Call with the model's lock held."""
        self.stopping, self.idle, self.wakes_at_rows = True, False, 0
        self.alarm.release()

    def mend_loop(self) -> None:
        """Have it call `Model.mend_loop` when it has time. Call with the model's lock held."""
        self._mends = True
        if self.idle:
            self.wake()

    def doubt(self, backend: Backend) -> None:
        """Report that a Backend, perhaps its own, was lost while nothing ran. Call with the model's lock held."""
        self._doubted = backend
        if self.idle:
            self.wake()

    def perform(self, errand: Callable[[], Any]) -> Any:
        """Run `errand` on its thread; return or raise what that does. Called by what loads the model."""
        done: Future[Any] = Future()
        self._errand = errand, done
        self.alarm.release()
        return done.result()

    def join(self) -> None:
        """Wait for the thread's end."""
        self._thread.join()
        self._overlap = None  # breaks a reference cycle that holds the Bindings

    def _main(self) -> None:
        keep_if_there(self.place.cpus)
        self.alarm.acquire()
        try:
            while not self.stopping:
                try:
                    self._go_on()
                except Exception as error:  # noqa: BLE001 - otherwise the thread ends and a ready model answers nothing
                    self._leave_turn()
                    give_up(self._model, error)
                    self.alarm.acquire(timeout=FAULT_S)
        finally:
            self._leave_turn()

    def _go_on(self) -> None:
        """Do what is due, run a Batch if there is one, or sleep."""
        if self._errand is not None:
            self._run_errand()
        if self._doubted is not None and not self._renew():
            return
        if (self.failure is not None or self._mends) and not self._recover():
            return
        in_turn = self.turn or (self.giver.crowded and not self.share.brief)
        batch = self._take_in_turn() if in_turn else self._take(0)
        if batch is None:
            # what woke it may have arrived while it waited for a turn
            if not self.wanted and self._errand is None:
                self._sleep()
        elif self._overlap is None:
            self.run_whole(batch)
        else:
            self._overlap.run(batch)

    def _sleep(self) -> None:
        """Sleep until something is due; after a while, release memory that the Bindings only keep for speed."""
        if self._rests and any(binding.can_trim for binding in self.bindings):  # type: ignore[attr-defined]
            if self.alarm.acquire(timeout=IDLE_RELEASE_S):
                return
            release_caches(self._model, self.bindings)
        self.alarm.acquire()

    def _run_errand(self) -> None:
        (errand, done), self._errand = self._errand, None  # type: ignore[misc]
        try:
            done.set_result(errand())
        except BaseException as error:  # noqa: BLE001 - raised again by the waiter
            done.set_exception(error)

    @property
    def wanted(self) -> bool:
        """Whether it has other work than taking Batches."""
        return self.stopping or self._mends or self._doubted is not None

    def _take(self, most_ns: float) -> Batch | None:
        model = self._model
        with model.lock:
            batch = model.scheduler.take(time.monotonic_ns(), most_ns, pin=homes.pin_of(model, self))
            self.idle = batch is None and not self.stopping
            left = model.scheduler.request_count > 0
            if left:
                homes.wake_next(model, self, has_taken=batch is not None)
        if batch is None and left and model.scheduler.sizing.may_hold:
            model.leave_held()
        return batch

    def _take_in_turn(self) -> Batch | None:
        """Wait for a turn, unless it has one, and take a Batch in it. Returns: None too when told to stop."""
        giver, share = self.giver, self.share
        if not self.turn and not self._granted():
            return None
        batch = self._take(giver.most_ns(share))
        if batch is None:
            self.end_turn()
        else:
            giver.begin(share, batch.cost_ns)
        return batch

    def _granted(self) -> bool:
        """Sleep until a turn is granted. Returns: False when told to stop before."""
        self.giver.ask(self.share, self)
        if self._limited and not self.turn:
            with self._model.lock:
                self._model.wake_one()  # another may need the resources that are free
        self.alarm.acquire()
        while not self.turn and not self.stopping:
            self.alarm.acquire()
        return self.turn or not self.giver.withdraw(self.share, self)

    def end_turn(self, predicted_ns: float = 0, real_ns: int = 0, more: bool = False) -> None:
        """End its turn; afterwards, `turn` says whether another has begun."""
        self.turn = self.giver.end(self.share, predicted_ns, real_ns, more)

    def _leave_turn(self) -> None:
        """End its turn, or its claim to come back for one."""
        if self.turn:
            self.end_turn()
        else:
            self.giver.forget(self.share)

    def run_whole(self, batch: Batch, failed: Exception | None = None) -> None:
        """Run a Batch while nothing else is under way here, and deliver it. `failed`: as in `execute`."""
        try:
            ran = self._ran(batch, failed)
        except Exception as error:  # noqa: BLE001 - the requests have left the queue and must be answered
            self._leave_turn()
            ran = settled(self._model, batch, error)
        self._model.finish_from_thread(batch, ran)

    def _ran(self, batch: Batch, failed: Exception | None) -> list[Batch]:
        model = self._model
        lost: LostBatch | None = None
        try:
            ran = homes.execute_at_home(self, model, execute, batch, failed)
        except LostBatch as error:
            lost = error
        if self.turn:
            more = model.scheduler.request_count > 0 and lost is None
            self.end_turn(batch.cost_ns, time.monotonic_ns() - batch.exec_start_ns, more)
        elif self.giver.crowded:
            self.giver.ran(self.share, time.monotonic_ns() - batch.exec_start_ns)
        if lost is not None:
            self._attempts.losses += lost.begun
            ran = lost.ran + self._run_again(lost)
        else:
            self._attempts.went_well()
        if self.place.name != "cpu":
            model.charge(self.place.name, device_ns(ran, self.binding))
        return ran

    def went_well(self, batch: Batch, binding: Binding) -> None:
        """Record that a Binding has run a Batch."""
        self._attempts.went_well()
        if self.place.name != "cpu":
            self._model.charge(self.place.name, device_ns([batch], binding))

    def _run_again(self, lost: LostBatch) -> list[Batch]:
        """Reload the model, and run the requests that a device loss left unanswered, one after another.

        A request that kills whatever runs it is thus found without taking others with it: it is answered with the loss,
        and the others continue. If the device was taken from outside, no request is guilty, and each may run once more.
        Only one Instance at a time does this, so that another's guilty request cannot make this one's look guilty.
        """
        ran: list[Batch] = []
        rest: Batch | None = lost.rest
        spared: InferRequest | None = None
        with self.place.trial:
            while self._attempts.left and self._replace(lost.error):
                if rest is None:
                    return ran
                if self._limited and not self._granted():
                    break
                try:
                    return ran + self._attempts.forgiven(homes.execute_at_home(self, self._model, execute_alone, rest))
                except LostBatch as again:
                    lost = again
                finally:
                    self._leave_turn()
                ran += self._attempts.forgiven(lost.ran)
                self._attempts.losses += 1
                rest = lost.rest
                if lost.begun and isinstance(lost.error, DeviceRemoved) and rest.requests[0] is not spared:
                    spared = rest.requests[0]
                elif lost.begun:
                    ran += refuse(cut(rest, 0, 1), DeviceLost(lost.error.code, lost.error.message, -1))
                    rest = cut(rest, 1) if len(rest.requests) > 1 else None
            else:
                if self.failure is None:
                    self._fail(lost.error)
        return ran + refuse(rest, lost.error) if rest is not None else ran

    def _replace(self, cause: InferError) -> bool:
        model = self._model
        logger.warning("model %s lost its device and is being reloaded: %s", model.name, cause.message)
        try:
            self.bindings = model.replace_backend(self.place, self.bindings)
            self.binding = self.bindings[0]
            prepare(model, self.bindings)
        except Exception as error:  # noqa: BLE001 - whatever the runtime raises, the next attempt may succeed
            self._fail(error)
            return False
        self.failure, self.home = None, object()
        homes.report_availability(model, self, can_run=True)
        model.count("instances_replaced")
        return True

    def _renew(self) -> bool:
        """Reload the model if it was lost while nothing ran here. Returns: False if that failed."""
        lost, self._doubted = self._doubted, None
        if lost is None or self.failure is not None or not self.place.is_bound(lost, self.binding):
            return True
        self._leave_turn()
        return self._replace(DeviceLost(Code.NOT_READY, "its process has ended"))

    def _mend(self) -> bool:
        try:
            self._model.mend_loop()
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(error)
            return False
        self._mends = False
        return True

    def _fail(self, error: Exception) -> None:
        text = error.message if isinstance(error, InferError) else type(error).__name__
        self.failure = InferError(Code.NOT_READY, f"model '{self._model.name}' lost its device: {text}")
        if isinstance(error, ProcessLost):
            self._attempts.end()
            self.place.devices.lose(self.failure.message)
            return
        homes.report_availability(self._model, self, can_run=False)
        wait_ns = self._attempts.failed(time.monotonic_ns())
        logger.error("%s; it is reloaded in %.0f s", self.failure.message, wait_ns / 1e9)

    def _recover(self) -> bool:
        """Retry if it is time; until then leave requests to the others, or reject them if there are none."""
        model, failure = self._model, self.failure
        self._leave_turn()  # loading takes long, and so may the wait for the next attempt
        if failure is None or (time.monotonic_ns() >= self._attempts.retry_ns and self._replace(failure)):
            return not self._mends or self._mend()
        if model.healthy and homes.pin_of(model, self) is None:
            with model.lock:
                model.wake_one()
        elif (batch := self._take(0)) is not None:
            model.finish_from_thread(batch, refuse(batch, failure))
            return False
        if not self.alarm.acquire(timeout=max(self._attempts.retry_ns - time.monotonic_ns(), 0) / 1e9):
            with model.lock:
                self.idle = False
        return False
