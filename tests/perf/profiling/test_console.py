from __future__ import annotations

import io
from dataclasses import replace

from penstock.perf.profiling import console, measuring
from penstock.perf.profiling.console import Console
from penstock.perf.profiling.options import Options, Range, Rule
from penstock.perf.reports.document import Document, Level, Offered
from tests.perf.profiling.scripted import document, level, served, window

SPLIT = "overhead 2 usec + queue 11 usec + compute input 5 usec + compute infer 20 usec + compute output 3 usec"
UNSTABLE = (
    "Failed to obtain stable measurement within 3 measurement windows for concurrency 1."
    " Please try to increase the --measurement-interval."
)
CLOSED = Options("iris", concurrency=Range(1, 2, 1))


def printed(options: Options, run: Document) -> tuple[str, str]:
    out, err = io.StringIO(), io.StringIO()
    console = Console(options, out, err)
    for each in run.levels:
        console.on_level_start(each.offered)
        console.on_level_end(each)
    console.close(run)
    return out.getvalue(), err.getvalue()


def test_a_level_is_printed_in_the_format_of_perf_analyzer() -> None:
    out, err = printed(CLOSED, document(level(2, 5321.987, server=served())))

    assert out.splitlines() == [
        "Request concurrency: 2",
        "  Client: ",
        "    Request count: 300",
        "    Throughput: 5321.99 infer/sec",
        "    Avg latency: 100 usec (standard deviation 1 usec)",
        "    p50 latency: 100 usec",
        "    p90 latency: 100 usec",
        "    p95 latency: 100 usec",
        "    p99 latency: 100 usec",
        "    Avg HTTP time: 100 usec",
        "    Generator: 10.0 usec of CPU per request, 0.10 cores",
        "  Server: ",
        "    Inference count: 300",
        "    Execution count: 100",
        "    Successful request count: 300",
        f"    Avg request latency: 42 usec ({SPLIT})",
        "",
        "Inferences/Second vs. Client Average Batch Latency",
        "Concurrency: 2, throughput: 5321.99 infer/sec, latency 100 usec",
    ]
    assert err == ""


def test_a_percentile_replaces_the_mean() -> None:
    out, _ = printed(replace(CLOSED, rule=Rule(percentile=97)), document(level(1, 10, mean_us=50)))

    assert "Avg latency" not in out
    assert "    p97 latency: 50 usec\n" in out
    assert "Inferences/Second vs. Client p97 Batch Latency\nConcurrency: 1, throughput: 10 infer/sec" in out


def test_an_ensemble_lists_its_models() -> None:
    out, _ = printed(CLOSED, document(level(1, 10, server=served(composing={"inner": served(version="3")}))))

    assert "(overhead 2 usec + queue 11 usec + compute 28 usec)" in out
    assert "  Composing models: \n  inner, version: 3\n      Inference count: 300\n" in out


def test_cache_figures_are_shown_separately() -> None:
    side = served(cache_hits=100, cache_misses=200, cache_hit_us=10.0, cache_miss_us=1.0)
    out, _ = printed(CLOSED, document(level(1, 10, server=side)))

    assert "    Cache hit count: 100\n    Cache miss count: 200\n" in out
    assert "queue 11 usec + cache hit/miss 23 usec)" in out


def test_levels_that_failed_or_were_unstable_are_marked() -> None:
    unstable = level(1, 10, stable=False, ended="unstable")
    exceeds_threshold = level(2, 10, ended=measuring.OVER)
    lost = level(3, 10, stable=False, settled=0, ended="the server was lost in window 2: reset")
    lost.client.errors = {"connection lost": 3}
    out, err = printed(replace(CLOSED, rule=Rule(threshold_ms=5)), document(unstable, exceeds_threshold, lost))

    assert err.splitlines() == [
        UNSTABLE,
        "Measured latency went over the set limit of 5 msec. ",
        "concurrency 3: the server was lost in window 2: reset. Errors: 3 (3 x connection lost)",
    ]
    assert out.splitlines()[-2:] == [
        "Concurrency: 1, throughput: 10 infer/sec, latency 100 usec [unstable]",
        "Concurrency: 2, throughput: 10 infer/sec, latency 100 usec [over the latency threshold]",
    ]


def test_the_most_frequent_errors_are_listed_first_up_to_a_limit() -> None:
    failing = level(1, 10)
    failing.client.errors = {f"50{number}: why": number for number in range(1, 8)}
    out, _ = printed(CLOSED, document(failing))

    assert (
        "    Errors: 28 (7 x 507: why; 6 x 506: why; 5 x 505: why; 4 x 504: why; 3 x 503: why; and 2 other kinds)"
        in out
    )


def test_a_generator_that_uses_its_whole_core_warns() -> None:
    busy = level(1, 10)
    busy.client.cores = 0.95

    assert "[WARNING] the load generator used 0.95 cores" in printed(CLOSED, document(busy))[0]
    assert "[WARNING]" not in printed(replace(CLOSED, processes=2), document(busy))[0]


def test_windows_are_printed_in_verbose_mode() -> None:
    out = io.StringIO()
    console = Console(replace(CLOSED, verbose=1), out, out)
    console.on_level_start(Offered("rate", 100.5))
    for part in (window([100] * 4), window([])):
        console.on_window(part, measuring.client(part))

    assert out.getvalue().splitlines() == [
        "Request Rate: 100.5 inference requests per seconds",
        "  Pass [1] throughput: 4 infer/sec. Avg latency: 100 usec (std 0 usec). ",
        "  Pass [2] no request ended well. ",
    ]


def test_the_settings_describe_what_is_measured_and_how() -> None:
    lines = console.settings(replace(CLOSED, rule=Rule(interval_ms=300, percentile=90), binary_search=True))

    assert lines[0] == "*** Measurement Settings ***"
    assert "  Stabilizing using p90 latency" in lines
    assert "  Measurement window: 300 msec" in lines
    assert "  Concurrency limit: 2 concurrent requests" in lines
    assert "  Using Binary Search algorithm" in lines
    counted = console.settings(
        Options("iris", concurrency=None, rate=Range(1, 9, 1), poisson=True, rule=Rule(by_count=True))
    )
    assert "  Minimum number of samples in each window: 50" in counted
    assert "  Request Rate limit: 9 requests per seconds" in counted
    assert "  Using poisson distribution on request generation" in counted
    assert "  Sending a total of 7 requests" in console.settings(Options("iris", rule=Rule(total_requests=7)))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_a_progress_bar_and_the_same_lines() -> None:
    out = Terminal()
    console = Console(replace(CLOSED, verbose=1), out, out)
    part = window([100] * 4)
    console.on_level_start(Offered("concurrency", 2))
    console.on_progress(0.5)
    console.on_window(part, measuring.client(part))
    console.on_level_end(level(2, 10))

    text = out.getvalue()
    assert "  Pass [1] throughput: 4 infer/sec. Avg latency: 100 usec (std 0 usec). " in text
    assert text.rstrip().endswith("Generator: 10.0 usec of CPU per request, 0.10 cores")
    assert "Request concurrency: 2" in text


def test_metrics_are_shown_for_each_gpu() -> None:
    figures = {"utilization": 0.5, "power_w": 71.25, "memory_bytes": 2e9, "memory_total_bytes": 8e10}
    out, _ = printed(replace(CLOSED, collect_metrics=True), document(level(1, 10, gpus={"GPU-a": figures})))

    assert "    Avg GPU Utilization:\n      GPU-a : 50%\n" in out
    assert "    Max GPU Memory Usage:\n      GPU-a : 2000000000 bytes\n" in out


def lost(value: float) -> Level:
    return level(value, 10, settled=0, ended="gone")


def test_a_run_without_figures_has_no_summary() -> None:
    assert console.summary(CLOSED, document(lost(1))) == []


def test_a_note_is_printed_once_unless_verbose() -> None:
    run = document(*(level(value, 10, notes=["no statistics"]) for value in (1, 2)))

    assert printed(CLOSED, run)[0].count("no statistics") == 1
    assert printed(replace(CLOSED, verbose=1), run)[0].count("no statistics") == 2


def test_the_summary_counts_failed_requests() -> None:
    run = document(level(1, 10))
    run.levels[0].client.errors = {"503: busy": 3, "429: busy": 2}

    assert printed(CLOSED, run)[0].endswith("latency 100 usec [5 requests failed]\n")


def test_a_level_that_ended_badly_is_one_line_with_one_full_stop() -> None:
    run = document(level(1, 10, settled=0, ended=measuring.EMPTY))

    assert printed(CLOSED, run)[1] == f"concurrency 1: {measuring.EMPTY}\n"


def test_responses_of_a_decoupled_model_have_a_line() -> None:
    run = document(level(1, 10))
    run.levels[0].client.responses_per_s = 40.0

    assert "    Throughput: 10 infer/sec\n    Response Throughput: 40 infer/sec\n" in printed(CLOSED, run)[0]
