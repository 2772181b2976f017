"""CostModel: what has been learned about a model's run time, by Key and rows. Predicts, never decides.

Fed by the Instances after each run and by the warm-up sweep; read by the Scheduler. Pure: it is told the durations and
the time. How one Key's run times become a prediction is in curve.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.batching.request import Key

from .curve import TRUSTED_AFTER_RUNS, Curve

KNEE_FACTOR = 1.6
"""The knee is the smallest size whose time per row is within this factor of the best one seen. The factor is generous:
the knee is the minimum for closed-loop clients, and overlapping runs with the front end's work makes up for it."""
EFFICIENT_FACTOR = 1.15
"""Promised batches are no larger than the last size whose time per row is within this factor of the best one seen:
beyond it, rows may no longer fit a cache. Measured on one core: 400 rows/s in batches of 8, 300 in batches of 64
(perf/overload.py)."""
MAX_KEYS = 256


@dataclass(frozen=True, slots=True)
class RunTime:
    """What is known of batches of one Key and size: how often they ran, and their current run time."""

    key: Key
    rows: int
    runs: int
    mean_ns: int
    p95_ns: int


class CostModel:
    """Run times of one model on one kind of device, whose Instances share what they have learned.

    `allowed`: if not empty, the only sizes that run; a batch of 5 rows then costs as much as the next allowed size.
    Bounded: beyond `MAX_KEYS`, the oldest Key that has not run since it was last considered is evicted.
    Threads: the caller holds the model's lock.
    """

    def __init__(self, allowed_rows: Sequence[int] = ()) -> None:
        self._allowed_rows = tuple(sorted(allowed_rows))
        self._curves: dict[Key, Curve] = {}
        self._stable_keys: dict[Key, None] = {}

    def run_times(self, max_keys: int = MAX_KEYS) -> list[RunTime]:
        """Return what is known of the `max_keys` Keys that ran most, by ascending size within a Key."""
        return [run_time for key in self._most_used()[:max_keys] for run_time in self._run_times_of(key)]

    def stable_run_times(self, max_keys: int) -> list[RunTime]:
        """Return the same for a fixed set of Keys: the first that ran most, up to `max_keys`; none is ever replaced.

        `rows` is the largest size that shares a Point with those that ran. So neither shapes nor sizes that clients
        choose can create an unbounded number of metric series.
        """
        for key in self._most_used():
            if len(self._stable_keys) >= max_keys:
                break
            self._stable_keys[key] = None
        return [
            replace(run_time, rows=self._curves[key].size_of(run_time.rows))
            for key in self._stable_keys
            for run_time in self._run_times_of(key)
        ]

    def _most_used(self) -> list[Key]:
        return sorted(self._curves, key=lambda key: -self._curves[key].runs)

    def _run_times_of(self, key: Key) -> list[RunTime]:
        curve = self._curves.get(key)
        return [
            RunTime(key, max(round(point.rows), 1), point.runs, round(centre_ns), round(tail_ns))
            for point, centre_ns, tail_ns in (curve.predictions() if curve is not None else ())
        ]

    def observe(self, key: Key, rows: int, run_ns: int, now_ns: int) -> bool:
        """Learn that a batch of `rows` took `run_ns`. Returns: whether the predictions were reviewed."""
        curve = self._curves.get(key)
        if curve is None:
            if len(self._curves) >= MAX_KEYS:
                self._evict_key()
            curve = self._curves[key] = Curve(self._allowed_rows)
        if not curve.observe(rows if rows > 0 else 1, run_ns, now_ns):
            return False
        _update_sizes(curve)
        return True

    def predict_ns(self, key: Key, rows: int) -> float | None:
        """Predict a run; None for a Key that has never run."""
        curve = self._curves.get(key)
        return None if curve is None else curve.predict(rows if rows > 0 else 1)[0]

    def p95_ns(self, key: Key, rows: int) -> float | None:
        """Predict the time that 95 of 100 runs do not exceed; None for a Key that has never run."""
        curve = self._curves.get(key)
        return None if curve is None else curve.predict(rows if rows > 0 else 1)[1]

    def rows_within(self, key: Key, max_ns: float) -> int:
        """Return the most rows predicted to run within `max_ns`, at least 1; 0 for a Key that has never run."""
        curve = self._curves.get(key)
        return 0 if curve is None else curve.rows_within(max_ns)

    def knee_rows(self, key: Key) -> int:
        """Return the smallest batch whose time per row is near the best seen; 0 for a Key that has never run."""
        curve = self._curves.get(key)
        return 0 if curve is None else curve.knee_rows

    def max_seen_rows(self, key: Key) -> int:
        """Return the largest batch that has run; predictions beyond it are guesses. 0 for a Key that has never run."""
        curve = self._curves.get(key)
        return 0 if curve is None else max(curve.points, default=0)

    def efficient_rows(self, key: Key) -> int:
        """Return the size beyond which time per row was seen to rise; 0 if it was not seen to rise."""
        curve = self._curves.get(key)
        return 0 if curve is None else curve.efficient_rows

    def best_rows(self, key: Key, waiting_rows: int) -> int:
        """Return how many of `waiting_rows` rows to run for the most rows per second; all for a Key that has never run.

        Devices work in tiles, so time per row has steps; it also rises where rows no longer fit a cache.
        """
        curve = self._curves.get(key)
        return waiting_rows if curve is None else curve.best_rows(waiting_rows)

    def untried_rows(self, key: Key, rows: int) -> int:
        """Return half of `rows` if hardly any batch of about that size has run; otherwise 0.

        About that size means more than half of it. Also 0 for a Key that has never run, and if no such size is allowed.
        """
        half = rows // 2
        if self._allowed_rows:
            half = max((size for size in self._allowed_rows if size <= half), default=0)
        curve = self._curves.get(key)
        if curve is None or not half:
            return 0
        tried = (point.rows for point in curve.points.values() if point.runs >= TRUSTED_AFTER_RUNS)
        return 0 if any(half / 2 < size <= half for size in tried) else half

    def _evict_key(self) -> None:
        while True:
            key = next(iter(self._curves))
            curve = self._curves.pop(key)
            if curve.runs == curve.runs_at_eviction_check:
                return
            curve.runs_at_eviction_check = curve.runs
            self._curves[key] = curve


def _update_sizes(curve: Curve) -> None:
    curve.knee_rows = curve.sizes_near_best(KNEE_FACTOR)[0]
    efficient_rows = curve.sizes_near_best(EFFICIENT_FACTOR)[-1]
    curve.efficient_rows = 0 if efficient_rows == max(curve.points) else efficient_rows
