"""Waits: how many calls of a model's hooks are worth having under way at once. Called by `replicas.py`.

A hook that waits, for an image to be downloaded say, leaves the processor to others; one that computes does not.
"""

from __future__ import annotations

LONG_NS = 2_000_000
"""What a call may wait, on average."""
FEW = 4
"""So many calls that wait for long are no accident."""
WINDOW = 32
"""Of how many calls an average is taken."""
_SHARE = 0.8


class Waits:
    """Learns from what calls took by the clock and of the processor. `wanted` is how many to have at once, 1 at least.

    Invariant: `wanted` is no more than `limit`, and 1 until calls were measured to wait.
    As many are worth it as bring the processor work, and a little less: where calls wait for each other, for the
    interpreter's lock, that comes down to 1 again. `measures`: every call's processor time is to be told.
    """

    def __init__(self, limit: int) -> None:
        self.wanted = 1
        self.measures = False
        self._limit = max(limit, 1)
        self._forget()

    def took(self, took_ns: int, cpu_ns: int) -> bool:
        """Hear of a call, and the processor time that it took; 0: that was not measured.

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
