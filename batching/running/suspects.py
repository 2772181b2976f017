"""Suspects: how many requests of a failed batch to run together next. Used by isolation.py."""

from __future__ import annotations

PARTS = 3
"""Of the requests that failed together, a third is tried, or two thirds if a failure costs next to nothing: either is
within a few percent of the optimum. Halves take 6 to 19% more for small models (docs/adr/0011)."""


class Suspects:
    """The unsettled requests of a failed batch, from first to last. Pure: told how runs went.

    A part of those that failed together is run, starting with the first. If it passes, its requests are served, and the
    guilty one must be among the others, which are not run as a whole again; if it fails, it is divided further. The
    requests behind a guilty one were never tried without it: they run together.
    `cheap`: a run that fails takes much less time than one that passes. `remaining`: the number of unsettled ones.
    `max_failures`: the most failures it takes to find one guilty request if failures are not cheap, including the
    first.
    """

    __slots__ = (
        "_cheap",
        "_cleared",
        "_culprits",
        "_failed_together",
        "_last_failed",
        "_max_fitting",
        "_settled",
        "_total",
        "max_failures",
        "remaining"
    )  # fmt: skip

    def __init__(self, count: int, *, cheap: bool = False) -> None:
        self.remaining = count
        self._cheap = cheap
        self.max_failures = (count - 1).bit_length() + 1
        self._failed_together = 0
        """How many of the next requests failed together, so that one of them is guilty; 0: unknown."""
        self._cleared = 0
        """How many of those are innocent, because the guilty one is known."""
        self._last_failed = count
        self._total = count
        self._max_fitting = count
        self._settled = 0
        self._culprits = 0

    def next_count(self) -> int:
        """Return how many to run now; at least one, since some are left."""
        if self._cleared:
            size = self._cleared
        elif self._failed_together:
            size = (self._failed_together * 2 if self._cheap else self._failed_together) // PARTS
        elif self._culprits > 1:
            # many are guilty: run as many as were settled per guilty one
            size = self._settled // self._culprits
        else:
            size = self.remaining
        return max(1, min(size, self._max_fitting, self.remaining))

    def record_success(self, count: int) -> None:
        """Record that the next `count` were served."""
        self._settle(count)
        if self._failed_together:
            self._failed_together -= count
            if self._failed_together <= 0:
                # every one of them passed: their number was the problem
                self._failed_together = 0
                self._max_fitting = max(1, self._last_failed // 2)

    def record_failure(self, count: int) -> None:
        """Record that the next `count` failed together."""
        self._failed_together = self._last_failed = count
        self._cleared = 0

    def record_culprit(self, position: int) -> None:
        """Record that the next ones failed together because of the one at this position among them."""
        self._failed_together = self._last_failed = position + 1
        self._cleared = position

    def record_too_many(self, count: int) -> None:
        """Record that the next `count` failed because they were too many."""
        self._failed_together = self._cleared = 0
        self._max_fitting = max(1, count // 2)

    def record_too_large(self) -> None:
        """Record that the next one does not fit alone, so nothing is known about how many others fit."""
        self._max_fitting = self._total

    def record_single_failure(self) -> None:
        """Record that the next one failed alone and was answered."""
        self._settle(1)
        self._culprits += 1
        self._failed_together = 0

    def _settle(self, count: int) -> None:
        self.remaining -= count
        self._settled += count
        self._cleared = 0
