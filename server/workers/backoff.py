"""Backoff: when to start again what has ended: at once, then later and later while it keeps failing.

Used by whoever keeps workers: hooks, Python models, the supervisor.
"""

from __future__ import annotations


class Backoff:
    """How long to wait before the next start. Told the time, of any clock.

    Invariants: the first wait is 0 s, the next `first_s`, each one after that twice as long, none above `most_s`. All
    begins anew once a start has served for `forget_s`, or with `forget`. A start that never served is a failure,
    however long it took.
    """

    def __init__(self, first_s: float = 1.0, most_s: float = 60.0, forget_s: float = 5.0) -> None:
        self.failures = 0
        """How often it has ended since it last served for a while."""
        self._first_s = first_s
        self._most_s = most_s
        self._forget_s = forget_s
        self._since_s: float | None = None

    def serves(self, now_s: float) -> None:
        """Say that what was started serves now."""
        self._since_s = now_s

    def forget(self) -> None:
        """Say that it has done what it is there for, or that its end is no failure: the next start is at once."""
        self.failures = 0

    def ended(self, now_s: float) -> float:
        """Say that it has ended, or could not be started. Returns: seconds to wait until the next start."""
        if self._since_s is not None and now_s - self._since_s >= self._forget_s:
            self.failures = 0
        self._since_s = None
        self.failures += 1
        if self.failures == 1:
            return 0.0
        return min(self._first_s * 2.0 ** min(self.failures - 2, 30), self._most_s)
