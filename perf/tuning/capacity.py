"""Capacity: finds the highest load that a server handles within a latency target, in few probes. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

MAX_PROBES = 9
"""The most probes of one search."""
CLOSE_RATIO = 1.08
"""If a load that was handled and one that was not are within this ratio, further probes mostly measure noise: the
result is interpolated.
"""
_STRIDE = 1.15


@dataclass(frozen=True, slots=True)
class Probe:
    """The result of a load. `latency_us`: of the percentile that is optimized."""

    load: float
    within_target: bool
    latency_us: float = math.nan


def find_capacity(
    probe: Callable[[float], Probe],
    start: float,
    bounds: tuple[float, float],
    target_us: float,
    *,
    integer: bool = False,
) -> float:
    """Return the highest load within `bounds` that is handled; 0 if not even the lowest is.

    `start` is an estimate from similar settings: steps away from it begin small and grow. `integer`: loads are whole
    numbers. Between the last load that was handled and the first that was not, the result is interpolated on the
    logarithm of latency.
    """
    low, high = bounds
    highest_handled: Probe | None = None
    lowest_missed: Probe | None = None
    stride = _STRIDE
    load = _clamp(start, low, high, integer=integer)
    for _ in range(MAX_PROBES):
        probed = probe(load)
        highest_handled, lowest_missed = (probed, lowest_missed) if probed.within_target else (highest_handled, probed)
        if highest_handled and lowest_missed:
            if lowest_missed.load / highest_handled.load <= CLOSE_RATIO or (
                integer and lowest_missed.load - highest_handled.load <= 1
            ):
                break
            load = _clamp(math.sqrt(highest_handled.load * lowest_missed.load), low, high, integer=integer)
            if load in {highest_handled.load, lowest_missed.load}:
                break
            continue
        if probed.load == (high if probed.within_target else low):
            break
        target = probed.load * stride if probed.within_target else probed.load / stride
        load = _clamp(_step(probed.load, target, integer=integer), low, high, integer=integer)
        stride = min(stride**2, 4.0)
    return _interpolate(highest_handled, lowest_missed, target_us, integer=integer) if highest_handled else 0.0


def _step(load: float, target: float, *, integer: bool) -> float:
    """Move by at least one if only whole numbers count."""
    if not integer:
        return target
    return max(math.ceil(target), load + 1) if target > load else min(math.floor(target), load - 1)


def _clamp(load: float, low: float, high: float, *, integer: bool) -> float:
    return min(max(round(load) if integer else load, low), high)


def _interpolate(highest_handled: Probe, lowest_missed: Probe | None, target_us: float, *, integer: bool) -> float:
    if (
        integer
        or lowest_missed is None
        or not 0 < highest_handled.latency_us < target_us < lowest_missed.latency_us < math.inf
    ):
        return highest_handled.load
    fraction = math.log(target_us / highest_handled.latency_us) / math.log(
        lowest_missed.latency_us / highest_handled.latency_us
    )
    return highest_handled.load + (lowest_missed.load - highest_handled.load) * fraction
