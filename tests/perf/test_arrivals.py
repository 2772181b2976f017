from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.perf.simulator.arrivals import (
    Arrivals,
    Bursts,
    Kind,
    bursty,
    constant,
    poisson,
    recorded,
)

A, B = Kind(1, ((4,),)), Kind(3, ((8,),), weight=3)


@pytest.mark.parametrize("come", [poisson, bursty, constant])
def test_arrivals_are_ordered_and_have_the_requested_rate(come: Callable[..., Arrivals]) -> None:
    arrivals = come(1000, 60, (A, B), 1)

    assert (np.diff(arrivals.at_ns) >= 0).all()
    assert arrivals.at_ns[0] >= 0
    assert arrivals.at_ns[-1] < 60e9
    assert len(arrivals) == pytest.approx(60_000, rel=0.06)
    assert np.bincount(arrivals.kind_indexes)[1] / len(arrivals) == pytest.approx(0.75, abs=0.01)
    assert arrivals.rows_per_s == pytest.approx(1000 * 2.5, rel=0.06)


@pytest.mark.parametrize("come", [poisson, bursty])
def test_the_same_seed_gives_the_same_arrivals(come: Callable[..., Arrivals]) -> None:
    first, again, other = (come(500, 4, (A, B), seed) for seed in (7, 7, 8))

    assert first.at_ns.tolist() == again.at_ns.tolist()
    assert first.kind_indexes.tolist() == again.kind_indexes.tolist()
    assert first.at_ns.tolist() != other.at_ns.tolist()


def test_the_intervals_of_poisson_arrivals_are_exponential() -> None:
    gaps = np.diff(poisson(1000, 100, seed=3).at_ns)

    assert gaps.mean() == pytest.approx(1e6, rel=0.02)
    assert gaps.std() == pytest.approx(1e6, rel=0.02)


def test_bursts_have_the_requested_density() -> None:
    per_10_ms = np.bincount(bursty(10_000, 60, seed=1, bursts=Bursts(3, 0.2, 0.5)).at_ns // 10_000_000)

    assert np.quantile(per_10_ms, 0.9) == pytest.approx(300, rel=0.05)
    assert np.quantile(per_10_ms, 0.3) == pytest.approx(50, rel=0.1)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=50))
def test_recorded_arrivals_are_repeated_exactly(ms: list[int]) -> None:
    kinds = [number % 2 for number in range(len(ms))]
    arrivals = recorded([each / 1000 for each in ms], (A, B), kinds)

    assert arrivals.at_ns.tolist() == [(each - min(ms)) * 1_000_000 for each in sorted(ms)]
    assert sorted(zip(ms, kinds, strict=True), key=lambda pair: pair[0]) == [
        (at // 1_000_000 + min(ms), kind)
        for at, kind in zip(arrivals.at_ns.tolist(), arrivals.kind_indexes.tolist(), strict=True)
    ]


@pytest.mark.parametrize("times", [[], [1.0, float("nan")]])
def test_invalid_recordings_are_rejected(times: list[float]) -> None:
    with pytest.raises(ValueError, match="not empty"):
        recorded(times)


def test_a_random_split_of_poisson_arrivals_is_poisson() -> None:
    thinned = poisson(10_000, 50, seed=2).thinned(0.1, seed=5)
    gaps = np.diff(thinned.at_ns)

    assert len(thinned) == pytest.approx(50_000, rel=0.02)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.02)
