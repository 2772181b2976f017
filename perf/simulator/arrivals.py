"""Arrivals: when requests arrive, and of which kind, for the simulator, `penstock plan` and the benchmarks.

Pure and seeded: the same arguments give the same arrivals, here and on the wire. Random arrivals are Poisson, or come
in bursts (two states).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.batching.request import Key

Ints = np.ndarray[Any, np.dtype[np.int64]]
SHAPELESS: Key = ((1,),)


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of request: its rows, its Key, and its share of all requests, in any unit.

    Units: `target_ns` and `deadline_ns` count from its arrival; 0 is none (see InferRequest).
    """

    rows: int = 1
    key: Key = SHAPELESS
    weight: float = 1.0
    target_ns: int = 0
    deadline_ns: int = 0


ONE_ROW = (Kind(),)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Requests in order of arrival: `at_ns` ascending from 0, and for each the index of its Kind in `kinds`."""

    at_ns: Ints
    kind_indexes: Ints
    kinds: tuple[Kind, ...]
    seconds: float

    def __len__(self) -> int:
        return len(self.at_ns)

    @property
    def rows(self) -> Ints:
        """Rows of each request."""
        return np.array([kind.rows for kind in self.kinds], np.int64)[self.kind_indexes]

    @property
    def rows_per_s(self) -> float:
        return float(self.rows.sum()) / self.seconds

    def thinned(self, fraction: float, seed: int) -> Arrivals:
        """Keep each request with probability `fraction`: what one of `1 / share` devices gets of a random split."""
        selected = np.random.default_rng(seed).random(len(self)) < fraction
        return Arrivals(self.at_ns[selected], self.kind_indexes[selected], self.kinds, self.seconds)


@dataclass(frozen=True, slots=True)
class Bursts:
    """The states of `bursty`: `rate_factor` times the mean rate `time_fraction` of the time, `mean_s` on average."""

    rate_factor: float = 2.5
    time_fraction: float = 0.25
    mean_s: float = 0.05

    @property
    def quiet_rate_factor(self) -> float:
        """The rate between bursts, as a multiple of the mean rate."""
        return max(1 - self.time_fraction * self.rate_factor, 0.0) / (1 - self.time_fraction)


def poisson(rate_per_s: float, seconds: float, kinds: Sequence[Kind] = ONE_ROW, seed: int = 0) -> Arrivals:
    """Make independent arrivals. Units: `rate_per_s` counts requests."""
    rng = np.random.default_rng(seed)
    count = rng.poisson(rate_per_s * seconds)
    return _assign_kinds(np.sort(rng.random(count)) * seconds, seconds, kinds, rng)


def bursty(
    rate_per_s: float, seconds: float, kinds: Sequence[Kind] = ONE_ROW, seed: int = 0, bursts: Bursts | None = None
) -> Arrivals:
    """Make arrivals in bursts: a Poisson process whose rate switches between two states at random times.

    The long-term mean is `rate_per_s`. Bursts of more than `1 / share` times the mean leave nothing in between.
    Source: the two-state Markov-modulated Poisson process.
    """
    bursts = bursts or Bursts()
    changes, rng = np.random.default_rng(seed), np.random.default_rng([seed, 1])  # the same bursts at every rate
    burst_rate = rate_per_s * min(bursts.rate_factor, 1 / bursts.time_fraction)
    means_s = (bursts.mean_s * (1 - bursts.time_fraction) / bursts.time_fraction, bursts.mean_s)
    rates = (rate_per_s * bursts.quiet_rate_factor, burst_rate)
    state, start_s, times = int(changes.random() < bursts.time_fraction), 0.0, []
    while start_s < seconds:
        stay_s = min(changes.exponential(means_s[state]), seconds - start_s)
        times.append(start_s + np.sort(rng.random(rng.poisson(rates[state] * stay_s))) * stay_s)
        start_s += stay_s
        state = 1 - state
    return _assign_kinds(np.concatenate(times), seconds, kinds, rng)


def constant(rate_per_s: float, seconds: float, kinds: Sequence[Kind] = ONE_ROW, seed: int = 0) -> Arrivals:
    """Make evenly spaced arrivals."""
    times = np.arange(int(rate_per_s * seconds)) / rate_per_s
    return _assign_kinds(times, seconds, kinds, np.random.default_rng(seed))


def recorded(
    times_s: Iterable[float], kinds: Sequence[Kind] = ONE_ROW, kind_indexes: Sequence[int] | None = None
) -> Arrivals:
    """Repeat recorded arrivals: times in seconds, in any order; the first becomes 0.

    `kind_indexes`: the Kind of each; None: mixed by weight. The duration is one mean interval longer than the last
    request. Raises: ValueError.
    """
    times = np.array(list(times_s), float)
    if not len(times) or not np.isfinite(times).all():
        raise ValueError("a record of arrivals is a list of finite times in seconds, and not empty")
    order = np.argsort(times, kind="stable")
    times = times[order] - times[order[0]]
    seconds = float(times[-1]) * len(times) / max(len(times) - 1, 1) or 1.0
    if kind_indexes is None:
        return _assign_kinds(times, seconds, kinds, np.random.default_rng(0))
    return Arrivals(_to_ns(times), np.array(kind_indexes, np.int64)[order], tuple(kinds), seconds)


def _assign_kinds(times_s: Any, seconds: float, kinds: Sequence[Kind], rng: np.random.Generator) -> Arrivals:
    weights = np.array([kind.weight for kind in kinds])
    if len(kinds) == 1:
        kind_indexes = np.zeros(len(times_s), np.int64)
    else:
        kind_indexes = rng.choice(len(kinds), len(times_s), p=weights / weights.sum())
    return Arrivals(_to_ns(times_s), kind_indexes.astype(np.int64), tuple(kinds), seconds)


def _to_ns(times_s: Any) -> Ints:
    result: Ints = np.rint(np.asarray(times_s, float) * 1e9).astype(np.int64)
    return result
