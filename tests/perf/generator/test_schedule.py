from __future__ import annotations

from itertools import islice, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.perf.generator.orders import Load, Part
from penstock.perf.generator.schedule import due_ns

PROCESSES = st.integers(1, 9)
RATES = st.floats(0.1, 1e6)
SEQUENCES = st.integers(0, 20)


def times(load: Load, count: int, part: Part | None = None) -> list[int]:
    return list(islice(due_ns(load, part or Part()), count))


def together(load: Load, processes: int, count: int) -> list[int]:
    each = [times(load, count, Part(number, processes)) for number in range(processes)]
    return sorted(due for part in each for due in part)[:count]


@given(RATES, PROCESSES, SEQUENCES)
def test_processes_together_produce_the_even_schedule_of_one(rate: float, processes: int, sequences: int) -> None:
    one = times(Load(rate_per_s=rate, sequences=sequences), 50)

    assert together(Load(rate_per_s=rate, sequences=sequences), processes, 50) == one


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=9).filter(lambda each: sum(each) > 1), PROCESSES, SEQUENCES)
def test_processes_together_produce_the_recorded_schedule_of_one(
    intervals: list[float], processes: int, sequences: int
) -> None:
    load = Load(intervals_us=tuple(intervals), sequences=sequences)

    assert together(load, processes, 50) == times(load, 50)


def test_an_even_schedule_starts_at_the_beginning_and_keeps_its_interval() -> None:
    assert times(Load(rate_per_s=1000), 4) == [0, 1_000_000, 2_000_000, 3_000_000]


def test_an_even_schedule_does_not_drift() -> None:
    due = due_ns(Load(rate_per_s=3), Part())

    assert next(islice(due, 3_000_000, None)) == 1_000_000 * 1_000_000_000


def test_recorded_intervals_repeat() -> None:
    assert times(Load(intervals_us=(10, 0, 5)), 7) == [10_000, 10_000, 15_000, 25_000, 25_000, 30_000, 40_000]


@given(PROCESSES, st.integers(1, 100), st.integers(0, 7), st.booleans())
def test_the_number_of_requests_is_exact(processes: int, requests: int, sequences: int, poisson: bool) -> None:
    load = Load(rate_per_s=10, requests=requests, sequences=sequences, poisson=poisson)

    counts = [len(list(due_ns(load, Part(number, processes)))) for number in range(processes)]

    assert sum(counts) == requests


@given(st.floats(1, 1e5), PROCESSES, st.integers(0, 1 << 32))
def test_a_poisson_schedule_is_determined_by_its_seed(rate: float, processes: int, seed: int) -> None:
    load = Load(rate_per_s=rate, poisson=True, seed=seed)

    one = times(load, 2000, Part(0, processes))

    assert one == times(load, 2000, Part(0, processes))
    assert one != times(Load(rate_per_s=rate, poisson=True, seed=seed + 1), 2000, Part(0, processes))
    assert all(before <= after for before, after in pairwise(one))


@pytest.mark.parametrize("processes", [1, 3])
@pytest.mark.parametrize("sequences", [0, 5])
def test_poisson_streams_together_have_the_rate_and_variance_of_one(processes: int, sequences: int) -> None:
    load = Load(rate_per_s=2000, poisson=True, sequences=sequences, seed=7)

    gaps = np.diff(together(load, processes, 60_000)[:20_000])

    assert np.mean(gaps) == pytest.approx(500_000, rel=0.03)
    assert np.std(gaps) == pytest.approx(np.mean(gaps), rel=0.03)


def test_processes_draw_different_poisson_streams() -> None:
    load = Load(rate_per_s=100, poisson=True)

    assert times(load, 10, Part(0, 2)) != times(load, 10, Part(1, 2))


def test_a_process_without_a_sequence_sends_nothing() -> None:
    assert times(Load(rate_per_s=100, sequences=1), 5, Part(1, 2)) == []


def test_a_sequence_gets_all_of_its_own_turns() -> None:
    of_three = times(Load(rate_per_s=1000, sequences=3), 4, Part(0, 2))

    assert of_three == [0, 2_000_000, 3_000_000, 5_000_000]  # sequences 0 and 2 of 0, 1, 2


@pytest.mark.parametrize(
    "load", [Load(), Load(rate_per_s=-1), Load(intervals_us=(0.0,)), Load(intervals_us=(2.0, -1.0))]
)
def test_a_schedule_without_times_is_rejected(load: Load) -> None:
    with pytest.raises(ValueError, match=r"rate above 0|0 or more"):
        next(due_ns(load, Part()))
