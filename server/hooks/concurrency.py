"""ConcurrencyEstimate: how many calls of a model's hooks to run concurrently. Used by `replicas.py`.

A hook that waits, for example for an image download, leaves the CPU to others; one that computes does not.
"""

from __future__ import annotations

MIN_WAIT_NS = 2_000_000
"""The average waiting time of a call above which concurrency is worthwhile."""
MIN_LONG_WAITS = 4
"""This many calls that wait for long are not a coincidence."""
WINDOW = 32
"""The number of calls in an average."""
_CPU_SHARE = 0.8


class ConcurrencyEstimate:
    """Learns from the elapsed time and the CPU time of calls. `target` is the number of concurrent calls, at least 1.

    Invariant: `target` is at most `limit`, and 1 until calls were measured to wait.
    It is a little less than the number that would keep the CPU busy: if calls wait for each other, for the GIL, it
    returns to 1. `measures_cpu`: every call's CPU time must be reported.
    """

    def __init__(self, limit: int) -> None:
        self.target = 1
        self.measures_cpu = False
        self._limit = max(limit, 1)
        self._reset()

    def record_call(self, duration_ns: int, cpu_ns: int) -> bool:
        """Record a call and its CPU time; 0 means that this was not measured.

        Returns: whether `target` has changed.
        """
        if not cpu_ns:
            self.measures_cpu = self.measures_cpu or (duration_ns > MIN_WAIT_NS and self._limit > 1)
            return False
        self._count += 1
        self._duration_ns += duration_ns
        self._cpu_ns += cpu_ns
        self._long_waits += duration_ns - cpu_ns > MIN_WAIT_NS
        full = self._count >= WINDOW
        if not full and self._long_waits != MIN_LONG_WAITS:
            return False
        target = self._estimate()
        if not full and target <= self.target:
            return False
        changed, self.target = target != self.target, target
        self.measures_cpu = target > 1
        self._reset()
        return changed

    def _estimate(self) -> int:
        waited_ns = self._duration_ns - self._cpu_ns
        if self._long_waits < MIN_LONG_WAITS or waited_ns <= MIN_WAIT_NS * self._count:
            return 1
        return min(self._limit, 1 + int(_CPU_SHARE * waited_ns / self._cpu_ns))

    def _reset(self) -> None:
        self._count = self._long_waits = self._duration_ns = self._cpu_ns = 0
