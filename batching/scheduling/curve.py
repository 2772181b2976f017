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

KEPT_RUNS = 32
"""Runs kept per size."""
FRESH_NS = 10_000_000_000
"""An older run counts only if fewer than `KNOWN_RUNS` came after it."""
KNOWN_RUNS = 8
"""Runs after which a size counts as known."""
SEEN_RUNS = 3
"""Runs after which batches may be cut to a size, or away from it: a single run is as often luck."""
AS_GOOD = 1.01
"""Time per row within this factor counts as good as the best, which is about the precision of what is learned. For a
model that takes 7% more per row at twice the rows, p99 at 90% of the knee is 1.06 times that of the best static cap;
with 1.02 it is 1.10 (docs/adr/0009)."""
REVIEW_NS = 20_000_000
"""Time between two reviews, which take 5 to 40 us for one size, and up to 200 us if many have run."""
REVIEW_RUNS = 256
"""Runs after which a review is due regardless of time; fewer while there have been few runs."""
PACE_RUNS = 16
PACE = 1.15
"""The device counts as slower at all sizes when three quarters of the last `PACE_RUNS` runs, of any size, took longer
than three quarters of runs used to, and longer than `PACE` times the usual. It counts as faster likewise."""
MOST_CARRIED = 8.0
"""A rescaled run time stays within this factor of the measured one, in either direction: rescaling is a guess, and many
guesses in a row would grow without bound."""
EXACT_ROWS = 8
MOST_ROWS = 1 << 30
_REMEMBERED = 1024


class Point:
    """The latest runs of one size, or of neighboring sizes, oldest first.

    `centre_ns` is the mean of the middle half of them: as steady as a mean, and robust against a few slow ones.
    `tail_ns` is what 95 of 100 do not exceed. `base_ns` is the centre when the device's pace was last determined, and
    `usual_ns` the range of runs then. `rows` is a running mean of their rows, `sure` the number of runs at the present
    pace, `unseen` how many came since the last review. `took_ns` are the runs as measured, `ns` as they would be at the
    present pace.
    """

    __slots__ = (
        "at_ns", "base_ns", "centre_ns", "ns", "rows", "runs", "sure", "tail_ns", "took_ns", "unseen", "usual_ns",
    )  # fmt: skip

    def __init__(self, rows: int) -> None:
        self.rows = float(rows)
        self.runs = 0
        self.sure = 0
        self.unseen = 0
        self.centre_ns = self.tail_ns = self.base_ns = 0.0
        self.usual_ns = (0.0, 0.0)
        self.ns: list[float] = []
        self.took_ns: list[float] = []
        self.at_ns: list[int] = []

    def take_in(self, now_ns: int) -> list[tuple[int, float]]:
        """Recompute the centre and the tail.

        Returns: for each new run, its time and its ratio to the base; 1 if it is within the usual range.
        """
        new = min(self.unseen, PACE_RUNS) if self.runs >= KNOWN_RUNS else 0
        self.runs += self.unseen
        self.sure = min(self.sure + self.unseen, KEPT_RUNS)
        self.unseen = 0
        del self.ns[:-KEPT_RUNS], self.took_ns[:-KEPT_RUNS], self.at_ns[:-KEPT_RUNS]
        least, most = self.usual_ns
        ratios = [
            (self.at_ns[place], 1.0 if least <= self.ns[place] <= most else self.ns[place] / self.base_ns)
            for place in range(-new, 0)
        ]
        self.settle(now_ns, rebase=self.runs <= KNOWN_RUNS)
        return ratios

    def settle(self, now_ns: int, *, rebase: bool) -> None:
        """Recompute the centre and the tail from the runs that count now; with `rebase`, also the base."""
        runs = self.ns
        if self.at_ns[0] < now_ns - FRESH_NS and len(runs) > KNOWN_RUNS:
            runs = runs[min(bisect_left(self.at_ns, now_ns - FRESH_NS), len(runs) - KNOWN_RUNS) :]
        middle, self.centre_ns, self.tail_ns = _spread(runs)
        if rebase:
            self.base_ns = self.centre_ns
            self.usual_ns = min(middle[0], self.base_ns / PACE), max(middle[-1], self.base_ns * PACE)

    def rescale(self, factor: float, before_ns: int, now_ns: int) -> None:
        """Rescale the runs before a change of pace to the present pace, as far as they do not show it already."""
        before = bisect_left(self.at_ns, before_ns)
        if before:
            wanted = factor * self.base_ns / _spread(self.ns[:before])[1]
            scale = min(max(wanted, 1.0), factor) if factor > 1 else max(min(wanted, 1.0), factor)
            self.ns[:before] = [
                min(max(ns * scale, took_ns / MOST_CARRIED), took_ns * MOST_CARRIED)
                for ns, took_ns in zip(self.ns[:before], self.took_ns, strict=False)
            ]
        self.sure = len(self.ns) - before
        self.settle(now_ns, rebase=True)


class Curve:
    """Run time of one Key: a Point for each size that ran, and straight lines between them.

    Sizes are the allowed ones if batches are padded up to these. Otherwise they are exact up to 8 rows, then four per
    doubling, since devices work in tiles and their times have steps.
    Invariant: after a review neither the centres nor the tails fall as rows grow. Where measurements fell, the points
    concerned share a mean, weighted by how well each is known.
    `runs` counts everything observed. `knee`, `most` and `spared` are the CostModel's notes.
    """

    __slots__ = (
        "_allowed", "_best", "_centres", "_due_ns", "_due_runs", "_falls", "_per_row", "_recent", "_rows", "_seen",
        "_sizes", "_tails", "_touched", "knee", "most", "points", "runs", "spared",
    )  # fmt: skip

    def __init__(self, allowed: Sequence[int] = ()) -> None:
        self.points: dict[int, Point] = {}
        self.knee = 0
        self.most = 0
        self.runs = 0
        self.spared = 1
        self._allowed = allowed
        self._touched: list[Point] = []
        self._due_ns = 0
        self._due_runs = 0
        self._recent: deque[tuple[int, float]] = deque(maxlen=PACE_RUNS)
        self._sizes: list[int] = []
        self._rows: list[float] = []
        self._centres: list[float] = []
        self._per_row: list[float] = []
        self._tails: list[float] = []
        self._seen: dict[int, tuple[float, float]] = {}
        self._best: dict[int, int] = {}
        self._falls = False

    def observe(self, rows: int, ns: int, now_ns: int) -> bool:
        """Learn that a batch of `rows` took `ns`. Returns: whether the predictions were reviewed."""
        allowed = self._allowed
        size = rows if rows <= EXACT_ROWS and not allowed else self.size_of(rows)
        point = self.points.get(size)
        if point is None:
            point = self.points[size] = Point(size if allowed else rows)
            self._due_runs = 0
        elif point.rows != rows and not allowed:
            point.rows += (rows - point.rows) / 16
        ns = ns if ns > 0 else 1
        point.ns.append(ns)
        point.took_ns.append(ns)
        point.at_ns.append(now_ns)
        if not point.unseen:
            self._touched.append(point)
        point.unseen += 1
        self.runs += 1
        if now_ns < self._due_ns and self.runs < self._due_runs:
            return False
        self.review(now_ns)
        return True

    def size_of(self, rows: int) -> int:
        """Return the size that a batch of `rows` counts as: the largest of those that share a Point."""
        if self._allowed and rows <= self._allowed[-1]:
            return self._allowed[bisect_left(self._allowed, rows)]
        if rows <= EXACT_ROWS:
            return rows
        shift = (rows - 1).bit_length() - 3
        return ((rows - 1 >> shift) + 1) << shift

    def review(self, now_ns: int) -> None:
        """Recompute the predictions."""
        ratios = [ratio for point in self._touched for ratio in point.take_in(now_ns)]
        self._recent += ratios if len(self._touched) == 1 else sorted(ratios)
        self._touched.clear()
        self._keep_pace(now_ns)
        self._draw()
        self._due_ns = now_ns + REVIEW_NS
        self._due_runs = self.runs + min(1 + self.runs // 4, REVIEW_RUNS)

    def predict(self, rows: int) -> tuple[float, float]:
        """Return the centre and the tail, in nanoseconds, for a batch of `rows`."""
        seen = self._seen.get(rows)
        if seen is None:
            if len(self._seen) >= _REMEMBERED:
                self._seen.clear()
            seen = self._seen[rows] = self._work_out(self.size_of(rows) if self._allowed else rows)
        return seen

    def best_rows(self, waiting: int) -> int:
        """Return how many of `waiting` rows to run at once for the most rows per second."""
        if self._falls or not waiting:  # requests may have no rows
            return waiting
        rows = self._best.get(waiting)
        if rows is None:
            if len(self._best) >= _REMEMBERED:
                self._best.clear()
            rows = self._best[waiting] = self._find_best(waiting)
        return rows

    def _find_best(self, waiting: int) -> int:
        point = self.points.get(self.size_of(waiting))
        if point is not None and point.sure < SEEN_RUNS:
            return waiting
        below = self._sizes[: bisect_left(self._sizes, waiting)]
        smaller = [size for size in below if self.points[size].sure >= SEEN_RUNS]
        per_row = [self.predict(rows)[0] / rows for rows in (*smaller, waiting)]
        most = AS_GOOD * min(per_row)
        return next(
            rows for rows, ns in zip((waiting, *reversed(smaller)), reversed(per_row), strict=True) if ns <= most
        )

    def sizes_near_best(self, factor: float) -> list[int]:
        """Return the sizes whose time per row is within `factor` of the best one, in ascending order."""
        most = factor * min(self._per_row)
        return [size for size, ns in zip(self._sizes, self._per_row, strict=True) if ns <= most]

    def rows_within(self, ns: float) -> int:
        """Return the most rows whose centre is within `ns`, at least 1."""
        place = bisect_right(self._centres, ns)
        if not place:
            return 1
        below_rows, below_ns = self._rows[place - 1], self._centres[place - 1]
        if place == len(self._rows):
            rows = below_rows * ns / below_ns
        else:
            above_rows, above_ns = self._rows[place], self._centres[place]
            rows = below_rows + (above_rows - below_rows) * (ns - below_ns) / (above_ns - below_ns)
        found = max(int(min(rows, MOST_ROWS)), 1)
        if self._allowed:
            fitting = bisect_right(self._allowed, found)
            return self._allowed[fitting - 1] if fitting else 1
        while found > 1 and self._work_out(found)[0] > ns:  # at most once, because of rounding
            found -= 1
        return found

    def known(self) -> list[tuple[Point, float, float]]:
        """Return each size with its predicted centre and tail, in nanoseconds."""
        if self._touched:
            self.review(max(point.at_ns[-1] for point in self._touched))
        points = [self.points[size] for size in self._sizes]
        return list(zip(points, self._centres, self._tails, strict=True))

    def _keep_pace(self, now_ns: int) -> None:
        """Apply a change of pace shown by the latest runs to the sizes that have not run since."""
        recent = self._recent
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

    def _draw(self) -> None:
        self._sizes = sorted(self.points)
        points = [self.points[size] for size in self._sizes]
        weights = [point.sure**2 + 1 for point in points]
        self._rows = [point.rows for point in points]
        self._centres = _rising(_believed(points, [point.centre_ns for point in points]), weights)
        tails = _rising(_believed(points, [point.tail_ns for point in points]), weights)
        self._tails = list(map(max, tails, self._centres))
        self._seen.clear()
        self._best.clear()
        per_row = self._per_row = [ns / rows for rows, ns in zip(self._rows, self._centres, strict=True)]
        # between allowed sizes, time per row is that of the next one spread over fewer rows
        self._falls = not self._allowed and all(more >= less for more, less in pairwise(per_row))

    def _work_out(self, rows: int) -> tuple[float, float]:
        place = bisect_left(self._rows, rows)
        if place == len(self._rows):
            factor = rows / self._rows[-1]
            return self._centres[-1] * factor, self._tails[-1] * factor
        above = self._centres[place], self._tails[place]
        if place == 0 or self._rows[place] == rows:
            return above
        low, high = self._rows[place - 1], self._rows[place]
        share = (rows - low) / (high - low)
        centre, tail = self._centres[place - 1], self._tails[place - 1]
        return centre + (above[0] - centre) * share, tail + (above[1] - tail) * share


def _spread(runs: Sequence[float]) -> tuple[list[float], float, float]:
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
    centre = sum(middle) / len(middle)
    tail = ordered[-2] if count >= 20 else min(ordered[-1], 2 * ordered[-2])
    return middle, centre, max(tail, centre)


def _believed(points: Sequence[Point], values: list[float]) -> list[float]:
    """Return the values; a size that has hardly run gets at most the time per row of the next smaller size.

    With a latency target, sizes predicted to be too slow never run. Without this, a size whose first run met a pause of
    the machine could never show that it is fast.
    """
    believed, doubted = list(values), 0
    for place in range(1, len(values)):
        above, below = points[place], points[place - 1]
        most = believed[place - 1] * above.rows / below.rows
        if above.runs < SEEN_RUNS and values[place] > most:
            believed[place] = most
            doubted += above.runs
    # this many slow runs, across all sizes, were no pause
    return believed if doubted < SEEN_RUNS else values


def _rising(values: list[float], weights: list[int]) -> list[float]:
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
            other, other_weight, other_count = pools.pop()
            value = exp((log(value) * weight + log(other) * other_weight) / (weight + other_weight))
            weight += other_weight
            count += other_count
        pools.append((value, weight, count))
    return [value for value, _, count in pools for _ in range(count)]
