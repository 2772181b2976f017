"""Backoff: when to restart what has ended: at once, then with growing delays while it keeps failing.

Used by everything that keeps workers: hooks, Python models, the supervisor.
"""

from __future__ import annotations


class Backoff:
    """The delay before the next start. Takes the time as an argument, from any clock.

    Invariants: the first delay is 0 s, the next `first_s`, and each later one doubles, up to `max_s`. The sequence
    starts over after a start that served for `reset_after_s`, or after `reset`. A start that never served is a failure,
    however long it took.
    """

    def __init__(self, first_s: float = 1.0, max_s: float = 60.0, reset_after_s: float = 5.0) -> None:
        self.failures = 0
        """The number of ends since it last served for `reset_after_s`."""
        self._first_s = first_s
        self._max_s = max_s
        self._reset_after_s = reset_after_s
        self._since_s: float | None = None

    def record_serving(self, now_s: float) -> None:
        """Record that what was started now serves."""
        self._since_s = now_s

    def reset(self) -> None:
        """Reset: it has done its work, or its end is not a failure. The next start is immediate."""
        self.failures = 0

    def next_delay_s(self, now_s: float) -> float:
        """Record that it has ended or failed to start. Returns: the seconds to wait before the next start."""
        if self._since_s is not None and now_s - self._since_s >= self._reset_after_s:
            self.failures = 0
        self._since_s = None
        self.failures += 1
        if self.failures == 1:
            return 0.0
        return min(self._first_s * 2.0 ** min(self.failures - 2, 30), self._max_s)
