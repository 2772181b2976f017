"""Waits: how many calls of a model's hooks to run concurrently. Used by `replicas.py`.

A hook that waits, for example for an image download, leaves the CPU to others; one that computes does not.
"""

from __future__ import annotations

LONG_NS = 2_000_000
"""The average waiting time of a call above which concurrency is worthwhile."""
FEW = 4
"""This many calls that wait for long are not a coincidence."""
WINDOW = 32
"""The number of calls in an average."""
_SHARE = 0.8


class ConcurrencyEstimate:
    """Learns from the elapsed time and the CPU time of calls. `wanted` is the number of concurrent calls, at least 1.

    Invariant: `wanted` is at most `limit`, and 1 until calls were measured to wait.
    It is a little less than the number that would keep the CPU busy: if calls wait for each other, for the GIL, it
    returns to 1. `measures`: every call's CPU time must be reported.
    """

    def __init__(self, limit: int) -> None:
        self.wanted = 1
        self.measures = False
        self._limit = max(limit, 1)
        self._forget()

    def took(self, took_ns: int, cpu_ns: int) -> bool:
        """Record a call and its CPU time; 0 means that this was not measured.

        Returns: whether `wanted` has changed.
        """
        if not cpu_ns:
            self.measures = self.measures or (took_ns > LONG_NS and self._limit > 1)
            return False
        self._count += 1
        self._took_ns += took_ns
        self._cpu_ns += cpu_ns
        self._long += took_ns - cpu_ns > LONG_NS
        full = self._count >= WINDOW
        if not full and self._long != FEW:
            return False
        wanted = self._worth()
        if not full and wanted <= self.wanted:
            return False
        changed, self.wanted = wanted != self.wanted, wanted
        self.measures = wanted > 1
        self._forget()
        return changed

    def _worth(self) -> int:
        waited_ns = self._took_ns - self._cpu_ns
        if self._long < FEW or waited_ns <= LONG_NS * self._count:
            return 1
        return min(self._limit, 1 + int(_SHARE * waited_ns / self._cpu_ns))

    def _forget(self) -> None:
        self._count = self._long = self._took_ns = self._cpu_ns = 0
