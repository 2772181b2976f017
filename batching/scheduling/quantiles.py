"""Quantiles: latencies of the last minute, kept in little memory, from which quantiles are computed.

Made by ModelStatistics for the summaries of the metrics page, and only if they are requested.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

WINDOWS = 5
WINDOW_NS = 12_000_000_000
"""Values older than a minute are dropped, a fifth of a minute at a time. Source: Triton's summaries do the same."""

_Ints = np.ndarray[Any, np.dtype[np.int64]]


class Sketch:
    """A sample of values in levels: one kept in level n stands for 2**n that were added.

    Invariant: no level holds more than `capacity`. A full one is sorted and every second value moves up a level,
    alternately starting at the first and the second; so a rank is off by at most half of `levels / capacity`, in the
    worst order.
    """

    __slots__ = ("_capacity", "_levels", "_starts_odd")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._levels: list[_Ints] = []
        self._starts_odd: list[bool] = []

    def add(self, values: _Ints) -> None:
        """Add values."""
        for first in range(0, len(values), self._capacity):
            self._add_to_level(0, values[first : first + self._capacity])

    def _add_to_level(self, level: int, values: _Ints) -> None:
        if level == len(self._levels):
            self._levels.append(np.empty(0, np.int64))
            self._starts_odd.append(False)
        merged = np.concatenate((self._levels[level], values))
        if len(merged) > self._capacity:
            merged.sort()
            # of an odd number, the last one stays
            pairs = len(merged) // 2 * 2
            promoted = merged[int(self._starts_odd[level]) : pairs : 2]
            self._starts_odd[level] = not self._starts_odd[level]
            merged = merged[pairs:]
            self._add_to_level(level + 1, promoted)
        self._levels[level] = merged

    def weighted(self) -> tuple[_Ints, _Ints]:
        """Return the values kept, and how many each stands for."""
        counts = [len(values) for values in self._levels]
        weights = np.repeat(np.array([1 << level for level in range(len(counts))], np.int64), counts)
        return np.concatenate(self._levels) if counts else np.empty(0, np.int64), weights


class Quantiles:
    """The last minute's values, in Sketches of a fifth of a minute each. Told the time, monotonic."""

    __slots__ = ("_capacity", "_windows")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._windows: dict[int, Sketch] = {}

    def add(self, values: _Ints, windows: _Ints) -> None:
        """Add values; `windows` is when each came, in units of WINDOW_NS."""
        for window in np.unique(windows).tolist():
            sketch = self._windows.get(window)
            if sketch is None:
                sketch = self._windows[window] = Sketch(self._capacity)
            sketch.add(values[windows == window])
        self._drop_expired(max(self._windows, default=0))

    def _drop_expired(self, window: int) -> None:
        for expired in [each for each in self._windows if each <= window - WINDOWS]:
            del self._windows[expired]

    def at(self, quantiles: Sequence[float], now_ns: int) -> list[int | None]:
        """Return the value at each quantile of the last minute's values; None if there are none."""
        self._drop_expired(now_ns // WINDOW_NS)
        samples = [sketch.weighted() for sketch in self._windows.values()]
        if not samples:
            return [None] * len(quantiles)
        values, weights = (np.concatenate(parts) for parts in zip(*samples, strict=True))
        order = np.argsort(values, kind="stable")
        ranks = np.cumsum(weights[order])
        target_ranks = np.ceil(np.array(quantiles) * ranks[-1])
        indices = np.minimum(np.searchsorted(ranks, target_ranks), len(values) - 1)
        return [int(value) for value in values[order][indices]]
