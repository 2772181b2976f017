from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from penstock.perf.generator.orders import Load, Window
from penstock.perf.generator.pacing import UNANSWERED
from penstock.perf.profiling import measuring
from penstock.perf.profiling.measuring import EMPTY, INTERRUPTED, OVER, UNSTABLE, LoadListener, measure
from penstock.perf.profiling.options import Rule
from penstock.perf.reports.document import Client
from tests.perf.profiling.scripted import QUICK, Scripted, window

FOUR = Load(concurrency=4)


class RecordingListener(LoadListener):
    def __init__(self, stop_after: int = 1000) -> None:
        self.words: list[str] = []
        self._stop_after = stop_after

    def on_start(self) -> None:
        self.words.append("began")

    def on_window_boundary(self) -> None:
        self.words.append("marked")

    def on_window(self, window: Window, client: Client) -> None:
        self.words.append("passed")

    def is_interrupted(self) -> bool:
        return self.words.count("passed") >= self._stop_after


def test_a_level_is_stable_after_three_similar_windows() -> None:
    fleet = Scripted(window([100] * 20))
    level = measure(fleet, FOUR, QUICK, rows=2)

    assert (level.stable, level.ended, level.settled, len(level.windows)) == (True, "", 3, 3)
    assert (level.client.requests, level.client.rows) == (60, 120)
    assert fleet.orders[0] == FOUR
    assert fleet.orders[-1] == "halt"


def test_windows_before_the_last_three_are_not_part_of_any_figure() -> None:
    slow, fast = window([9000] * 5), window([100] * 20)
    level = measure(Scripted(slow, slow, fast), FOUR, QUICK)

    assert (level.stable, len(level.windows)) == (True, 5)
    assert level.client.latency_us["max"] == pytest.approx(100)


def test_a_level_that_never_settles_is_unstable_with_its_last_windows() -> None:
    windows = [window([100] * count) for count in (10, 20, 40, 80, 160)]
    level = measure(Scripted(*windows), FOUR, replace(QUICK, trials=5))

    assert (level.stable, level.ended, level.settled) == (False, UNSTABLE, 3)
    assert level.client.requests == 40 + 80 + 160


def test_a_level_over_the_threshold_is_measured_and_marked() -> None:
    level = measure(Scripted(window([6000] * 10)), FOUR, replace(QUICK, threshold_ms=5))

    assert (level.stable, level.ended, level.settled) == (True, OVER, 3)


def test_the_threshold_applies_to_the_chosen_percentile() -> None:
    mixed = window([1000] * 80 + [9000] * 20)
    rule = replace(QUICK, threshold_ms=5)

    assert measure(Scripted(mixed), FOUR, rule).ended == ""
    assert measure(Scripted(mixed), FOUR, replace(rule, percentile=90)).ended == OVER


def test_an_interrupted_level_keeps_its_results() -> None:
    level = measure(Scripted(window([100] * 20)), FOUR, QUICK, listener=RecordingListener(stop_after=2))

    assert (level.stable, level.ended, level.settled) == (False, INTERRUPTED, 3)
    assert level.client.requests > 0


def test_a_server_that_dies_is_reported_and_not_averaged() -> None:
    good, silent = window([100] * 20), window([])
    dying = window([100] * 5, errors=Counter({"connection lost: reset": 4}))
    dead = window([], failure="connection refused")
    level = measure(Scripted(good, good, dying, silent, dead), FOUR, replace(QUICK, percentage=0))

    assert (level.stable, level.settled) == (False, 0)
    assert level.ended == "the server was lost in window 3: connection refused"
    assert level.client.requests == 5
    assert level.client.errors == {"connection lost: reset": 4}
    assert len(level.windows) == 5


def test_windows_shorter_than_a_request_do_not_mean_that_the_server_died() -> None:
    level = measure(Scripted(window([100]), window([])), FOUR, replace(QUICK, trials=6))

    assert (level.stable, level.settled, level.ended) == (False, 0, EMPTY)


@pytest.mark.parametrize(
    ("after", "reason"),
    [
        (
            window([], errors=Counter({UNANSWERED: 4})),
            f"the server stopped answering in window 3: {UNANSWERED}",
        ),
        (window([], failure="connection refused"), "the server was lost in window 3: connection refused"),
    ],
)
@pytest.mark.parametrize("stop_after", [1000, 3])
def test_a_server_that_dies_in_the_last_window_is_reported(after: Window, reason: str, stop_after: int) -> None:
    level = measure(Scripted(window([100] * 20), after=after), FOUR, QUICK, listener=RecordingListener(stop_after))

    assert (level.stable, level.settled, level.ended) == (False, 0, reason)


def test_a_server_that_never_answers_is_not_reported_as_a_short_window() -> None:
    level = measure(Scripted(window([]), after=window([], errors=Counter({UNANSWERED: 4}))), FOUR, QUICK)

    assert level.ended == f"the server stopped answering in window 1: {UNANSWERED}"


def test_one_hanging_request_among_answered_ones_does_not_mean_that_the_server_died() -> None:
    after = window([100], errors=Counter({UNANSWERED: 1}))

    assert measure(Scripted(window([100] * 20), after=after), FOUR, QUICK).ended == ""


def test_a_window_by_count_ends_if_the_server_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hanging(Scripted):
        def wait(self, seconds: float, requests: int = 0) -> bool:
            super().wait(seconds, requests)
            return False

    monkeypatch.setattr(measuring, "STALL_TIMEOUT_S", 0)
    fleet = Hanging(window([]), after=window([], errors=Counter({UNANSWERED: 4})))
    rule = replace(QUICK, by_count=True, warmup_requests=5)

    assert "stopped answering" in measure(fleet, FOUR, rule).ended


def test_windows_in_which_no_request_ends_are_too_short() -> None:
    level = measure(Scripted(window([])), FOUR, replace(QUICK, trials=4))

    assert (level.stable, level.ended, level.client.requests) == (False, EMPTY, 0)
    assert len(level.windows) == 4


def test_a_window_with_only_errors_ends_the_level_in_the_words_of_the_server() -> None:
    bad = window([], errors=Counter({"400: no such input": 9, "connection lost: reset": 1}))
    level = measure(Scripted(bad), FOUR, QUICK)

    assert level.ended == "every request failed: 400: no such input"
    assert level.client.errors == {"400: no such input": 9, "connection lost: reset": 1}


def test_errors_are_counted_without_a_latency() -> None:
    mixed = window([100] * 20, errors=Counter({"503: full": 2}))
    level = measure(Scripted(mixed), FOUR, QUICK)

    assert (level.stable, level.ended) == (True, "")
    assert level.client.errors == {"503: full": 6}
    assert level.client.requests == 60


def test_a_fixed_number_of_requests_is_one_window_from_first_start_to_last_end() -> None:
    load = replace(FOUR, requests=20)
    fleet = Scripted(window([100] * 20, begin_s=5))
    level = measure(fleet, load, QUICK)

    assert (level.stable, len(level.windows), level.client.requests) == (True, 1, 20)
    assert level.client.seconds == pytest.approx(1 - 0.05 + 100e-6)


def test_warm_up_requests_precede_the_first_window() -> None:
    fleet = Scripted(window([100] * 20))
    measure(fleet, FOUR, replace(QUICK, warmup_requests=7))

    assert fleet.orders[:4] == [replace(FOUR, requests=7), "wait", "halt", FOUR]


def test_marks_are_set_before_the_first_window_and_after_each() -> None:
    figures = RecordingListener()
    measure(Scripted(window([100] * 20)), FOUR, QUICK, listener=figures)

    assert figures.words == ["began", "marked", "marked", "passed", "marked", "passed", "marked", "passed"]


def test_windows_by_count_wait_for_their_requests() -> None:
    fleet = Scripted(window([100] * 20))

    assert measure(fleet, FOUR, Rule(by_count=True, requests=10)).stable
    assert fleet.waits == 3


@pytest.mark.parametrize(
    ("load", "kind", "value"),
    [
        (Load(concurrency=3), "concurrency", 3),
        (Load(rate_per_s=2.5, poisson=True), "rate", 2.5),
        (Load(intervals_us=(1000.0, 3000.0)), "intervals", 500),
    ],
)
def test_the_offered_load_is_described(load: Load, kind: str, value: float) -> None:
    figures = measuring.offered(load)

    assert (figures.kind, figures.value) == (kind, value)


def test_the_chosen_percentile_is_reported_besides_the_usual_ones() -> None:
    figures = measuring.client(window(list(range(1, 101))), 1, 97)

    assert figures.latency_us["p97"] == pytest.approx(97, abs=0.01)
    assert {"mean", "std", "min", "max", "p50", "p75", "p90", "p95", "p99", "p99.9"} < figures.latency_us.keys()


def test_responses_are_reported_if_a_request_has_several() -> None:
    one = measuring.client(window([100], earlier_counts=np.array([0], np.int64), responses=1))
    several = measuring.client(
        window([100], earlier_counts=np.array([2], np.int64), earlier_ns=np.ones(2), responses=3)
    )

    assert (one.responses_per_s, several.responses_per_s) == (None, 3.0)


def test_lateness_is_reported_only_for_an_open_loop() -> None:
    late = window([100] * 4, late_ns=np.array([0, 1000, 2000, 9000], np.int64))

    assert measuring.client(late).late_us == {"mean": 3.0, "p50": 2.0, "p99": 9.0, "max": 9.0}
    assert measuring.client(window([100])).late_us is None


def test_the_figures_of_a_window_follow_from_its_answers_and_its_time() -> None:
    ends = np.arange(1, 102) * 1_000_000
    window = Window(0, 2_000_000_000, ends - 500_000, ends, np.arange(101) * 1000, cpu_s=0.5)
    window.starts_ns[0] -= 101_000

    figures = measuring.client(window, rows=4)

    assert (figures.requests, figures.rows, figures.requests_per_s, figures.rows_per_s) == (101, 404, 50.5, 202.0)
    assert figures.cpu_us_per_request == pytest.approx(0.5e6 / 101)
    assert (figures.cores, figures.latency_us["max"]) == (0.25, 601)
    assert figures.latency_us["mean"] == pytest.approx(501)
    assert figures.latency_us["std"] == pytest.approx(101**0.5)
    assert figures.late_us == {"mean": 50, "p50": 50, "p99": 99, "max": 100}
