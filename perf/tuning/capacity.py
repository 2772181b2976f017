"""Capacity: finds the highest load that a server handles within a latency target, in few probes. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

PROBES = 9
"""The most probes of one search."""
NEAR = 1.08
"""If a load that was handled and one that was not are within this ratio, further probes mostly measure noise: the
result is interpolated.
"""
_STRIDE = 1.15


@dataclass(frozen=True, slots=True)
class Probe:
    """The result of a load. `good`: it was within the target; `latency_us`: of the percentile that is optimized."""

    load: float
    good: bool
    latency_us: float = math.nan


def greatest(
    probe: Callable[[float], Probe], start: float, bounds: tuple[float, float], target_us: float, *, whole: bool = False
) -> float:
    """Return the highest load within `bounds` that is handled; 0 if not even the lowest is.

    `start` is an estimate from similar settings: steps away from it begin small and grow. `whole`: loads are whole
    numbers. Between the last load that was handled and the first that was not, the result is interpolated on the
    logarithm of latency.
    """
    low, high = bounds
    good: Probe | None = None
    bad: Probe | None = None
    stride = _STRIDE
    load = _within(start, low, high, whole=whole)
    for _ in range(PROBES):
        found = probe(load)
        good, bad = (found, bad) if found.good else (good, found)
        if good and bad:
            if bad.load / good.load <= NEAR or (whole and bad.load - good.load <= 1):
                break
            load = _within(math.sqrt(good.load * bad.load), low, high, whole=whole)
            if load in {good.load, bad.load}:
                break
            continue
        if found.load == (high if found.good else low):
            break
        further = found.load * stride if found.good else found.load / stride
        load = _within(_off(found.load, further, whole=whole), low, high, whole=whole)
        stride = min(stride**2, 4.0)
    return _between(good, bad, target_us, whole=whole) if good else 0.0


def _off(now: float, further: float, *, whole: bool) -> float:
    """Move by at least one if only whole numbers count."""
    if not whole:
        return further
    return max(math.ceil(further), now + 1) if further > now else min(math.floor(further), now - 1)


def _within(load: float, low: float, high: float, *, whole: bool) -> float:
    return min(max(round(load) if whole else load, low), high)


def _between(good: Probe, bad: Probe | None, target_us: float, *, whole: bool) -> float:
    if whole or bad is None or not 0 < good.latency_us < target_us < bad.latency_us < math.inf:
        return good.load
    share = math.log(target_us / good.latency_us) / math.log(bad.latency_us / good.latency_us)
    return good.load + (bad.load - good.load) * share
