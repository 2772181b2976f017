"""Levels: the loads that a run visits, one after the other. Pure: each search is sent the result of the previous level.

Source: perf_analyzer's inference_profiler.h. A search is a generator: it yields the next value, and is sent whether
that level was stable and below the latency threshold.
"""

from __future__ import annotations

from collections.abc import Generator

from .options import Range

Search = Generator[float, bool, None]


def linear(levels: Range) -> Search:
    """Visit `start`, then each step up to `end`, stopping after a level that failed. `end` 0: no upper limit."""
    value = levels.start
    while (yield value):
        value += levels.step
        if levels.end and value > levels.end:
            return


def halving(levels: Range, integer: bool) -> Search:
    """Visit `start` and `end`. If only `start` succeeded, halve the interval until it is no wider than `step`.

    `integer`: values are whole numbers.
    """
    low, high = levels.start, levels.end
    if not (yield low) or (yield high):
        return
    while high - low > levels.step:
        value = (low + high) // 2 if integer else (low + high) / 2
        if not low < value < high:
            return
        if (yield value):
            low = value
        else:
            high = value


def single(value: float) -> Search:
    """Visit one level."""
    yield value
