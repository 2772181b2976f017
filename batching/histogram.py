"""Histogram: counts of values per bucket. Used by statistics.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """Counts by inclusive upper bound, not cumulative; `counts` has one more entry, for values above the last bound."""

    bounds: tuple[int, ...]
    counts: tuple[int, ...]
    total: int

    @property
    def count(self) -> int:
        """Number of observations."""
        return sum(self.counts)


class Histogram:
    """Counts per bucket. Invariant: one more count than bounds."""

    __slots__ = ("_bounds", "_counts", "_edges", "_total")

    def __init__(self, bounds: tuple[int, ...]) -> None:
        self._bounds = bounds
        self._edges = np.array(bounds, np.int64)
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self._total = 0

    def add(self, values: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        """Count values."""
        buckets = np.searchsorted(self._edges, values)
        self._counts += np.bincount(buckets, minlength=len(self._bounds) + 1)
        self._total += int(values.sum())

    def snapshot(self) -> HistogramSnapshot:
        """Read the counts."""
        return HistogramSnapshot(self._bounds, tuple(self._counts.tolist()), self._total)
