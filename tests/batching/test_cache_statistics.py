"""What the response cache adds to a model's statistics. Source: Triton core, UpdateSuccessCacheHit and -Miss."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.batching.request import InferRequest
from penstock.batching.running.batch import Batch
from penstock.batching.statistics import CACHE_LATENCIES, LATENCIES, Duration, ModelStatistics
from tests.fakes import fake_model, fake_request

US = 1_000


def request_at(start_us: int = 0, queue_us: int = 0) -> InferRequest:
    request = fake_request(fake_model())
    request.start_ns, request.enqueued_ns = start_us * US, queue_us * US
    return request


def test_a_cache_hit_counts_as_success_with_queue_time_and_without_execution() -> None:
    statistics = ModelStatistics()
    statistics.record_hit(request_at(10, 20), 25 * US, 40 * US)
    counted = statistics.snapshot()

    assert counted.success == Duration(1, 30 * US)
    assert counted.queue == Duration(1, 5 * US)
    assert counted.cache_hit == Duration(1, 15 * US)
    assert (
        counted.cache_miss == counted.compute_input == counted.compute_infer == counted.compute_output == Duration(0, 0)
    )
    assert (counted.inference_count, counted.execution_count, counted.last_inference_ns) == (0, 0, 0)
    assert (counted.batch_stats, counted.rows_histogram.count, counted.compute_histogram.count) == ((), 0, 0)
    assert (counted.total_histogram.count, counted.queue_histogram.count) == (1, 1)


def test_a_cache_miss_counts_its_lookup_and_insertion_and_no_success() -> None:
    statistics = ModelStatistics()
    statistics.record_miss(3 * US, 4 * US, 100 * US)
    counted = statistics.snapshot()

    assert counted.cache_miss == Duration(1, 7 * US)
    assert counted.success == Duration(0, 0)


@given(hits=st.integers(0, 2500), misses=st.integers(0, 2500))
def test_executions_equal_successes_minus_cache_hits(hits: int, misses: int) -> None:
    statistics = ModelStatistics()
    request = request_at(1, 2)
    for _ in range(hits):
        statistics.record_hit(request, 3 * US, 5 * US)
    for _ in range(misses):
        statistics.record_batch(_ran(request), 9 * US)
        statistics.record_miss(1 * US, 1 * US, 9 * US)
    counted = statistics.snapshot()

    assert counted.success.count == counted.queue.count == hits + misses
    assert counted.compute_infer.count == counted.execution_count == counted.cache_miss.count == misses
    assert counted.cache_hit == Duration(hits, 2 * US * hits)
    assert counted.success.ns == 4 * US * hits + 8 * US * misses


def _ran(request: InferRequest) -> Batch:
    return Batch([request], 1, request.key, 5 * US)


def test_latency_summaries_include_cache_hits_and_misses() -> None:
    statistics = ModelStatistics()
    found = statistics.summaries([0.5], 1024, 0)
    assert found == {name: [None] for name in (*LATENCIES, *CACHE_LATENCIES)}

    statistics.record_hit(request_at(10, 20), 25 * US, 40 * US)
    statistics.record_miss(3 * US, 4 * US, 100 * US)
    found = statistics.summaries([0.5], 1024, 100 * US)

    assert found["cache_hit"] == [15 * US]
    assert found["cache_miss"] == [7 * US]
    assert found["queue"] == [5 * US]
    assert found["compute_infer"] == [None]
