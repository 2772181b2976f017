"""Engine: loads models and accepts requests. `server/` calls nothing else in this package to do either."""

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
from .loading.resizing import Change, close, make_change
from .model import Model
from .request import NO_TERMS, InferRequest, Terms
from .running.batch import Batch
from .running.outsides import OutsideLoader, close_outsides, open_outside
from .running.watchdog import Watchdog
from .scheduling.admission_control import LATE_EVENT, AdmissionControl
from .scheduling.arrivals import Arrivals
from .scheduling.bulk_enqueue import enqueue_all
from .scheduling.request_checks import make_request, values_key
from .shapes.splitting import add_parts
from .sinks import answered, let_go, withdraw
from .spec import ModelSpec
from .statistics import CANCELED, REJECTED
from .turns import Turns

logger = logging.getLogger("penstock.batching")


class Engine:
    """All loaded Models, on one event loop.

    Invariant: a request that `submit` accepted is delivered to its sink exactly once, unless it is cancelled.
    `cache` is None if no answers are cached; set it before models are opened.
    `generation` changes whenever the result of `model` may change, so callers may cache that result until then.
    Threads: the event loop's. It wakes once per loop turn for everything submitted, and once per loop turn for
    everything Instances have finished (turns.py).
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
        admission = AdmissionControl(self._turns)
        self._aim, self.turn_away, self.make_room = admission.set_target, admission.early_rejection, admission.make_room
        self._arrivals = Arrivals(self, self._turns.begin, self._left)
        self.submit_soon = self._arrivals.add
        self._held = Leaving(lambda model: not model.holds)
        self._retiring = Leaving(lambda model: not model.inflight)
        self._idle = asyncio.Event()
        self._idle.set()
        # whether a retire or stop is waiting for requests to end; checked once per batch
        self._watched = False
        self.generation = 0
        self.stopping = False

    @property
    def trace(self) -> Callable[[Model, Batch, int], None] | None:
        """Called with each delivered batch and the time of delivery; None if there is no tracer."""
        return self._turns.trace

    @trace.setter
    def trace(self, trace: Callable[[Model, Batch, int], None] | None) -> None:
        self._turns.trace = trace

    # -- models ------------------------------------------------------------------------------------------------

    async def open(self, spec: ModelSpec) -> Model:
        """Load, complete and warm up one version, without publishing it. Raises: InferError."""
        if spec.ensemble is not None:
            model = open_ensemble(spec)
            self._ensembles.register(model)
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
        """Prepare the Instances that a Model needs to match a spec that differs only in instance groups (resizing.py).

        Returns: None if the model must be opened anew. Raises: InferError, after undoing everything it did.
        """
        return await make_change(model, spec, self._loaders, self.outsides, self.devices)

    def _changed(self) -> None:
        self.generation += 1
        # an ensemble's cached answers are valid as long as its steps are the same (remembering.py)
        self._ensembles.invalidate_links()

    def publish(self, name: str, models: Iterable[Model], absent: Iterable[str] = ()) -> list[Model]:
        """Replace all versions of a name with open Models; `absent` lists versions that should exist but cannot.

        Returns: the replaced Models. They keep serving whoever holds them until they are retired.
        """
        gone = self._models.replace(name, models, absent)
        self._changed()
        return gone

    async def retire(self, model: Model) -> None:
        """Close an unpublished Model once nothing holds it and its accepted requests have finished."""
        await self.unheld(model)
        self._arrivals.flush()
        model.closing, model.looped, model.gathers = True, False, False
        self._watched = True
        await self._retiring.wait(model)
        self._watched = self.stopping or bool(self._retiring)
        self._turns.alarms.cancel(model)
        self._ensembles.unregister(model)
        if model.cache is not None:
            await model.cache.forget()
        await close(model)

    async def unheld(self, model: Model) -> None:
        """Wait until nothing holds an unpublished Model."""
        self.hurry(model)  # a holder, such as hooks around a request, would wait for a batch that is held open
        await self._held.wait(model)

    def hold(self, model: Model) -> None:
        """Keep a Model from being retired until `release`: a request is being decoded or an ensemble may need it."""
        model.holds += 1

    def release(self, model: Model) -> None:
        """End one `hold`."""
        model.holds -= 1
        self._held.look(model)

    async def load(self, spec: ModelSpec) -> Model:
        """Open a version and publish it beside the others, replacing an earlier load of it. Raises: InferError."""
        model = await self.open(spec)
        old = self._models.put(model)
        self._changed()
        if old is not None:
            await self.retire(old)
        return model

    async def unload(self, name: str, version: int) -> None:
        """Take a version out of service; its accepted requests finish first. Raises: InferError (NOT_FOUND)."""
        model = self._models.take(name, str(version))
        self._changed()
        await self.retire(model)

    def model(self, name: str, version: str = "") -> Model:
        """Find a published version; "" means the highest. Raises: InferError (NOT_FOUND; NOT_READY: see await_more)."""
        return self._models.find(name, version)

    def await_more(self, coming: bool) -> None:
        """Set whether startup is still loading models; until it ends, unknown models are NOT_READY, to be retried."""
        self._models.coming = coming

    def models(self) -> list[Model]:
        """List every published version, ordered by name and version."""
        return self._models.all()

    def named(self, name: str) -> tuple[list[Model], list[str]]:
        """Return the published versions of a name, and the version numbers that existed or should exist."""
        return self._models.named(name)

    def _served(self) -> list[Model]:
        """List the models that may have requests: the published ones and those that were replaced."""
        return [*self.models(), *self._held.models(), *self._retiring.models()]

    @property
    def inflight(self) -> int:
        """Number of requests accepted and not yet delivered."""
        return sum(model.inflight for model in self._served())

    # -- requests ----------------------------------------------------------------------------------------------

    def submit(self, request: InferRequest) -> None:
        """Accept a request or reject it. For an ensemble, a rejection by one of its steps goes to the request's sink.

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
                model.count(LATE_EVENT)
            raise
        model.inflight += parts
        if request.deadline_ns or scheduler.sequences is not None:
            self._turns.watch(model)
        if not model.dirty:
            self._turns.mark(model)

    def submit_together(self, model: Model, requests: Sequence[InferRequest]) -> bool:
        """Accept steps of requests accepted earlier (bulk_enqueue.py). Returns: False to submit each alone."""
        if not enqueue_all(model, requests, time.monotonic_ns()):
            return False
        model.inflight += len(requests)
        if not model.dirty:
            self._turns.mark(model)
        return True

    def _detour(self, request: InferRequest) -> bool:
        """Serve a request without its model's queue if possible. Raises: InferError."""
        model = request.model
        if model.passive:
            model.statistics.record_failure(REJECTED, request.start_ns, request.queue_ns)
            raise InferError(Code.INTERNAL, f"Unable to find the payload queue for the model {model.name}")
        if model.forms is not None and model.forms.has_value_keys:
            request.key = values_key(request)
        if model.cache is not None:
            if model.cache.takes(request):
                return True
            if model.scheduler.is_full():
                self.make_room(model)
        if model.ensemble is None:
            return False
        self._ensembles.start(request)
        return True

    def cancel(self, request: InferRequest) -> None:
        """Withdraw a waiting request. One that is running finishes and still reaches its sink, which must accept it."""
        model = request.model
        if self._arrivals.withdraw(request) or (model.cache is not None and model.cache.gives_up(request)):
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
        elif model.scheduler.sizing.may_hold and model.scheduler.request_count and not model.dirty:
            self._turns.mark(model)  # those behind it may now make a batch of a preferred size

    async def infer(
        self, model: Model, inputs: list[Array | None], *, wanted: tuple[int, ...] | None = None,
        terms: Terms = NO_TERMS, id: str = "",  # noqa: A002 - the protocol's word
        parameters: Mapping[str, Any] | None = None,
    ) -> list[Any]:  # fmt: skip
        """Check, submit and await one request; cancelling the awaiting task cancels it.

        Shapes: as `InferRequest.inputs`. `parameters` are for models of user code.
        Returns: the outputs at the positions in `wanted`; None means all, including outputs that are not tensors.
        Raises: InferError.
        """
        request = make_request(model, inputs, wanted, terms, parameters)
        request.id = id
        return await answered(self, request)

    def hurry(self, *models: Model) -> None:
        """Stop holding batches open: of these models, which get no more requests, or of all models if none is given."""
        for model in models or self._served():
            self._turns.hurry(model, last=bool(models))

    async def stop(self, grace_s: float) -> int:
        """Reject new requests, finish the accepted ones, and close every model.

        Returns: how many requests were dropped because `grace_s` ran out.
        """
        self._arrivals.flush()
        self.stopping = self._watched = True
        if self.inflight:
            self._idle.clear()
            self.hurry()
            try:
                await asyncio.wait_for(self._idle.wait(), grace_s)
            except TimeoutError:
                logger.warning("exit timeout expired with %d unfinished requests", self.inflight)
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
        # replaced models too: one of them may have a request that never finishes
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
                text = f"Server is stopping, model '{model.name}' drops its queued requests"
                self._turns.fail(model, waiting, Code.NOT_READY, text)
