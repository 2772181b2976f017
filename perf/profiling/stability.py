"""Stability: when a level's windows agree. The rule is perf_analyzer's, and pure.

Source: perf_analyzer's inference_profiler.cc: of the last three windows, the greatest throughput and the greatest
latency are at most so many percent above the least. Percentiles are entries of the sorted latencies, never between two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.perf.generator.orders import Times

SETTLED = 3
"""Windows that must agree, and that make up a level's figures."""
NS_PER_MS = 1e6


@dataclass(frozen=True, slots=True)
class Passed:
    """What a window is judged by: answers per second, and the mean or percentile latency; infinite where none came."""

    per_s: float
    latency_ns: float


def stable(windows: Sequence[Passed], percentage: float) -> bool:
    """Say whether the last three agree."""
    last = windows[-SETTLED:]
    if len(last) < SETTLED or min(each.per_s for each in last) <= 0:
        return False
    return _within([each.per_s for each in last], percentage) and _within(
        [each.latency_ns for each in last], percentage
    )


def over(windows: Sequence[Passed], threshold_ms: float) -> bool:
    """Say whether one of the last three reached the threshold; never before there are three, or with threshold 0."""
    last = windows[-SETTLED:]
    return (
        threshold_ms > 0 and len(last) == SETTLED and any(each.latency_ns >= threshold_ms * NS_PER_MS for each in last)
    )


def passed(latencies_ns: Times, seconds: float, percentile: int) -> Passed:
    """Judge a window by its latencies."""
    count = len(latencies_ns)
    return Passed(count / max(seconds, 1e-9), deciding_ns(latencies_ns, percentile))


def deciding_ns(latencies_ns: Times, percentile: int) -> float:
    """Give the latency that decides: the mean where `percentile` is 0; infinite where there is none."""
    if not len(latencies_ns):
        return math.inf
    return percentiles_ns(latencies_ns, [percentile])[0] if percentile else float(latencies_ns.mean())


def percentiles_ns(latencies_ns: Times, percentiles: Sequence[float]) -> list[float]:
    """Give percentiles of at least one latency."""
    most = len(latencies_ns) - 1
    at = [min(int(percentile / 100 * most + 0.5), most) for percentile in percentiles]
    ordered = np.partition(latencies_ns, sorted(set(at)))
    return [float(ordered[index]) for index in at]


def _within(values: Sequence[float], percentage: float) -> bool:
    return max(values) <= min(values) * (1 + percentage / 100)
