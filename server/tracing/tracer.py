"""Tracer: samples the requests that the Engine delivers, and passes their traces to a thread that writes them.

Made by the composition root. The Engine calls `record` for each batch, only while something is traced: without tracing
the cost is one attribute check per batch.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from .config import OPENTELEMETRY, Sampling, TraceConfig
from .nesting import SampledRequest, TracedStep, child_context, node_of, root_of, with_steps
from .trace import Trace, TraceSink, context_of, is_sampled, stamps_of, tensors_of

if TYPE_CHECKING:
    from penstock.batching.model import Model
    from penstock.batching.request import InferRequest
    from penstock.batching.running.batch import Batch

logger = logging.getLogger("penstock.tracing")

MAX_QUEUED_TRACES = 8192
MAX_QUEUED_BYTES = 64 << 20
"""The most that may wait for the thread; further traces are dropped and counted."""
STOP_TIMEOUT_S = 2.0
_MAX_TRACES_PER_WRITE = 256
_NONE_SAMPLED = range(0)

Record = Callable[["Model", "Batch", int], None]


class TracedEngine(Protocol):
    """The part of the Engine set here."""

    trace: Record | None


class _Scope:
    """One Sampling and its progress. `number` identifies it, 0 if it has no count."""

    __slots__ = ("number", "remaining", "sampling", "seen")

    def __init__(self, sampling: Sampling, number: int) -> None:
        self.sampling = sampling
        self.number = number if sampling.count > 0 else 0
        self.remaining = sampling.count
        self.seen = 0

    def sample(self, count: int) -> range:
        """Return which positions among the next `count` requests to trace."""
        rate = self.sampling.rate
        if not rate or not self.remaining:
            return _NONE_SAMPLED
        first = rate - 1 - self.seen % rate
        self.seen += count
        sampled = range(first, count, rate)
        if self.remaining > 0:
            sampled = sampled[: self.remaining]
            self.remaining -= len(sampled)
        return sampled


class Tracer:
    """The sampling of one server, and the traces waiting to be written.

    Threads: the event loop's, except for `_write_all`. A trace that cannot be queued is dropped: nothing waits for it.
    """

    def __init__(
        self, config: TraceConfig, traced: TracedEngine, open_sink: Callable[[TraceConfig], TraceSink]
    ) -> None:
        self._config = config
        self._engine = traced
        self._open_sink = open_sink
        self._propagates = config.mode == OPENTELEMETRY
        self._scopes = itertools.count(1)
        self._global_scope = _Scope(config.sampling, next(self._scopes))
        self._by_model: dict[str, _Scope] = {}
        self._number = 0
        self._traces: queue.Queue[Trace | None] = queue.Queue(MAX_QUEUED_TRACES)
        # each is updated by one thread only, because concurrent updates would be lost
        self._queued_bytes = 0
        self._dequeued_bytes = 0
        self._writer: threading.Thread | None = None
        self.dropped = 0
        self._update_engine()

    def sampling(self, model: str = "") -> Sampling:
        """Return the sampling of a model, or the global one; `count` is how many traces are left."""
        scope = self._by_model.get(model, self._global_scope)
        return replace(scope.sampling, count=scope.remaining)

    def set_sampling(self, model: str, sampling: Sampling | None) -> None:
        """Change the sampling of a model, or the global one; None makes a model use the global one."""
        if sampling is None:
            self._by_model.pop(model, None)
        elif model:
            self._by_model[model] = _Scope(sampling, next(self._scopes))
        else:
            self._global_scope = _Scope(sampling, next(self._scopes))
        self._update_engine()

    def _update_engine(self) -> None:
        scopes = (self._global_scope, *self._by_model.values())
        self._engine.trace = self.record if any(scope.sampling.level for scope in scopes) else None

    def context_for(self, request: InferRequest) -> tuple[str, str]:
        """Choose whether a request that user code is about to run is traced, and return the W3C context of its span.

        Returns: its `traceparent` and `tracestate`, "" if it has none: in mode triton, and for a warm-up sample.
        """
        if not self._propagates or self._engine.trace is None or not request.enqueued_ns:
            return "", ""
        sampled = self._sampled_for(root_of(request))
        return ("", "") if sampled is None else child_context(sampled, node_of(request))

    def record(self, model: Model, batch: Batch, end_ns: int) -> None:
        """Queue the traces of a batch that is being delivered at `end_ns`."""
        requests: Sequence[InferRequest] = batch.requests
        if model.hold_count:
            # an ensemble holds the models of its steps, and user code those that it calls
            requests = self._collect_steps(model, batch, end_ns)
        decided: Sequence[InferRequest] = ()
        if model.ensemble is not None:
            requests, decided = (), requests
        elif model.executors:
            decided = [request for request in requests if hasattr(request, "traced")]
            requests = [request for request in requests if not hasattr(request, "traced")]
        for request, sampled in self._sample(model, requests):
            self._enqueue(model, batch, request, end_ns, sampled)
        for request in decided:
            earlier = self._sampled_for(request)
            if earlier is not None:
                self._enqueue(model, batch, request, end_ns, earlier)

    def _collect_steps(self, model: Model, batch: Batch, end_ns: int) -> list[InferRequest]:
        """Keep the traces of steps for their ensembles. Returns: the requests that are not steps."""
        others = []
        for request in batch.requests:
            root = root_of(request)
            if root is request:
                others.append(request)
                continue
            sampled = self._sampled_for(root)
            if sampled is not None:
                sampled.steps.append(TracedStep(node_of(request), _make_trace(model, batch, request, end_ns, sampled)))
        return others

    def _sampled_for(self, root: InferRequest) -> SampledRequest | None:
        """Return the choice made for a request when its first step ended, or make it now."""
        try:
            sampled: SampledRequest | None = root.traced
        except AttributeError:
            sampled = root.traced = next((each for _, each in self._sample(root.model, [root])), None)
        return sampled

    def _sample(self, model: Model, requests: Sequence[InferRequest]) -> Sequence[tuple[InferRequest, SampledRequest]]:
        """Sample client requests to one model."""
        scope = self._by_model.get(model.name, self._global_scope)
        sampling = scope.sampling
        if not sampling.level:
            return ()
        positions = scope.sample(len(requests))
        if not self._propagates:
            last_position = positions[-1] if positions and not scope.remaining else -1
            return [
                (
                    requests[position],
                    SampledRequest(sampling, count_number=scope.number, last=position == last_position),
                )
                for position in positions
            ]
        sampled = []
        for position, request in enumerate(requests):
            context = context_of(request.context)
            # a request that belongs to a trace recorded elsewhere must be included, as in Triton
            if position in positions or (context[0] and is_sampled(context[0])):
                sampled.append((request, SampledRequest(sampling, context)))
        return sampled

    def _enqueue(self, model: Model, batch: Batch, request: InferRequest, end_ns: int, sampled: SampledRequest) -> None:
        trace = with_steps(_make_trace(model, batch, request, end_ns, sampled), sampled, self._number + 1)
        if sampled.count_number:
            trace = trace._replace(count_number=sampled.count_number, last=sampled.last)
        self._number += 1 + len(trace.steps)
        nbytes = trace.nbytes
        if self._writer is None and not self._start_writer():
            self.dropped += 1
            return
        if nbytes and self._queued_bytes - self._dequeued_bytes + nbytes > MAX_QUEUED_BYTES:
            self.dropped += 1
            return
        try:
            self._traces.put_nowait(trace)
            self._queued_bytes += nbytes
        except queue.Full:
            self.dropped += 1

    def _start_writer(self) -> bool:
        """Start the thread, if one is available now."""
        writer = threading.Thread(target=self._write_all, name="penstock-traces", daemon=True)
        with suppress(RuntimeError):
            writer.start()
            self._writer = writer
        return self._writer is not None

    def stop(self) -> None:
        """Write what is queued; waits at most STOP_TIMEOUT_S for a stuck file or collector. Blocks."""
        self._engine.trace = None
        if self._writer is not None:
            deadline_s = time.monotonic() + STOP_TIMEOUT_S
            with suppress(queue.Full):
                self._traces.put(None, timeout=STOP_TIMEOUT_S)
            self._writer.join(max(0.0, deadline_s - time.monotonic()))
            if self._writer.is_alive():
                destination = self._config.endpoint if self._propagates else self._config.file
                logger.warning("traces are lost: %s did not accept them within %g s", destination, STOP_TIMEOUT_S)
            self._writer = None

    # -- the thread --------------------------------------------------------------------------------------------

    def _write_all(self) -> None:
        try:
            sink = self._open_sink(self._config)
        except Exception:
            logger.exception("traces cannot be written")
            return
        reported = failed = 0
        open_ = True
        while open_:
            traces = self._dequeue()
            open_ = traces[-1] is not None
            failed = _write(sink, [trace for trace in traces if trace is not None], failed)
            if self.dropped > reported:
                logger.warning("%d traces dropped: they could not be written fast enough", self.dropped - reported)
                reported = self.dropped
        try:
            sink.close()
        except Exception:
            logger.exception("not all traces could be written")

    def _dequeue(self) -> list[Trace | None]:
        """Wait for traces, and return those available; None is the last."""
        traces = [self._traces.get()]
        while traces[-1] is not None and len(traces) < _MAX_TRACES_PER_WRITE:
            try:
                traces.append(self._traces.get_nowait())
            except queue.Empty:
                break
        self._dequeued_bytes += sum(trace.nbytes for trace in traces if trace is not None)
        return traces


def _make_trace(model: Model, batch: Batch, request: InferRequest, end_ns: int, sampled: SampledRequest) -> Trace:
    """Make a trace that has no number yet."""
    level, log_frequency = sampled.sampling.level, sampled.sampling.log_frequency
    return Trace(
        0, model.name, model.version, request.id, request.error is not None, stamps_of(batch, request, end_ns), level,
        log_frequency, *sampled.context, tensors_of(model, request, level),
    )  # fmt: skip


def _write(sink: TraceSink, traces: Sequence[Trace], failed: int) -> int:
    """Write traces; `failed` is how many were lost since the last success. Returns: the new number.

    A full disk is logged once, and once more when writing works again: the log may be on the same disk.
    """
    if not traces:
        return failed
    try:
        sink.write(traces)
    except OSError as error:
        if not failed:
            file_name = f"{error.filename}: " if error.filename else ""
            logger.error("traces cannot be written: %s%s", file_name, error.strerror or error)  # noqa: TRY400 - expected
        return failed + len(traces)
    except Exception:
        logger.exception("%d traces were not written", len(traces))
        return failed
    if failed:
        logger.warning("traces are written again; %d were lost", failed)
    return 0
