"""Point: the run time of one batch size, learned from its latest runs. Used by curve.py."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

MAX_SAMPLES = 32
"""Runs kept per size."""
FRESH_NS = 10_000_000_000
"""An older run counts only if fewer than `KNOWN_AFTER_RUNS` came after it."""
KNOWN_AFTER_RUNS = 8
"""Runs after which a size counts as known."""
PACE_RUNS = 16
PACE_FACTOR = 1.15
"""The device counts as slower at all sizes when three quarters of the last `PACE_RUNS` runs, of any size, took longer
than three quarters of runs used to, and longer than `PACE_FACTOR` times the usual. It counts as faster likewise."""
MAX_RESCALE = 8.0
"""A rescaled run time stays within this factor of the measured one, in either direction: rescaling is a guess, and many
guesses in a row would grow without bound."""


class Point:
    """The latest runs of one size, or of neighboring sizes, oldest first.

    `center_ns` is the mean of the middle half of them: as steady as a mean, and robust against a few slow ones.
    `p95_ns` is what 95 of 100 do not exceed. `baseline_ns` is the center when the device's pace was last determined,
    and `usual_range_ns` the range of runs then. `rows` is a running mean of their rows, `current_pace_runs` the number
    of runs at the present pace, `unreviewed_runs` how many came since the last review. `measured_ns` are the runs as
    measured, `rescaled_ns` as they would be at the present pace.
    """

    __slots__ = (
        "baseline_ns", "center_ns", "current_pace_runs", "measured_ns", "p95_ns", "recorded_ns", "rescaled_ns", "rows",
        "runs", "unreviewed_runs", "usual_range_ns",
    )  # fmt: skip

    def __init__(self, rows: int) -> None:
        self.rows = float(rows)
        self.runs = 0
        self.current_pace_runs = 0
        self.unreviewed_runs = 0
        self.center_ns = self.p95_ns = self.baseline_ns = 0.0
        self.usual_range_ns = (0.0, 0.0)
        self.rescaled_ns: list[float] = []
        self.measured_ns: list[float] = []
        self.recorded_ns: list[int] = []

    def include_new_runs(self, now_ns: int) -> list[tuple[int, float]]:
        """Recompute the center and the tail.

        Returns: for each new run, its time and its ratio to the base; 1 if it is within the usual range.
        """
        new_runs = min(self.unreviewed_runs, PACE_RUNS) if self.runs >= KNOWN_AFTER_RUNS else 0
        self.runs += self.unreviewed_runs
        self.current_pace_runs = min(self.current_pace_runs + self.unreviewed_runs, MAX_SAMPLES)
        self.unreviewed_runs = 0
        del self.rescaled_ns[:-MAX_SAMPLES], self.measured_ns[:-MAX_SAMPLES], self.recorded_ns[:-MAX_SAMPLES]
        low, high = self.usual_range_ns
        ratios = [
            (
                self.recorded_ns[index],
                1.0 if low <= self.rescaled_ns[index] <= high else self.rescaled_ns[index] / self.baseline_ns,
            )
            for index in range(-new_runs, 0)
        ]
        self.recompute(now_ns, rebase=self.runs <= KNOWN_AFTER_RUNS)
        return ratios

    def recompute(self, now_ns: int, *, rebase: bool) -> None:
        """Recompute the center and the tail from the runs that count now; with `rebase`, also the base."""
        runs = self.rescaled_ns
        if self.recorded_ns[0] < now_ns - FRESH_NS and len(runs) > KNOWN_AFTER_RUNS:
            runs = runs[min(bisect_left(self.recorded_ns, now_ns - FRESH_NS), len(runs) - KNOWN_AFTER_RUNS) :]
        middle, self.center_ns, self.p95_ns = _summarize(runs)
        if rebase:
            self.baseline_ns = self.center_ns
            self.usual_range_ns = (
                min(middle[0], self.baseline_ns / PACE_FACTOR),
                max(middle[-1], self.baseline_ns * PACE_FACTOR),
            )

    def rescale(self, factor: float, before_ns: int, now_ns: int) -> None:
        """Rescale the runs before a change of pace to the present pace, as far as they do not show it already."""
        older = bisect_left(self.recorded_ns, before_ns)
        if older:
            needed_factor = factor * self.baseline_ns / _summarize(self.rescaled_ns[:older])[1]
            scale = min(max(needed_factor, 1.0), factor) if factor > 1 else max(min(needed_factor, 1.0), factor)
            self.rescaled_ns[:older] = [
                min(max(ns * scale, measured_ns / MAX_RESCALE), measured_ns * MAX_RESCALE)
                for ns, measured_ns in zip(self.rescaled_ns[:older], self.measured_ns, strict=False)
            ]
        self.current_pace_runs = len(self.rescaled_ns) - older
        self.recompute(now_ns, rebase=True)


def _summarize(runs: Sequence[float]) -> tuple[list[float], float, float]:
    """Return the middle half in order, its mean, and what 95 of 100 do not exceed.

    Of two runs the faster counts: the first run of a size is often slow for reasons that do not recur. With fewer than
    20 runs the slowest is the tail, but at most twice the next, so that one hiccup does not count as typical.
    """
    ordered = sorted(runs)
    count = len(ordered)
    if count == 1:
        return ordered, ordered[0], ordered[0]
    cut = (count + 1) // 4
    middle = ordered[cut : count - cut] if count > 2 else ordered[:1]
    center = sum(middle) / len(middle)
    p95 = ordered[-2] if count >= 20 else min(ordered[-1], 2 * ordered[-2])
    return middle, center, max(p95, center)
