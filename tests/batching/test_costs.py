from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.batching.costs import MAX_KEYS, REVIEW_RUNS, CostModel
from penstock.batching.request import Key

KEY: Key = ((4,),)
OTHER: Key = ((5,),)
STEP = 1.05

# As long for 16 rows as for one; from there on, nothing is gained by more.
MEASURED = {1: 1000, 2: 1000, 4: 1000, 8: 1000, 16: 1000, 32: 2000, 64: 4000}


def measured(points: dict[int, int], key: Key = KEY) -> CostModel:
    costs = CostModel()
    for rows, ns in points.items():
        costs.observe(key, rows, ns, 1)
    return costs


def test_of_a_key_that_never_ran_nothing_is_known() -> None:
    costs = measured(MEASURED)

    assert costs.predict_ns(OTHER, 1) is None
    assert costs.knee_rows(OTHER) == 0


def test_the_knee_is_where_time_per_row_stops_falling() -> None:
    assert measured(MEASURED).knee_rows(KEY) == 16


def test_where_time_per_row_never_falls_the_knee_is_one_row() -> None:
    assert measured({1: 100, 2: 200, 4: 400}).knee_rows(KEY) == 1


def test_where_time_per_row_always_falls_the_knee_is_the_biggest_batch() -> None:
    assert measured(dict.fromkeys((1, 2, 4, 8), 100)).knee_rows(KEY) == 8


def test_the_most_is_where_time_per_row_begins_to_rise() -> None:
    costs = measured({1: 100, 2: 150, 4: 300, 8: 600, 16: 1300, 32: 2800})

    assert (costs.knee_rows(KEY), costs.most_rows(KEY)) == (1, 16)


@pytest.mark.parametrize("points", [{}, {1: 100}, {1: 100, 2: 200, 4: 410}, MEASURED])
def test_where_time_per_row_has_not_been_seen_to_rise_there_is_no_most(points: dict[int, int]) -> None:
    assert measured(points).most_rows(KEY) == 0


def test_a_new_size_is_reviewed_at_once_and_a_known_one_every_few_runs() -> None:
    costs = CostModel()
    reviewed = [costs.observe(KEY, 1, 100, 1) for _ in range(2 * REVIEW_RUNS + 1)]

    assert [run for run, review in enumerate(reviewed) if review] == [0, REVIEW_RUNS, 2 * REVIEW_RUNS]
    assert costs.observe(KEY, 2, 100, 1)


def test_a_batch_without_rows_counts_as_one_row() -> None:
    costs = measured({0: 100})

    assert costs.predict_ns(KEY, 0) == costs.predict_ns(KEY, 1) == 100


CURVES = st.dictionaries(st.sampled_from([1, 2, 4, 8, 16, 32, 64]), st.integers(1, 10**9), min_size=1)


@settings(deadline=None, max_examples=50)
@given(CURVES)
def test_what_was_measured_is_what_is_predicted(points: dict[int, int]) -> None:
    costs = measured(points)

    assert {rows: costs.predict_ns(KEY, rows) for rows in points} == points


@settings(deadline=None, max_examples=50)
@given(CURVES)
def test_between_two_measured_sizes_predictions_go_straight_from_one_to_the_other(points: dict[int, int]) -> None:
    costs, sizes = measured(points), sorted(points)
    for low, high in pairwise(sizes):
        predicted = [costs.predict_ns(KEY, rows) or 0.0 for rows in range(low, high + 1)]
        if points[low] > points[high]:
            predicted.reverse()

        assert predicted == sorted(predicted)
        assert math.isclose(predicted[0], min(points[low], points[high]))
        assert math.isclose(predicted[-1], max(points[low], points[high]))


@settings(deadline=None, max_examples=50)
@given(CURVES)
def test_outside_of_what_was_measured_a_small_batch_takes_as_long_and_a_big_one_in_proportion(
    points: dict[int, int],
) -> None:
    costs, low, high = measured(points), min(points), max(points)

    assert all(costs.predict_ns(KEY, rows) == points[low] for rows in range(1, low + 1))
    assert costs.predict_ns(KEY, 3 * high) == pytest.approx(3 * points[high])


@pytest.mark.parametrize("outlier_ns", [1, 10**12])
@pytest.mark.parametrize("rows", MEASURED)
def test_an_outlier_moves_neither_the_prediction_nor_the_knee(rows: int, outlier_ns: int) -> None:
    costs = measured(MEASURED)
    costs.observe(KEY, rows, outlier_ns, 1)
    for _ in range(REVIEW_RUNS):
        costs.observe(KEY, rows, MEASURED[rows], 1)

    assert costs.predict_ns(KEY, rows) == pytest.approx(MEASURED[rows], rel=0.051)
    assert costs.knee_rows(KEY) == 16


@settings(deadline=None, max_examples=50)
@given(st.floats(0.1, 10.0), st.sampled_from([1, 4, 32]))
def test_a_device_that_changes_its_pace_is_known_after_as_many_steps_of_five_percent(factor: float, rows: int) -> None:
    costs = measured({rows: 10**6})
    now_ns = int(factor * 10**6)
    for _ in range(math.ceil(abs(math.log(factor, STEP))) + 1):
        costs.observe(KEY, rows, now_ns, 1)

    assert costs.predict_ns(KEY, rows) == pytest.approx(now_ns, rel=0.11)


def test_a_device_twice_as_slow_is_known_after_fifteen_runs() -> None:
    costs = measured({8: 1000})
    for _ in range(15):
        costs.observe(KEY, 8, 2000, 1)

    assert costs.predict_ns(KEY, 8) == pytest.approx(2000, rel=0.06)


def test_a_knee_moves_when_the_device_does() -> None:
    costs = measured({1: 100, 2: 100})
    for _ in range(4 * REVIEW_RUNS):
        costs.observe(KEY, 2, 300, 1)

    assert costs.knee_rows(KEY) == 1


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 100), st.integers(1, 10**9)), min_size=1, max_size=60))
def test_whatever_was_measured_the_knee_is_a_size_near_one_that_ran_and_predictions_are_finite(
    runs: list[tuple[int, int]],
) -> None:
    costs = CostModel()
    for rows, ns in runs:
        costs.observe(KEY, rows, ns, 1)

    assert 1 <= costs.knee_rows(KEY) < 2 * max(max(rows, 1) for rows, _ in runs)
    assert all(0 < (costs.predict_ns(KEY, rows) or 0) < 10**12 for rows in range(101))


def test_keys_do_not_learn_from_each_other() -> None:
    costs = measured(MEASURED)
    costs.observe(OTHER, 1, 7, 1)

    assert (costs.predict_ns(KEY, 1), costs.predict_ns(OTHER, 1)) == (1000, 7)


def test_any_number_of_keys_is_bounded_and_the_latest_are_known() -> None:
    costs, keys = CostModel(), [((width,),) for width in range(5 * MAX_KEYS)]
    for key in keys:
        costs.observe(key, 1, 100, 1)

    assert [key for key in keys if costs.predict_ns(key, 1) is not None] == keys[-MAX_KEYS:]
