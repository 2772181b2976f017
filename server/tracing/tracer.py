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
from .nesting import Chosen, TracedStep, context_in, mark_of, nested, root_of
from .trace import Trace, TraceSink, asks_for_trace, context_of, stamps_of, tensors_of

if TYPE_CHECKING:
    from penstock.batching.model import Model
    from penstock.batching.request import InferRequest
    from penstock.batching.running.batch import Batch

logger = logging.getLogger("penstock.tracing")

QUEUE_TRACES = 8192
QUEUE_BYTES = 64 << 20
"""The most that may wait for the thread; further traces are dropped and counted."""
STOP_TIMEOUT_S = 2.0
_AT_ONCE = 256
_NOTHING = range(0)

Record = Callable[["Model", "Batch", int], None]


class Traced(Protocol):
    """The part of the Engine set here."""

    trace: Record | None


class _Scope:
    """One Sampling and its progress. `number` identifies it, 0 if it has no count."""

    __slots__ = ("left", "number", "sampling", "seen")

    def __init__(self, sampling: Sampling, number: int) -> None:
        self.sampling = sampling
        self.number = number if sampling.count > 0 else 0
        self.left = sampling.count
        self.seen = 0

    def take(self, count: int) -> range:
        """Return which positions among the next `count` requests to trace."""
        rate = self.sampling.rate
        if not rate or not self.left:
            return _NOTHING
        first = rate - 1 - self.seen % rate
        self.seen += count
        taken = range(first, count, rate)
        if self.left > 0:
            taken = taken[: self.left]
            self.left -= len(taken)
        return taken


class Tracer:
    """The sampling of one server, and the traces waiting to be written.

    Threads: the event loop's, except for `_write_all`. A trace that cannot be queued is dropped: nothing waits for it.
    """

    def __init__(self, config: TraceConfig, traced: Traced, open_sink: Callable[[TraceConfig], TraceSink]) -> None:
        self._config = config
        self._traced = traced
        self._open_sink = open_sink
        self._propagates = config.mode == OPENTELEMETRY
        self._scopes = itertools.count(1)
        self._all = _Scope(config.sampling, next(self._scopes))
        self._by_model: dict[str, _Scope] = {}
        self._number = 0
        self._traces: queue.Queue[Trace | None] = queue.Queue(QUEUE_TRACES)
        # each is updated by one thread only, because concurrent updates would be lost
        self._queued_bytes = 0
        self._taken_bytes = 0
        self._writer: threading.Thread | None = None
        self.dropped = 0
        self._switch()

    def sampling(self, model: str = "") -> Sampling:
        """Return the sampling of a model, or the global one; `count` is how many traces are left."""
        scope = self._by_model.get(model, self._all)
        return replace(scope.sampling, count=scope.left)

    def set_sampling(self, model: str, sampling: Sampling | None) -> None:
        """Change the sampling of a model, or the global one; None makes a model use the global one."""
        if sampling is None:
            self._by_model.pop(model, None)
        elif model:
            self._by_model[model] = _Scope(sampling, next(self._scopes))
        else:
            self._all = _Scope(sampling, next(self._scopes))
        self._switch()

    def _switch(self) -> None:
        scopes = (self._all, *self._by_model.values())
        self._traced.trace = self.record if any(scope.sampling.level for scope in scopes) else None

    def context_for(self, request: InferRequest) -> tuple[str, str]:
        """Choose whether a request that user code is about to run is traced, and return the W3C context of its span.

        Returns: its `traceparent` and `tracestate`, "" if it has none: in mode triton, and for a warm-up sample.
        """
        if not self._propagates or self._traced.trace is None or not request.enqueued_ns:
            return "", ""
        chosen = self._chosen_for(root_of(request))
        return ("", "") if chosen is None else context_in(chosen, mark_of(request))

    def record(self, model: Model, batch: Batch, end_ns: int) -> None:
        """Queue the traces of a batch that is being delivered at `end_ns`."""
        requests: Sequence[InferRequest] = batch.requests
        if model.hold_count:
            # an ensemble holds the models of its steps, and user code those that it calls
            requests = self._gather(model, batch, end_ns)
        begun: Sequence[InferRequest] = ()
        if model.ensemble is not None:
            requests, begun = (), requests
        elif model.executors:
            begun = [request for request in requests if hasattr(request, "traced")]
            requests = [request for request in requests if not hasattr(request, "traced")]
        for request, chosen in self._choose(model, requests):
            self._keep(model, batch, request, end_ns, chosen)
        for request in begun:
            found = self._chosen_for(request)
            if found is not None:
                self._keep(model, batch, request, end_ns, found)

    def _gather(self, model: Model, batch: Batch, end_ns: int) -> list[InferRequest]:
        """Keep the traces of steps for their ensembles. Returns: the requests that are not steps."""
        others = []
        for request in batch.requests:
            root = root_of(request)
            if root is request:
                others.append(request)
                continue
            chosen = self._chosen_for(root)
            if chosen is not None:
                chosen.steps.append(TracedStep(mark_of(request), _trace_of(model, batch, request, end_ns, chosen)))
        return others

    def _chosen_for(self, root: InferRequest) -> Chosen | None:
        """Return the choice made for a request when its first step ended, or make it now."""
        try:
            chosen: Chosen | None = root.traced
        except AttributeError:
            chosen = root.traced = next((each for _, each in self._choose(root.model, [root])), None)
        return chosen

    def _choose(self, model: Model, requests: Sequence[InferRequest]) -> Sequence[tuple[InferRequest, Chosen]]:
        """Sample client requests to one model."""
        scope = self._by_model.get(model.name, self._all)
        sampling = scope.sampling
        if not sampling.level:
            return ()
        taken = scope.take(len(requests))
        if not self._propagates:
            ending = taken[-1] if taken and not scope.left else -1
            return [
                (requests[position], Chosen(sampling, count_number=scope.number, last=position == ending))
                for position in taken
            ]
        found = []
        for position, request in enumerate(requests):
            context = context_of(request.context)
            # a request that belongs to a trace recorded elsewhere must be included, as in Triton
            if position in taken or (context[0] and asks_for_trace(context[0])):
                found.append((request, Chosen(sampling, context)))
        return found

    def _keep(self, model: Model, batch: Batch, request: InferRequest, end_ns: int, chosen: Chosen) -> None:
        trace = nested(_trace_of(model, batch, request, end_ns, chosen), chosen, self._number + 1)
        if chosen.count_number:
            trace = trace._replace(count_number=chosen.count_number, last=chosen.last)
        self._number += 1 + len(trace.steps)
        held = trace.nbytes
        if self._writer is None and not self._start_writer():
            self.dropped += 1
            return
        if held and self._queued_bytes - self._taken_bytes + held > QUEUE_BYTES:
            self.dropped += 1
            return
        try:
            self._traces.put_nowait(trace)
            self._queued_bytes += held
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
        self._traced.trace = None
        if self._writer is not None:
            deadline_s = time.monotonic() + STOP_TIMEOUT_S
            with suppress(queue.Full):
                self._traces.put(None, timeout=STOP_TIMEOUT_S)
            self._writer.join(max(0.0, deadline_s - time.monotonic()))
            if self._writer.is_alive():
                place = self._config.endpoint if self._propagates else self._config.file
                logger.warning("traces are lost: %s did not accept them within %g s", place, STOP_TIMEOUT_S)
            self._writer = None

    # -- the thread --------------------------------------------------------------------------------------------

    def _write_all(self) -> None:
        try:
            sink = self._open_sink(self._config)
        except Exception:
            logger.exception("traces cannot be written")
            return
        told = lost = 0
        open_ = True
        while open_:
            traces = self._next()
            open_ = traces[-1] is not None
            lost = _write(sink, [trace for trace in traces if trace is not None], lost)
            if self.dropped > told:
                logger.warning("%d traces dropped: they could not be written fast enough", self.dropped - told)
                told = self.dropped
        try:
            sink.close()
        except Exception:
            logger.exception("not all traces could be written")

    def _next(self) -> list[Trace | None]:
        """Wait for traces, and return those available; None is the last."""
        traces = [self._traces.get()]
        while traces[-1] is not None and len(traces) < _AT_ONCE:
            try:
                traces.append(self._traces.get_nowait())
            except queue.Empty:
                break
        self._taken_bytes += sum(trace.nbytes for trace in traces if trace is not None)
        return traces


def _trace_of(model: Model, batch: Batch, request: InferRequest, end_ns: int, chosen: Chosen) -> Trace:
    """Make a trace that has no number yet."""
    level, log_frequency = chosen.sampling.level, chosen.sampling.log_frequency
    return Trace(
        0, model.name, model.version, request.id, request.error is not None, stamps_of(batch, request, end_ns), level,
        log_frequency, *chosen.context, tensors_of(model, request, level),
    )  # fmt: skip


def _write(sink: TraceSink, traces: Sequence[Trace], lost: int) -> int:
    """Write traces; `lost` is how many were lost since the last success. Returns: the new number.

    A full disk is logged once, and once more when writing works again: the log may be on the same disk.
    """
    if not traces:
        return lost
    try:
        sink.write(traces)
    except OSError as error:
        if not lost:
            place = f"{error.filename}: " if error.filename else ""
            logger.error("traces cannot be written: %s%s", place, error.strerror or error)  # noqa: TRY400 - expected
        return lost + len(traces)
    except Exception:
        logger.exception("%d traces were not written", len(traces))
        return lost
    if lost:
        logger.warning("traces are written again; %d were not", lost)
    return 0
