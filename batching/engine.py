"""Engine: the front door. All that `server/` ever calls."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from penstock.backends.backend import Array, Loader
from penstock.backends.errors import Code, InferError

from .admission import admit
from .batch import Batch
from .device import Device
from .loaded import STOPPING, Leaving, Loaded
from .model import Model
from .opening import close_model, open_model
from .request import NO_TERMS, InferRequest, Terms
from .sinks import FutureSink
from .spec import ModelSpec
from .splitting import split
from .statistics import CANCELED, REJECTED
from .turns import Turns
from .watchdog import Watchdog

logger = logging.getLogger("penstock.batching")

LATE = "late_refusals"
"""The event of a request refused at the door because it would be late."""


class Engine:
    """All loaded Models, on one event loop.

    Invariant: a request that `submit` accepted is delivered to its sink exactly once, unless it is cancelled.
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
        self.devices: dict[str, Device] = {}
        self._making_room = False
        self._held = Leaving(lambda model: not model.holds)
        self._retiring = Leaving(lambda model: not model.inflight)
        self._future_sink = FutureSink()
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
        finished = self._turns.finished_on_thread
        model = await self._loop.run_in_executor(None, open_model, spec, self._loaders, finished, self.devices)
        if spec.policy.run_limit_us:
            model.watchdog = self._watchdog
        return model

    def publish(self, name: str, models: Iterable[Model], absent: Iterable[str] = ()) -> list[Model]:
        """Put open Models in the place of all versions of a name; `absent` should be there too, and cannot be.

        Returns: the Models that gave way. They serve whoever holds them until they are retired.
        """
        gone = self._models.replace(name, models, absent)
        self.generation += 1
        return gone

    async def retire(self, model: Model) -> None:
        """Close a Model that nobody finds any more, once nobody holds it and what it had accepted is finished."""
        await self.unheld(model)
        model.closing = True
        self._watched = True
        await self._retiring.wait(model)
        self._watched = self.stopping or bool(self._retiring)
        self._turns.alarms.cancel(model)
        await self._loop.run_in_executor(None, close_model, model)

    async def unheld(self, model: Model) -> None:
        """Wait until nobody holds a Model."""
        await self._held.wait(model)

    def hold(self, model: Model) -> None:
        """Keep a Model from being retired while a request for it is being decoded. To be followed by `release`."""
        model.holds += 1

    def release(self, model: Model) -> None:
        """End a `hold`."""
        model.holds -= 1
        self._held.look(model)

    async def load(self, spec: ModelSpec) -> Model:
        """Open and publish a version beside the others, in the place of an older load of it. Raises: InferError."""
        model = await self.open(spec)
        old = self._models.put(model)
        self.generation += 1
        if old is not None:
            await self.retire(old)
        return model

    async def unload(self, name: str, version: int) -> None:
        """Take a version out of service; what it had accepted is finished first. Raises: InferError (NOT_FOUND)."""
        model = self._models.take(name, str(version))
        self.generation += 1
        await self.retire(model)

    def model(self, name: str, version: str = "") -> Model:
        """Find a published version; "" means the highest. Raises: InferError (NOT_FOUND)."""
        return self._models.find(name, version)

    def models(self) -> list[Model]:
        """List every published version, by name and version."""
        return self._models.all()

    @property
    def inflight(self) -> int:
        """How many requests were accepted and are not yet delivered."""
        return sum(model.inflight for model in (*self.models(), *self._retiring.models()))

    # -- requests ----------------------------------------------------------------------------------------------

    def submit(self, request: InferRequest) -> None:
        """Accept a request, or refuse it at the door.

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
        if model.scheduler.target_ns:
            self._aim(request, model.scheduler.target_ns, now_ns)
        if self.stopping or model.closing:
            raise self._refused(request, now_ns, STOPPING)
        parts = 1
        try:
            if request.rows > model.max_rows:
                parts = self._add_parts(model, request)
            else:
                with model.lock:
                    model.scheduler.add(request)
        except InferError as error:
            model.statistics.record_failure(REJECTED, request.start_ns, now_ns)
            if error.retry_after_ns:
                model.count(LATE)
            raise
        model.inflight += parts
        if request.deadline_ns or model.scheduler.sequences is not None:
            self._turns.watch(model)
        if not model.dirty:
            self._turns.mark(model)

    def _aim(self, request: InferRequest, target_ns: int, now_ns: int) -> None:
        """Hold a request to its model's target, counted from when it may have arrived."""
        request.start_ns = min(request.start_ns, self._turns.arrived_ns(now_ns))
        if not 0 < request.target_ns < request.start_ns + target_ns:
            request.target_ns = request.start_ns + target_ns

    def _detour(self, request: InferRequest) -> bool:
        """Serve a request without its model's queue, where that is possible. Raises: InferError."""
        return False

    def _add_parts(self, model: Model, whole: InferRequest) -> int:
        """Put a request that is too large for a batch in the queue, all of its parts or none. Returns: how many."""
        most_bytes = model.spec.policy.max_queue_bytes
        if whole.nbytes > most_bytes:
            text = f"request of {whole.nbytes} bytes for '{model.name}', whose queue holds {most_bytes}"
            raise InferError(Code.INVALID, text)
        parts = split(whole, model.max_rows, self.cancel)
        with model.lock:
            for number, part in enumerate(parts):
                try:
                    model.scheduler.add(part)
                except InferError:
                    for added in parts[:number]:
                        model.scheduler.remove(added)
                    whole.parts = None
                    raise
        whole.promised_ns = max(part.promised_ns for part in parts)
        return len(parts)

    def turn_away(self, model: Model) -> InferError | None:
        """Give the error of a request that is refused whatever it brings, before its body is decoded; None for none.

        The queue is full, or whoever comes now would be answered after the model's target.
        """
        scheduler = model.scheduler
        if scheduler.full():
            try:
                self.make_room(model)
            except InferError as error:
                return error
        if not scheduler.target_ns:
            return None
        now_ns = time.monotonic_ns()
        with model.lock:
            late = scheduler.late(now_ns, self._turns.arrived_ns(now_ns))
        if late is None:
            return None
        model.statistics.record_failure(REJECTED, now_ns, now_ns)
        model.count(LATE)
        # it is shared: each raise would add its frames to those before, and they hold bodies
        return late.with_traceback(None)

    def make_room(self, model: Model) -> None:
        """Run a batch of a full queue here and now if it is fast; refuse the request at the door otherwise.

        A loop turn may bring more requests than a queue holds, and refusing one costs the loop as much as serving it:
        with 2048 clients in lock step, iris served 900 requests/s and refused 40,000 before this (perf/overload.py).
        Raises: InferError (OVERLOADED).
        """
        if self._making_room:
            self.refuse_full(model)
        self._making_room = True
        try:
            ran, _ = model.dispatch(time.monotonic_ns())
            if model.scheduler.expired:
                self._turns.expire(model)
            self._turns.deliver(model, ran)
        finally:
            self._making_room = False
        if model.scheduler.full():
            self.refuse_full(model)

    def refuse_full(self, model: Model) -> NoReturn:
        """Refuse a request whose body need not even be decoded: the queue is full.

        Raises: InferError (OVERLOADED).
        """
        now_ns = time.monotonic_ns()
        model.statistics.record_failure(REJECTED, now_ns, now_ns)
        raise InferError(Code.OVERLOADED, "Exceeds maximum queue size")

    @staticmethod
    def _refused(request: InferRequest, now_ns: int, text: str) -> InferError:
        request.model.statistics.record_failure(REJECTED, request.start_ns, now_ns)
        return InferError(Code.NOT_READY, text)

    def cancel(self, request: InferRequest) -> None:
        """Take a request back while it waits; one that runs is finished, and its sink must not mind."""
        model = request.model
        if request.parts:
            parts, request.parts = request.parts, None
            for part in parts:
                self.cancel(part)
            return
        with model.lock:
            if not request.waiting:
                return
            model.scheduler.remove(request)
        self._left(model, 1)
        model.statistics.record_failure(CANCELED, request.start_ns, time.monotonic_ns())

    async def infer(
        self,
        model: Model,
        inputs: list[Array | None],
        *,
        wanted: tuple[int, ...] | None = None,
        terms: Terms = NO_TERMS,
        id: str = "",  # noqa: A002 - the protocol's word
    ) -> list[Any]:
        """Check, submit and await one request; cancelling the awaiting task cancels it.

        Shapes: as `InferRequest.inputs`. Returns: outputs at the positions `wanted`; None means all, those that are
        no tensors included.
        Raises: InferError.
        """
        signature = model.signature
        shapes = [None if array is None else array.shape for array in inputs]
        rows, key = admit(model.name, signature, model.request_rows, shapes, model.padding)
        positions = tuple(range(len(signature.outputs))) if wanted is None else wanted
        request = InferRequest(model, inputs, rows, key, positions, self._future_sink)
        request.id = id
        request.deadline_ns, request.priority, request.sequence = terms
        request.nbytes = sum(array.nbytes for array in inputs if array is not None)
        future: asyncio.Future[list[Any]] = self._loop.create_future()
        request.context = future
        self.submit(request)
        try:
            return await future
        except asyncio.CancelledError:
            self.cancel(request)
            raise

    async def stop(self, grace_s: float) -> int:
        """Refuse new work, finish what was accepted, and close every model.

        Returns: how many requests were dropped because `grace_s` ran out.
        """
        self.stopping = self._watched = True
        if self.inflight:
            self._idle.clear()
            try:
                await asyncio.wait_for(self._idle.wait(), grace_s)
            except TimeoutError:
                logger.warning("exit timeout expired with %d requests unfinished", self.inflight)
        dropped = self.inflight
        self._turns.alarms.clear()
        self._watchdog.stop()
        if dropped:
            self._drop_waiting()
        else:
            models = self.models()
            self._models.clear()
            await asyncio.gather(*(self._loop.run_in_executor(None, model.close) for model in models))
        return dropped

    def _left(self, model: Model, count: int) -> None:
        model.inflight -= count
        if self._watched and not model.inflight:
            self._retiring.look(model)
            if self.stopping and not self.inflight:
                self._idle.set()

    def _drop_waiting(self) -> None:
        for model in (*self.models(), *self._retiring.models()):
            self._turns.expire(model)
            with model.lock:
                waiting = model.scheduler.drain()
            if waiting:
                self._turns.fail(
                    model, waiting, Code.NOT_READY, f"Server is stopping, model '{model.name}' drops what waits"
                )
