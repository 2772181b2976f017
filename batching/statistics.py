"""ModelStatistics: what one model version has served, computed from stamps once per batch.

Written by the Engine on its event loop, and read there by the statistics endpoint and the metrics page. It is told the
time and owns no clock: `last_inference_ns` is monotonic, and `server/` turns it into a date.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor
from typing import Any

import numpy as np

from .answer_statistics import AnswerStatistics
from .histogram import Histogram, HistogramSnapshot
from .request import InferRequest
from .running.batch import Batch, Stamps
from .scheduling.quantiles import WINDOW_NS, Quantiles
from .spec import FIRST_RESPONSE_BOUNDS_MS

REJECTED = "REJECTED"
CANCELED = "CANCELED"
BACKEND = "BACKEND"
OTHER = "OTHER"
FAILURE_REASONS = (REJECTED, CANCELED, BACKEND, OTHER)
HOOKS = ("pre", "post")
LATENCIES = ("request", "queue", "compute_input", "compute_infer", "compute_output")
"""The latencies that have summaries, per successful request."""
CACHE_LATENCIES = ("cache_hit", "cache_miss")
"""The same for models whose answers are cached."""

# 50 us to 10 s: a model run by the loop takes tens of microseconds, and Prometheus' own default begins at 5 ms.
LATENCY_BOUNDS_NS: tuple[int, ...] = tuple(
    microseconds * 1_000
    for microseconds in (
        50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000,
        1_000_000, 2_500_000, 5_000_000, 10_000_000,
    )
)  # fmt: skip
ROWS_BOUNDS: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

# Bounds what is not yet counted; counting this many requests takes the loop about 0.25 ms.
_MAX_PENDING = 1024
# A model may see any number of batch sizes; past this many, a new one is rounded up to a power of two.
_MAX_BATCH_SIZES = 512
_STAMPS_PER_BATCH = 8
_STAMPS_PER_HIT = 4
_STAMPS_PER_MISS = 3

_IntArray = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Duration:
    """A count and a total time. Units: nanoseconds."""

    count: int
    ns: int


@dataclass(frozen=True, slots=True)
class BatchSizeStatistics:
    """All batches that ran with `rows` rows. Units: nanoseconds, once per batch."""

    rows: int
    count: int
    compute_input_ns: int
    compute_infer_ns: int
    compute_output_ns: int


@dataclass(frozen=True, slots=True)
class StatisticsSnapshot:
    """One consistent reading.

    Every successful request is charged the whole durations of its batch. `last_inference_ns` is a monotonic stamp, 0 if
    there was none. The `compute` and `rows` histograms count batches, `queue` and `total` requests. A request answered
    from the cache counts as successful and queued, but not as run.
    Source: Triton core, infer_stats.cc (the counters); the histograms are Penstock's own.
    """

    success: Duration
    queue: Duration
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration
    cache_hit: Duration
    cache_miss: Duration
    fail: Duration
    failures: dict[str, int]
    inference_count: int
    execution_count: int
    last_inference_ns: int
    batch_stats: tuple[BatchSizeStatistics, ...]
    queue_histogram: HistogramSnapshot
    compute_histogram: HistogramSnapshot
    total_histogram: HistogramSnapshot
    first_response_histogram: HistogramSnapshot
    rows_histogram: HistogramSnapshot
    hook_histograms: dict[str, HistogramSnapshot]


class ModelStatistics:
    """Counts of one model version since it was loaded.

    Invariant: memory is bounded, whatever is recorded. The writing methods only append integers; numpy counts them once
    a thousand requests have accumulated, or on a read. Measured, counting included: 0.15 us per request in batches of
    32, 0.45 us for a batch of one.
    Threads: the event loop's only, reads included.
    """

    def __init__(self, first_response_ms: Sequence[float] = FIRST_RESPONSE_BOUNDS_MS) -> None:
        self._starts: list[int] = []
        self._queued: list[int] = []
        self._batches: list[int] = []
        self._hits: list[int] = []
        self._misses: list[int] = []
        self._hook_ns: dict[str, list[int]] = {hook: [] for hook in HOOKS}
        self._failures = dict.fromkeys(FAILURE_REASONS, 0)
        self._fail_ns = 0
        self._inference_count = self._unused_rows = 0
        self._execution_count = 0
        self._success_count = 0
        self._success_ns = 0
        self._queue_ns = 0
        self._compute_ns = [0, 0, 0]
        self._hit_count = self._hit_ns = self._miss_count = self._miss_ns = 0
        self._last_inference_ns = 0
        self._by_rows: dict[int, list[int]] = {}
        self._queue = Histogram(LATENCY_BOUNDS_NS)
        self._compute = Histogram(LATENCY_BOUNDS_NS)
        self._total = Histogram(LATENCY_BOUNDS_NS)
        self._first_response = Histogram(tuple(floor(bound * 1e6) for bound in first_response_ms))
        self._rows = Histogram(ROWS_BOUNDS)
        self._hooks = {hook: Histogram(LATENCY_BOUNDS_NS) for hook in HOOKS}
        self._quantiles: dict[str, Quantiles] = {}
        self.answers: AnswerStatistics | None = None

    def record_batch(self, batch: Batch, end_ns: int) -> None:
        """Count a batch all of whose requests succeeded and were delivered at `end_ns`."""
        requests = batch.requests
        if len(requests) == 1:
            request = requests[0]
            self._starts.append(request.start_ns)
            self._queued.append(request.enqueued_ns)
            empty = 0 if request.rows else 1
        else:
            self._starts += [request.start_ns for request in requests]
            self._queued += [request.enqueued_ns for request in requests]
            empty = [request.rows for request in requests].count(0)
        unused = batch.span_rows - batch.rows  # unused rows count for the batch but not as inferences, as in Triton
        self._unused_rows += unused
        self._batches += (
            len(requests),
            batch.rows + empty + unused,  # a request without rows counts as one inference, as in Triton
            batch.exec_start_ns,
            batch.compute_start_ns,
            batch.compute_end_ns,
            batch.exec_end_ns,
            end_ns,
            batch.run_count,
        )
        if len(self._starts) >= _MAX_PENDING:
            self._count_batches()

    def record_single(self, request: InferRequest, stamps: Stamps, end_ns: int) -> None:
        """Count a request that succeeded in its own batch and was delivered at `end_ns`."""
        self._starts.append(request.start_ns)
        self._queued.append(request.enqueued_ns)
        self._batches += (1, request.rows or 1, *stamps, end_ns, 1)
        if len(self._starts) >= _MAX_PENDING:
            self._count_batches()

    def record_hit(self, request: InferRequest, start_ns: int, end_ns: int) -> None:
        """Count a request answered from the cache, whose lookup took from `start_ns` to `end_ns`."""
        self._hits += (request.start_ns, request.enqueued_ns, start_ns, end_ns)
        if len(self._hits) >= _MAX_PENDING * _STAMPS_PER_HIT:
            self._count_hits()

    def record_miss(self, lookup_ns: int, insertion_ns: int, end_ns: int) -> None:
        """Count a cache miss, once the answer has been inserted at `end_ns`."""
        self._misses += (lookup_ns, insertion_ns, end_ns)
        if len(self._misses) >= _MAX_PENDING * _STAMPS_PER_MISS:
            self._count_misses()

    def record_failure(self, reason: str, start_ns: int, end_ns: int) -> None:
        """Count a request that was rejected, cancelled or failed. `reason` is one of FAILURE_REASONS."""
        self._failures[reason] += 1
        self._fail_ns += max(end_ns - start_ns, 0)

    def record_first_response(self, ns: int) -> None:
        """Count the first answer of a request that has `answer_sink`, which does not come with its batch."""
        self._first_response.add(np.array([ns], np.int64))

    def record_hook(self, hook: str, ns: int) -> None:
        """Count one call of a hook, "pre" or "post"."""
        pending = self._hook_ns[hook]
        pending.append(ns)
        if len(pending) >= _MAX_PENDING:
            self._count_hook(hook)

    def snapshot(self) -> StatisticsSnapshot:
        """Read everything recorded so far."""
        self._count_all()
        for hook in HOOKS:
            self._count_hook(hook)
        count, ran = self._success_count, self._success_count - self._hit_count
        compute_input_ns, compute_infer_ns, compute_output_ns = self._compute_ns
        return StatisticsSnapshot(
            success=Duration(count, self._success_ns),
            queue=Duration(count, self._queue_ns),
            compute_input=Duration(ran, compute_input_ns),
            compute_infer=Duration(ran, compute_infer_ns),
            compute_output=Duration(ran, compute_output_ns),
            cache_hit=Duration(self._hit_count, self._hit_ns),
            cache_miss=Duration(self._miss_count, self._miss_ns),
            fail=Duration(sum(self._failures.values()), self._fail_ns),
            failures=dict(self._failures),
            inference_count=self._inference_count,
            execution_count=self._execution_count,
            last_inference_ns=self._last_inference_ns,
            batch_stats=tuple(BatchSizeStatistics(rows, *self._by_rows[rows]) for rows in sorted(self._by_rows)),
            queue_histogram=self._queue.snapshot(),
            compute_histogram=self._compute.snapshot(),
            total_histogram=self._total.snapshot(),
            first_response_histogram=self._first_response.snapshot(),
            rows_histogram=self._rows.snapshot(),
            hook_histograms={hook: self._hooks[hook].snapshot() for hook in HOOKS},
        )

    def summaries(self, quantiles: Sequence[float], capacity: int, now_ns: int) -> dict[str, list[int | None]]:
        """Return the quantiles of LATENCIES and CACHE_LATENCIES over the last minute, or as much of it as was recorded.

        Recording starts with the first call, so servers that never ask pay nothing.
        Units: nanoseconds; None if there was no request.
        """
        self._count_all()
        if not self._quantiles:
            self._quantiles = {name: Quantiles(capacity) for name in (*LATENCIES, *CACHE_LATENCIES)}
        return {name: estimator.at(quantiles, now_ns) for name, estimator in self._quantiles.items()}

    def _count_all(self) -> None:
        self._count_batches()
        self._count_hits()
        self._count_misses()

    def _count_batches(self) -> None:
        if not self._starts:
            return
        batches = _to_array(self._batches).reshape(-1, _STAMPS_PER_BATCH)
        starts, queued = _to_array(self._starts), _to_array(self._queued)
        self._starts, self._queued, self._batches = [], [], []
        sizes, rows, stamps, ends, runs = batches[:, 0], batches[:, 1], batches[:, 2:6], batches[:, 6], batches[:, 7]
        # Stamps come from two threads and a loop turn may share one: clamp differences just below 0.
        total = np.maximum(np.repeat(ends, sizes) - starts, 0)
        queue = np.maximum(np.repeat(stamps[:, 0], sizes) - queued, 0)
        parts = np.maximum(stamps[:, 1:] - stamps[:, :-1], 0) // runs[:, None]
        self._success_count += len(starts)
        self._execution_count += int(runs.sum())
        self._inference_count, self._unused_rows = self._inference_count + int(rows.sum()) - self._unused_rows, 0
        self._success_ns += int(total.sum())
        self._queue_ns += int(queue.sum())
        charged = (parts * sizes[:, None]).sum(axis=0).tolist()
        self._compute_ns = [before + more for before, more in zip(self._compute_ns, charged, strict=True)]
        self._last_inference_ns = max(self._last_inference_ns, int(ends.max()))
        self._total.add(total)
        if self.answers is None:
            self._first_response.add(total)
        self._queue.add(queue)
        self._count_runs(np.repeat(rows // runs, runs), np.repeat(parts, runs, axis=0))
        if self._quantiles:
            windows = np.repeat(ends // WINDOW_NS, sizes)
            for name, values in zip(LATENCIES, (total, queue, *np.repeat(parts, sizes, axis=0).T), strict=True):
                self._quantiles[name].add(values, windows)

    def _count_hits(self) -> None:
        if not self._hits:
            return
        stamps = _to_array(self._hits).reshape(-1, _STAMPS_PER_HIT)
        self._hits = []
        starts, queued, lookup_starts, ends = stamps.T
        total, queue, lookups = (
            np.maximum(each, 0) for each in (ends - starts, lookup_starts - queued, ends - lookup_starts)
        )
        self._success_count += len(stamps)
        self._hit_count += len(stamps)
        self._success_ns += int(total.sum())
        self._queue_ns += int(queue.sum())
        self._hit_ns += int(lookups.sum())
        self._total.add(total)
        if self.answers is None:
            self._first_response.add(total)
        self._queue.add(queue)
        if self._quantiles:
            windows = ends // WINDOW_NS
            for name, values in zip(("request", "queue", "cache_hit"), (total, queue, lookups), strict=True):
                self._quantiles[name].add(values, windows)

    def _count_misses(self) -> None:
        if not self._misses:
            return
        stamps = _to_array(self._misses).reshape(-1, _STAMPS_PER_MISS)
        self._misses = []
        lookups, insertions, ends = stamps.T
        self._miss_count += len(stamps)
        self._miss_ns += int((lookups + insertions).sum())
        if self._quantiles:
            self._quantiles["cache_miss"].add(lookups + insertions, ends // WINDOW_NS)

    def _count_runs(self, rows: _IntArray, parts: _IntArray) -> None:
        self._compute.add(parts.sum(axis=1))
        self._rows.add(rows)
        order = np.argsort(rows, kind="stable")
        sizes, first, counts = np.unique(rows[order], return_index=True, return_counts=True)
        sums = np.add.reduceat(parts[order], first, axis=0)
        for size, count, more in zip(sizes.tolist(), counts.tolist(), sums.tolist(), strict=True):
            known = size in self._by_rows or len(self._by_rows) < _MAX_BATCH_SIZES
            entry = self._by_rows.setdefault(size if known else 1 << (size - 1).bit_length(), [0, 0, 0, 0])
            entry[:] = [before + value for before, value in zip(entry, (count, *more), strict=True)]

    def _count_hook(self, hook: str) -> None:
        pending = self._hook_ns[hook]
        if pending:
            self._hook_ns[hook] = []
            self._hooks[hook].add(np.maximum(_to_array(pending), 0))


def _to_array(numbers: list[int]) -> _IntArray:
    # a third of the time that np.array takes
    return np.fromiter(numbers, np.int64, len(numbers))
