"""ModelCache: one model's use of the Cache: looks its requests up, and inserts the answers of those not found.

Made for the Engine, whose `submit` consults it first. Source: Triton core, dynamic_batch_scheduler.cc (when lookups and
insertions happen) and infer_stats.cc (what is counted).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol
from weakref import ReferenceType, ref

from penstock.backends.errors import Code, InferError
from penstock.batching.ensembles.passage import is_step, links_for
from penstock.batching.running.batch import Batch
from penstock.batching.running.custom_outputs import CustomOutputs
from penstock.batching.sinks import deliver_requests
from penstock.batching.statistics import CANCELED

if TYPE_CHECKING:
    from penstock.batching.model import Model
    from penstock.batching.request import InferRequest, Sink

    from .cache import Cache

logger = logging.getLogger("penstock.batching")

INLINE_HASH_BYTES = 256 << 10
"""Larger requests are hashed on a thread: blake2b takes 1.5 us per KiB and blocks the loop that long."""
_REMOVED_PER_TURN = 512
"""How many answers of a retired model are removed in one turn of the loop."""


class Miss(NamedTuple):
    """What is known of a request that was not found: its key, the duration of the lookup, and its own sink."""

    key: bytes
    lookup_ns: int
    sink: Sink


class CachingEngine(Protocol):
    """The part of the Engine that is used here."""

    stopping: bool
    generation: int

    @property
    def trace(self) -> Callable[[Model, Batch, int], None] | None: ...

    def submit(self, request: InferRequest) -> None: ...

    def hold(self, model: Model) -> None: ...

    def release(self, model: Model) -> None: ...


def enable_cache(cache: Cache | None, model: Model, engine: CachingEngine, loop: asyncio.AbstractEventLoop) -> None:
    """Cache a model's answers from now on, if there is a cache."""
    if cache is None:
        text = "model %s enables the response cache, but the server has none: set --cache-config local,size=BYTES"
        logger.warning(text, model.name)
        return
    model.cache = ModelCache(cache, model, engine, loop)
    model.intercepts = True


class ModelCache:
    """The cached answers of one load of a model version. It is the sink of requests that were not found.

    Of two equal concurrent requests, both run, and the second to be answered does not count as a miss, as in Triton.
    Failures are not cached. An ensemble's answers are valid until one of its steps is another load of its model.
    Threads: the event loop's.
    """

    def __init__(self, cache: Cache, model: Model, engine: CachingEngine, loop: asyncio.AbstractEventLoop) -> None:
        self._cache = cache
        self._model = model
        self._engine = engine
        self._loop = loop
        self._keys = cache.make_keys(model.name, model.version, model.signature)
        self._generation = -1
        self._steps: list[ReferenceType[Model]] = []
        self._cached_keys: set[bytes] = set()
        self._warned = False
        self._hits: list[InferRequest] = []
        self._hashing: set[InferRequest] = set()

    def try_answer(self, request: InferRequest) -> bool:
        """Answer a request from the cache, in this turn of the loop.

        Returns: False if it is not cached: it must run, and its answer passes through here. True also for a large
        request, which is looked up later: the Engine gets it again if it is not found.
        """
        if request.miss is not None or self._engine.stopping or self._model.closing:
            return False
        start_ns = time.monotonic_ns()
        if self._model.ensemble is not None and not self._are_keys_current(request):
            return False
        if request.nbytes > INLINE_HASH_BYTES and self._model.scheduler.ordering is None:
            self._engine.hold(self._model)
            self._hashing.add(request)
            key = self._loop.run_in_executor(None, self._keys.key_for, request.inputs, request.output_positions)
            key.add_done_callback(partial(self._on_hashed, request, start_ns))
            return True
        return self._look_up(request, self._keys.key_for(request.inputs, request.output_positions), start_ns)

    def cancel(self, request: InferRequest) -> bool:
        """Withdraw a request that is being looked up on a thread; it gets no answer. Returns: False for any other."""
        if request not in self._hashing:
            return False
        self._hashing.remove(request)
        self._model.statistics.record_failure(CANCELED, request.start_ns, time.monotonic_ns())
        return True

    def _are_keys_current(self, request: InferRequest) -> bool:
        """Whether the keys match the steps that an ensemble's request has to pass."""
        ensemble = self._model.ensemble
        # a step begun before a swap takes the old way; requests after the swap must not find its answer
        if ensemble is not None and is_step(request) and links_for(request, ensemble).stale:
            return False
        return self._generation == self._engine.generation or self._renew_keys()

    def _renew_keys(self) -> bool:
        """Make new keys if an ensemble's steps have changed.

        Returns: False if they cannot serve, or if one of them, at any depth, has sequences.
        """
        try:
            steps = list(_steps_of(self._model))
        except InferError:
            return False
        if [step() for step in self._steps] != steps:
            self._keys = self._cache.make_keys(self._model.name, self._model.version, self._model.signature)
            self._steps = [ref(step) for step in steps]
        if any(step.spec.sequence is not None for step in steps):
            return False
        self._generation = self._engine.generation
        return True

    def _look_up(self, request: InferRequest, key: bytes, start_ns: int) -> bool:
        outputs = self._cache.find(key)
        end_ns = time.monotonic_ns()
        if outputs is None:
            request.miss = Miss(key, end_ns - start_ns, request.sink)
            request.sink = self
            return False
        self._model.statistics.record_hit(request, start_ns, end_ns)
        request.outputs = outputs
        trace = self._engine.trace
        if trace is not None:
            trace(self._model, Batch([request], request.rows, request.key, 0), end_ns)
        ordering = self._model.scheduler.ordering
        if ordering is not None:
            ordering.add(request)
        if not self._hits:
            self._engine.hold(self._model)
            self._loop.call_soon(self._deliver_hits)
        self._hits.append(request)
        return True

    def _deliver_hits(self) -> None:
        """Hand out the hits of a loop turn together, like a batch."""
        # clients answered while the loop still reads send their next requests at once, and each turn has less to read:
        # a hit with 64 clients took 31 us of CPU, and takes 24 (perf/cache.py)
        hits, self._hits = self._hits, []
        try:
            deliver_requests(hits)
        finally:
            self._engine.release(self._model)

    def _on_hashed(self, request: InferRequest, start_ns: int, key: asyncio.Future[bytes]) -> None:
        """Look up a request hashed on a thread, and submit it if not found, unless it was withdrawn meanwhile."""
        try:
            if request not in self._hashing:
                return
            self._hashing.remove(request)
            if not self._look_up(request, key.result(), start_ns):
                self._engine.submit(request)
        except InferError as error:
            request.error = error
            deliver_requests([request])
        except Exception as error:
            logger.exception(
                "model %s: the cache key of a request could not be computed",
                self._model.name,
                extra={"request_id": request.id},
            )
            request.error = InferError(
                Code.INTERNAL, f"inference failed in '{self._model.name}': {type(error).__name__}"
            )
            deliver_requests([request])
        finally:
            self._engine.release(self._model)

    # -- the sink ----------------------------------------------------------------------------------------------

    def deliver(self, requests: Sequence[InferRequest]) -> None:
        """Pass the answers on, then insert them into the cache: no client waits for that."""
        missed = [(request, request.miss) for request in requests if request.miss is not None]
        for request, miss in missed:
            request.sink = miss.sink
        deliver_requests(list(requests))
        for request, miss in missed:
            if request.error is None and miss.key not in self._cache:
                self._insert(request, miss)

    def _insert(self, request: InferRequest, miss: Miss) -> None:
        start_ns = time.monotonic_ns()
        try:
            outputs = request.outputs or []
            # a CustomOutputs belongs to one request only and is never cached
            inserted = type(outputs) is CustomOutputs or self._cache.insert(miss.key, outputs, self._cached_keys)
        except MemoryError:
            inserted = False
        end_ns = time.monotonic_ns()
        self._model.statistics.record_miss(miss.lookup_ns, end_ns - start_ns, end_ns)
        if not inserted and not self._warned:
            self._warned = True
            text = "model %s: Failed to insert key %s into response cache: the answer does not fit in %d bytes or is "
            text += "not a tensor; further failures are not logged"
            logger.warning(text, self._model.name, miss.key.hex(), self._cache.size_bytes)

    async def clear(self) -> None:
        """Remove everything cached for this load, over several turns of the loop if it is much."""
        more = True
        while more:
            more = self._cache.remove_some(self._cached_keys, _REMOVED_PER_TURN)
            await asyncio.sleep(0)


def _steps_of(model: Model) -> Iterator[Model]:
    """Yield the current steps of an ensemble, at any depth. Raises: InferError."""
    if model.ensemble is not None:
        for step in model.ensemble.links().steps:
            yield step.model
            yield from _steps_of(step.model)
