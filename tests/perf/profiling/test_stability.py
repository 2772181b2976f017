from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.perf.profiling import stability
from penstock.perf.profiling.stability import WindowFigures

PASSES = st.lists(st.builds(WindowFigures, st.floats(0, 1e6), st.floats(1, 1e9)), max_size=6)


def test_three_windows_that_agree_are_stable() -> None:
    assert stability.stable([WindowFigures(100, 50), WindowFigures(105, 54), WindowFigures(110, 55)], 10)


@pytest.mark.parametrize(
    "odd", [WindowFigures(111, 50), WindowFigures(100, 56), WindowFigures(0, 50), WindowFigures(0, math.inf)]
)
def test_one_deviating_window_of_three_makes_them_unstable(odd: WindowFigures) -> None:
    assert not stability.stable([WindowFigures(100, 50), odd, WindowFigures(100, 50)], 10)


def test_three_windows_of_a_slow_server_are_stable_but_three_without_an_answer_are_not() -> None:
    assert not stability.stable([WindowFigures(0, math.inf)] * 3, 10)
    assert stability.stable([WindowFigures(0.5, 2e9)] * 3, 10)


def test_two_windows_are_never_stable() -> None:
    assert not stability.stable([WindowFigures(100, 50)] * 2, 10)


@given(PASSES, st.floats(0, 100))
def test_only_the_last_three_windows_count_in_any_order(passes: list[WindowFigures], percentage: float) -> None:
    result = stability.stable(passes, percentage)

    assert stability.stable([WindowFigures(0, 1), *passes], percentage) == (result and len(passes) >= 3)
    assert stability.stable(passes[:-3] + passes[-3:][::-1], percentage) == result


@given(PASSES, st.floats(0, 100), st.floats(0, 100))
def test_a_larger_tolerance_never_makes_windows_unstable(
    passes: list[WindowFigures], percentage: float, more: float
) -> None:
    assert stability.stable(passes, percentage) <= stability.stable(passes, percentage + more)


@given(PASSES)
def test_three_equal_windows_are_stable_at_zero_percent(passes: list[WindowFigures]) -> None:
    same = [WindowFigures(10.5, 3.25)] * 3

    assert stability.stable(passes + same, 0)


def test_the_threshold_is_exceeded_by_one_of_three_windows_that_reaches_it() -> None:
    passes = [WindowFigures(1, 1e6), WindowFigures(1, 5e6), WindowFigures(1, 1e6)]

    assert stability.exceeds_threshold(passes, 5)
    assert not stability.exceeds_threshold(passes, 5.1)
    assert not stability.exceeds_threshold(passes[:2], 5)
    assert not stability.exceeds_threshold(passes, 0)
    assert stability.exceeds_threshold(passes, 0.5)
    assert not stability.exceeds_threshold([*passes, *[WindowFigures(1, 1e6)] * 3], 5)


@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=50), st.integers(1, 99))
def test_a_percentile_is_the_latency_that_perf_analyzer_would_choose(latencies: list[int], percentile: int) -> None:
    result = stability.percentiles_ns(np.array(latencies, np.int64), [percentile])

    assert result == [sorted(latencies)[int(percentile / 100 * (len(latencies) - 1) + 0.5)]]


def test_the_99th_percentile_of_a_hundred_latencies_is_the_99th() -> None:
    assert stability.percentiles_ns(np.arange(1, 101), [50, 99, 1]) == [51, 99, 2]


def test_the_mean_decides_if_no_percentile_is_chosen() -> None:
    latencies = np.array([1, 2, 9], np.int64)

    assert stability.decisive_latency_ns(latencies, 0) == 4
    assert stability.decisive_latency_ns(latencies, 50) == 2
    assert stability.decisive_latency_ns(np.array([], np.int64), 0) == math.inf
