from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.perf.tuning.duels import ENOUGH, Measured, Round, Standing, gain, judged


def rounds_of(*ratios: float) -> list[Round]:
    return [Round(Measured(100.0, p99_us=10.0), Measured(100.0 * ratio, p99_us=10.0)) for ratio in ratios]


def won(draw: Callable[[], float]) -> bool:
    """Duel until it is decided."""
    rounds: list[Round] = []
    while judged(rounds).standing is Standing.OPEN:
        rounds += rounds_of(draw())
    return judged(rounds).standing is Standing.WON


def test_ahead_in_all_of_seven_rounds_wins() -> None:
    assert judged(rounds_of(*[1.1] * 6)).standing is Standing.OPEN
    assert judged(rounds_of(*[1.1] * 7)).standing is Standing.WON


@pytest.mark.parametrize(("lost", "enough"), [(1, 11), (2, 14), (3, 17)])
def test_rounds_may_be_lost_for_more_that_are_won(lost: int, enough: int) -> None:
    ahead = [1.1] * (enough - lost)

    assert judged(rounds_of(*ahead[1:], *[0.9] * lost)).standing is Standing.OPEN
    assert judged(rounds_of(*ahead, *[0.9] * lost)).standing is Standing.WON


def test_a_fourth_lost_round_ends_it() -> None:
    assert judged(rounds_of(*[1.1] * 10, *[0.9] * 4)).standing is Standing.LOST


def test_a_second_lost_round_ends_it_where_the_median_is_no_gain_either() -> None:
    verdict = judged(rounds_of(1.02, 0.9, 1.2, 1.0))

    assert (verdict.standing, verdict.says) == (Standing.LOST, "not better: behind in 2 of 4 rounds")
    assert judged(rounds_of(1.2, 0.9, 1.2, 1.0)).standing is Standing.OPEN


def test_what_is_ahead_by_a_hair_is_not_worth_a_change() -> None:
    assert judged(rounds_of(*[1.02] * 7)).standing is Standing.LOST


def test_throughput_is_not_bought_with_a_tail() -> None:
    bought = [Round(each.incumbent, replace(each.challenger, p99_us=16.0)) for each in rounds_of(*[1.5] * 7)]

    assert judged(bought).says == "ahead in 7 of 7 rounds, but p99 is 1.6 times as long"
    assert judged(bought, p99_growth=math.inf).standing is Standing.WON


def test_what_cannot_be_taken_loses_with_its_reason() -> None:
    rounds = [*rounds_of(1.5), Round(Measured(1.0), Measured(0.0, why="over the memory budget"))]

    assert judged(rounds).says == "over the memory budget"


def test_what_serves_at_all_beats_what_does_not() -> None:
    assert judged([Round(Measured(0.0), Measured(1.0))] * ENOUGH[0]).standing is Standing.WON
    assert judged([Round(Measured(0.0), Measured(0.0))] * 2).standing is Standing.LOST


@given(st.lists(st.floats(0.01, 100), max_size=ENOUGH[-1] + 2))
def test_a_duel_is_decided_within_seventeen_rounds_and_for_the_better_only(ratios: list[float]) -> None:
    rounds = rounds_of(*ratios)
    verdict = judged(rounds)

    assert verdict.standing is not Standing.OPEN or len(rounds) < ENOUGH[-1]
    assert verdict.standing is not Standing.WON or gain(rounds) >= 1.03
    assert verdict.says


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.5])
def test_one_that_is_no_different_wins_hardly_ever(noise: float) -> None:
    drawn = random.Random(1)

    wins = sum(won(lambda: math.exp(drawn.gauss(0, noise))) for _ in range(4000))

    assert wins / 4000 < 0.02


def test_rare_outliers_make_no_winner() -> None:
    drawn = random.Random(2)

    wins = sum(won(lambda: drawn.choice([0.999, 1.0, 1.001, 5.0])) for _ in range(4000))

    assert wins / 4000 < 0.02


def test_what_is_a_tenth_better_wins_most_duels_though_noise_is_four_percent() -> None:
    drawn = random.Random(3)

    wins = sum(won(lambda: 1.1 * math.exp(drawn.gauss(0, 0.04))) for _ in range(1000))

    assert wins / 1000 > 0.95
