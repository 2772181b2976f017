"""The parts of generator_accuracy/ that run nothing: draws, parsing what other clients print, verdicts."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from penstock.perf.generator.orders import Window
from penstock.perf.generator_accuracy import analyzer, theory
from penstock.perf.generator_accuracy.analyzer import FIGURES, Figures
from penstock.perf.generator_accuracy.theory import SEEDS, Draw
from penstock.perf.queueing import DETERMINISTIC, EXPONENTIAL, departures


def window_of(draw: Draw, times: float = 1.0, late_ns: int = 0) -> Window:
    """Let a generator see what the queue does, `times` as slowly and so much later."""
    arrivals = draw.arrivals()
    stays = (departures(arrivals, draw.services) - arrivals) * times + late_ns
    window = Window(0, 1, arrivals, arrivals + stays.astype(np.int64), np.zeros_like(arrivals))
    order = np.random.default_rng(1).permutation(len(arrivals))  # several connections do not end in order
    window.starts_ns, window.ends_ns = window.starts_ns[order], window.ends_ns[order]
    return window


@pytest.mark.parametrize(("law", "load"), SEEDS)
def test_the_draws_that_are_sent_are_close_to_theory(law: str, load: float) -> None:
    assert theory.distance_from_theory(Draw(law, load, SEEDS[law, load])) < 0.015


def test_the_draw_closest_to_theory_is_selected() -> None:
    find_closest_draw = theory.find_closest_draw(EXPONENTIAL, 0.7, seconds=5, tries=20)

    assert theory.distance_from_theory(find_closest_draw) == min(
        theory.distance_from_theory(Draw(EXPONENTIAL, 0.7, seed, 5)) for seed in range(20)
    )


@pytest.mark.parametrize(("law", "load"), SEEDS)
def test_an_exact_measurement_of_the_queue_passes(law: str, load: float) -> None:
    draw = Draw(law, load, SEEDS[law, load])
    written = theory.lines(draw, window_of(draw, late_ns=200_000), "HTTP")

    assert [line.rsplit(": ", 1)[1] for line in written] == ["holds", "holds"]
    assert all("+200 us of the draw" in line for line in written)


def test_a_measurement_that_is_off_by_a_tenth_fails() -> None:
    draw = Draw(DETERMINISTIC, 0.7, SEEDS[DETERMINISTIC, 0.7])

    assert all(line.endswith("DOES NOT HOLD") for line in theory.lines(draw, window_of(draw, times=0.9), "gRPC"))


def test_a_draw_that_was_not_answered_completely_fails() -> None:
    draw = Draw(DETERMINISTIC, 0.5, SEEDS[DETERMINISTIC, 0.5])
    window = window_of(draw)
    window.errors = Counter({"503: busy": 1})
    (failed,) = theory.lines(draw, window, "HTTP")
    (short,) = theory.lines(draw, Window(0, 1), "HTTP")

    assert "503: busy" in failed
    assert failed.endswith("DOES NOT HOLD")
    assert short.startswith("M/D/1 at 50% over HTTP: 0 of 1500 requests answered")


def test_both_csv_tables_are_parsed_alike() -> None:
    table = io.StringIO(
        "Concurrency,Inferences/Second,Client Send,Server Queue,Server Compute Input,Server Compute Infer,"
        "Server Compute Output,p50 latency,p90 latency,p95 latency,p99 latency,Avg latency\n"
        "4,205.4,111,13762,65,4695,50,19070,20976,21553,25390,19260\n"
    )

    assert analyzer.figures(table) == {
        "requests/s": 205.4, "avg": 19260, "p50": 19070, "p90": 20976, "p95": 21553, "p99": 25390,
        "server": 18572,
    }  # fmt: skip


def turns(*shares: float) -> Iterator[tuple[Figures, Figures]]:
    """Take turns in which our p99 is so far from theirs."""
    theirs = dict.fromkeys(FIGURES, 100.0)
    return iter([({**theirs, "p99": 100.0 * (1 + share)}, theirs) for share in shares])


@pytest.mark.parametrize(
    ("shares", "run_count", "p99"),
    [((0.04,), 1, 104), ((0.3, 0.01, 0.02), 3, 102), ((0.3, 0.3, -0.1), 3, 130), ((-0.06, -0.07, 0.0), 3, 94)],
)
def test_a_mode_that_differs_is_measured_again_and_judged_by_medians(
    shares: tuple[float, ...], run_count: int, p99: float
) -> None:
    mine, theirs, count = analyzer.median_comparison(turns(*shares).__next__, 3)

    assert (count, theirs["p99"]) == (run_count, 100)
    assert mine["p99"] == pytest.approx(p99)


def test_each_mode_has_its_own_name_and_flags() -> None:
    assert len({case.name for case in analyzer.CASES}) == len(analyzer.CASES)
    assert len({(case.words, case.grpc, case.intervals) for case in analyzer.CASES}) == len(analyzer.CASES)
