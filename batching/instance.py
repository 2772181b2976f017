"""Instance: one executor on one device: take a Batch, run it, deliver it.

The work itself is `isolation.execute`, shared by both executors: `ThreadInstance` has a thread of its own; the event
loop acts as an Instance through `Model.dispatch` for batches that run in less time than a hand-over to a thread takes.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from penstock.backends.errors import Code, InferError

from .isolation import LostBatch, execute, refuse

if TYPE_CHECKING:
    from penstock.backends.backend import Binding

    from .batch import Batch
    from .model import Model
    from .placement import Placement

logger = logging.getLogger("penstock.batching")

FIRST_RETRY_NS = 1_000_000_000
LAST_RETRY_NS = 60_000_000_000
"""How long a device that was lost is left alone before the model is loaded on it again: doubled with each failure."""


class ThreadInstance:
    """An Instance on a thread of its own.

    It takes a Batch as soon as it is woken or free, something is due, and the Device lets it; it sleeps only when one
    of these is wanting. It is born asleep. `idle`: it sleeps since nothing is due, and is to be woken; while it waits
    for the Device it is not, for it looks at the queue when it gets its turn. A turn that finds nothing to run is
    handed on at once.
    `failure` is why it cannot run: its device was lost, and the model could not be loaded there again. It tries again
    from time to time. Meanwhile others serve; if no Instance can run, it answers what comes with that.

    Threads: `wake`, `grant` and `stop` are called by others, all else happens on the Instance's thread. Each of these
    calls releases the alarm once, and whoever slept looks again at what it slept for: a release too many does no harm.
    The Device never takes a model's lock.
    """

    def __init__(self, model: Model, place: Placement, name: str) -> None:
        self.binding: Binding = place.bind(model.bound, model.max_rows)
        self.place = place
        self._model = model
        self._device = place.device
        self._alarm = threading.Semaphore(0)
        self._stopping = False
        self._turn = False
        self._mends = False
        self._retry_ns = 0
        self._wait_ns = FIRST_RETRY_NS
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self.idle = True
        self.failure: InferError | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """End its sleep. Call with the model's lock held, when `idle` is set."""
        self.idle = False
        self._alarm.release()

    def grant(self) -> None:
        """Give it the turn that it has asked the Device for."""
        self._turn = True
        self._alarm.release()

    def stop(self) -> None:
        """Let the thread end once what it runs is done. Call with the model's lock held."""
        self._stopping = True
        self._alarm.release()

    def mend_loop(self) -> None:
        """Let it call `Model.mend_loop` when it has time. Call with the model's lock held."""
        self._mends = True
        if self.idle:
            self.wake()

    def join(self) -> None:
        """Wait for the thread's end."""
        self._thread.join()

    def _main(self) -> None:
        self._alarm.acquire()
        try:
            while not self._stopping:
                if (self.failure is not None or self._mends) and not self._recover():
                    continue
                in_turn = self._turn or (self._device.crowded and not self.place.share.brief)
                batch = self._take_in_turn() if in_turn else self._take(0)
                if batch is None:
                    if not self._stopping:
                        self._alarm.acquire()
                    continue
                self._run(batch)
        finally:
            if self._turn:
                self._end_turn()

    def _take(self, most_ns: float) -> Batch | None:
        model = self._model
        with model.lock:
            batch = model.scheduler.take(time.monotonic_ns(), most_ns)
            self.idle = batch is None and not self._stopping
            left = model.scheduler.live > 0
            if batch is not None and left:
                model.wake_one()
        if batch is None and left and model.held:
            model.leave_held()
        return batch

    def _take_in_turn(self) -> Batch | None:
        """Wait for a turn unless there is one, and take a Batch in it. Returns: None too when told to stop."""
        device, share = self._device, self.place.share
        if not self._turn and not self._granted():
            return None
        batch = self._take(device.most_ns(share))
        if batch is None:
            self._end_turn()
        else:
            device.begin(share, batch.cost_ns)
        return batch

    def _granted(self) -> bool:
        """Sleep until the Device grants a turn. Returns: False when told to stop before."""
        self._device.ask(self.place.share, self)
        self._alarm.acquire()
        while not self._turn and not self._stopping:
            self._alarm.acquire()
        return self._turn or not self._device.withdraw(self.place.share, self)

    def _end_turn(self, predicted_ns: float = 0, real_ns: int = 0, more: bool = False) -> None:
        self._turn = self._device.end(self.place.share, predicted_ns, real_ns, more)

    def _run(self, batch: Batch) -> None:
        model = self._model
        lost: LostBatch | None = None
        try:
            ran = execute(model, self.binding, batch)
        except LostBatch as error:
            lost = error
        if self._turn:
            more = model.scheduler.live > 0 and lost is None
            self._end_turn(batch.cost_ns, time.monotonic_ns() - batch.exec_start_ns, more)
        elif self._device.crowded:
            self._device.ran(self.place.share, time.monotonic_ns() - batch.exec_start_ns)
        if lost is not None:
            ran = lost.ran + self._run_again(lost)
        else:
            self._wait_ns = FIRST_RETRY_NS
        model.finish_from_thread(batch, ran)

    def _run_again(self, lost: LostBatch) -> list[Batch]:
        """Load the model again, and run there what its device was lost under; once, or it is answered with the loss."""
        if self._replace(lost.error):
            try:
                return execute(self._model, self.binding, lost.rest)
            except LostBatch as again:
                self._fail(again.error)
                return again.ran + refuse(again.rest, again.error)
        return refuse(lost.rest, lost.error)

    def _replace(self, cause: InferError) -> bool:
        model = self._model
        logger.warning("model %s lost its device, it is loaded again: %s", model.name, cause.message)
        try:
            self.binding = model.replace_backend(self.place, self.binding)
        except Exception as error:  # noqa: BLE001 - whatever a runtime raises, the next attempt may go well
            self._fail(error)
            return False
        self.failure = None
        model.count("instances_replaced")
        return True

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
        self._retry_ns = time.monotonic_ns() + self._wait_ns
        logger.error("%s; it is loaded again in %.0f s", self.failure.message, self._wait_ns / 1e9)
        self._wait_ns = min(2 * self._wait_ns, LAST_RETRY_NS)

    def _recover(self) -> bool:
        """Try again when it is time; until then leave what comes to the others, or refuse it if there are none."""
        model, failure = self._model, self.failure
        if self._turn:
            self._end_turn()  # loading takes long, and so may the wait for the next attempt
        if failure is None or (time.monotonic_ns() >= self._retry_ns and self._replace(failure)):
            return not self._mends or self._mend()
        if model.healthy:
            with model.lock:
                model.wake_one()
        elif (batch := self._take(0)) is not None:
            model.finish_from_thread(batch, refuse(batch, failure))
            return False
        if not self._alarm.acquire(timeout=max(self._retry_ns - time.monotonic_ns(), 0) / 1e9):
            with model.lock:
                self.idle = False
        return False
