"""ModelStatistics: hand-made batches in, counts out."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from penstock.batching.histogram import HistogramSnapshot
from penstock.batching.request import InferRequest
from penstock.batching.running.batch import Batch
from penstock.batching.statistics import (
    BACKEND,
    CANCELED,
    LATENCY_BOUNDS_NS,
    REJECTED,
    ROWS_BOUNDS,
    BatchSizeStatistics,
    Duration,
    ModelStatistics,
)
from tests.fakes import fake_model

US = 1_000
MS = 1_000_000


class NoSink:
    def deliver(self, requests: object) -> None:
        raise AssertionError("nothing is delivered here")


@dataclass(frozen=True)
class Stamps:
    """One batch: its requests as (rows, start, queue), then exec start, three durations and the delay to delivery."""

    requests: tuple[tuple[int, int, int], ...]
    exec_ns: int
    input_ns: int
    infer_ns: int
    output_ns: int
    delivery_ns: int

    @property
    def end_ns(self) -> int:
        return self.exec_ns + self.input_ns + self.infer_ns + self.output_ns + self.delivery_ns

    def batch(self) -> Batch:
        model, sink = fake_model(), NoSink()
        requests = []
        for rows, start_ns, queue_ns in self.requests:
            request = InferRequest(model, [], rows, (), (0,), sink)
            request.start_ns, request.enqueued_ns = start_ns, queue_ns
            requests.append(request)
        batch = Batch(requests, sum(rows for rows, _, _ in self.requests), (), self.exec_ns)
        batch.compute_start_ns = self.exec_ns + self.input_ns
        batch.compute_end_ns = batch.compute_start_ns + self.infer_ns
        batch.exec_end_ns = batch.compute_end_ns + self.output_ns
        return batch


def _recorded(*stamps: Stamps) -> ModelStatistics:
    statistics = ModelStatistics()
    for each in stamps:
        statistics.record_batch(each.batch(), each.end_ns)
    return statistics


TWO = Stamps(((3, 100 * US, 110 * US), (1, 200 * US, 205 * US)), 300 * US, 10 * US, 400 * US, 20 * US, 70 * US)
ONE = Stamps(((2, 1000 * US, 1000 * US),), 1001 * US, 1 * US, 50 * US, 3 * US, 5 * US)


def test_each_request_is_charged_the_whole_durations_of_its_batch() -> None:
    counted = _recorded(TWO, ONE).snapshot()

    assert counted.compute_input == Duration(3, (2 * 10 + 1) * US)
    assert counted.compute_infer == Duration(3, (2 * 400 + 50) * US)
    assert counted.compute_output == Duration(3, (2 * 20 + 3) * US)


def test_queue_time_ends_where_execution_starts_and_success_ends_at_delivery() -> None:
    counted = _recorded(TWO, ONE).snapshot()

    assert counted.queue == Duration(3, (190 + 95 + 1) * US)
    assert counted.success == Duration(3, (700 + 600 + 60) * US)
    assert counted.last_inference_ns == ONE.end_ns


def test_inferences_count_rows_and_executions_count_batches() -> None:
    counted = _recorded(TWO, ONE).snapshot()

    assert (counted.inference_count, counted.execution_count) == (6, 2)


def test_batch_stats_are_per_execution_and_by_rows() -> None:
    counted = _recorded(TWO, ONE, ONE).snapshot()

    assert counted.batch_stats == (
        BatchSizeStatistics(2, 2, 2 * US, 100 * US, 6 * US),
        BatchSizeStatistics(4, 1, 10 * US, 400 * US, 20 * US),
    )


def test_requests_run_one_after_another_count_as_separate_executions() -> None:
    statistics = ModelStatistics()
    stamps = Stamps(((1, 0, 0), (1, 0, 0), (1, 0, 0)), 10 * US, 0, 90 * US, 0, 0)
    batch = stamps.batch()
    batch.run_count = 3
    statistics.record_batch(batch, stamps.end_ns)

    counted = statistics.snapshot()

    assert (counted.inference_count, counted.execution_count) == (3, 3)
    assert counted.compute_infer == Duration(3, 90 * US)
    assert counted.batch_stats == (BatchSizeStatistics(1, 3, 0, 90 * US, 0),)


def test_a_request_without_rows_counts_as_one_inference() -> None:
    empty = Stamps(((0, 1, 1), (2, 1, 1)), 2, 1, 1, 1, 1)
    alone = Stamps(((0, 1, 1),), 2, 1, 1, 1, 1)

    assert _recorded(empty, alone).snapshot().inference_count == 4


def test_queue_time_is_counted_even_if_no_request_waited() -> None:
    at_once = Stamps(((1, 5, 5),), 5, 0, 0, 0, 0)

    assert _recorded(at_once).snapshot().queue == Duration(1, 0)


def test_a_batch_stamped_before_its_requests_arrival_counts_as_no_wait() -> None:
    early = Stamps(((1, 1000, 1000),), 990, 5, 5, 5, 5)

    counted = _recorded(early).snapshot()

    assert (counted.queue.ns, counted.queue_histogram.total) == (0, 0)


def test_histograms_count_requests_or_batches_by_inclusive_upper_bound() -> None:
    counted = _recorded(TWO, ONE).snapshot()

    assert _filled(counted.queue_histogram) == {50 * US: 1, 100 * US: 1, 250 * US: 1}
    assert _filled(counted.compute_histogram) == {100 * US: 1, 500 * US: 1}
    assert _filled(counted.total_histogram) == {100 * US: 1, 1 * MS: 2}
    assert _filled(counted.rows_histogram) == {2: 1, 4: 1}
    assert counted.total_histogram.total == counted.success.ns


def test_histogram_bounds_are_inclusive_and_larger_values_count_as_overflow() -> None:
    statistics = ModelStatistics()
    for ns in (50 * US, 50 * US + 1, 10_000 * MS, 10_000 * MS + 1):
        statistics.record_hook("pre", ns)

    counts = statistics.snapshot().hook_histograms["pre"].counts

    assert (counts[0], counts[1], counts[-2], counts[-1]) == (1, 1, 1, 1)


def test_hooks_have_separate_histograms() -> None:
    statistics = ModelStatistics()
    statistics.record_hook("pre", 60 * US)
    statistics.record_hook("post", 40 * US)
    statistics.record_hook("post", 30 * US)

    histograms = statistics.snapshot().hook_histograms

    assert (histograms["pre"].count, histograms["pre"].total) == (1, 60 * US)
    assert (histograms["post"].count, histograms["post"].total) == (2, 70 * US)


def test_failures_are_counted_by_reason_and_not_as_successes() -> None:
    statistics = ModelStatistics()
    statistics.record_failure(REJECTED, 10, 15)
    statistics.record_failure(REJECTED, 10, 17)
    statistics.record_failure(BACKEND, 20, 40)
    statistics.record_failure(CANCELED, 9, 8)

    counted = statistics.snapshot()

    assert counted.failures == {"REJECTED": 2, "CANCELED": 1, "BACKEND": 1, "OTHER": 0}
    assert counted.fail == Duration(4, 5 + 7 + 20)
    assert counted.success == Duration(0, 0)


def test_statistics_without_records_are_zero() -> None:
    counted = ModelStatistics().snapshot()

    assert (counted.inference_count, counted.last_inference_ns, counted.batch_stats) == (0, 0, ())
    assert counted.total_histogram == HistogramSnapshot(LATENCY_BOUNDS_NS, (0,) * (len(LATENCY_BOUNDS_NS) + 1), 0)


def test_batch_sizes_are_rounded_up_once_there_are_many() -> None:
    statistics = ModelStatistics()
    for rows in range(1, 5001):
        statistics.record_batch(Stamps(((rows, 1, 1),), 2, 1, 1, 1, 1).batch(), 10)

    sizes = statistics.snapshot().batch_stats

    assert len(sizes) < 600
    assert sum(size.count for size in sizes) == 5000


_ns = st.integers(0, 10**12)
_request = st.tuples(st.integers(0, 9), _ns, _ns)
_stamps = st.builds(Stamps, st.lists(_request, min_size=1, max_size=5).map(tuple), _ns, _ns, _ns, _ns, _ns)


@given(st.lists(_stamps, max_size=8), st.lists(st.booleans(), min_size=8, max_size=8), st.integers(1, 400))
def test_every_sum_matches_the_recorded_stamps_whenever_it_is_read(
    batches: list[Stamps], read_between: list[bool], repeats: int
) -> None:
    statistics = ModelStatistics()
    for stamps, reads in zip(batches, read_between, strict=False):
        batch = stamps.batch()
        for _ in range(repeats):
            statistics.record_batch(batch, stamps.end_ns)
        if reads:
            statistics.snapshot()
    counted = statistics.snapshot()

    each = [(stamps, request) for stamps in batches for request in stamps.requests]
    assert counted.success.count == counted.queue.count == counted.compute_infer.count == len(each) * repeats
    assert counted.queue.ns == repeats * sum(max(s.exec_ns - queue, 0) for s, (_, _, queue) in each)
    assert counted.success.ns == repeats * sum(max(s.end_ns - start, 0) for s, (_, start, _) in each)
    assert counted.compute_input.ns == repeats * sum(s.input_ns for s, _ in each)
    assert counted.compute_infer.ns == repeats * sum(s.infer_ns for s, _ in each)
    assert counted.compute_output.ns == repeats * sum(s.output_ns for s, _ in each)
    assert counted.inference_count == repeats * sum(max(rows, 1) for _, (rows, _, _) in each)
    assert counted.execution_count == counted.rows_histogram.count == repeats * len(batches)
    assert counted.queue_histogram.total == counted.queue.ns
    assert counted.total_histogram.count == counted.success.count
    assert counted.compute_histogram.total == repeats * sum(s.input_ns + s.infer_ns + s.output_ns for s in batches)
    by_rows: Counter[int] = Counter()
    for stamps in batches:
        by_rows[sum(max(rows, 1) for rows, _, _ in stamps.requests)] += repeats
    assert {entry.rows: entry.count for entry in counted.batch_stats} == dict(by_rows)
    assert sum(entry.compute_infer_ns for entry in counted.batch_stats) == repeats * sum(s.infer_ns for s in batches)


@given(st.lists(st.integers(1, 5000), max_size=20))
def test_row_counts_fall_into_the_first_bucket_that_holds_them(rows: list[int]) -> None:
    statistics = ModelStatistics()
    for count in rows:
        statistics.record_batch(Stamps(((count, 1, 1),), 1, 0, 0, 0, 0).batch(), 1)

    histogram = statistics.snapshot().rows_histogram

    cumulated = [sum(histogram.counts[: position + 1]) for position in range(len(ROWS_BOUNDS))]
    assert cumulated == [sum(count <= bound for count in rows) for bound in ROWS_BOUNDS]
    assert histogram.total == sum(rows)


def _filled(histogram: HistogramSnapshot) -> dict[int, int]:
    return {bound: count for bound, count in zip(histogram.bounds, histogram.counts, strict=False) if count}
