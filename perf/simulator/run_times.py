"""RunTimes: the true run times of batches for the simulator, assumed or measured by a running server.

The CostModel does not see them: it learns from the runs, as it does on a device.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist

import numpy as np

from penstock.batching.request import Key

from .arrivals import SHAPELESS

QUANTILES = 512
"""A distribution is stored as this many equally likely values."""
_DRAWS = 1 << 15

Table = Mapping[int, float | Sequence[float]]
"""By rows: the run time, or a sample of run times. Units: nanoseconds."""
Slowdowns = Sequence[tuple[int, float]]


class RunTimes:
    """True run times by Key and rows, as distributions.

    Between two sizes the quantiles are interpolated; below the smallest size they are those of the smallest, beyond the
    largest they grow by the last slope. A Key that is not listed runs as the first one listed. `noise`: the standard
    deviation of the logarithm of a factor with mean 1, applied to the table. `slowdowns`: times from which runs
    slow down, with the factors.
    Units: nanoseconds.
    """

    def __init__(self, tables: Mapping[Key, Table], noise: float = 0.0, slowdowns: Slowdowns = ()) -> None:
        normal = NormalDist(-noise * noise / 2, noise) if noise else None
        quantiles = (np.arange(QUANTILES) + 0.5) / QUANTILES
        factors = np.exp([normal.inv_cdf(index) for index in quantiles]) if normal else np.ones(QUANTILES)
        self._curves: dict[Key, tuple[list[int], list[list[float]]]] = {}
        for key, by_rows in tables.items():
            sizes = sorted(by_rows)
            values = [np.quantile(np.atleast_1d(by_rows[rows]), quantiles) for rows in sizes]
            if noise:
                rng = np.random.default_rng(0)
                values = [np.sort(value * rng.permutation(factors)) for value in values]
            self._curves[key] = (sizes, [value.tolist() for value in values])
        self._default_key = next(iter(self._curves))
        self._cached: dict[tuple[Key, int], list[float]] = {}
        self._slowdowns = sorted(slowdowns)

    def values_ns(self, key: Key, rows: int) -> list[float]:
        """Return the equally likely run times of a batch, ascending."""
        cached = self._cached.get((key, rows))
        if cached is None:
            cached = self._cached[key, rows] = self._values_ns(key, rows)
        return cached

    def _values_ns(self, key: Key, rows: int) -> list[float]:
        sizes, values = self._curves.get(key) or self._curves[self._default_key]
        index = bisect_left(sizes, rows)
        if index < len(sizes) and (sizes[index] == rows or not index):
            return values[index]
        if len(sizes) == 1:
            return [value * rows / sizes[0] for value in values[0]]
        index = min(index, len(sizes) - 1)
        (low, high), (value_below, value_above) = sizes[index - 1 : index + 1], values[index - 1 : index + 1]
        fraction = (rows - low) / (high - low)
        return [max(b + (a - b) * fraction, min(a, b)) for b, a in zip(value_below, value_above, strict=True)]

    def mean_ns(self, key: Key, rows: int) -> float:
        """Return the mean run time of a batch, before any slowdown."""
        values = self.values_ns(key, rows)
        return sum(values) / len(values)

    def sampler(self, seed: int) -> Callable[[Key, int, int], int]:
        """Return a function that draws run times for a Key, rows and the current time."""
        quantiles = np.random.default_rng(seed).integers(0, QUANTILES, _DRAWS).tolist()
        turn = 0

        def draw_ns(key: Key, rows: int, now_ns: int) -> int:
            nonlocal turn
            turn = (turn + 1) % _DRAWS
            ns = self.values_ns(key, rows)[quantiles[turn]]
            for start_ns, factor in self._slowdowns:
                if now_ns < start_ns:
                    break
                ns *= factor
            return max(int(ns), 1)

        return draw_ns

    def knee(self, key: Key, max_rows: int) -> tuple[int, float]:
        """Return the batch size with the most rows per second, among 1, 2, 4, ..., and that rate.

        It is the knee: a higher rate cannot be sustained.
        """
        sizes = {1 << power for power in range(max_rows.bit_length()) if 1 << power <= max_rows} | {max_rows}
        rows = max(sizes, key=lambda rows: (rows / self.mean_ns(key, rows), -rows))
        return rows, rows / self.mean_ns(key, rows) * 1e9


def from_table(by_rows: Table, noise: float = 0.0, slowdowns: Slowdowns = ()) -> RunTimes:
    """Make run times that are the same for every Key."""
    return RunTimes({SHAPELESS: by_rows}, noise, slowdowns)


def linear(base_ns: float, per_row_ns: float, noise: float = 0.0) -> RunTimes:
    """Make run times of a fixed cost per batch plus a cost per row."""
    return from_table({rows: base_ns + rows * per_row_ns for rows in (1, 1024)}, noise)
