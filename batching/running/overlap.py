"""Overlap: an Instance has two Batches on its device, so that one is copied there while the other is computed.

Used by instance.py if Bindings can begin a run and end it later (`OverlappingBinding`). A run that fails is repeated in
the ordinary way once nothing else is there, so failures are handled as everywhere else (isolation.py).
"""

from __future__ import annotations

import logging
import time
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Protocol

from penstock.backends.backend import supports_overlap
from penstock.backends.errors import DeviceLost, InferError, OutOfMemory, RunStopped
from penstock.batching.scheduling.memory_cap import RECOVERY_NS

from .execution import GatheredRun, gather, scatter
from .isolation import fail_queued, fail_requests, fail_unanswered, to_exception
from .lead import Lead, estimate_end_ns

if TYPE_CHECKING:
    from threading import Semaphore

    from penstock.backends.backend import Binding, OverlappingBinding
    from penstock.batching.devices.device import TurnArbiter
    from penstock.batching.devices.placement import Placement
    from penstock.batching.model import Model

    from .batch import Batch

logger = logging.getLogger("penstock.batching")

_QUARANTINED = Exception("some of its requests are known to fail and run separately")
POLLS_PER_RUN = 8
MIN_POLL_NS, MAX_POLL_NS = 300_000, 2_000_000
"""How often a run is polled for its end before it is due: otherwise its answers would wait for what comes next."""


def allocate_bindings(model: Model, placement: Placement) -> list[Binding]:
    """Allocate an Instance's Bindings: two if they overlap, have no rate limiter and both fit in memory.

    A model that remembers sequences itself runs one batch after another.
    Raises: whatever binding the first one raises.
    """
    first = placement.bind(model.binding_signature, model.max_rows)
    sequences = model.scheduler.sequences
    if (
        not supports_overlap(first)
        or placement.limiter is not None
        or (sequences is not None and sequences.model_keeps_state)
    ):
        return [first]
    try:
        return [first, placement.bind(model.binding_signature, model.max_rows)]
    except OutOfMemory as error:
        text = "model %s: not enough memory for two batches in flight, so batches run one at a time: %s"
        logger.warning(text, model.name, error.message)
        return [first]


class NextAction(Enum):
    """What an Instance does next while a run is under way."""

    TAKE = auto()
    WAIT = auto()
    END = auto()


def next_action(now_ns: float, take_ns: float, *, ended: bool, waiting: bool, full: bool) -> NextAction:
    """Decide what to do about the next Batch while one is on the device.

    `ended`: that one has ended, or should have by now; its answers go first. `waiting`: there is something to take.
    `full`: nothing could join what would be taken. Never waits beyond `take_ns`.
    """
    if ended:
        return NextAction.END
    if now_ns < take_ns and not (waiting and full):
        return NextAction.WAIT
    return NextAction.TAKE if waiting else NextAction.END


class Runner(Protocol):
    """The part of an Instance that is used here. All on its thread."""

    binding: Binding
    bindings: list[Binding]
    failure: InferError | None
    wake_at_rows: int
    wakeup: Semaphore
    has_turn: bool
    arbiter: TurnArbiter
    share: Any

    @property
    def has_other_work(self) -> bool:
        """Whether it has other work than taking Batches."""

    def end_turn(self, predicted_ns: float, real_ns: int, more: bool) -> None:
        """End its turn, which may begin another."""

    def run_and_deliver(self, batch: Batch, failed: Exception | None = None) -> None:
        """Run a Batch in the ordinary way, with nothing else under way, and deliver it."""

    def record_success(self, batch: Batch, binding: Binding) -> None:
        """Record that a Binding has run a Batch."""


class _StartedRun:
    """A Batch whose run was started, or failed to start: `error` is why it failed.

    `device_start_ns`: from when it has the device to itself; `run_ns`: its predicted time there.
    """

    __slots__ = ("batch", "binding", "device_start_ns", "error", "gathered", "run_ns")

    def __init__(self, batch: Batch, binding: OverlappingBinding) -> None:
        self.batch = batch
        self.binding = binding
        self.error: Exception | None = None
        self.gathered: GatheredRun = ((), 0, None)
        self.device_start_ns = float(batch.device_free_ns or batch.exec_start_ns)
        self.run_ns = batch.cost_ns

    @property
    def free_ns(self) -> float:
        """When it is predicted to have run."""
        return self.device_start_ns + self.run_ns

    @property
    def ended(self) -> bool:
        """Whether it has ended or, if the Binding cannot tell, should have."""
        ended = getattr(self.binding, "is_done", None)
        try:
            return time.monotonic_ns() >= self.free_ns if ended is None else bool(ended())
        except Exception:  # noqa: BLE001 - `end` reports what is wrong
            return True


class Overlap:
    """Runs the Batches of one Instance, starting each while the previous one is still on the device.

    Invariants: at most two are there, and they end in the order in which they were started. Each is delivered once. A
    run's time limit starts when it has the device to itself; until then the limit of the previous run is added.
    """

    def __init__(self, model: Model, runner: Runner) -> None:
        self._model = model
        self._runner = runner
        self._lead = Lead()
        self._single_until_ns = 0

    def run(self, batch: Batch) -> None:
        """Run a Batch, and those that follow while the device has one; return when it has none."""
        runner = self._runner
        if time.monotonic_ns() < self._single_until_ns:
            runner.run_and_deliver(batch)
            return
        running = self._start(batch, 0)
        index = 0
        while True:
            following = None
            if running.error is None and (next_batch := self._take_next(running)) is not None:
                index = 1 - index
                following = self._start(next_batch, index, after=True)
            self._end(running)
            if running.error is not None:
                break
            self._deliver(running, followed=following is not None and following.error is None)
            if following is None:
                return
            self._on_device_acquired(following, running)
            running = following
        self._run_failed_again(running, following)

    def _take_next(self, running: _StartedRun) -> Batch | None:
        try:
            return self._wait_and_take(running)
        except Exception as error:  # noqa: BLE001 - the current run must still be delivered
            fail_queued(self._model, error)
            return None

    def _wait_and_take(self, running: _StartedRun) -> Batch | None:
        """Take the next Batch when it is time; None if there is none, or there is other work."""
        model, runner = self._model, self._runner
        take_ns = self._lead.take_ns(running.free_ns, running.run_ns)
        poll_ns = min(max(running.run_ns / POLLS_PER_RUN, MIN_POLL_NS), MAX_POLL_NS)
        while not runner.has_other_work and not self._must_yield():
            ended, now_ns = running.ended, time.monotonic_ns()
            with model.lock:
                scheduler = model.scheduler
                lacking = scheduler.free_batch_rows(now_ns)
                action = next_action(
                    now_ns, take_ns, ended=ended, waiting=scheduler.request_count > 0, full=lacking <= 0
                )
                if action is NextAction.TAKE:
                    return self._take(now_ns, int(running.free_ns))
                if action is NextAction.END:
                    return None
                runner.wake_at_rows = scheduler.rows + max(lacking, 1)
            runner.wakeup.acquire(timeout=min(take_ns - now_ns, poll_ns) / 1e9)
            runner.wake_at_rows = 0
        return None

    def _must_yield(self) -> bool:
        """Whether another Instance waits for the device and gets a turn before this one takes more."""
        runner = self._runner
        return runner.arbiter.contended and (not runner.has_turn or runner.arbiter.max_batch_ns(runner.share) > 0)

    def _take(self, now_ns: int, free_ns: int) -> Batch | None:
        """Take a Batch in the current turn. Call with the model's lock held."""
        model, runner = self._model, self._runner
        batch = model.scheduler.take(now_ns, 0, free_ns)
        if batch is not None and model.scheduler.request_count:
            model.wake_one()
        if batch is not None and runner.has_turn:
            runner.arbiter.begin_batch(runner.share, batch.cost_ns)
        return batch

    def _start(self, batch: Batch, index: int, *, after: bool = False) -> _StartedRun:
        binding: OverlappingBinding = self._runner.bindings[index]  # type: ignore[assignment]
        run = _StartedRun(batch, binding)
        try:
            if self._model.quarantine.find_known(batch.requests):
                run.error = _QUARANTINED
                return run
            self._start_limit(binding, 2 if after else 1)
            run.gathered = gather(self._model, binding, batch)
            batch.compute_start_ns = now_ns = time.monotonic_ns()
            self._lead.learn_gather(now_ns - batch.exec_start_ns)
            run.device_start_ns = max(run.device_start_ns, now_ns)
            run.run_ns = self._lead.run_ns(batch.key, run.gathered[1], batch.cost_ns)
            binding.begin(run.gathered[0])
        except BaseException as error:  # noqa: BLE001 - run again, and answered or logged where the request is known
            run.error = to_exception(error)
            self._end_limit(binding)
        return run

    def _end(self, run: _StartedRun) -> None:
        """Wait until a run has ended, unless it has already failed."""
        if run.error is not None:
            return
        batch, binding = run.batch, run.binding
        ended, polled_ns = run.ended, time.monotonic_ns()
        try:
            outputs = binding.end()
            batch.compute_end_ns = now_ns = time.monotonic_ns()
            run.run_ns = binding.device_ns or run.run_ns
            run.run_ns = estimate_end_ns(run.free_ns, polled_ns, now_ns, ended=ended) - run.device_start_ns
            self._lead.learn_run(batch.key, run.gathered[1], binding.device_ns)
            scatter(self._model, batch, run.gathered, outputs)
        except BaseException as error:  # noqa: BLE001 - as above
            run.error = to_exception(error)
        finally:
            self._end_limit(binding)

    def _on_device_acquired(self, following: _StartedRun, ended: _StartedRun) -> None:
        """Record that a run has the device to itself now."""
        following.batch.device_free_ns = ended.batch.exec_end_ns
        following.device_start_ns = max(following.batch.compute_start_ns, ended.free_ns)
        try:
            if following.error is None:
                self._start_limit(following.binding, 1)
        except Exception:  # it keeps running
            logger.exception("model %s: a run may exceed its time limit by that of the previous run", self._model.name)

    def _deliver(self, run: _StartedRun, *, followed: bool) -> None:
        batch, runner, batches = run.batch, self._runner, [run.batch]
        try:
            if runner.has_turn:
                real_ns = batch.exec_end_ns - (batch.device_free_ns or batch.exec_start_ns)
                runner.end_turn(batch.cost_ns, real_ns, followed or self._model.scheduler.request_count > 0)
            runner.record_success(batch, run.binding)
        except Exception as error:  # noqa: BLE001 - it has run, and the next is already running
            batches = fail_unanswered(self._model, batch, error)
        self._model.finish_from_thread(batch, batches, followed=followed)

    def _run_failed_again(self, running: _StartedRun, following: _StartedRun | None) -> None:
        """Run again what failed, once everything else there has ended."""
        failed = [running]
        if following is not None:
            following.batch.device_free_ns = time.monotonic_ns()
            self._end(following)
            if following.error is None:
                self._deliver(following, followed=False)
            else:
                failed.append(following)
        binding = self._runner.binding
        for run in failed:
            self._run_again(run, same=self._runner.binding is binding)

    def _run_again(self, run: _StartedRun, *, same: bool) -> None:
        """Run a failed Batch in the ordinary way. `same`: the model was not reloaded since."""
        runner, batch, error = self._runner, run.batch, run.error
        batch.device_free_ns = 0
        if runner.failure is not None:
            self._model.finish_from_thread(batch, fail_requests(batch, runner.failure))
        elif same and isinstance(error, (DeviceLost, RunStopped)):
            # no run is needed to know: a lost device stays lost, and reaching the limit again takes long
            runner.run_and_deliver(batch, error)
        else:
            if isinstance(error, (OutOfMemory, MemoryError)):
                self._single_until_ns = time.monotonic_ns() + RECOVERY_NS
            batch.exec_start_ns = batch.compute_start_ns = batch.compute_end_ns = time.monotonic_ns()
            runner.run_and_deliver(batch)

    def _start_limit(self, binding: Binding, limits: int) -> None:
        """Have a run stopped that takes longer than `limits` times its limit, if there is one."""
        watchdog = self._model.watchdog
        if watchdog is not None:
            watchdog.begin(binding, limits * self._model.spec.policy.run_limit_us * 1000, time.monotonic_ns())

    def _end_limit(self, binding: Binding) -> None:
        watchdog = self._model.watchdog
        if watchdog is not None:
            watchdog.end(binding)
