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

from .batch import Batch, parted
from .execution import run_batch
from .hints import HINTS, pointed_at
from .suspects import Suspects

if TYPE_CHECKING:
    from penstock.batching.model import Model
    from penstock.batching.request import InferRequest

logger = logging.getLogger("penstock.batching")

CHEAP = 4
"""A failure is cheap if it took this many times less than the batch's predicted run time."""


_SAYS_MORE = DeviceLost, OutOfMemory, PartUnreadable, RunStopped
"""Failures that carry more than a text."""


class LostBatch(Exception):  # noqa: N818 - a condition, as DeviceLost is
    """The device was lost during a Batch: `ran` is what had ended, `rest` is unanswered and can run elsewhere.

    `error` answers the rest if it cannot run elsewhere (`refuse`). `begun`: the first request of the rest was running,
    alone or with others; otherwise the device was found to be lost before that.
    """

    def __init__(self, ran: list[Batch], rest: Batch, error: DeviceLost, *, begun: bool) -> None:
        super().__init__(error.message)
        self.ran = ran
        self.rest = rest
        self.error = error
        self.begun = begun


def execute(model: Model, binding: Binding, batch: Batch, failed: Exception | None = None) -> list[Batch]:
    """Run a Batch; every request in it ends with `outputs` or `error`. `failed`: how a first run of it failed.

    A batch that fails is run again in parts, until the guilty request is alone and the others are served. One that does
    not fit in memory is halved, and so are those after it, for a while. A model that remembers sequences itself never
    runs anything twice: it may have absorbed the input that it failed on.
    Returns: the batches that ran: the given one unless it was split. The requests keep their order, except that those
    known to fail (quarantine.py) run last, each alone.
    Raises: LostBatch.
    """
    quarantine = model.quarantine
    if failed is None and quarantine.known and (known := quarantine.among(batch.requests)):
        others = [request for request in batch.requests if request not in known]
        ran = _in_turn(model, binding, batch, [*([others] if others else []), *([request] for request in known)])
        quarantine.acquit(known)
        model.count("quarantined", len(known))
        return ran
    return _run(model, binding, batch, failed)


def execute_alone(model: Model, binding: Binding, batch: Batch) -> list[Batch]:
    """Run each request of a Batch alone, in order; otherwise as `execute`."""
    return _in_turn(model, binding, batch, [[request] for request in batch.requests])


def _in_turn(
    model: Model, binding: Binding, batch: Batch, parts: Sequence[list[InferRequest]], hints: int = HINTS
) -> list[Batch]:
    """Run parts of a Batch, which together are all of it, one after another. `hints`: as in `_run`."""
    ran: list[Batch] = []
    for position, part in enumerate(parts):
        try:
            ran += _run(model, binding, _part(batch, part), hints=hints)
        except LostBatch as lost:
            left = [*lost.rest.requests, *chain.from_iterable(parts[position + 1 :])]
            raise LostBatch(ran + lost.ran, _part(batch, left), lost.error, begun=lost.begun) from lost.error
    return ran


def _run(
    model: Model, binding: Binding, batch: Batch, failed: Exception | None = None, hints: int = HINTS
) -> list[Batch]:
    """Run a Batch. On failure, run those the text points at apart, at most `hints` times; otherwise search."""
    error = failed or _attempt(model, binding, batch)
    if error is None:
        return [batch]
    searched = not hints or model.scheduler.sequences is not None or isinstance(error, _SAYS_MORE)
    named = [] if searched else pointed_at(str(error), batch.requests)
    if not named:
        return _Search(model, binding, batch, error).settle(error)
    model.count("batch_retries", 2)
    others = [request for request in batch.requests if request not in named]
    return _in_turn(model, binding, batch, [named, others], hints - 1)


def refuse(batch: Batch, error: InferError) -> list[Batch]:
    """Answer every request of a Batch with an error. Returns: batches to deliver, one per request."""
    now_ns = time.monotonic_ns()
    refused = []
    for request in batch.requests:
        alone = Batch([request], request.rows, batch.key, batch.exec_start_ns)
        alone.exec_end_ns = now_ns
        _fail(request, error)
        refused.append(alone)
    return refused


def give_up(model: Model, error: Exception) -> None:
    """Reject everything that waits for a Model after choosing its next Batch failed. Any thread."""
    logger.error("model %s: scheduling failed, all queued requests are rejected", model.name, exc_info=error)
    with model.lock:
        waiting = model.scheduler.drain()
    if waiting:
        told = InferError(Code.INTERNAL, f"model '{model.name}': the request could not be scheduled")
        rows = sum([request.rows for request in waiting])
        model.hand_over(refuse(Batch(waiting, rows, waiting[0].key, time.monotonic_ns()), told))


def settled(model: Model, batch: Batch, error: Exception) -> list[Batch]:
    """Answer the unanswered requests of a Batch after an unexpected error. Returns: as `execute`."""
    logger.error("model %s: a batch could not be completed", model.name, exc_info=error)
    told = InferError(Code.INTERNAL, f"model '{model.name}': the request could not be completed")
    for request in batch.requests:
        if request.outputs is None and request.error is None:
            _fail(request, told)
    batch.exec_end_ns = time.monotonic_ns()
    return parted(batch, batch.requests)


def cut(batch: Batch, first: int, end: int | None = None) -> Batch:
    """Make a Batch of the requests from position `first` up to, not including, `end`."""
    return _part(batch, batch.requests[first:end])


def _part(batch: Batch, requests: list[InferRequest]) -> Batch:
    part = Batch(requests, sum([request.rows for request in requests]), batch.key, time.monotonic_ns())
    if batch.places is not None:
        place_of = dict(zip(batch.requests, batch.places, strict=True))
        part.places = [place_of[request] for request in requests]
        part.span_rows = part.places[-1] + 1
    return part


def _attempt(model: Model, binding: Binding, batch: Batch) -> Exception | None:
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
        return as_failure(error)
    finally:
        if watchdog is not None:
            watchdog.end(binding)
    return None


def as_failure(error: BaseException) -> Exception:
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


class _Search:
    """The search for the guilty requests of one failed Batch, from its first request to its last."""

    def __init__(self, model: Model, binding: Binding, batch: Batch, error: Exception) -> None:
        self._model = model
        self._binding = binding
        self._batch = batch
        took_ns = time.monotonic_ns() - batch.exec_start_ns
        cheap = took_ns * CHEAP < batch.cost_ns and not isinstance(error, RunStopped)
        self._suspects = Suspects(len(batch.requests), cheap=cheap)
        self._ran: list[Batch] = []
        self._too_big: list[tuple[int, Batch]] = []
        """Parts that did not fit in memory, each with how many requests were unsettled then."""
        self._events = {"batch_retries": 0, "runs_stopped": 0, "out_of_memory": 0}
        self._patient = True
        sequences = model.scheduler.sequences
        self._once = sequences is not None and sequences.model_keeps_state

    def settle(self, error: Exception | None) -> list[Batch]:
        """Run the Batch, which failed with `error`, in parts until every request is settled."""
        part = self._batch
        try:
            while True:
                self._judge(part, error)
                if not self._suspects.left:
                    return self._ran
                part = self._part(self._suspects.next())
                self._events["batch_retries"] += 1
                error = _attempt(self._model, self._binding, part)
        finally:
            self._lower_cap()
            for event, times in self._events.items():
                if times:
                    self._model.count(event, times)

    def _judge(self, part: Batch, error: Exception | None) -> None:
        """Draw the conclusions from one run."""
        suspects, count = self._suspects, len(part.requests)
        if error is None:
            self._ran.append(part)
            suspects.passed(count)
        elif isinstance(error, DeviceLost):
            begun = part.compute_start_ns != part.exec_start_ns
            raise LostBatch(self._ran, self._part(suspects.left), error, begun=begun) from error
        elif self._once and not isinstance(error, PartUnreadable):
            self._give_up(part, error)
        elif isinstance(error, OutOfMemory) and (count > 1 or self._patient):
            self._events["out_of_memory"] += 1
            suspects.too_many(count)
            if count > 1:
                self._too_big.append((suspects.left, part))
            # a request that does not fit alone is retried once: other runs may have ended
            self._patient = count > 1
            return
        elif isinstance(error, RunStopped):
            self._stopped(part, error)
        elif isinstance(error, PartUnreadable) and count > 1:
            suspects.named(error.part_index)
        elif count > 1:
            suspects.failed(count)
        else:
            self._convict(part, error)
        self._patient = True

    def _give_up(self, part: Batch, error: Exception) -> None:
        """Answer all of a part with its failure."""
        if isinstance(error, RunStopped):
            self._events["runs_stopped"] += 1
            error = self._limit(error)
        for position in range(len(part.requests)):
            self._convict(cut(part, position, position + 1), error)

    def _stopped(self, part: Batch, stopped: RunStopped) -> None:
        """Continue unless more runs were stopped than finding one guilty request takes: each took the whole limit."""
        suspects = self._suspects
        self._events["runs_stopped"] += 1
        error = self._limit(stopped)
        if len(part.requests) > 1:
            suspects.failed(len(part.requests))
        else:
            # no retry: a gRPC client with a retry policy would resend it and hold up the others each time
            self._convict(part, RunStopped(error.code, error.message, -1))
        if suspects.left and self._events["runs_stopped"] > suspects.depth:
            self._ran += refuse(self._part(suspects.left), error)
            suspects.left = 0

    def _limit(self, stopped: RunStopped) -> RunStopped:
        name, limit_ms = self._model.name, self._model.spec.policy.run_limit_us / 1000
        if not limit_ms:  # the Backend has its own limit
            return stopped
        return RunStopped(Code.EXPIRED, f"model '{name}': run exceeded its limit of {limit_ms:g} ms")

    def _convict(self, part: Batch, error: Exception) -> None:
        """Answer the single request of a part that failed."""
        request = part.requests[0]
        # later requests of a sequence depend on it, and each request stopped apart takes the whole limit
        if self._model.scheduler.sequences is None and not isinstance(error, RunStopped):
            self._model.quarantine.note(request)
        name = self._model.name
        about = {"request_id": request.id, "model": name}
        if not isinstance(error, InferError):
            logger.error("model %s failed", name, exc_info=error, extra=about)
            error = InferError(Code.INTERNAL, f"inference failed in '{name}': {type(error).__name__}")
        elif isinstance(error, OutOfMemory):
            self._events["out_of_memory"] += 1
            self._absolve(self._suspects.left)
        elif error.code is Code.INTERNAL:  # errors that the runtime blames on the request are only for the client
            logger.error("model %s failed: %s", name, error.message, extra=about)
        _fail(request, error)
        part.exec_end_ns = time.monotonic_ns()
        self._ran.append(part)
        self._suspects.convicted()

    def _absolve(self, left: int) -> None:
        """Forget the parts that held a request which does not fit alone: they do not show how many rows fit.

        Otherwise one client's outsize request would make all others run in batches of one for half a minute.
        """
        self._too_big = [(at, part) for at, part in self._too_big if not at - len(part.requests) < left <= at]
        self._suspects.too_big()

    def _lower_cap(self) -> None:
        for _, part in self._too_big:
            with self._model.lock:
                self._model.scheduler.memory_cap.lower(part.rows, time.monotonic_ns())

    def _part(self, count: int) -> Batch:
        """Make a Batch of the next `count` unsettled requests."""
        first = len(self._batch.requests) - self._suspects.left
        return cut(self._batch, first, first + count)


def _fail(request: InferRequest, error: InferError) -> None:
    # a new error that was never raised: a traceback holds the batch, and the batch holds the request
    request.error = type(error)(error.code, error.message, error.retry_after_ns)
    request.outputs = None
