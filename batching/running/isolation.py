"""Isolation: a Batch that fails is run again in parts, until the guilty request is alone.

Called by both executors: ThreadInstance (instance.py) and the event loop (model.py). The cost, and the reasons for the
choice of parts, are in docs/adr/0011-faults-stay-alone.md.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

from penstock.backends.backend import Binding
from penstock.backends.errors import (
    RETRY_AFTER_NS,
    Code,
    DeviceLost,
    InferError,
    OutOfMemory,
    PartUnreadable,
    RunStopped,
    without_traceback,
)

from .batch import Batch, split_by_result
from .execution import run_batch
from .suspects import MAX_HINTS, Suspects, named_in_error

if TYPE_CHECKING:
    from penstock.batching.model import Model
    from penstock.batching.request import InferRequest

logger = logging.getLogger("penstock.batching")

CHEAP_FACTOR = 4
"""A failure is cheap if it took this many times less than the batch's predicted run time."""


_SPECIFIC_FAILURES = DeviceLost, OutOfMemory, PartUnreadable, RunStopped
"""Failures that carry more than a text."""


class LostBatch(Exception):  # noqa: N818 - a condition, as DeviceLost is
    """The device was lost during a Batch.

    `finished` is what had ended; `remaining` is unanswered and can run elsewhere, and `error` answers it if not
    (`fail_requests`). `started`: the first of its requests was running, alone or with others; otherwise the device was
    found to be lost before that.
    """

    def __init__(self, finished: list[Batch], remaining: Batch, error: DeviceLost, *, started: bool) -> None:
        super().__init__(error.message)
        self.finished = finished
        self.remaining = remaining
        self.error = error
        self.started = started


def execute(model: Model, binding: Binding, batch: Batch, first_error: Exception | None = None) -> list[Batch]:
    """Run a Batch; every request in it ends with `outputs` or `error`. `first_error`: how a first run of it failed.

    A batch that fails is run again in parts, until the guilty request is alone and the others are served. One that does
    not fit in memory is halved, and so are those after it, for a while. A model that remembers sequences itself never
    runs anything twice: it may have absorbed the input that it failed on.
    Returns: the batches that ran: the given one unless it was split. The requests keep their order, except that those
    known to fail (quarantine.py) run last, each alone.
    Raises: LostBatch.
    """
    quarantine = model.quarantine
    if first_error is None and quarantine.known and (known := quarantine.find_known(batch.requests)):
        others = [request for request in batch.requests if request not in known]
        batches = _run_parts(model, binding, batch, [*([others] if others else []), *([request] for request in known)])
        quarantine.discard_served(known)
        model.count_event("quarantined", len(known))
        return batches
    return _run(model, binding, batch, first_error)


def execute_singly(model: Model, binding: Binding, batch: Batch) -> list[Batch]:
    """Run each request of a Batch alone, in order; otherwise as `execute`."""
    return _run_parts(model, binding, batch, [[request] for request in batch.requests])


def _run_parts(
    model: Model, binding: Binding, batch: Batch, parts: Sequence[list[InferRequest]], hints: int = MAX_HINTS
) -> list[Batch]:
    """Run parts of a Batch, which together are all of it, one after another. `hints`: as in `_run`."""
    batches: list[Batch] = []
    for position, part in enumerate(parts):
        try:
            batches += _run(model, binding, _make_part(batch, part), hints=hints)
        except LostBatch as lost:
            remaining = [*lost.remaining.requests, *chain.from_iterable(parts[position + 1 :])]
            raise LostBatch(
                batches + lost.finished, _make_part(batch, remaining), lost.error, started=lost.started
            ) from lost.error
    return batches


def _run(
    model: Model, binding: Binding, batch: Batch, first_error: Exception | None = None, hints: int = MAX_HINTS
) -> list[Batch]:
    """Run a Batch. On failure, run those the text points at apart, at most `hints` times; otherwise search."""
    error = first_error or _try_run(model, binding, batch)
    if error is None:
        return [batch]
    skips_hints = not hints or model.scheduler.sequences is not None or isinstance(error, _SPECIFIC_FAILURES)
    suspected = [] if skips_hints else named_in_error(str(error), batch.requests)
    if not suspected:
        return _FaultSearch(model, binding, batch, error).run(error)
    model.count_event("batch_retries", 2)
    others = [request for request in batch.requests if request not in suspected]
    return _run_parts(model, binding, batch, [suspected, others], hints - 1)


def fail_requests(batch: Batch, error: InferError) -> list[Batch]:
    """Answer every request of a Batch with an error. Returns: batches to deliver, one per request."""
    now_ns = time.monotonic_ns()
    failed = []
    for request in batch.requests:
        single = Batch([request], request.rows, batch.key, batch.exec_start_ns)
        single.exec_end_ns = now_ns
        _fail(request, error)
        failed.append(single)
    return failed


def fail_queued(model: Model, error: Exception) -> None:
    """Reject everything that waits for a Model after choosing its next Batch failed. Any thread."""
    logger.error("model %s: scheduling failed, all queued requests are rejected", model.name, exc_info=error)
    with model.lock:
        waiting = model.scheduler.drain()
    if waiting:
        failure = InferError(Code.INTERNAL, f"model '{model.name}': the request could not be scheduled")
        rows = sum([request.rows for request in waiting])
        model.pass_to_loop(fail_requests(Batch(waiting, rows, waiting[0].key, time.monotonic_ns()), failure))


def fail_unanswered(model: Model, batch: Batch, error: Exception) -> list[Batch]:
    """Answer the unanswered requests of a Batch after an unexpected error. Returns: as `execute`."""
    logger.error("model %s: a batch could not be completed", model.name, exc_info=error)
    failure = InferError(Code.INTERNAL, f"model '{model.name}': the request could not be completed")
    for request in batch.requests:
        if request.outputs is None and request.error is None:
            _fail(request, failure)
    batch.exec_end_ns = time.monotonic_ns()
    return split_by_result(batch, batch.requests)


def slice_batch(batch: Batch, first: int, end: int | None = None) -> Batch:
    """Make a Batch of the requests from position `first` up to, not including, `end`."""
    return _make_part(batch, batch.requests[first:end])


def _make_part(batch: Batch, requests: list[InferRequest]) -> Batch:
    part = Batch(requests, sum([request.rows for request in requests]), batch.key, time.monotonic_ns())
    if batch.row_positions is not None:
        place_of = dict(zip(batch.requests, batch.row_positions, strict=True))
        part.row_positions = [place_of[request] for request in requests]
        part.span_rows = part.row_positions[-1] + 1
    return part


def _try_run(model: Model, binding: Binding, batch: Batch) -> Exception | None:
    """Run a Batch once. Returns: what went wrong."""
    watchdog = model.watchdog
    try:
        if watchdog is not None:
            watchdog.begin(binding, model.spec.policy.run_limit_us * 1000, time.monotonic_ns())
        run_batch(model, binding, batch)
    except MemoryError:
        text = f"model '{model.name}': not enough memory for a batch of {batch.rows} rows"
        return OutOfMemory(Code.OVERLOADED, text, RETRY_AFTER_NS)
    except BaseException as error:  # noqa: BLE001 - returned, and answered or logged by code that knows the request
        return to_exception(error)
    finally:
        if watchdog is not None:
            watchdog.end(binding)
    return None


def to_exception(error: BaseException) -> Exception:
    """Convert what a run failed with, which can be anything if an operator or a callback is third-party code.

    Raises: what ends the process.
    """
    if isinstance(error, Exception):
        return without_traceback(error)
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        raise error
    failure = RuntimeError(f"{type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


class _FaultSearch:
    """The search for the guilty requests of one failed Batch, from its first request to its last."""

    def __init__(self, model: Model, binding: Binding, batch: Batch, error: Exception) -> None:
        self._model = model
        self._binding = binding
        self._batch = batch
        took_ns = time.monotonic_ns() - batch.exec_start_ns
        cheap = took_ns * CHEAP_FACTOR < batch.cost_ns and not isinstance(error, RunStopped)
        self._suspects = Suspects(len(batch.requests), cheap=cheap)
        self._ran: list[Batch] = []
        self._oversized: list[tuple[int, Batch]] = []
        """Parts that did not fit in memory, each with how many requests were unsettled then."""
        self._events = {"batch_retries": 0, "runs_stopped": 0, "out_of_memory": 0}
        self._may_retry = True
        sequences = model.scheduler.sequences
        self._never_rerun = sequences is not None and sequences.model_keeps_state

    def run(self, error: Exception | None) -> list[Batch]:
        """Run the Batch, which failed with `error`, in parts until every request is settled."""
        part = self._batch
        try:
            while True:
                self._record_run(part, error)
                if not self._suspects.remaining:
                    return self._ran
                part = self._next_part(self._suspects.next_count())
                self._events["batch_retries"] += 1
                error = _try_run(self._model, self._binding, part)
        finally:
            self._lower_cap()
            for event, times in self._events.items():
                if times:
                    self._model.count_event(event, times)

    def _record_run(self, part: Batch, error: Exception | None) -> None:
        """Draw the conclusions from one run."""
        suspects, count = self._suspects, len(part.requests)
        if error is None:
            self._ran.append(part)
            suspects.record_success(count)
        elif isinstance(error, DeviceLost):
            started = part.compute_start_ns != part.exec_start_ns
            raise LostBatch(self._ran, self._next_part(suspects.remaining), error, started=started) from error
        elif self._never_rerun and not isinstance(error, PartUnreadable):
            self._fail_part(part, error)
        elif isinstance(error, OutOfMemory) and (count > 1 or self._may_retry):
            self._events["out_of_memory"] += 1
            suspects.record_too_many(count)
            if count > 1:
                self._oversized.append((suspects.remaining, part))
            # a request that does not fit alone is retried once: other runs may have ended
            self._may_retry = count > 1
            return
        elif isinstance(error, RunStopped):
            self._on_run_stopped(part, error)
        elif isinstance(error, PartUnreadable) and count > 1:
            suspects.record_culprit(error.part_index)
        elif count > 1:
            suspects.record_failure(count)
        else:
            self._fail_request(part, error)
        self._may_retry = True

    def _fail_part(self, part: Batch, error: Exception) -> None:
        """Answer all of a part with its failure."""
        if isinstance(error, RunStopped):
            self._events["runs_stopped"] += 1
            error = self._limit_error(error)
        for position in range(len(part.requests)):
            self._fail_request(slice_batch(part, position, position + 1), error)

    def _on_run_stopped(self, part: Batch, stopped: RunStopped) -> None:
        """Continue unless more runs were stopped than finding one guilty request takes: each took the whole limit."""
        suspects = self._suspects
        self._events["runs_stopped"] += 1
        error = self._limit_error(stopped)
        if len(part.requests) > 1:
            suspects.record_failure(len(part.requests))
        else:
            # no retry: a gRPC client with a retry policy would resend it and hold up the others each time
            self._fail_request(part, RunStopped(error.code, error.message, -1))
        if suspects.remaining and self._events["runs_stopped"] > suspects.max_failures:
            self._ran += fail_requests(self._next_part(suspects.remaining), error)
            suspects.remaining = 0

    def _limit_error(self, stopped: RunStopped) -> RunStopped:
        name, limit_ms = self._model.name, self._model.spec.policy.run_limit_us / 1000
        if not limit_ms:  # the Backend has its own limit
            return stopped
        return RunStopped(Code.EXPIRED, f"model '{name}': run exceeded its limit of {limit_ms:g} ms")

    def _fail_request(self, part: Batch, error: Exception) -> None:
        """Answer the single request of a part that failed."""
        request = part.requests[0]
        # later requests of a sequence depend on it, and each request stopped apart takes the whole limit
        if self._model.scheduler.sequences is None and not isinstance(error, RunStopped):
            self._model.quarantine.record_failure(request)
        name = self._model.name
        log_fields = {"request_id": request.id, "model": name}
        if not isinstance(error, InferError):
            logger.error("model %s failed", name, exc_info=error, extra=log_fields)
            error = InferError(Code.INTERNAL, f"inference failed in '{name}': {type(error).__name__}")
        elif isinstance(error, OutOfMemory):
            self._events["out_of_memory"] += 1
            self._discard_oversized(self._suspects.remaining)
        elif error.code is Code.INTERNAL:  # errors that the runtime blames on the request are only for the client
            logger.error("model %s failed: %s", name, error.message, extra=log_fields)
        _fail(request, error)
        part.exec_end_ns = time.monotonic_ns()
        self._ran.append(part)
        self._suspects.record_single_failure()

    def _discard_oversized(self, remaining: int) -> None:
        """Forget the parts that held a request which does not fit alone: they do not show how many rows fit.

        Otherwise one client's outsize request would make all others run in batches of one for half a minute.
        """
        self._oversized = [(at, part) for at, part in self._oversized if not at - len(part.requests) < remaining <= at]
        self._suspects.record_too_large()

    def _lower_cap(self) -> None:
        for _, part in self._oversized:
            with self._model.lock:
                self._model.scheduler.memory_cap.lower(part.rows, time.monotonic_ns())

    def _next_part(self, count: int) -> Batch:
        """Make a Batch of the next `count` unsettled requests."""
        first = len(self._batch.requests) - self._suspects.remaining
        return slice_batch(self._batch, first, first + count)


def _fail(request: InferRequest, error: InferError) -> None:
    # a new error that was never raised: a traceback holds the batch, and the batch holds the request
    request.error = type(error)(error.code, error.message, error.retry_after_ns)
    request.outputs = None
