"""Outside: Instances whose Batches run in other processes, driven on the event loop without a thread.

Made by `outsides.py` for models of user code; the code that runs the Batches is in `server/python_models/`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from penstock.batching.sequences import homes

from .attempts import FAULT_S
from .batch import Batch, part_of, parted
from .isolation import give_up, refuse

if TYPE_CHECKING:
    from penstock.backends.errors import InferError
    from penstock.batching.devices.rates import Claim, RateLimiter
    from penstock.batching.model import Model
    from penstock.batching.request import InferRequest, Key
    from penstock.batching.spec import InstanceGroup

logger = logging.getLogger("penstock.batching")


class Takes(Protocol):
    """Receives what happens to the Batches of an Outside: an OutsideInstance."""

    def freed(self, batch: Batch, answered: Sequence[InferRequest]) -> None: ...
    def late(self, batch: Batch, answered: Sequence[InferRequest]) -> None: ...
    def unrun(self, batch: Batch) -> None: ...
    def down(self, failure: InferError, *, hopeless: bool) -> None: ...
    def up(self) -> None: ...
    def count(self, event: str) -> None: ...


class Outside(Protocol):
    """One executor in another process. It runs one Batch at a time.

    For each Batch it must call `freed` once, with the requests answered by then, and `late` for those answered earlier
    or afterwards. Or else `unrun` with the requests that were not started, if any, after `late` for the others.
    Requests that are to run again are in neither: the Batch lists them (`again`). `down` says that it cannot run now,
    `up` that it can again.
    Threads: the event loop's.
    """

    def most_ns(self, key: Key) -> int:
        """Return the longest predicted run of a Batch of a Key, since others could run it; 0: no limit."""

    def attach(self, instance: Takes) -> None:
        """Set the object to report to."""

    def begin(self, batch: Batch) -> None:
        """Run a Batch; each of its requests gets `outputs` or `error`, the Batch its stamps. Must not raise."""

    def abandon(self, request: InferRequest) -> None:
        """Record that nothing takes a request's answers any more. The request still finishes."""

    async def says_ready(self) -> bool:
        """Whether it can run and, if user code defines a readiness check, that passes."""

    async def close(self) -> None:
        """End it."""


class OutsideInstance:
    """An Instance whose Batches an Outside runs.

    It takes a Batch when woken or freed, once it holds what the RateLimiter requires. It does not use Devices: other
    processes run whenever the system lets them. `idle`: wake it when a request arrives. `failure` is why it cannot run
    now; what waits stays queued for it or for another Instance. Once it is `hopeless` and no Instance of its model can
    run, requests are answered with the failure.
    `home` is its identity for the sequences it remembers (homes.py), which is lost whenever it cannot run. `owed`
    counts the requests it has taken and not delivered. `seat` is its number. `leaving`: it is about to end.
    Invariant: each request that it has taken is delivered exactly once, which its Outside ensures.
    Threads: the event loop's; `grant` may be called on any.
    """

    binding = None
    overlaps = False
    wakes_at_rows = 0

    def __init__(
        self, model: Model, outside: Outside, group: InstanceGroup, limiter: RateLimiter | None = None,
        claim: Claim | None = None,
    ) -> None:  # fmt: skip
        self.outside = outside
        self.group = group
        self._loop = asyncio.get_running_loop()
        self._model = model
        self._limiter = limiter
        self._claim: Any = claim
        self._asked = self._turn = self._busy = self.stopping = False
        self.kept: Batch | None = None
        self.owed = 0
        self._quiet: asyncio.Event | None = None
        self.idle = True
        self.hopeless = False
        self.failure: InferError | None = None
        self.home = object()
        self.seat = len(model.instances)
        self.leaving = False

    # -- what Model expects of its Instances -----------------------------------------------------------------------

    def start(self) -> None:
        """Do nothing: it runs when woken."""

    def wake(self) -> None:
        """Let it look at the queue in the next loop turn. Call with the model's lock held, when `idle` is set."""
        self.idle = False
        self._loop.call_soon(self._look)

    def grant(self) -> None:
        """Grant the turn that it asked for."""
        self._turn = True
        self._loop.call_soon_threadsafe(self._look)

    def stop(self) -> None:
        """Take nothing more, and leave what was not started to others. Call with the model's lock held."""
        self.stopping, self.idle = True, False
        self._loop.call_soon_threadsafe(self._look)

    async def quiet(self) -> None:
        """Wait until everything that it has taken is delivered, once it is stopped."""
        self._quiet = asyncio.Event()
        self._note_quiet()
        await self._quiet.wait()

    def _note_quiet(self) -> None:
        if self._quiet is not None and not self.owed and self.kept is None:
            self._quiet.set()

    def mend_loop(self) -> None:
        """Do nothing: the event loop never runs such a model."""

    def join(self) -> None:
        """Return its resources to the RateLimiter."""
        if self._limiter is None:
            return
        if self._turn or (self._asked and not self._limiter.withdraw(self._claim, self)):
            self._limiter.end(self._claim, 0, 0, more=False)
        self._turn = self._asked = False
        self._limiter.leave(self._claim)

    # -- what its Outside reports ----------------------------------------------------------------------------------

    def freed(self, batch: Batch, answered: Sequence[InferRequest]) -> None:
        """Hand out the requests of a Batch that have been answered, and take the next Batch."""
        model, self._busy = self._model, False
        self.owed -= len(answered) + len(batch.again)
        if batch.again:
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
            model.hand_over(parted(batch, answered))
        elif model.scheduler.nearest_deadline_ns():
            model.leave_held()  # nothing is delivered that would make the loop look at deadlines
        self._look()
        self._note_quiet()

    def _count_run(self, batch: Batch) -> None:
        """Count a Batch of which some requests run again, before their stamps are overwritten.

        Each run of a request is an inference, and succeeds unless it has failed by now, as in Triton.
        """
        well = [each for each in batch.requests if each.error is None]
        ran = batch if len(well) == len(batch.requests) else part_of(batch, well)
        self._model.statistics.record_batch(ran, batch.exec_end_ns)
        batch.runs = 0

    def late(self, batch: Batch, answered: Sequence[InferRequest]) -> None:
        """Hand out requests that were answered before or after their Batch was freed."""
        self.owed -= len(answered)
        self._model.hand_over(parted(batch, answered))
        self._note_quiet()

    def count(self, event: str) -> None:
        """Count an event of its process, for the metrics page."""
        self._model.count(event)

    def unrun(self, batch: Batch) -> None:
        """Run a Batch elsewhere, or here later: none of its requests was started."""
        self._busy = False
        self.owed -= len(batch.requests)
        self._end_turn(more=False)
        others = self._peers() if homes.pin_of(self._model, self) is None else []
        next((each for each in others if each.free), self).keep(batch)
        self._note_quiet()

    def _peers(self) -> list[OutsideInstance]:
        return [each for each in self._model.instances if isinstance(each, OutsideInstance)]

    def _left_over(self) -> Batch | None:
        """Return a Batch taken from the queue earlier: its own, or one of an Instance that cannot run it now."""
        keeper = self
        if self.kept is None and homes.pin_of(self._model, self) is None:
            keeper = next((each for each in self._peers() if each.kept is not None and not each.serves), self)
        batch, keeper.kept = keeper.kept, None
        keeper._note_quiet()  # noqa: SLF001 - an object of the same class
        return batch

    @property
    def serves(self) -> bool:
        """Whether it takes Batches and can run them."""
        return self.failure is None and not self.stopping

    @property
    def free(self) -> bool:
        """Whether it would run a Batch at once."""
        return not self._busy and self.kept is None and self.serves

    def keep(self, batch: Batch) -> None:
        """Keep a Batch, taken from the queue by another Instance or by itself, to run it next."""
        self.idle, self.kept = False, batch
        self._loop.call_soon(self._look)

    def down(self, failure: InferError, *, hopeless: bool) -> None:
        """Leave what waits to the others for now; if `hopeless` and they cannot run either, answer it."""
        self.failure, self.hopeless, self.idle = failure, hopeless, False
        self.home = object()
        homes.report_availability(self._model, self, can_run=False)
        with self._model.lock:
            self._model.wake_one()
        self._loop.call_soon(self._look)

    def up(self) -> None:
        """Resume."""
        self.failure, self.hopeless = None, False
        homes.report_availability(self._model, self, can_run=True)
        self._look()

    # -- taking Batches --------------------------------------------------------------------------------------------

    def _look(self) -> None:
        try:
            self._go_on()
        except Exception as error:  # noqa: BLE001 - otherwise nothing wakes it again, and the model is silent
            self._end_turn(more=False)
            give_up(self._model, error)
            self._loop.call_later(FAULT_S, self._look)

    def _go_on(self) -> None:
        """Do what is due, and start a Batch if there is one for it."""
        if self._busy:
            return
        if self.stopping:
            self._end_turn(more=False)
            if self.kept is not None:
                self._pass_on()
            return
        if self.failure is not None:
            self._end_turn(more=False)
            if self.hopeless and (homes.pin_of(self._model, self) is not None or not self._model.healthy):
                self._refuse_all(self.failure)
            return
        if not self._in_turn():
            return
        batch = self._left_over() or self._take()
        if batch is None:
            self._end_turn(more=False)
            return
        here, refused = homes.split_by_home(self._model, self, batch)
        if refused:
            self._hand_out(refused)
        if here is None:
            self._end_turn(more=False)
            self._loop.call_soon(self._look)
            return
        self._begin(here)

    def _begin(self, batch: Batch) -> None:
        self._busy = True
        self.owed += len(batch.requests)
        if self._limiter is not None:
            self._limiter.begin(self._claim, 0)
        self.outside.begin(batch)

    def _pass_on(self) -> None:
        """Pass its kept Batch to an Instance that is free; if none is, the next one that can run takes it."""
        other = next((each for each in self._peers() if each.free), None)
        if other is not None and self.kept is not None:
            batch, self.kept = self.kept, None
            other.keep(batch)
            self._note_quiet()

    def _hand_out(self, refused: list[Batch]) -> None:
        """Answer requests that it has taken and does not run."""
        now_ns = time.monotonic_ns()
        with self._model.lock:
            for each in refused:
                self._model.scheduler.record_ended(each, now_ns)
        self._model.hand_over(refused)

    def _in_turn(self) -> bool:
        """Whether it may run; if not, ask for a turn, whose grant makes it look again."""
        if self._limiter is None or self._turn:
            return True
        if not self._asked:
            self._asked = True
            self._limiter.ask(self._claim, self)
        return self._turn

    def _end_turn(self, *, more: bool) -> None:
        if self._limiter is not None and self._turn:
            self._asked = False
            self._turn = self._limiter.end(self._claim, 0, 0, more=more)
        elif self._limiter is not None and not self._asked:
            self._limiter.forget(self._claim)

    def _take(self) -> Batch | None:
        model = self._model
        with model.lock:
            now_ns = time.monotonic_ns()
            lane = model.scheduler.next_lane(now_ns, pin=homes.pin_of(model, self))
            most_ns = self.outside.most_ns(lane.key) if lane is not None else 0
            # a call that never ran may take long: leave everything else that waits to the others
            batch = model.scheduler.take_from(lane, now_ns, most_ns, 1) if lane is not None else None
            self.idle = batch is None
            left = model.scheduler.request_count > 0
            if left:
                homes.wake_next(model, self, has_taken=batch is not None)
        if batch is None and left and model.scheduler.sizing.may_hold:
            model.leave_held()
        return batch

    def _refuse_all(self, failure: InferError) -> None:
        model = self._model
        while (batch := self._left_over() or self._take()) is not None:
            with model.lock:
                model.scheduler.record_ended(batch, time.monotonic_ns())
            model.hand_over(refuse(batch, failure))
