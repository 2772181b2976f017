"""One Key's curve: its predictions under noise, outliers and steps, and when a device changes its pace."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.batching.scheduling.curve import MAX_REVIEW_RUNS, Curve
from penstock.batching.scheduling.point import FRESH_NS, KNOWN_AFTER_RUNS, MAX_SAMPLES, PACE_RUNS

MS = 1_000_000
S = 1_000_000_000
SIZES = (1, 2, 4, 8, 16, 32)


def true_ns(rows: int) -> float:
    """Run time of a device with tiles of 8 rows."""
    return 1 * MS + 0.02 * MS * (-(-rows // 8) * 8)


def serve(
    curve: Curve, sizes: Sequence[int], runs: int, *, start_ns: int = 0, gap_ns: int = 20 * MS, factor: float = 1.0,
    spread: float = 0.1, seed: int = 1,
) -> int:  # fmt: skip
    """Observe runs of random sizes on a device slowed by `factor`. Returns: the time of the last run."""
    chance, now_ns = random.Random(seed), start_ns
    for _ in range(runs):
        rows = chance.choice(sizes)
        now_ns += gap_ns
        curve.observe(rows, int(factor * true_ns(rows) * chance.lognormvariate(0, spread)), now_ns)
    return now_ns


def error(curve: Curve, rows: int, factor: float = 1.0) -> float:
    return curve.predict(rows)[0] / (factor * true_ns(rows)) - 1


class TestSizes:
    @given(st.integers(1, 1 << 20))
    def test_a_size_is_the_largest_of_its_group_and_at_most_a_quarter_more(self, rows: int) -> None:
        curve = Curve()
        size = curve.size_of(rows)

        assert rows <= size <= max(rows, 1.25 * (rows - 1))
        assert curve.size_of(size) == size

    def test_small_sizes_are_exact_and_larger_ones_come_four_to_a_doubling(self) -> None:
        curve = Curve()

        assert [size for size in range(1, 65) if curve.size_of(size) == size] == [
            *range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64,
        ]  # fmt: skip

    def test_a_step_between_two_sizes_is_learned_where_it_is(self) -> None:
        curve = Curve()
        serve(curve, range(1, 33), 2000, spread=0.05)

        assert all(abs(error(curve, rows)) < 0.08 for rows in (1, 5, 8, 10, 12, 14, 16, 20, 24, 28, 32))

    @given(st.lists(st.integers(1, 10**9), min_size=1, max_size=100))
    def test_any_set_of_sizes_needs_few_points(self, rows: list[int]) -> None:
        curve = Curve()
        for each in rows:
            curve.observe(each, 1000, 1)

        assert len(curve.points) <= 8 + 4 * 30


def test_memory_does_not_grow_with_runs_or_predictions() -> None:
    curve = Curve()
    serve(curve, range(1, 65), 5000, gap_ns=1000)
    for rows in range(1, 5000):
        curve.predict(rows)

    assert max(len(point.rescaled_ns) for point in curve.points.values()) <= MAX_SAMPLES + MAX_REVIEW_RUNS
    assert len(curve.points) == 20
    assert len(curve._cached_predictions) <= 1024


class TestNoise:
    @settings(deadline=None, max_examples=30)
    @given(st.lists(st.tuples(st.sampled_from(SIZES), st.integers(1, 10**9)), min_size=1, max_size=200))
    def test_a_prediction_lies_between_the_fastest_and_slowest_recent_runs(self, runs: list[tuple[int, int]]) -> None:
        curve = Curve()
        for rows, ns in runs:
            curve.observe(rows, ns, 1)
        measured = [
            ns
            for size in SIZES
            for ns in [each for rows, each in runs if rows == size][-MAX_SAMPLES - MAX_REVIEW_RUNS :]
        ]

        for rows in {rows for rows, _ in runs}:
            centre_ns, tail_ns = curve.predict(rows)
            assert min(measured) * (1 - 1e-9) <= centre_ns <= tail_ns * (1 + 1e-9) <= max(measured) * (1 + 1e-9)

    @pytest.mark.parametrize("spread", [0.05, 0.2, 0.3])
    def test_the_predicted_center_of_a_steady_device_is_steady(self, spread: float) -> None:
        curve = Curve()
        now_ns = serve(curve, SIZES, 400, spread=spread)
        errors = []
        for seed in range(40):
            now_ns = serve(curve, SIZES, 20, start_ns=now_ns, spread=spread, seed=seed)
            errors += [abs(error(curve, rows)) for rows in SIZES]

        assert sorted(errors)[len(errors) // 2] < 0.02 + spread / 6

    @settings(deadline=None, max_examples=40)
    @given(st.integers(0, 10**6), st.integers(KNOWN_AFTER_RUNS, 200), st.sampled_from([0.01, 100.0]))
    def test_one_run_a_hundred_times_off_moves_the_center_by_a_few_percent(
        self, seed: int, runs: int, factor: float
    ) -> None:
        curve = Curve()
        now_ns = serve(curve, [4], runs, spread=0.05, seed=seed)
        before_ns = curve.predict(4)[0]
        curve.observe(4, int(factor * true_ns(4)), now_ns + 20 * MS)

        assert curve.predict(4)[0] == pytest.approx(before_ns, rel=0.04)

    @settings(deadline=None, max_examples=40)
    @given(st.integers(0, 10**6), st.integers(2, 200))
    def test_one_slow_run_at_most_doubles_the_tail_and_two_in_thirty_raise_it(self, seed: int, runs: int) -> None:
        curve = Curve()
        now_ns = serve(curve, [4], runs, spread=0.05, seed=seed)
        before_ns = curve.predict(4)[1]
        curve.observe(4, int(100 * true_ns(4)), now_ns + 20 * MS)
        once_ns = curve.predict(4)[1]
        curve.observe(4, int(100 * true_ns(4)), now_ns + 40 * MS)

        assert once_ns <= 2.2 * before_ns
        assert curve.predict(4)[1] > 50 * true_ns(4)

    @settings(deadline=None, max_examples=20)
    @given(st.integers(0, 10**6), st.floats(0.02, 0.6))
    def test_the_predicted_tail_covers_nine_of_ten_runs(self, seed: int, spread: float) -> None:
        chance, curve, covered = random.Random(seed), Curve(), 0
        now_ns = serve(curve, [4], 100, spread=spread, seed=seed)
        for run in range(1, 1001):
            ns = int(true_ns(4) * chance.lognormvariate(0, spread))
            covered += ns <= curve.predict(4)[1]
            curve.observe(4, ns, now_ns + run * 20 * MS)

        assert 900 <= covered <= 985

    def test_a_slow_first_run_of_a_size_does_not_change_predictions_of_neighboring_sizes(self) -> None:
        curve = Curve()
        now_ns = serve(curve, SIZES, 300)
        curve.observe(6, int(100 * true_ns(6)), now_ns + MS)

        assert all(abs(error(curve, rows)) < 0.1 for rows in SIZES)

    @settings(deadline=None, max_examples=50)
    @given(st.lists(st.tuples(st.integers(1, 100), st.integers(1, 10**9)), min_size=1, max_size=100))
    def test_more_rows_are_never_predicted_to_take_less(self, runs: list[tuple[int, int]]) -> None:
        curve = Curve()
        for rows, ns in runs:
            curve.observe(rows, ns, 1)

        for one, more in pairwise(curve.predict(rows) for rows in range(1, 130)):
            assert one[0] <= more[0] * (1 + 1e-9)
            assert one[1] <= more[1] * (1 + 1e-9)


class TestPaceChange:
    @settings(deadline=None, max_examples=60)
    @given(st.floats(0.2, 5.0), st.sampled_from(SIZES), st.integers(0, 1000))
    @example(factor=0.2, rows=8, seed=1)
    @example(factor=5.0, rows=32, seed=1)
    def test_a_pace_change_is_learned_within_two_seconds_at_fifty_runs_per_second(
        self, factor: float, rows: int, seed: int
    ) -> None:
        curve = Curve()
        now_ns = serve(curve, SIZES, 500, seed=seed)
        end_ns = serve(curve, [rows], 99, start_ns=now_ns, factor=factor, seed=seed + 1)

        assert end_ns - now_ns < 2 * S
        assert abs(error(curve, rows, factor)) < 0.15

    @pytest.mark.parametrize("factor", [0.2, 0.5, 2.0, 5.0])
    @pytest.mark.parametrize("gap_ns", [MS, 20 * MS, 500 * MS])
    def test_a_pace_change_is_learned_for_all_sizes_after_a_few_runs_of_one_size(
        self, factor: float, gap_ns: int
    ) -> None:
        curve = Curve()
        now_ns = serve(curve, SIZES, 500, gap_ns=gap_ns)
        serve(curve, [8], PACE_RUNS + 20 * MS // gap_ns, start_ns=now_ns, gap_ns=gap_ns, factor=factor, seed=2)

        assert all(abs(error(curve, rows, factor)) < 0.2 for rows in SIZES)

    @pytest.mark.parametrize("factor", [0.5, 2.0])
    def test_a_return_to_the_previous_pace_is_learned(self, factor: float) -> None:
        curve = Curve()
        now_ns = serve(curve, SIZES, 500)
        now_ns = serve(curve, [8], 200, start_ns=now_ns, factor=factor)
        serve(curve, [8], 50, start_ns=now_ns)

        assert all(abs(error(curve, rows)) < 0.2 for rows in SIZES)

    def test_a_gradual_pace_change_is_learned_for_all_sizes(self) -> None:
        curve = Curve()
        now_ns = serve(curve, SIZES, 500)
        for step in range(70):
            now_ns = serve(curve, [8], 20, start_ns=now_ns, factor=1.01**step, seed=step)

        assert all(abs(error(curve, rows, 1.01**69)) < 0.25 for rows in SIZES)

    def test_a_pace_change_is_learned_even_if_all_runs_have_the_same_time_stamp(self) -> None:
        curve = Curve()
        serve(curve, [8], 100, gap_ns=0)
        serve(curve, [8], 100, gap_ns=0, factor=3.0)

        assert abs(error(curve, 8, 3.0)) < 0.1

    @pytest.mark.parametrize("seed", range(3))
    def test_a_pace_change_is_never_carried_over_to_other_sizes_more_than_eightfold(self, seed: int) -> None:
        curve, chance = Curve(), random.Random(seed)
        now_ns = serve(curve, SIZES, 100)
        before_ns = curve.predict(32)[0]
        for _ in range(2000):
            # a busy host on which runs are repeatedly thirty times as slow for a moment
            runs, factor = chance.choice(((100, 1.0), (10, 30.0)))
            now_ns = serve(curve, SIZES[:3], runs, start_ns=now_ns, gap_ns=MS, factor=factor, seed=runs)

        now_ns = serve(curve, SIZES[:3], 500, start_ns=now_ns)
        assert curve.predict(32)[0] < 10 * before_ns

    def test_a_slowdown_of_one_size_does_not_change_predictions_of_other_sizes(self) -> None:
        curve = Curve()
        now_ns = serve(curve, SIZES, 500)
        for step in range(200):
            now_ns = serve(curve, SIZES[:-1], 4, start_ns=now_ns, seed=step)
            now_ns = serve(curve, [32], 1, start_ns=now_ns, factor=3.0, seed=step)

        assert all(abs(error(curve, rows)) < 0.1 for rows in SIZES[:-1])
        assert abs(error(curve, 32, 3.0)) < 0.15

    def test_a_few_new_runs_replace_old_ones(self) -> None:
        curve = Curve()
        now_ns = serve(curve, [4], 100, spread=0.01)
        now_ns += 2 * FRESH_NS
        serve(curve, [4], KNOWN_AFTER_RUNS, start_ns=now_ns, gap_ns=S, factor=1.1, spread=0.01)

        assert abs(error(curve, 4, 1.1)) < 0.02
