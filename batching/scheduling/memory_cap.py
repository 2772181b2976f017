"""MemoryCap: the limit on batch rows after the device ran out of memory. Read by the Scheduler."""

from __future__ import annotations

RECOVERY_NS = 30_000_000_000
"""The limit doubles after this long without running out of memory. Running out costs a run, and disturbs everything
else while memory is short; halving a batch costs a few percent."""


class MemoryCap:
    """The most rows per batch, learned from batches that did not fit. Pure: told the time; its caller holds the lock.

    Half of what did not fit is allowed. The limit doubles every RECOVERY_NS and is removed when it reaches what did not
    fit, since whatever took the memory may be gone. `rows` is the current limit, 0 for none, so reading it costs
    nothing.
    """

    __slots__ = ("_failed_rows", "_next_raise_ns", "rows")

    def __init__(self) -> None:
        self.rows = 0
        self._failed_rows = 0
        self._next_raise_ns = 0

    def lower(self, rows: int, now_ns: int) -> None:
        """Record that a batch of this many rows did not fit."""
        half = max(rows // 2, 1)
        self._failed_rows = max(self._failed_rows, rows) if self.rows else rows
        self.rows = min(self.rows, half) if self.rows else half
        self._next_raise_ns = now_ns + RECOVERY_NS

    def limit(self, now_ns: int) -> int:
        """Return the most rows per batch; 0 for no limit."""
        while self.rows and now_ns >= self._next_raise_ns:
            self._next_raise_ns += RECOVERY_NS
            self.rows *= 2
            if self.rows >= self._failed_rows:
                self.rows = 0
        return self.rows
