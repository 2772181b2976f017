"""Caps: how many rows a batch may have since the device's memory did not hold more. Read by the Scheduler."""

from __future__ import annotations

RECOVER_NS = 30_000_000_000
"""After so long without running out of memory the limit doubles. Running out costs a run, and what others lose while
memory is short; a batch of half the rows costs a few percent."""


class MemoryCap:
    """The most rows of a batch, learned from those that did not fit. Pure: told the time; its caller holds the lock.

    Half of what did not fit is allowed; the limit doubles every RECOVER_NS and is gone when it reaches what did not
    fit: what took the memory may have left. `rows` is the limit now, 0 for none, so that a look at it costs nothing.
    """

    __slots__ = ("_raise_ns", "_too_many", "rows")

    def __init__(self) -> None:
        self.rows = 0
        self._too_many = 0
        self._raise_ns = 0

    def lower(self, rows: int, now_ns: int) -> None:
        """Note that a batch of so many rows did not fit."""
        half = max(rows // 2, 1)
        self._too_many = max(self._too_many, rows) if self.rows else rows
        self.rows = min(self.rows, half) if self.rows else half
        self._raise_ns = now_ns + RECOVER_NS

    def limit(self, now_ns: int) -> int:
        """Give the most rows of a batch; 0 for no limit."""
        while self.rows and now_ns >= self._raise_ns:
            self._raise_ns += RECOVER_NS
            self.rows *= 2
            if self.rows >= self._too_many:
                self.rows = 0
        return self.rows
