"""Stability: when a level's windows agree. The rule is perf_analyzer's. Pure.

Source: perf_analyzer's inference_profiler.cc: of the last three windows, the highest throughput and the highest latency
are at most a given percentage above the lowest. Percentiles are entries of the sorted latencies, not interpolated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.perf.generator.orders import Times

WINDOWS_TO_AGREE = 3
"""The number of windows that must agree, and that make up a level's figures."""
NS_PER_MS = 1e6


@dataclass(frozen=True, slots=True)
class WindowFigures:
    """The figures that decide: answers per second, and the mean or percentile latency (infinite if there are none)."""

    per_s: float
    latency_ns: float


def stable(windows: Sequence[WindowFigures], percentage: float) -> bool:
    """Return whether the last three agree."""
    last = windows[-WINDOWS_TO_AGREE:]
    if len(last) < WINDOWS_TO_AGREE or min(each.per_s for each in last) <= 0:
        return False
    return _within([each.per_s for each in last], percentage) and _within(
        [each.latency_ns for each in last], percentage
    )


def exceeds_threshold(windows: Sequence[WindowFigures], threshold_ms: float) -> bool:
    """Return whether one of the last three reached the threshold; False before there are three, or if it is 0."""
    last = windows[-WINDOWS_TO_AGREE:]
    return (
        threshold_ms > 0
        and len(last) == WINDOWS_TO_AGREE
        and any(each.latency_ns >= threshold_ms * NS_PER_MS for each in last)
    )


def window_figures(latencies_ns: Times, seconds: float, percentile: int) -> WindowFigures:
    """Compute the figures of a window."""
    count = len(latencies_ns)
    return WindowFigures(count / max(seconds, 1e-9), decisive_latency_ns(latencies_ns, percentile))


def decisive_latency_ns(latencies_ns: Times, percentile: int) -> float:
    """Return the latency that decides: the mean if `percentile` is 0; infinite if there are no latencies."""
    if not len(latencies_ns):
        return math.inf
    return percentiles_ns(latencies_ns, [percentile])[0] if percentile else float(latencies_ns.mean())


def percentiles_ns(latencies_ns: Times, percentiles: Sequence[float]) -> list[float]:
    """Return percentiles of at least one latency."""
    last_index = len(latencies_ns) - 1
    indexes = [min(int(percentile / 100 * last_index + 0.5), last_index) for percentile in percentiles]
    ordered = np.partition(latencies_ns, sorted(set(indexes)))
    return [float(ordered[index]) for index in indexes]


def _within(values: Sequence[float], percentage: float) -> bool:
    return max(values) <= min(values) * (1 + percentage / 100)
