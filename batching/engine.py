"""Engine: the front door. All that `server/` ever calls."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from penstock.backends.backend import Array, Loader
from penstock.backends.errors import Code, InferError

from .caching.cache import Cache
from .caching.remembering import remember
from .devices.placement import Devices
from .ensembles.ensembles import Ensembles
from .ensembles.passage import is_step
from .loaded import STOPPING, Leaving, Loaded
from .loading.opening import open_ensemble, open_model
from .loading.resizing import Change, change_to, close
from .model import Model
from .request import NO_TERMS, InferRequest, Terms
from .running.batch import Batch
from .running.outsides import OutsideLoader, close_outsides, open_outside
from .running.watchdog import Watchdog
from .scheduling.admission import request_for, values_key
from .scheduling.arrivals import Arrivals
from .scheduling.door import LATE, Door
from .scheduling.together import add_together
from .shapes.splitting import add_parts
from .sinks import answered, let_go, withdraw
from .spec import ModelSpec
from .statistics import CANCELED, REJECTED
from .turns import Turns

logger = logging.getLogger("penstock.batching")


class Engine:
    """All loaded Models, on one event loop.

    Invariant: a request that `submit` accepted is delivered to its sink exactly once, unless it is cancelled.
    `cache` is None where no answers are remembered; to be set before models are opened.
    `generation` changes whenever what `model` answers may change, so that callers may keep what it answered.
    Threads: the event loop's. It wakes once per loop turn for whatever was submitted, and once per loop turn for
    whatever Instances have finished (turns.py).
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, loaders: Mapping[str, Loader]) -> None:
        self._loop = loop
        self._loaders = loaders
        self._models = Loaded()
        self._turns = Turns(loop, self._left)
        self._watchdog = Watchdog()
        self.cache: Cache | None = None
        self.devices = Devices()
        self.outsides: dict[str, OutsideLoader] = {}
        self._ensembles = Ensembles(self, self._left, self._turns.begin)
        door = Door(self._turns)
        self._aim, self.turn_away, self.make_room = door.aim, door.turn_away, door.make_room
        self._arrivals = Arrivals(self, self._turns.begin, self._left)
        self.submit_soon = self._arrivals.add
        self._held = Leaving(lambda model: not model.holds)
        self._retiring = Leaving(lambda model: not model.inflight)
        self._idle = asyncio.Event()
        self._idle.set()
        # whether anybody waits for requests to end: told apart once per batch
        self._watched = False
        self.generation = 0
        self.stopping = False

    @property
    def trace(self) -> Callable[[Model, Batch, int], None] | None:
        """Called with each batch that is delivered, and when; None for nobody."""
        return self._turns.trace

    @trace.setter
    def trace(self, trace: Callable[[Model, Batch, int], None] | None) -> None:
        self._turns.trace = trace

    # -- models ------------------------------------------------------------------------------------------------

    async def open(self, spec: ModelSpec) -> Model:
        """Load, complete and warm up one version, which nobody finds before it is published. Raises: InferError."""
        if spec.ensemble is not None:
            model = open_ensemble(spec)
            self._ensembles.adopt(model)
            return self._with_cache(model)
        outside = self.outsides.get(spec.backend)
        if outside is not None:
            return self._with_cache(await open_outside(spec, outside, self._turns.finished_on_loop, self.devices))
        finished = self._turns.finished_on_thread
        model = await self._loop.run_in_executor(None, open_model, spec, self._loaders, finished, self.devices)
        if spec.policy.run_limit_us:
            model.watchdog = self._watchdog
        return self._with_cache(model)

    def _with_cache(self, model: Model) -> Model:
        if model.spec.cached:
            remember(self.cache, model, self, self._loop)
        return model

    async def change(self, model: Model, spec: ModelSpec) -> Change | None:
        """Make what Instances a Model lacks of those of a spec that says all else as its own did (resizing.py).

        Returns: None if it is to be opened anew. Raises: InferError. Nothing is left behind then.
        """
        return await change_to(model, spec, self._loaders, self.outsides, self.devices)

    def _changed(self) -> None:
        self.generation += 1
        # what an ensemble remembers is found as long as its steps are the same (remembering.py)
        self._ensembles.forget()

    def publish(self, name: str, models: Iterable[Model], absent: Iterable[str] = ()) -> list[Model]:
        """Put open Models in the place of all versions of a name; `absent` should be there too, and cannot be.

        Returns: the Models that gave way. They serve whoever holds them until they are retired.
        """
        gone = self._models.replace(name, models, absent)
        self._changed()
        return gone

    async def retire(self, model: Model) -> None:
        """Close a Model that nobody finds any more, once nobody holds it and what it had accepted is finished."""
        await self.unheld(model)
        self._arrivals.admit()
        model.closing, model.looped, model.gathers = True, False, False
        self._watched = True
        await self._retiring.wait(model)
        self._watched = self.stopping or bool(self._retiring)
        self._turns.alarms.cancel(model)
        self._ensembles.dismiss(model)
        if model.cache is not None:
            await model.cache.forget()
        await close(model)

    async def unheld(self, model: Model) -> None:
        """Wait until nobody holds a Model that nobody finds any more."""
        self.hurry(model)  # who holds it, as hooks do around a request, would wait for what is held open
        await self._held.wait(model)

    def hold(self, model: Model) -> None:
        """Keep a Model from being retired until `release`: a request for it is decoded, or an ensemble may need it."""
        model.holds += 1

    def release(self, model: Model) -> None:
        """End a `hold`."""
        model.holds -= 1
        self._held.look(model)

    async def load(self, spec: ModelSpec) -> Model:
        """Open and publish a version beside the others, in the place of an older load of it. Raises: InferError."""
        model = await self.open(spec)
        old = self._models.put(model)
        self._changed()
        if old is not None:
            await self.retire(old)
        return model

    async def unload(self, name: str, version: int) -> None:
        """Take a version out of service; what it had accepted is finished first. Raises: InferError (NOT_FOUND)."""
        model = self._models.take(name, str(version))
        self._changed()
        await self.retire(model)

    def model(self, name: str, version: str = "") -> Model:
        """Find a published version; "" means the highest. Raises: InferError (NOT_FOUND; NOT_READY: await_more)."""
        return self._models.find(name, version)

    def await_more(self, coming: bool) -> None:
        """Say whether models are being loaded since the server starts: whoever asks for one is to try again soon."""
        self._models.coming = coming

    def models(self) -> list[Model]:
        """List every published version, by name and version."""
        return self._models.all()

    def named(self, name: str) -> tuple[list[Model], list[str]]:
        """Give what is published of a name: its versions, and those that there were or should have been."""
        return self._models.named(name)

    def _served(self) -> list[Model]:
        """List the models that may have requests: those published, and those that have given way."""
        return [*self.models(), *self._held.models(), *self._retiring.models()]

    @property
    def inflight(self) -> int:
        """How many requests were accepted and are not yet delivered."""
        return sum(model.inflight for model in self._served())

    # -- requests ----------------------------------------------------------------------------------------------

    def submit(self, request: InferRequest) -> None:
        """Accept a request, or refuse it at the door; one of an ensemble is told by its sink what refuses a step.

        Raises: InferError (OVERLOADED: the queue is full, or the answer would come after its target; EXPIRED: its
        deadline would pass in the queue; NOT_READY: the model or the server is stopping).
        """
        model = request.model
        now_ns = time.monotonic_ns()
        request.queue_ns = now_ns
        if not request.start_ns:
            request.start_ns = now_ns
        if model.detours and self._detour(request):
            return
        scheduler = model.scheduler
        if scheduler.target_ns:
            self._aim(request, scheduler.target_ns, now_ns)
        if (self.stopping or model.closing) and not is_step(request):
            model.statistics.record_failure(REJECTED, request.start_ns, now_ns)
            raise InferError(Code.NOT_READY, STOPPING)
        parts = 1
        try:
            if request.rows > model.max_rows:
                parts = add_parts(model, request, self.cancel)
            else:
                with model.lock:
                    scheduler.add(request)
        except InferError as error:
            model.statistics.record_failure(REJECTED, request.start_ns, now_ns)
            if error.retry_after_ns:
                model.count(LATE)
            raise
        model.inflight += parts
        if request.deadline_ns or scheduler.sequences is not None:
            self._turns.watch(model)
        if not model.dirty:
            self._turns.mark(model)

    def submit_together(self, model: Model, requests: Sequence[InferRequest]) -> bool:
        """Accept steps of requests that were accepted before, as together.py does; if not, they come one by one."""
        if not add_together(model, requests, time.monotonic_ns()):
            return False
        model.inflight += len(requests)
        if not model.dirty:
            self._turns.mark(model)
        return True

    def _detour(self, request: InferRequest) -> bool:
        """Serve a request without its model's queue, where that is possible. Raises: InferError."""
        model = request.model
        if model.passive:
            model.statistics.record_failure(REJECTED, request.start_ns, request.queue_ns)
            raise InferError(Code.INTERNAL, f"Unable to find the payload queue for the model {model.name}")
        if model.forms is not None and model.forms.valued:
            request.key = values_key(request)
        if model.cache is not None:
            if model.cache.takes(request):
                return True
            if model.scheduler.full():
                self.make_room(model)
        if model.ensemble is None:
            return False
        self._ensembles.start(request)
        return True

    def cancel(self, request: InferRequest) -> None:
        """Take a request back while it waits; one that runs is finished, and its sink must not mind."""
        model = request.model
        if self._arrivals.take_back(request) or (model.cache is not None and model.cache.gives_up(request)):
            return
        if model.ensemble is not None:
            self._ensembles.cancel(request)
            return
        if request.parts:
            parts, request.parts = request.parts, None
            for part in parts:
                self.cancel(part)
            return
        with model.lock:
            if waited := request.waiting:
                model.scheduler.remove(request, time.monotonic_ns())
        for outside in model.outsides:
            outside.abandon(request)
        if not waited:
            return
        self._left(model, 1)
        model.statistics.record_failure(CANCELED, request.start_ns, time.monotonic_ns())
        withdraw(request)
        if model.scheduler.sequences is not None:
            self._turns.cut(model)
        elif model.scheduler.sizing.holds and model.scheduler.live and not model.dirty:
            self._turns.mark(model)  # those behind it may make a batch of a preferred size now

    async def infer(
        self, model: Model, inputs: list[Array | None], *, wanted: tuple[int, ...] | None = None,
        terms: Terms = NO_TERMS, id: str = "",  # noqa: A002 - the protocol's word
        parameters: Mapping[str, Any] | None = None,
    ) -> list[Any]:  # fmt: skip
        """Check, submit and await one request; cancelling the awaiting task cancels it.

        Shapes: as `InferRequest.inputs`. `parameters` are for models of user code. Returns: outputs at the positions
        `wanted`; None means all, those that are no tensors included.
        Raises: InferError.
        """
        request = request_for(model, inputs, wanted, terms, parameters)
        request.id = id
        return await answered(self, request)

    def hurry(self, *models: Model) -> None:
        """Hold no batch open any more, of these models, for which nobody comes any more, or of all."""
        for model in models or self._served():
            self._turns.hurry(model, last=bool(models))

    async def stop(self, grace_s: float) -> int:
        """Refuse new work, finish what was accepted, and close every model.

        Returns: how many requests were dropped because `grace_s` ran out.
        """
        self._arrivals.admit()
        self.stopping = self._watched = True
        if self.inflight:
            self._idle.clear()
            self.hurry()
            try:
                await asyncio.wait_for(self._idle.wait(), grace_s)
            except TimeoutError:
                logger.warning("exit timeout expired with %d requests unfinished", self.inflight)
        dropped = self.inflight
        self._turns.alarms.clear()
        self._watchdog.stop()
        models = self.models()
        if dropped:
            self._drop_waiting()
        else:
            self._models.clear()
            for error in filter(None, await asyncio.gather(*map(close, models), return_exceptions=True)):
                logger.error("a model could not be closed", exc_info=error)
        # those that have given way, too: one of them may have a request that is never done
        await asyncio.gather(*map(close_outsides, self._served()))
        return dropped

    def _left(self, model: Model, count: int) -> None:
        model.inflight -= count
        if self._watched and not model.inflight:
            self._retiring.look(model)
            if self.stopping and not self.inflight:
                self._idle.set()

    def _drop_waiting(self) -> None:
        for model in self._served():
            self._turns.expire(model)
            with model.lock:
                waiting = model.scheduler.drain()
            let_go(model)
            if waiting:
                text = f"Server is stopping, model '{model.name}' drops what waits"
                self._turns.fail(model, waiting, Code.NOT_READY, text)
