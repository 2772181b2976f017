"""Curve: the run time of one Key by rows, learned from runs. Used by the CostModel, which has one per Key.

Recording a run costs a third of a microsecond. Predictions change only in a review: every 20 ms, every 256 runs, or
when a size runs for the first time. In between, a prediction is a lookup.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from math import exp, log

from .point import PACE_RUNS, Point

TRUSTED_AFTER_RUNS = 3
"""Runs after which batches may be cut to a size, or away from it: a single run is as often luck."""
TIE_FACTOR = 1.01
"""Time per row within this factor counts as good as the best, which is about the precision of what is learned. For a
model that takes 7% more per row at twice the rows, p99 at 90% of the knee is 1.06 times that of the best static cap;
with 1.02 it is 1.10 (docs/adr/0009)."""
REVIEW_NS = 20_000_000
"""Time between two reviews, which take 5 to 40 us for one size, and up to 200 us if many have run."""
MAX_REVIEW_RUNS = 256
"""Runs after which a review is due regardless of time; fewer while there have been few runs."""
MAX_EXACT_ROWS = 8
MAX_ROWS = 1 << 30
_MAX_CACHED = 1024


class Curve:
    """Run time of one Key: a Point for each size that ran, and straight lines between them.

    Sizes are the allowed ones if batches are padded up to these. Otherwise they are exact up to 8 rows, then four per
    doubling, since devices work in tiles and their times have steps.
    Invariant: after a review neither the centers nor the tails fall as rows grow. Where measurements fell, the points
    concerned share a mean, weighted by how well each is known.
    `runs` counts everything observed. `knee_rows`, `efficient_rows` and `runs_at_eviction_check` are the CostModel's
    notes.
    """

    __slots__ = (
        "_allowed_rows", "_cached_best_rows", "_cached_predictions", "_centers_ns", "_ns_per_row", "_p95s_ns",
        "_per_row_never_rises", "_point_rows", "_recent_ratios", "_review_due_ns", "_review_due_runs", "_sizes",
        "_unreviewed", "efficient_rows", "knee_rows", "points", "runs", "runs_at_eviction_check",
    )  # fmt: skip

    def __init__(self, allowed_rows: Sequence[int] = ()) -> None:
        self.points: dict[int, Point] = {}
        self.knee_rows = 0
        self.efficient_rows = 0
        self.runs = 0
        self.runs_at_eviction_check = 1
        self._allowed_rows = allowed_rows
        self._unreviewed: list[Point] = []
        self._review_due_ns = 0
        self._review_due_runs = 0
        self._recent_ratios: deque[tuple[int, float]] = deque(maxlen=PACE_RUNS)
        self._sizes: list[int] = []
        self._point_rows: list[float] = []
        self._centers_ns: list[float] = []
        self._ns_per_row: list[float] = []
        self._p95s_ns: list[float] = []
        self._cached_predictions: dict[int, tuple[float, float]] = {}
        self._cached_best_rows: dict[int, int] = {}
        self._per_row_never_rises = False

    def observe(self, rows: int, run_ns: int, now_ns: int) -> bool:
        """Learn that a batch of `rows` took `run_ns`. Returns: whether the predictions were reviewed."""
        allowed = self._allowed_rows
        size = rows if rows <= MAX_EXACT_ROWS and not allowed else self.size_of(rows)
        point = self.points.get(size)
        if point is None:
            point = self.points[size] = Point(size if allowed else rows)
            self._review_due_runs = 0
        elif point.rows != rows and not allowed:
            point.rows += (rows - point.rows) / 16
        run_ns = run_ns if run_ns > 0 else 1
        point.rescaled_ns.append(run_ns)
        point.measured_ns.append(run_ns)
        point.recorded_ns.append(now_ns)
        if not point.unreviewed_runs:
            self._unreviewed.append(point)
        point.unreviewed_runs += 1
        self.runs += 1
        if now_ns < self._review_due_ns and self.runs < self._review_due_runs:
            return False
        self.review(now_ns)
        return True

    def size_of(self, rows: int) -> int:
        """Return the size that a batch of `rows` counts as: the largest of those that share a Point."""
        if self._allowed_rows and rows <= self._allowed_rows[-1]:
            return self._allowed_rows[bisect_left(self._allowed_rows, rows)]
        if rows <= MAX_EXACT_ROWS:
            return rows
        shift = (rows - 1).bit_length() - 3
        return ((rows - 1 >> shift) + 1) << shift

    def review(self, now_ns: int) -> None:
        """Recompute the predictions."""
        ratios = [ratio for point in self._unreviewed for ratio in point.include_new_runs(now_ns)]
        self._recent_ratios += ratios if len(self._unreviewed) == 1 else sorted(ratios)
        self._unreviewed.clear()
        self._apply_pace_change(now_ns)
        self._rebuild()
        self._review_due_ns = now_ns + REVIEW_NS
        self._review_due_runs = self.runs + min(1 + self.runs // 4, MAX_REVIEW_RUNS)

    def predict(self, rows: int) -> tuple[float, float]:
        """Return the center and the tail, in nanoseconds, for a batch of `rows`."""
        prediction = self._cached_predictions.get(rows)
        if prediction is None:
            if len(self._cached_predictions) >= _MAX_CACHED:
                self._cached_predictions.clear()
            prediction = self._cached_predictions[rows] = self._interpolate(
                self.size_of(rows) if self._allowed_rows else rows
            )
        return prediction

    def best_rows(self, waiting_rows: int) -> int:
        """Return how many of `waiting_rows` rows to run at once for the most rows per second."""
        if self._per_row_never_rises or not waiting_rows:  # requests may have no rows
            return waiting_rows
        rows = self._cached_best_rows.get(waiting_rows)
        if rows is None:
            if len(self._cached_best_rows) >= _MAX_CACHED:
                self._cached_best_rows.clear()
            rows = self._cached_best_rows[waiting_rows] = self._find_best_rows(waiting_rows)
        return rows

    def _find_best_rows(self, waiting_rows: int) -> int:
        point = self.points.get(self.size_of(waiting_rows))
        if point is not None and point.current_pace_runs < TRUSTED_AFTER_RUNS:
            return waiting_rows
        below = self._sizes[: bisect_left(self._sizes, waiting_rows)]
        smaller = [size for size in below if self.points[size].current_pace_runs >= TRUSTED_AFTER_RUNS]
        per_row = [self.predict(rows)[0] / rows for rows in (*smaller, waiting_rows)]
        max_ns = TIE_FACTOR * min(per_row)
        return next(
            rows for rows, ns in zip((waiting_rows, *reversed(smaller)), reversed(per_row), strict=True) if ns <= max_ns
        )

    def sizes_near_best(self, factor: float) -> list[int]:
        """Return the sizes whose time per row is within `factor` of the best one, in ascending order."""
        max_ns = factor * min(self._ns_per_row)
        return [size for size, ns in zip(self._sizes, self._ns_per_row, strict=True) if ns <= max_ns]

    def rows_within(self, max_ns: float) -> int:
        """Return the most rows whose center is within `max_ns`, at least 1."""
        index = bisect_right(self._centers_ns, max_ns)
        if not index:
            return 1
        below_rows, below_ns = self._point_rows[index - 1], self._centers_ns[index - 1]
        if index == len(self._point_rows):
            rows = below_rows * max_ns / below_ns
        else:
            above_rows, above_ns = self._point_rows[index], self._centers_ns[index]
            rows = below_rows + (above_rows - below_rows) * (max_ns - below_ns) / (above_ns - below_ns)
        result = max(int(min(rows, MAX_ROWS)), 1)
        if self._allowed_rows:
            fitting = bisect_right(self._allowed_rows, result)
            return self._allowed_rows[fitting - 1] if fitting else 1
        while result > 1 and self._interpolate(result)[0] > max_ns:  # at most once, because of rounding
            result -= 1
        return result

    def predictions(self) -> list[tuple[Point, float, float]]:
        """Return each size with its predicted center and tail, in nanoseconds."""
        if self._unreviewed:
            self.review(max(point.recorded_ns[-1] for point in self._unreviewed))
        points = [self.points[size] for size in self._sizes]
        return list(zip(points, self._centers_ns, self._p95s_ns, strict=True))

    def _apply_pace_change(self, now_ns: int) -> None:
        """Apply a change of pace shown by the latest runs to the sizes that have not run since."""
        recent = self._recent_ratios
        if len(recent) < PACE_RUNS:
            return
        slower = [ratio for _, ratio in recent if ratio > 1]
        faster = [ratio for _, ratio in recent if ratio < 1]
        changed = max(slower, faster, key=len)
        if 4 * len(changed) < 3 * PACE_RUNS:
            return
        factor = sorted(changed)[len(changed) // 2]
        before_ns = recent[0][0]
        for point in self.points.values():
            point.rescale(factor, before_ns, now_ns)
        recent.clear()

    def _rebuild(self) -> None:
        self._sizes = sorted(self.points)
        points = [self.points[size] for size in self._sizes]
        weights = [point.current_pace_runs**2 + 1 for point in points]
        self._point_rows = [point.rows for point in points]
        self._centers_ns = _make_monotonic(_cap_untrusted(points, [point.center_ns for point in points]), weights)
        p95s_ns = _make_monotonic(_cap_untrusted(points, [point.p95_ns for point in points]), weights)
        self._p95s_ns = list(map(max, p95s_ns, self._centers_ns))
        self._cached_predictions.clear()
        self._cached_best_rows.clear()
        per_row = self._ns_per_row = [ns / rows for rows, ns in zip(self._point_rows, self._centers_ns, strict=True)]
        # between allowed sizes, time per row is that of the next one spread over fewer rows
        self._per_row_never_rises = not self._allowed_rows and all(more >= less for more, less in pairwise(per_row))

    def _interpolate(self, rows: int) -> tuple[float, float]:
        index = bisect_left(self._point_rows, rows)
        if index == len(self._point_rows):
            factor = rows / self._point_rows[-1]
            return self._centers_ns[-1] * factor, self._p95s_ns[-1] * factor
        above = self._centers_ns[index], self._p95s_ns[index]
        if index == 0 or self._point_rows[index] == rows:
            return above
        low, high = self._point_rows[index - 1], self._point_rows[index]
        share = (rows - low) / (high - low)
        center, p95 = self._centers_ns[index - 1], self._p95s_ns[index - 1]
        return center + (above[0] - center) * share, p95 + (above[1] - p95) * share


def _cap_untrusted(points: Sequence[Point], values: list[float]) -> list[float]:
    """Return the values; a size that has hardly run gets at most the time per row of the next smaller size.

    With a latency target, sizes predicted to be too slow never run. Without this, a size whose first run met a pause of
    the machine could never show that it is fast.
    """
    capped, capped_runs = list(values), 0
    for index in range(1, len(values)):
        above, below = points[index], points[index - 1]
        max_value = capped[index - 1] * above.rows / below.rows
        if above.runs < TRUSTED_AFTER_RUNS and values[index] > max_value:
            capped[index] = max_value
            capped_runs += above.runs
    # this many slow runs, across all sizes, were no pause
    return capped if capped_runs < TRUSTED_AFTER_RUNS else values


def _make_monotonic(values: list[float], weights: list[int]) -> list[float]:
    """Return the values adjusted to a sequence that never falls, close to each by its weight.

    Averages logarithms, so one size seen once, a hundred times too slow, hardly moves its neighbors.
    Source: pool adjacent violators (Ayer et al. 1955).
    """
    if values == sorted(values):
        return values
    pools: list[tuple[float, int, int]] = []
    for value, weight in zip(values, weights, strict=True):
        count = 1
        while pools and pools[-1][0] > value:
            previous, previous_weight, previous_count = pools.pop()
            value = exp((log(value) * weight + log(previous) * previous_weight) / (weight + previous_weight))
            weight += previous_weight
            count += previous_count
        pools.append((value, weight, count))
    return [value for value, _, count in pools for _ in range(count)]
