from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.perf.tuning.knobs import ORIGINAL, Axis, Setting, with_values
from penstock.perf.tuning.search import Search, SearchResult
from tests.perf.tuning.simulated import SimulatedBench

GRIDS = ({"instance_count": (1, 2, 4, 8), "intra_op_threads": (1, 2, 4)}, {"max_queue_delay": (0, 100, 500)})


def axes(at: Setting) -> Iterator[Axis]:
    for grid in GRIDS:
        combined = (with_values(at, zip(grid, values, strict=True)) for values in product(*grid.values()))
        yield Axis(" and ".join(grid), tuple(each for each in combined if each != at))


def searched(bench: SimulatedBench, axes_of: Callable[[Setting], Iterator[Axis]] = axes) -> SearchResult:
    return Search(bench, axes_of).run()


def alike(setting: dict[str, int]) -> float:
    return 100.0


def peaked(setting: dict[str, int]) -> float:
    """Best with four instances of one thread and a delay of 100, and there 1.5 times as it is."""
    worth = 1.5 if setting.get("instance_count") == 4 and setting.get("intra_op_threads") == 1 else 1.1
    return (
        100.0
        * (worth if setting.get("instance_count", 1) > 1 else 1)
        * (1.1 if setting.get("max_queue_delay") == 100 else 1)
    )


def test_the_best_setting_is_found_without_noise() -> None:
    result = searched(SimulatedBench(peaked))

    assert dict(result.kept) == {"instance_count": 4, "intra_op_threads": 1, "max_queue_delay": 100}
    assert result.confirmed
    assert result.ended_early == ""


def test_the_best_setting_is_usually_found_despite_noise() -> None:
    settings = [searched(SimulatedBench(peaked, 0.04, seed=seed)).kept for seed in range(30)]

    assert sum(dict(each).get("instance_count") == 4 for each in settings) >= 26


def test_nothing_is_kept_if_all_settings_are_equal() -> None:
    settings = [searched(SimulatedBench(alike, noise, seed=seed)).kept for seed in range(60) for noise in (0.02, 0.3)]

    assert sum(each != ORIGINAL for each in settings) <= 3


def test_the_kept_setting_is_finally_compared_with_the_original_configuration() -> None:
    last = searched(SimulatedBench(peaked)).final_trial

    assert last is not None
    assert (last.incumbent, last.kept, len(last.rounds)) == (ORIGINAL, True, 7)
    assert all(1.6 < each.ratio < 1.7 for each in last.rounds)


def test_a_setting_that_the_server_rejects_is_a_row_with_the_reason() -> None:
    result = searched(SimulatedBench(lambda setting: -1.0 if setting.get("instance_count") == 8 else 100.0))

    refused = [trial for trial in result.trials if dict(trial.setting).get("instance_count") == 8]
    assert {trial.verdict for trial in refused} == {"the server does not take it"}
    assert result.kept == ORIGINAL


def test_a_setting_that_serves_replaces_one_that_does_not() -> None:
    result = searched(SimulatedBench(lambda setting: 100.0 if setting.get("instance_count") == 2 else -1.0))

    assert dict(result.kept)["instance_count"] == 2


@given(st.integers(0, 200), st.floats(0, 0.2), st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_the_time_limit_is_kept_and_every_row_has_a_verdict(budget_s: int, noise: float, seed: int) -> None:
    bench = SimulatedBench(peaked, noise, budget_s, seed)

    result = searched(bench)

    assert len(bench.measured) <= budget_s + 1  # what has begun is finished
    assert all(trial.verdict for trial in result.trials)
    assert result.kept == ORIGINAL or not result.confirmed or result.final_trial is not None


def test_each_setting_is_tried_once() -> None:
    tried = [trial.setting for trial in searched(SimulatedBench(peaked)).trials]

    assert len(tried) == len(set(tried))


def test_too_little_time_is_reported_and_nothing_is_tried() -> None:
    result = searched(SimulatedBench(peaked, budget_s=20))

    assert result.trials == []
    assert "would not do" in result.ended_early


def test_an_interrupted_search_keeps_its_winner_as_unconfirmed() -> None:
    bench = SimulatedBench(peaked)
    won: list[str] = []

    def say(line: str) -> None:
        won.append(line)
        if "  kept" in line:
            bench.interrupted_at_s = bench.remaining_s()

    result = Search(bench, axes, say).run()

    assert dict(result.kept)["instance_count"] == 4
    assert (result.confirmed, result.ended_early) == (False, "interrupted")
