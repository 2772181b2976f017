from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.perf.tuning.duels import ROUNDS_TO_WIN, Measurement, Round, Standing, judge, median_ratio


def rounds_of(*ratios: float) -> list[Round]:
    return [Round(Measurement(100.0, p99_us=10.0), Measurement(100.0 * ratio, p99_us=10.0)) for ratio in ratios]


def won(draw: Callable[[], float]) -> bool:
    """Duel until it is decided."""
    rounds: list[Round] = []
    while judge(rounds).standing is Standing.OPEN:
        rounds += rounds_of(draw())
    return judge(rounds).standing is Standing.WON


def test_winning_all_of_seven_rounds_wins() -> None:
    assert judge(rounds_of(*[1.1] * 6)).standing is Standing.OPEN
    assert judge(rounds_of(*[1.1] * 7)).standing is Standing.WON


@pytest.mark.parametrize(("lost", "enough"), [(1, 11), (2, 14), (3, 17)])
def test_more_won_rounds_make_up_for_lost_ones(lost: int, enough: int) -> None:
    ahead = [1.1] * (enough - lost)

    assert judge(rounds_of(*ahead[1:], *[0.9] * lost)).standing is Standing.OPEN
    assert judge(rounds_of(*ahead, *[0.9] * lost)).standing is Standing.WON


def test_a_fourth_lost_round_ends_the_duel() -> None:
    assert judge(rounds_of(*[1.1] * 10, *[0.9] * 4)).standing is Standing.LOST


def test_a_second_lost_round_ends_the_duel_if_the_median_shows_no_gain() -> None:
    verdict = judge(rounds_of(1.02, 0.9, 1.2, 1.0))

    assert (verdict.standing, verdict.reason) == (Standing.LOST, "not better: behind in 2 of 4 rounds")
    assert judge(rounds_of(1.2, 0.9, 1.2, 1.0)).standing is Standing.OPEN


def test_a_negligible_gain_is_not_worth_a_change() -> None:
    assert judge(rounds_of(*[1.02] * 7)).standing is Standing.LOST


def test_higher_throughput_does_not_justify_a_long_tail() -> None:
    bought = [Round(each.incumbent, replace(each.challenger, p99_us=16.0)) for each in rounds_of(*[1.5] * 7)]

    assert judge(bought).reason == "ahead in 7 of 7 rounds, but p99 is 1.6 times as long"
    assert judge(bought, p99_growth=math.inf).standing is Standing.WON


def test_a_setting_that_cannot_be_served_loses_with_its_reason() -> None:
    rounds = [*rounds_of(1.5), Round(Measurement(1.0), Measurement(0.0, why="over the memory budget"))]

    assert judge(rounds).reason == "over the memory budget"


def test_a_setting_that_serves_beats_one_that_does_not() -> None:
    assert judge([Round(Measurement(0.0), Measurement(1.0))] * ROUNDS_TO_WIN[0]).standing is Standing.WON
    assert judge([Round(Measurement(0.0), Measurement(0.0))] * 2).standing is Standing.LOST


@given(st.lists(st.floats(0.01, 100), max_size=ROUNDS_TO_WIN[-1] + 2))
def test_a_duel_is_decided_within_seventeen_rounds_and_only_for_a_better_setting(ratios: list[float]) -> None:
    rounds = rounds_of(*ratios)
    verdict = judge(rounds)

    assert verdict.standing is not Standing.OPEN or len(rounds) < ROUNDS_TO_WIN[-1]
    assert verdict.standing is not Standing.WON or median_ratio(rounds) >= 1.03
    assert verdict.reason


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.5])
def test_an_equal_setting_hardly_ever_wins(noise: float) -> None:
    drawn = random.Random(1)

    wins = sum(won(lambda: math.exp(drawn.gauss(0, noise))) for _ in range(4000))

    assert wins / 4000 < 0.02


def test_rare_outliers_do_not_make_a_winner() -> None:
    drawn = random.Random(2)

    wins = sum(won(lambda: drawn.choice([0.999, 1.0, 1.001, 5.0])) for _ in range(4000))

    assert wins / 4000 < 0.02


def test_a_gain_of_a_tenth_usually_wins_despite_four_percent_noise() -> None:
    drawn = random.Random(3)

    wins = sum(won(lambda: 1.1 * math.exp(drawn.gauss(0, 0.04))) for _ in range(1000))

    assert wins / 1000 > 0.95
