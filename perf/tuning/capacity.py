"""Capacity: the greatest load that a server bears within a latency target, found by few probes. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

PROBES = 9
"""The most probes of one search."""
NEAR = 1.08
"""Between a load that was borne and one that was not, this far apart, what is measured is mostly noise: the rest is
interpolated."""
_STRIDE = 1.15


@dataclass(frozen=True, slots=True)
class Probe:
    """What a load did: `good`: it was borne within the target; `latency_us`: of the percentile that counts."""

    load: float
    good: bool
    latency_us: float = math.nan


def greatest(
    probe: Callable[[float], Probe], start: float, bounds: tuple[float, float], target_us: float, *, whole: bool = False
) -> float:
    """Give the greatest load within `bounds` that is borne; 0: not even the least one is.

    `start` is what is known of others like it: strides away from it begin small and grow. `whole`: loads are whole
    numbers. Between the last that was borne and the first that was not the answer is drawn on the logarithm of latency.
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
    """Move by one at least, where only whole numbers count."""
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
