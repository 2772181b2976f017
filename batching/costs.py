"""CostModel: what has been learned of a model's run time, by Key and rows. Predicts, never decides.

Fed by the Instances after each run and by the warm-up sweep; read by the Scheduler. Pure, and told the durations.
"""

from __future__ import annotations

from .request import Key

NEAR_BEST = 1.6
"""A batch is big enough when its time per row is within this factor of the best one seen. Generous, since the batch
grows by itself when much waits, and a model that runs while the front end answers makes up for it."""
AT_BEST = 1.15
"""A batch is too big when its time per row is above the best one seen by more than this factor: its rows may no longer
fit a cache. Measured on one core: 400 rows/s in batches of 8, 300 in batches of 64 (perf/overload.py)."""
MAX_KEYS = 256
REVIEW_RUNS = 8
"""Runs of a Key between two reviews of its knee, which costs as much as the smallest run."""
_STEP = 1.05


class _Curve:
    """Run time of one Key: one point per power of two of rows, each a running median.

    A median, because one descheduled run must not look like a slow model: each run moves the estimate by 5% towards
    itself, whatever its distance. A device that becomes twice as slow is known after fifteen runs.
    """

    __slots__ = ("cap", "most", "points", "unseen")

    def __init__(self) -> None:
        self.points: dict[int, tuple[float, float]] = {}
        self.cap = 0
        self.most = 0
        self.unseen = 0

    def observe(self, rows: int, ns: int) -> bool:
        bucket = (rows - 1).bit_length() if rows > 1 else 0
        old = self.points.get(bucket)
        if old is None:
            self.points[bucket] = (float(rows), float(ns))
        else:
            mean_rows = old[0] + (rows - old[0]) / 16
            self.points[bucket] = (mean_rows, old[1] * _STEP if ns > old[1] else old[1] / _STEP)
        self.unseen -= 1
        if old is not None and self.unseen > 0:
            return False
        self.unseen = REVIEW_RUNS
        self._review()
        return True

    def _review(self) -> None:
        best = min(ns / rows for rows, ns in self.points.values())
        self.cap = 1 << min(b for b, (rows, ns) in self.points.items() if ns / rows <= best * NEAR_BEST)
        most = max(b for b, (rows, ns) in self.points.items() if ns / rows <= best * AT_BEST)
        self.most = 0 if most == max(self.points) else 1 << most

    def predict_ns(self, rows: int) -> float:
        points = sorted(self.points.values())
        below = [p for p in points if p[0] <= rows]
        above = [p for p in points if p[0] >= rows]
        if below and above:
            (r0, t0), (r1, t1) = below[-1], above[0]
            return t0 if r1 == r0 else t0 + (t1 - t0) * (rows - r0) / (r1 - r0)
        if below:
            return below[-1][1] * rows / below[-1][0]
        return above[0][1]


class CostModel:
    """Run times of one model on one device. Bounded: the Keys least lately made give way beyond `MAX_KEYS`.

    Threads: the caller holds the Scheduler's lock.
    """

    def __init__(self) -> None:
        self._curves: dict[Key, _Curve] = {}

    def observe(self, key: Key, rows: int, ns: int, now_ns: int) -> bool:
        """Learn that a batch of `rows` took `ns`. Returns: whether what is predicted was reviewed."""
        curve = self._curves.get(key)
        if curve is None:
            if len(self._curves) >= MAX_KEYS:
                del self._curves[next(iter(self._curves))]
            curve = self._curves[key] = _Curve()
        return curve.observe(max(rows, 1), ns)

    def predict_ns(self, key: Key, rows: int) -> float | None:
        """Predict a run; None for a Key that has never run."""
        curve = self._curves.get(key)
        return None if curve is None else curve.predict_ns(max(rows, 1))

    def p95_ns(self, key: Key, rows: int) -> float | None:
        """Predict what 95 of 100 runs do not exceed; None for a Key that has never run."""
        return self.predict_ns(key, rows)

    def rows_within(self, key: Key, ns: float) -> int:
        """Give the most rows that are predicted to run within `ns`; 0 for a Key that has never run."""
        curve = self._curves.get(key)
        if curve is None:
            return 0
        rows = 1
        while rows < (1 << 30) and curve.predict_ns(2 * rows) <= ns:
            rows *= 2
        return rows

    def knee_rows(self, key: Key) -> int:
        """Give the smallest batch whose time per row is near the best seen; 0 for a Key that has never run."""
        curve = self._curves.get(key)
        return 0 if curve is None else curve.cap

    def most_rows(self, key: Key) -> int:
        """Give the biggest batch beyond which time per row has been seen to rise; 0 where it has not been seen to."""
        curve = self._curves.get(key)
        return 0 if curve is None else curve.most
