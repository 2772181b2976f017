"""The rule that attributes energy to models, without clocks or devices."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.gpus import energy
from penstock.server.gpus.energy import OTHERS, EnergyAccount

S = 1_000_000_000


def account(*steps: tuple[int, int, dict[str, int]]) -> EnergyAccount:
    """Add readings: seconds, joules, and the milliseconds that each model used before."""
    energy = EnergyAccount()
    for at_s, joules, used in steps:
        for model, ms in used.items():
            energy.add_run_time(model, ms * 1_000_000)
        energy.add_reading(at_s * S, joules * 1000)
    return energy


def test_energy_is_attributed_by_run_time_and_the_rest_is_unattributed() -> None:
    shared = account((0, 500, {}), (10, 600, {"a": 2000, "b": 5000}))

    assert shared.models_uj == {"a": 20_000_000, "b": 50_000_000}
    assert (shared.unattributed_uj, shared.total_uj) == (30_000_000, 100_000_000)


def test_models_that_run_in_parallel_share_all_of_the_energy() -> None:
    shared = account((0, 0, {}), (10, 100, {"a": 10_000, "b": 30_000}))

    assert (shared.models_uj, shared.unattributed_uj) == ({"a": 25_000_000, "b": 75_000_000}, 0)


def test_run_time_before_the_first_reading_has_no_energy() -> None:
    assert account((5, 1000, {"a": 4000}), (6, 1010, {})).models_uj == {}


def test_energy_is_attributed_once_the_counter_moves() -> None:
    shared = account((0, 0, {}), (1, 0, {"a": 1000}), (2, 100, {}))

    assert shared.models_uj == {"a": 50_000_000}


def test_a_counter_that_restarts_subtracts_nothing() -> None:
    shared = account((0, 0, {}), (1, 100, {"a": 500}), (2, 7, {"a": 1000}), (3, 17, {"a": 1000}))

    assert (shared.models_uj, shared.unattributed_uj, shared.total_uj) == ({"a": 60_000_000}, 50_000_000, 110_000_000)


def test_the_least_recently_run_models_are_merged_above_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "MAX_MODELS", 2)
    shared = account((0, 0, {}), *((at, 10 * at, {model: 1000}) for at, model in enumerate("abac", 1)))

    assert shared.models_uj == {"c": 10_000_000, OTHERS: 30_000_000}


@pytest.mark.parametrize(
    ("models", "remaining"),
    [("abacdce", {"c": 20_000_000, "e": 10_000_000, OTHERS: 40_000_000}),
     ("abacdcef", {"e": 10_000_000, "f": 10_000_000, OTHERS: 60_000_000})],
)  # fmt: skip
def test_merged_models_stay_merged_as_further_models_run(
    models: str, remaining: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(energy, "MAX_MODELS", 3)
    shared = account((0, 0, {}), *((at, 10 * at, {model: 1000}) for at, model in enumerate(models, 1)))

    assert shared.models_uj == remaining


_STEPS = st.lists(
    st.tuples(
        st.integers(0, 5 * S),  # nanoseconds passed
        st.integers(-200, 5000),  # millijoules added; negative: the driver was reloaded
        st.dictionaries(st.sampled_from("abc"), st.integers(0, 9 * S), max_size=3),
    ),
    max_size=12,
)


@given(_STEPS)
def test_attributed_energy_adds_up_to_the_total_and_never_decreases(
    steps: Sequence[tuple[int, int, dict[str, int]]],
) -> None:
    shared, now_ns, counter_mj, used_mj = EnergyAccount(), 0, 10_000, 0
    shared.add_reading(now_ns, counter_mj)
    for passed_ns, more_mj, used in steps:
        before = (shared.unattributed_uj, dict(shared.models_uj))
        now_ns += passed_ns
        used_mj += max(more_mj, 0)
        counter_mj = counter_mj + more_mj if more_mj >= 0 else 0
        for model, ns in used.items():
            shared.add_run_time(model, ns)
        shared.add_reading(now_ns, counter_mj)

        assert shared.total_uj == used_mj * 1000 == shared.unattributed_uj + sum(shared.models_uj.values())
        assert shared.unattributed_uj >= before[0] >= 0
        assert all(shared.models_uj[model] >= uj >= 0 for model, uj in before[1].items())
