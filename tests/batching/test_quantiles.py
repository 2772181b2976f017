"""Quantiles: the ranks they promise, what they forget, and what they may hold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.batching.scheduling.quantiles import WINDOW_NS, WINDOWS, Quantiles, Sketch

QUANTILES = (0.0, 0.01, 0.5, 0.9, 0.99, 0.999, 1.0)


def rank_errors(quantiles: Quantiles, values: np.ndarray[tuple[int], np.dtype[np.int64]], now_ns: int) -> list[float]:
    """Return the rank error of each quantile as a share of all values."""
    ordered = np.sort(values)
    errors = []
    for quantile, found in zip(QUANTILES, quantiles.at(QUANTILES, now_ns), strict=True):
        assert found is not None
        low, high = np.searchsorted(ordered, found, "left"), np.searchsorted(ordered, found, "right")
        expected = quantile * len(values)
        errors.append(max(low - expected, expected - high, 0) / len(values))
    return errors


@pytest.mark.parametrize("order", ["random", "rising", "falling", "alternating"])
def test_rank_errors_stay_within_the_promised_bound(order: str) -> None:
    values = np.random.default_rng(1).integers(0, 10**9, 400_000)
    values = {
        "random": values,
        "rising": np.sort(values),
        "falling": np.sort(values)[::-1],
        "alternating": np.sort(values).reshape(2, -1).T.reshape(-1),
    }[order]
    quantiles = Quantiles(4000)
    for part in np.array_split(values, 400):
        quantiles.add(part, np.zeros(len(part), np.int64))

    assert max(rank_errors(quantiles, values, 0)) <= 0.001


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=60))
def test_quantiles_of_few_values_are_exact(values: list[int]) -> None:
    quantiles = Quantiles(64)
    quantiles.add(np.array(values, np.int64), np.zeros(len(values), np.int64))
    ordered = sorted(values)

    assert quantiles.at((0.0, 0.5, 1.0), 0) == [ordered[0], ordered[-(-len(values) // 2) - 1], ordered[-1]]


def test_no_level_of_a_sketch_holds_more_than_its_capacity() -> None:
    sketch = Sketch(16)
    for count in range(1, 200):
        sketch.add(np.arange(count))
    values, weights = sketch.weighted()

    assert weights.sum() == sum(range(1, 200))
    assert max(np.unique(weights, return_counts=True)[1]) <= 16
    assert len(values) <= 16 * 12


def test_the_oldest_fifth_of_the_minute_expires_first() -> None:
    quantiles = Quantiles(64)
    for window in range(WINDOWS):
        quantiles.add(np.array([window]), np.array([window]))

    assert quantiles.at((0.0,), (WINDOWS - 1) * WINDOW_NS) == [0]
    assert quantiles.at((0.0,), WINDOWS * WINDOW_NS) == [1]
    assert quantiles.at((0.0,), 100 * WINDOW_NS) == [None]


def test_values_of_several_fifths_of_a_minute_may_be_added_together() -> None:
    quantiles = Quantiles(64)
    quantiles.add(np.array([1, 2, 3, 4]), np.array([0, 1, 0, 7]))

    assert quantiles.at((0.0, 1.0), 7 * WINDOW_NS) == [4, 4]
