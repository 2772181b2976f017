"""What the levels of a run come to."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.perf.reports import findings, histograms
from penstock.perf.reports.document import Client, Document, Level, Model, Offered


def level(value: float, per_s: float, mean_us: float, *, kind: str = "concurrency", stable: bool = True) -> Level:
    """A level all of whose answers took as long."""
    latencies = np.full(1000, int(mean_us * 1e3))
    latency = dict.fromkeys(("mean", "p50", "p90", "p95", "p99"), mean_us)
    client = Client(1000, 1000, 1000 / per_s, per_s, per_s, latency, histograms.text(latencies))
    return Level(Offered(kind, value), stable, client)


def document(*levels: Level) -> Document:
    return Document(Model("m", "1", "", 0), [], "", "", "http", levels=list(levels))


RISING = (level(1, 1000, 1000), level(2, 1900, 1050), level(4, 3000, 1330), level(8, 3100, 2580), level(16, 3100, 5160))


def test_the_knee_maximizes_throughput_divided_by_mean_latency() -> None:
    result = findings.knee(RISING)

    assert result is RISING[2]
    assert [findings.power(each) for each in RISING] == pytest.approx([1, 1.81, 2.256, 1.2, 0.6], rel=0.01)


def test_a_single_level_has_no_knee() -> None:
    assert findings.knee(RISING[:1]) is None
    assert findings.best(RISING[:1]) is RISING[0]
    assert findings.best([]) is None


def test_unstable_levels_are_not_part_of_the_curve() -> None:
    loose = level(32, 9000, 100, stable=False)

    assert findings.fault(loose) == "not stable"
    assert findings.sound([*RISING, loose]) == list(RISING)
    assert findings.best([*RISING, loose]) is RISING[3]


def test_a_level_that_ended_early_states_its_reason() -> None:
    died = level(32, 9000, 100, stable=False)
    died.ended = "connection refused"

    assert findings.fault(died) == "connection refused"


def test_a_level_over_the_threshold_is_sound() -> None:
    past = level(32, 3100, 9000)
    past.ended = "over the latency threshold"

    assert not findings.fault(past)


@pytest.mark.parametrize(("errors", "sound"), [(1, True), (2, False)])
def test_a_thousandth_of_errors_is_tolerated_and_more_is_not(errors: int, sound: bool) -> None:
    some = level(32, 3100, 9000)
    some.client.errors = {"503": errors}

    assert (not findings.fault(some)) is sound
    assert f"{errors} errors" in " ".join(findings.cautions(document(some)))


def test_a_level_without_an_answer_has_no_figures() -> None:
    none = level(1, 1, 1)
    none.client.requests = 0

    assert findings.fault(none) == "no request was answered well"


def test_the_curve_is_ordered_by_load_however_it_was_visited() -> None:
    assert findings.sound(RISING[::-1]) == list(RISING)


def test_goodput_counts_answers_within_the_target() -> None:
    mixed = level(4, 1000, 1000)
    mixed.client.histogram = histograms.text(np.array([1_000_000] * 750 + [9_000_000] * 250))

    assert findings.goodput(mixed, 5.0) == 750
    assert findings.goodput(mixed, 0.5) == 0
    assert findings.goodput(mixed, 10.0) == 1000


def test_the_goodput_of_a_run_is_that_of_its_best_level() -> None:
    mixed = level(16, 5000, 2000)
    mixed.client.histogram = histograms.text(np.array([1_000_000] * 70 + [9_000_000] * 30))

    result = findings.goodput_of([*RISING[:3], mixed], 2.0)

    assert result
    assert (result.most, result.at, result.meeting) == (3500, mixed, RISING[2])


def test_without_a_sound_level_there_is_no_goodput() -> None:
    assert findings.goodput_of([], 2.0) is None
    assert findings.goodput_of([level(1, 1, 1, stable=False)], 2.0) is None


@pytest.mark.parametrize(
    ("p99_us", "target"), [(1330, 1.4), (1300, 1.3), (999, 1.0), (12_345, 13), (0.51, 0.00051), (99_100, 100)]
)
def test_the_default_target_is_the_p99_at_the_knee_rounded_up(p99_us: float, target: float) -> None:
    run = document(level(1, 1000, p99_us))

    assert findings.target_ms(run) == pytest.approx(target)


def test_a_requested_target_overrides_that_of_the_run() -> None:
    run = document(*RISING)
    run.target_ms = 7.0

    assert findings.target_ms(run) == 7.0
    assert findings.target_ms(run, 3.0) == 3.0
    assert findings.target_ms(document()) is None


def test_loads_are_named() -> None:
    every = [Offered("concurrency", 8), Offered("rate", 2500, "poisson"), Offered("rate", 0.5), Offered("intervals", 0)]

    assert [findings.load(each) for each in every] == ["8", "2,500/s", "0.500/s", "intervals"]
    assert [findings.load_words(each) for each in every] == [
        "concurrency 8",
        "2,500/s due (poisson)",
        "0.500/s due",
        "recorded intervals",
    ]


def test_falling_short_of_the_offered_load_and_lateness_cause_warnings() -> None:
    short = level(2000, 1000, 1000, kind="rate")
    short.client.late_us = {"p50": 1.0, "p99": 101.0, "max": 200.0}

    warnings = findings.cautions(document(short))

    assert warnings == [
        "2,000/s due: 2,000/s were due, 1,000/s were answered well.",
        "2,000/s due: the generator itself was late: 1% of requests left more than 101 us after they were due.",
    ]


def test_a_schedule_that_was_kept_and_a_closed_loop_cause_no_warning() -> None:
    on_schedule, closed = level(2000, 1901, 1000, kind="rate"), level(2000, 1000, 1000)
    on_schedule.client.late_us = {"p50": 1.0, "p99": 99.0, "max": 200.0}

    assert findings.cautions(document(on_schedule, closed)) == []


def test_recorded_intervals_may_exceed_what_is_answered_too() -> None:
    assert findings.cautions(document(level(2000, 1000, 1000, kind="intervals"))) == [
        "Recorded intervals, 2,000/s: 2,000/s were due, 1,000/s were answered well."
    ]


def test_a_run_that_ended_early_is_reported_first() -> None:
    run = document()
    run.failed, run.interrupted = "the server is gone", True

    assert findings.cautions(run) == [
        "The run ended before its time: the server is gone.",
        "The run was interrupted: levels that were still to come are missing.",
        "No level was measured.",
    ]
