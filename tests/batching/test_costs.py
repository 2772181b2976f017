from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.batching.request import Key
from penstock.batching.scheduling.costs import MAX_KEYS, CostModel, RunTime
from penstock.batching.scheduling.curve import MAX_REVIEW_RUNS, REVIEW_NS, TIE_FACTOR, TRUSTED_AFTER_RUNS

KEY: Key = ((4,),)
OTHER: Key = ((5,),)

# 16 rows take as long as one; larger batches gain nothing.
MEASURED = {1: 1000, 2: 1000, 4: 1000, 8: 1000, 16: 1000, 32: 2000, 64: 4000}


def measured(points: dict[int, int], key: Key = KEY) -> CostModel:
    costs = CostModel()
    for rows, ns in points.items():
        for review in range(1 - TRUSTED_AFTER_RUNS, 1):
            costs.observe(key, rows, ns, 1 + review * REVIEW_NS)
    return costs


def test_a_key_that_never_ran_has_no_prediction_and_no_knee() -> None:
    costs = measured(MEASURED)

    assert costs.predict_ns(OTHER, 1) is None
    assert costs.knee_rows(OTHER) == 0


def test_the_knee_is_where_time_per_row_stops_falling() -> None:
    assert measured(MEASURED).knee_rows(KEY) == 16


def test_the_knee_is_one_row_if_time_per_row_never_falls() -> None:
    assert measured({1: 100, 2: 200, 4: 400}).knee_rows(KEY) == 1


def test_the_knee_is_the_largest_batch_if_time_per_row_always_falls() -> None:
    assert measured(dict.fromkeys((1, 2, 4, 8), 100)).knee_rows(KEY) == 8


def test_efficient_rows_is_where_time_per_row_begins_to_rise() -> None:
    costs = measured({1: 100, 2: 150, 4: 300, 8: 600, 16: 1300, 32: 2800})

    assert (costs.knee_rows(KEY), costs.efficient_rows(KEY)) == (1, 16)


def test_half_the_current_size_is_untried_until_a_nearby_size_has_run_often_enough() -> None:
    costs = measured({64: 100})
    assert [costs.untried_rows(KEY, rows) for rows in (1, 2, 64)] == [0, 1, 32]
    for run in range(TRUSTED_AFTER_RUNS):
        assert costs.untried_rows(KEY, 64) == 32
        costs.observe(KEY, 20, 50, (run + 2) * REVIEW_NS)
    assert costs.untried_rows(KEY, 64) == 0
    assert costs.untried_rows(OTHER, 64) == 0


def test_a_tried_size_stays_tried_when_the_devices_pace_changes() -> None:
    costs = measured({16: 30, 64: 100})
    for run in range(40):
        costs.observe(KEY, 64, 100 if run < 20 else 500, (run + 1) * REVIEW_NS)

    assert (costs.predict_ns(KEY, 16) or 0) > 100
    assert costs.untried_rows(KEY, 32) == 0


def test_only_allowed_sizes_are_untried() -> None:
    costs = CostModel(allowed_rows=(4, 16, 64))
    for _ in range(TRUSTED_AFTER_RUNS):
        costs.observe(KEY, 64, 100, 1)
    assert [costs.untried_rows(KEY, rows) for rows in (64, 16, 7, 4)] == [16, 4, 0, 0]


@pytest.mark.parametrize("points", [{}, {1: 100}, {1: 100, 2: 200, 4: 410}, MEASURED])
def test_efficient_rows_is_zero_while_time_per_row_has_not_been_seen_to_rise(points: dict[int, int]) -> None:
    assert measured(points).efficient_rows(KEY) == 0


def test_predictions_change_only_in_a_review_and_observe_returns_whether_one_took_place() -> None:
    costs = CostModel()
    predicted = []
    reviewed = []
    for run in range(200):
        reviewed.append(costs.observe(KEY, 1, 100 + run, 1))
        predicted.append(costs.predict_ns(KEY, 1))
    changes = [run for run in range(1, 200) if predicted[run] != predicted[run - 1]]

    assert reviewed[:4] == [True] * 4
    assert 0 < sum(reviewed[100:]) < 10
    assert set(changes) <= {run for run, review in enumerate(reviewed) if review}
    assert costs.observe(KEY, 2, 100, 1), "a size that has never run is reviewed at once"


def test_run_times_of_a_device_with_long_runs_are_reviewed_after_every_run() -> None:
    costs = CostModel()

    assert all(costs.observe(KEY, 1, REVIEW_NS, run * REVIEW_NS) for run in range(3 * MAX_REVIEW_RUNS))


def test_a_batch_without_rows_costs_as_much_as_one_row() -> None:
    costs = measured({0: 100})

    assert costs.predict_ns(KEY, 0) == costs.predict_ns(KEY, 1) == 100


def _rising(points: dict[int, int]) -> dict[int, int]:
    return dict(zip(sorted(points), sorted(points.values()), strict=True))


SIZES = st.sampled_from([1, 2, 4, 8, 16, 32, 64])
CURVES = st.dictionaries(SIZES, st.integers(1, 10**9), min_size=1).map(_rising)


@settings(deadline=None, max_examples=50)
@given(CURVES)
def test_predictions_equal_the_measured_run_times(points: dict[int, int]) -> None:
    costs = measured(points)

    assert {rows: costs.predict_ns(KEY, rows) for rows in points} == points


@settings(deadline=None, max_examples=50)
@given(CURVES)
def test_predictions_between_two_measured_sizes_are_interpolated_linearly(points: dict[int, int]) -> None:
    costs, sizes = measured(points), sorted(points)
    for low, high in pairwise(sizes):
        predicted = [costs.predict_ns(KEY, rows) or 0.0 for rows in range(low, high + 1)]

        assert predicted == sorted(predicted)
        assert math.isclose(predicted[0], points[low])
        assert math.isclose(predicted[-1], points[high])


@settings(deadline=None, max_examples=50)
@given(CURVES)
def test_predictions_are_constant_below_the_measured_sizes_and_proportional_above(
    points: dict[int, int],
) -> None:
    costs, low, high = measured(points), min(points), max(points)

    assert all(costs.predict_ns(KEY, rows) == points[low] for rows in range(1, low + 1))
    assert costs.predict_ns(KEY, 3 * high) == pytest.approx(3 * points[high])


def test_a_rarely_run_size_is_predicted_no_slower_per_row_than_the_size_below() -> None:
    costs, predicted = measured({1: 100, 4: 200}), []
    for run in range(TRUSTED_AFTER_RUNS):
        costs.observe(KEY, 8, 10**9, 1 + run * REVIEW_NS)
        predicted.append(costs.predict_ns(KEY, 8))

    assert predicted == [400, 400, 10**9]


@pytest.mark.parametrize("outlier_ns", [1, 10**12])
@pytest.mark.parametrize("rows", MEASURED)
def test_an_outlier_moves_neither_the_prediction_nor_the_knee(rows: int, outlier_ns: int) -> None:
    costs = measured(MEASURED)
    for _ in range(4):
        costs.observe(KEY, rows, MEASURED[rows], 1)
    costs.observe(KEY, rows, outlier_ns, 1)

    assert costs.predict_ns(KEY, rows) == pytest.approx(MEASURED[rows], rel=0.05)
    assert costs.knee_rows(KEY) == 16


def test_the_knee_moves_when_the_devices_run_times_change() -> None:
    costs = measured({1: 100, 2: 100})
    for _ in range(32):
        costs.observe(KEY, 2, 300, 1)

    assert costs.knee_rows(KEY) == 1


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 100), st.integers(1, 10**9)), min_size=1, max_size=60))
def test_the_knee_is_near_a_size_that_ran_and_predictions_are_finite(
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


def test_the_number_of_known_keys_is_bounded_and_the_latest_keys_are_kept() -> None:
    costs, keys = CostModel(), [((width,),) for width in range(5 * MAX_KEYS)]
    for key in keys:
        costs.observe(key, 1, 100, 1)

    assert [key for key in keys if costs.predict_ns(key, 1) is not None] == keys[-MAX_KEYS:]


def test_a_key_in_use_outlives_unused_keys() -> None:
    costs = CostModel()
    costs.observe(KEY, 1, 100, 1)
    for width in range(3 * MAX_KEYS):
        costs.observe(((width, width),), 1, 100, 1)
        costs.observe(KEY, 1, 100, 1)

    assert costs.predict_ns(KEY, 1) == 100


class TestAllowedSizes:
    ALLOWED = (1, 4, 16, 64)

    def test_a_batch_costs_as_much_as_the_allowed_size_it_is_padded_to(self) -> None:
        costs = CostModel(self.ALLOWED)
        for rows, ns in ((1, 100), (4, 130), (16, 200)):
            costs.observe(KEY, rows, ns, 1)

        assert [costs.predict_ns(KEY, rows) for rows in (1, 2, 4, 5, 15, 16)] == [100, 130, 130, 200, 200, 200]
        assert costs.predict_ns(KEY, 17) == 800

    def test_a_padded_run_is_recorded_under_the_size_that_ran(self) -> None:
        costs = CostModel(self.ALLOWED)
        costs.observe(KEY, 5, 200, 1)

        assert [(known.rows, known.mean_ns) for known in costs.run_times()] == [(16, 200)]
        assert costs.predict_ns(KEY, 16) == 200

    @given(st.dictionaries(st.sampled_from(ALLOWED), st.integers(1, 10**6), min_size=1), st.integers(1, 10**7))
    def test_rows_within_a_time_limit_is_an_allowed_size(self, points: dict[int, int], ns: int) -> None:
        costs = CostModel(self.ALLOWED)
        for rows, measured_ns in points.items():
            costs.observe(KEY, rows, measured_ns, 1)
        rows = costs.rows_within(KEY, ns)

        assert rows in self.ALLOWED
        assert rows == 1 or (costs.predict_ns(KEY, rows) or 0) <= ns

    def test_the_knee_is_an_allowed_size(self) -> None:
        costs = CostModel(self.ALLOWED)
        for rows, ns in ((1, 100), (3, 110), (9, 400), (64, 1600)):
            costs.observe(KEY, rows, ns, 1)

        assert costs.knee_rows(KEY) == 4


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.integers(1, 200), st.integers(1, 10**6)), min_size=1, max_size=40),
    st.integers(1, 10**7),
)
def test_rows_within_a_time_limit_is_the_largest_size_predicted_to_fit(runs: list[tuple[int, int]], ns: int) -> None:
    costs = CostModel()
    for rows, measured_ns in runs:
        costs.observe(KEY, rows, measured_ns, 1)
    rows = costs.rows_within(KEY, ns)

    assert rows == 1 or (costs.predict_ns(KEY, rows) or 0) <= ns
    assert (costs.predict_ns(KEY, rows + 1) or 0) > ns * (1 - 1e-9)


class TestRunTimes:
    def test_run_times_equal_the_predictions_and_list_the_most_used_key_first(self) -> None:
        costs = measured({1: 100, 32: 500})
        for _ in range(3 * TRUSTED_AFTER_RUNS):
            costs.observe(OTHER, 2, 70, 1)

        assert costs.run_times() == [
            RunTime(OTHER, 2, 3 * TRUSTED_AFTER_RUNS, 70, 70),
            RunTime(KEY, 1, TRUSTED_AFTER_RUNS, 100, 100),
            RunTime(KEY, 32, TRUSTED_AFTER_RUNS, 500, 500),
        ]
        assert {known.key for known in costs.run_times(max_keys=1)} == {OTHER}

    def test_every_run_is_counted(self) -> None:
        costs = CostModel()
        for run in range(1000):
            costs.observe(KEY, run % 50, 100, run)

        assert sum(known.runs for known in costs.run_times()) == 1000

    def test_a_model_that_never_ran_has_no_run_times(self) -> None:
        assert CostModel().run_times() == []

    @settings(deadline=None, max_examples=50)
    @given(st.lists(st.tuples(st.integers(1, 8), st.integers(1, 10**9)), min_size=1, max_size=200))
    def test_every_exact_size_has_the_run_time_predicted_for_it(self, runs: list[tuple[int, int]]) -> None:
        costs = CostModel()
        for rows, ns in runs:
            costs.observe(KEY, rows, ns, 1)

        for known in costs.run_times():
            assert costs.predict_ns(KEY, known.rows) == pytest.approx(known.mean_ns, abs=0.5)
            assert costs.p95_ns(KEY, known.rows) == pytest.approx(known.p95_ns, abs=0.5)


@given(st.dictionaries(st.integers(1, 8), st.integers(100, 10_000), min_size=1), st.integers(1, 100))
def test_best_rows_is_about_the_most_efficient_size_up_to_all_waiting_rows(
    points: dict[int, int], waiting: int
) -> None:
    costs = CostModel()
    for number in range(TRUSTED_AFTER_RUNS + 1):
        for rows, ns in points.items():
            costs.observe(KEY, rows, ns, number * REVIEW_NS)

    best = costs.best_rows(KEY, waiting)

    def per_row(rows: int) -> float:
        return (costs.predict_ns(KEY, rows) or 0.0) / rows

    assert 1 <= best <= waiting
    for rows in {waiting, *(rows for rows in points if rows < waiting)}:
        assert per_row(best) <= TIE_FACTOR * per_row(rows) + 1e-6


def test_best_rows_of_a_key_that_never_ran_is_all_waiting_rows() -> None:
    assert measured(MEASURED).best_rows(OTHER, 48) == 48


def test_best_rows_of_a_batch_without_rows_is_zero() -> None:
    costs = CostModel()
    for number in range(TRUSTED_AFTER_RUNS + 1):
        for rows, ns in {1: 100, 2: 900, 8: 9_000}.items():  # time per row rises, so that less than all may go
            costs.observe(KEY, rows, ns, number * REVIEW_NS)

    assert costs.best_rows(KEY, 8) < 8
    assert costs.best_rows(KEY, 0) == 0
