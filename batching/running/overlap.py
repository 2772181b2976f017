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

from .execution import Filled, gather, scatter
from .isolation import as_failure, give_up, refuse, settled
from .lead import Lead, ended_ns

if TYPE_CHECKING:
    from threading import Semaphore

    from penstock.backends.backend import Binding, OverlappingBinding
    from penstock.batching.devices.device import TurnGiver
    from penstock.batching.devices.placement import Placement
    from penstock.batching.model import Model

    from .batch import Batch

logger = logging.getLogger("penstock.batching")

_SHARED = Exception("some of its requests are known to fail and run separately")
LOOKS = 8
LEAST_LOOK_NS, MOST_LOOK_NS = 300_000, 2_000_000
"""How often a run is polled for its end before it is due: otherwise its answers would wait for what comes next."""


def bind(model: Model, place: Placement) -> list[Binding]:
    """Allocate an Instance's Bindings: two if they overlap, have no rate limiter and both fit in memory.

    A model that remembers sequences itself runs one batch after another.
    Raises: whatever binding the first one raises.
    """
    first = place.bind(model.bound, model.max_rows)
    sequences = model.scheduler.sequences
    if (
        not supports_overlap(first)
        or place.limiter is not None
        or (sequences is not None and sequences.model_keeps_state)
    ):
        return [first]
    try:
        return [first, place.bind(model.bound, model.max_rows)]
    except OutOfMemory as error:
        text = "model %s: not enough memory for two batches in flight, so batches run one at a time: %s"
        logger.warning(text, model.name, error.message)
        return [first]


class NextAction(Enum):
    """What an Instance does next while a run is under way."""

    TAKE = auto()
    WAIT = auto()
    END = auto()


def next_step(now_ns: float, take_ns: float, *, over: bool, waiting: bool, full: bool) -> NextAction:
    """Decide what to do about the next Batch while one is on the device.

    `over`: that one has ended, or should have by now; its answers go first. `waiting`: there is something to take.
    `full`: nothing could join what would be taken. Never waits beyond `take_ns`.
    """
    if over:
        return NextAction.END
    if now_ns < take_ns and not (waiting and full):
        return NextAction.WAIT
    return NextAction.TAKE if waiting else NextAction.END


class Runner(Protocol):
    """The part of an Instance that is used here. All on its thread."""

    binding: Binding
    bindings: list[Binding]
    failure: InferError | None
    wakes_at_rows: int
    alarm: Semaphore
    turn: bool
    giver: TurnGiver
    share: Any

    @property
    def wanted(self) -> bool:
        """Whether it has other work than taking Batches."""

    def end_turn(self, predicted_ns: float, real_ns: int, more: bool) -> None:
        """End its turn, which may begin another."""

    def run_whole(self, batch: Batch, failed: Exception | None = None) -> None:
        """Run a Batch in the ordinary way, with nothing else under way, and deliver it."""

    def went_well(self, batch: Batch, binding: Binding) -> None:
        """Record that a Binding has run a Batch."""


class _Begun:
    """A Batch whose run was started, or failed to start: `error` is why it failed.

    `from_ns`: from when it has the device to itself; `run_ns`: its predicted time there.
    """

    __slots__ = ("batch", "binding", "error", "filled", "from_ns", "run_ns")

    def __init__(self, batch: Batch, binding: OverlappingBinding) -> None:
        self.batch = batch
        self.binding = binding
        self.error: Exception | None = None
        self.filled: Filled = ((), 0, None)
        self.from_ns = float(batch.free_ns or batch.exec_start_ns)
        self.run_ns = batch.cost_ns

    @property
    def free_ns(self) -> float:
        """When it is predicted to have run."""
        return self.from_ns + self.run_ns

    @property
    def over(self) -> bool:
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
        self._alone_until_ns = 0

    def run(self, batch: Batch) -> None:
        """Run a Batch, and those that follow while the device has one; return when it has none."""
        runner = self._runner
        if time.monotonic_ns() < self._alone_until_ns:
            runner.run_whole(batch)
            return
        running = self._begin(batch, 0)
        turn = 0
        while True:
            following = None
            if running.error is None and (next_batch := self._next(running)) is not None:
                turn = 1 - turn
                following = self._begin(next_batch, turn, after=True)
            self._end(running)
            if running.error is not None:
                break
            self._deliver(running, followed=following is not None and following.error is None)
            if following is None:
                return
            self._follow(following, running)
            running = following
        self._fail(running, following)

    def _next(self, running: _Begun) -> Batch | None:
        try:
            return self._take_late(running)
        except Exception as error:  # noqa: BLE001 - the current run must still be delivered
            give_up(self._model, error)
            return None

    def _take_late(self, running: _Begun) -> Batch | None:
        """Take the next Batch when it is time; None if there is none, or there is other work."""
        model, runner = self._model, self._runner
        take_ns = self._lead.take_ns(running.free_ns, running.run_ns)
        look_ns = min(max(running.run_ns / LOOKS, LEAST_LOOK_NS), MOST_LOOK_NS)
        while not runner.wanted and not self._others_wait():
            over, now_ns = running.over, time.monotonic_ns()
            with model.lock:
                scheduler = model.scheduler
                lacking = scheduler.free_batch_rows(now_ns)
                step = next_step(now_ns, take_ns, over=over, waiting=scheduler.request_count > 0, full=lacking <= 0)
                if step is NextAction.TAKE:
                    return self._take(now_ns, int(running.free_ns))
                if step is NextAction.END:
                    return None
                runner.wakes_at_rows = scheduler.rows + max(lacking, 1)
            runner.alarm.acquire(timeout=min(take_ns - now_ns, look_ns) / 1e9)
            runner.wakes_at_rows = 0
        return None

    def _others_wait(self) -> bool:
        """Whether another Instance waits for the device and gets a turn before this one takes more."""
        runner = self._runner
        return runner.giver.crowded and (not runner.turn or runner.giver.most_ns(runner.share) > 0)

    def _take(self, now_ns: int, free_ns: int) -> Batch | None:
        """Take a Batch in the current turn. Call with the model's lock held."""
        model, runner = self._model, self._runner
        batch = model.scheduler.take(now_ns, 0, free_ns)
        if batch is not None and model.scheduler.request_count:
            model.wake_one()
        if batch is not None and runner.turn:
            runner.giver.begin(runner.share, batch.cost_ns)
        return batch

    def _begin(self, batch: Batch, turn: int, *, after: bool = False) -> _Begun:
        binding: OverlappingBinding = self._runner.bindings[turn]  # type: ignore[assignment]
        begun = _Begun(batch, binding)
        try:
            if self._model.quarantine.among(batch.requests):
                begun.error = _SHARED
                return begun
            self._watch(binding, 2 if after else 1)
            begun.filled = gather(self._model, binding, batch)
            batch.compute_start_ns = now_ns = time.monotonic_ns()
            self._lead.learn(now_ns - batch.exec_start_ns)
            begun.from_ns = max(begun.from_ns, now_ns)
            begun.run_ns = self._lead.run_ns(batch.key, begun.filled[1], batch.cost_ns)
            binding.begin(begun.filled[0])
        except BaseException as error:  # noqa: BLE001 - run again, and answered or logged where the request is known
            begun.error = as_failure(error)
            self._unwatch(binding)
        return begun

    def _end(self, begun: _Begun) -> None:
        """Wait until a run has ended, unless it has already failed."""
        if begun.error is not None:
            return
        batch, binding = begun.batch, begun.binding
        over, asked_ns = begun.over, time.monotonic_ns()
        try:
            outputs = binding.end()
            batch.compute_end_ns = now_ns = time.monotonic_ns()
            begun.run_ns = binding.device_ns or begun.run_ns
            begun.run_ns = ended_ns(begun.free_ns, asked_ns, now_ns, over=over) - begun.from_ns
            self._lead.learn_run(batch.key, begun.filled[1], binding.device_ns)
            scatter(self._model, batch, begun.filled, outputs)
        except BaseException as error:  # noqa: BLE001 - as above
            begun.error = as_failure(error)
        finally:
            self._unwatch(binding)

    def _follow(self, following: _Begun, ended: _Begun) -> None:
        """Record that a run has the device to itself now."""
        following.batch.free_ns = ended.batch.exec_end_ns
        following.from_ns = max(following.batch.compute_start_ns, ended.free_ns)
        try:
            if following.error is None:
                self._watch(following.binding, 1)
        except Exception:  # it keeps running
            logger.exception("model %s: a run may exceed its time limit by that of the previous run", self._model.name)

    def _deliver(self, begun: _Begun, *, followed: bool) -> None:
        batch, runner, ran = begun.batch, self._runner, [begun.batch]
        try:
            if runner.turn:
                real_ns = batch.exec_end_ns - (batch.free_ns or batch.exec_start_ns)
                runner.end_turn(batch.cost_ns, real_ns, followed or self._model.scheduler.request_count > 0)
            runner.went_well(batch, begun.binding)
        except Exception as error:  # noqa: BLE001 - it has run, and the next is already running
            ran = settled(self._model, batch, error)
        self._model.finish_from_thread(batch, ran, followed=followed)

    def _fail(self, running: _Begun, following: _Begun | None) -> None:
        """Run again what failed, once everything else there has ended."""
        failed = [running]
        if following is not None:
            following.batch.free_ns = time.monotonic_ns()
            self._end(following)
            if following.error is None:
                self._deliver(following, followed=False)
            else:
                failed.append(following)
        loaded = self._runner.binding
        for begun in failed:
            self._run_again(begun, same=self._runner.binding is loaded)

    def _run_again(self, begun: _Begun, *, same: bool) -> None:
        """Run a failed Batch in the ordinary way. `same`: the model was not reloaded since."""
        runner, batch, error = self._runner, begun.batch, begun.error
        batch.free_ns = 0
        if runner.failure is not None:
            self._model.finish_from_thread(batch, refuse(batch, runner.failure))
        elif same and isinstance(error, (DeviceLost, RunStopped)):
            # no run is needed to know: a lost device stays lost, and reaching the limit again takes long
            runner.run_whole(batch, error)
        else:
            if isinstance(error, (OutOfMemory, MemoryError)):
                self._alone_until_ns = time.monotonic_ns() + RECOVERY_NS
            batch.exec_start_ns = batch.compute_start_ns = batch.compute_end_ns = time.monotonic_ns()
            runner.run_whole(batch)

    def _watch(self, binding: Binding, limits: int) -> None:
        """Have a run stopped that takes longer than `limits` times its limit, if there is one."""
        watchdog = self._model.watchdog
        if watchdog is not None:
            watchdog.begin(binding, limits * self._model.spec.policy.run_limit_us * 1000, time.monotonic_ns())

    def _unwatch(self, binding: Binding) -> None:
        watchdog = self._model.watchdog
        if watchdog is not None:
            watchdog.end(binding)
