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
from .caching.model_cache import enable_cache
from .devices.placement import Devices
from .dispatcher import Dispatcher
from .ensembles.ensembles import Ensembles
from .ensembles.passage import is_step
from .loading.opening import open_ensemble, open_model
from .loading.resizing import Change, close, make_change
from .model import Model
from .registry import STOPPING_MESSAGE, CompletionWaiters, ModelRegistry
from .request import DEFAULT_REQUEST_OPTIONS, InferRequest, RequestOptions
from .running.batch import Batch
from .running.external_models import ExternalLoader, close_executors, open_external
from .running.watchdog import Watchdog
from .scheduling.admission_control import LATE_EVENT, AdmissionControl
from .scheduling.arrivals import Arrivals, enqueue_all
from .scheduling.request_checks import make_request, values_key
from .shapes.splitting import add_parts
from .sinks import flush_ordering, remove_from_ordering, submit_and_wait
from .spec import ModelSpec
from .statistics import CANCELED, REJECTED

logger = logging.getLogger("penstock.batching")


class Engine:
    """All loaded Models, on one event loop.

    Invariant: a request that `submit` accepted is delivered to its sink exactly once, unless it is cancelled.
    `cache` is None if no answers are cached; set it before models are opened.
    `generation` changes whenever the result of `model` may change, so callers may cache that result until then.
    Threads: the event loop's. It wakes once per loop turn for all that was submitted or has finished (dispatcher.py).
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, loaders: Mapping[str, Loader]) -> None:
        self._loop = loop
        self._loaders = loaders
        self._models = ModelRegistry()
        self._dispatcher = Dispatcher(loop, self._on_requests_done)
        self._watchdog = Watchdog()
        self.cache: Cache | None = None
        self.devices = Devices()
        self.external_loaders: dict[str, ExternalLoader] = {}
        self._ensembles = Ensembles(self, self._on_requests_done, self._dispatcher.call_before_dispatch)
        admission = AdmissionControl(self._dispatcher)
        self._set_target, self.make_room = admission.set_target, admission.make_room
        self.early_rejection = admission.early_rejection
        self._arrivals = Arrivals(self, self._dispatcher.call_before_dispatch, self._on_requests_done)
        self.submit_soon = self._arrivals.add
        self._release_waiters = CompletionWaiters(lambda model: not model.hold_count)
        self._retire_waiters = CompletionWaiters(lambda model: not model.inflight)
        self._idle = asyncio.Event()
        self._idle.set()
        # whether a retire or stop is waiting for requests to end; checked once per batch
        self._drain_awaited = False
        self.generation = 0
        self.stopping = False

    @property
    def trace(self) -> Callable[[Model, Batch, int], None] | None:
        """Called with each delivered batch and the time of delivery; None if there is no tracer."""
        return self._dispatcher.trace

    @trace.setter
    def trace(self, trace: Callable[[Model, Batch, int], None] | None) -> None:
        self._dispatcher.trace = trace

    # -- models ------------------------------------------------------------------------------------------------

    async def open(self, spec: ModelSpec) -> Model:
        """Load, complete and warm up one version, without publishing it. Raises: InferError."""
        if spec.ensemble is not None:
            model = open_ensemble(spec)
            self._ensembles.register(model)
            return self._attach_cache(model)
        loader = self.external_loaders.get(spec.backend)
        if loader is not None:
            return self._attach_cache(await open_external(spec, loader, self._dispatcher.deliver_soon, self.devices))
        on_finished = self._dispatcher.deliver_from_thread
        model = await self._loop.run_in_executor(None, open_model, spec, self._loaders, on_finished, self.devices)
        if spec.policy.run_limit_us:
            model.watchdog = self._watchdog
        return self._attach_cache(model)

    def _attach_cache(self, model: Model) -> Model:
        if model.spec.cached:
            enable_cache(self.cache, model, self, self._loop)
        return model

    async def change(self, model: Model, spec: ModelSpec) -> Change | None:
        """Prepare the Instances that a Model needs to match a spec that differs only in instance groups (resizing.py).

        Returns: None if the model must be opened anew. Raises: InferError, after undoing everything it did.
        """
        return await make_change(model, spec, self._loaders, self.external_loaders, self.devices)

    def _advance_generation(self) -> None:
        self.generation += 1
        # an ensemble's cached answers are valid as long as its steps are the same (model_cache.py)
        self._ensembles.invalidate_links()

    def publish(self, name: str, models: Iterable[Model], absent: Iterable[str] = ()) -> list[Model]:
        """Replace all versions of a name with open Models; `absent` lists versions that should exist but cannot.

        Returns: the replaced Models. They keep serving whoever holds them until they are retired.
        """
        replaced = self._models.replace(name, models, absent)
        self._advance_generation()
        return replaced

    async def retire(self, model: Model) -> None:
        """Close an unpublished Model once nothing holds it and its accepted requests have finished."""
        await self.wait_released(model)
        self._arrivals.flush()
        model.closing, model.ran_on_loop, model.collects_arrivals = True, False, False
        self._drain_awaited = True
        await self._retire_waiters.wait(model)
        self._drain_awaited = self.stopping or bool(self._retire_waiters)
        self._dispatcher.alarms.cancel(model)
        self._ensembles.unregister(model)
        if model.cache is not None:
            await model.cache.clear()
        await close(model)

    async def wait_released(self, model: Model) -> None:
        """Wait until nothing holds an unpublished Model."""
        self.flush(model)  # a holder, such as hooks around a request, would wait for a batch that is held open
        await self._release_waiters.wait(model)

    def hold(self, model: Model) -> None:
        """Keep a Model from being retired until `release`: a request is being decoded or an ensemble may need it."""
        model.hold_count += 1

    def release(self, model: Model) -> None:
        """End one `hold`."""
        model.hold_count -= 1
        self._release_waiters.check(model)

    async def load(self, spec: ModelSpec) -> Model:
        """Open a version and publish it beside the others, replacing an earlier load of it. Raises: InferError."""
        model = await self.open(spec)
        old = self._models.put(model)
        self._advance_generation()
        if old is not None:
            await self.retire(old)
        return model

    async def unload(self, name: str, version: int) -> None:
        """Take a version out of service; its accepted requests finish first. Raises: InferError (NOT_FOUND)."""
        model = self._models.remove(name, str(version))
        self._advance_generation()
        await self.retire(model)

    def model(self, name: str, version: str = "") -> Model:
        """Find a published version; "" means the highest. Raises: InferError (NOT_FOUND; NOT_READY: loading)."""
        return self._models.find(name, version)

    def set_loading(self, loading: bool) -> None:
        """Set whether startup is still loading models; until it ends, unknown models are NOT_READY, to be retried."""
        self._models.loading = loading

    def models(self) -> list[Model]:
        """List every published version, ordered by name and version."""
        return self._models.all()

    def versions_of(self, name: str) -> tuple[list[Model], list[str]]:
        """Return the published versions of a name, and the version numbers that existed or should exist."""
        return self._models.versions_of(name)

    def _active_models(self) -> list[Model]:
        """List the models that may have requests: the published ones and those that were replaced."""
        return [*self.models(), *self._release_waiters.models(), *self._retire_waiters.models()]

    @property
    def inflight(self) -> int:
        """Number of requests accepted and not yet delivered."""
        return sum(model.inflight for model in self._active_models())

    # -- requests ----------------------------------------------------------------------------------------------

    def submit(self, request: InferRequest) -> None:
        """Accept a request or reject it. For an ensemble, a rejection by one of its steps goes to the request's sink.

        Raises: InferError (OVERLOADED: the queue is full, or the answer would come after its target; EXPIRED: its
        deadline would pass in the queue; NOT_READY: the model or the server is stopping).
        """
        model = request.model
        now_ns = time.monotonic_ns()
        request.enqueued_ns = now_ns
        if not request.start_ns:
            request.start_ns = now_ns
        if model.intercepts and self._intercept(request):
            return
        scheduler = model.scheduler
        if scheduler.target_ns:
            self._set_target(request, scheduler.target_ns, now_ns)
        if (self.stopping or model.closing) and not is_step(request):
            model.statistics.record_failure(REJECTED, request.start_ns, now_ns)
            raise InferError(Code.NOT_READY, STOPPING_MESSAGE)
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
                model.count_event(LATE_EVENT)
            raise
        model.inflight += parts
        if request.deadline_ns or scheduler.sequences is not None:
            self._dispatcher.set_alarm(model)
        if not model.scheduled:
            self._dispatcher.schedule(model)

    def submit_together(self, model: Model, requests: Sequence[InferRequest]) -> bool:
        """Accept steps of requests accepted earlier (arrivals.py). Returns: False to submit each alone."""
        if not enqueue_all(model, requests, time.monotonic_ns()):
            return False
        model.inflight += len(requests)
        if not model.scheduled:
            self._dispatcher.schedule(model)
        return True

    def _intercept(self, request: InferRequest) -> bool:
        """Serve a request without its model's queue if possible. Raises: InferError."""
        model = request.model
        if model.passive:
            model.statistics.record_failure(REJECTED, request.start_ns, request.enqueued_ns)
            raise InferError(Code.INTERNAL, f"Unable to find the payload queue for the model {model.name}")
        if model.forms is not None and model.forms.has_value_keys:
            request.key = values_key(request)
        if model.cache is not None:
            if model.cache.try_answer(request):
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
        if self._arrivals.withdraw(request) or (model.cache is not None and model.cache.cancel(request)):
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
            if was_waiting := request.waiting:
                model.scheduler.remove(request, time.monotonic_ns())
        for executor in model.executors:
            executor.abandon(request)
        if not was_waiting:
            return
        self._on_requests_done(model, 1)
        model.statistics.record_failure(CANCELED, request.start_ns, time.monotonic_ns())
        remove_from_ordering(request)
        if model.scheduler.sequences is not None:
            self._dispatcher.cancel_followers(model)
        elif model.scheduler.sizing.may_hold and model.scheduler.request_count and not model.scheduled:
            self._dispatcher.schedule(model)  # those behind it may now make a batch of a preferred size

    async def infer(
        self, model: Model, inputs: list[Array | None], *, output_positions: tuple[int, ...] | None = None,
        options: RequestOptions = DEFAULT_REQUEST_OPTIONS, id: str = "",  # noqa: A002 - the protocol's word
        parameters: Mapping[str, Any] | None = None,
    ) -> list[Any]:  # fmt: skip
        """Check, submit and await one request; cancelling the awaiting task cancels it.

        Shapes: as `InferRequest.inputs`. `parameters` are for models of user code.
        Returns: the outputs at these positions; None means all, including outputs that are not tensors.
        Raises: InferError.
        """
        request = make_request(model, inputs, output_positions, options, parameters)
        request.id = id
        return await submit_and_wait(self, request)

    def flush(self, *models: Model) -> None:
        """Stop holding batches open: of these models, which get no more requests, or of all models if none is given."""
        for model in models or self._active_models():
            self._dispatcher.flush(model, end_idle=bool(models))

    async def stop(self, grace_s: float) -> int:
        """Reject new requests, finish the accepted ones, and close every model.

        Returns: how many requests were dropped because `grace_s` ran out.
        """
        self._arrivals.flush()
        self.stopping = self._drain_awaited = True
        if self.inflight:
            self._idle.clear()
            self.flush()
            try:
                await asyncio.wait_for(self._idle.wait(), grace_s)
            except TimeoutError:
                logger.warning("exit timeout expired with %d unfinished requests", self.inflight)
        dropped = self.inflight
        self._dispatcher.alarms.close()
        self._watchdog.stop()
        models = self.models()
        if dropped:
            self._reject_queued()
        else:
            self._models.clear()
            for error in filter(None, await asyncio.gather(*map(close, models), return_exceptions=True)):
                logger.error("a model could not be closed", exc_info=error)
        # replaced models too: one of them may have a request that never finishes
        await asyncio.gather(*map(close_executors, self._active_models()))
        return dropped

    def _on_requests_done(self, model: Model, count: int) -> None:
        model.inflight -= count
        if self._drain_awaited and not model.inflight:
            self._retire_waiters.check(model)
            if self.stopping and not self.inflight:
                self._idle.set()

    def _reject_queued(self) -> None:
        for model in self._active_models():
            self._dispatcher.expire(model)
            with model.lock:
                waiting = model.scheduler.drain()
            flush_ordering(model)
            if waiting:
                text = f"Server is stopping, model '{model.name}' drops its queued requests"
                self._dispatcher.fail(model, waiting, Code.NOT_READY, text)
