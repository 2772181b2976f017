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
    `cheap`: a run that fails takes much less time than one that passes. `left`: the number of unsettled ones. `depth`:
    the most failures it takes to find one guilty request if failures are not cheap, including the first.
    """

    __slots__ = (
        "_all", "_cheap", "_convicted", "_failed", "_fits", "_innocent", "_settled", "_together", "depth", "left"
    )  # fmt: skip

    def __init__(self, count: int, *, cheap: bool = False) -> None:
        self.left = count
        self._cheap = cheap
        self.depth = (count - 1).bit_length() + 1
        self._together = 0
        """How many of the next requests failed together, so that one of them is guilty; 0: unknown."""
        self._innocent = 0
        """How many of those are innocent, because the guilty one is known."""
        self._failed = count
        self._all = count
        self._fits = count
        self._settled = 0
        self._convicted = 0

    def next(self) -> int:
        """Return how many to run now; at least one, since some are left."""
        if self._innocent:
            size = self._innocent
        elif self._together:
            size = (self._together * 2 if self._cheap else self._together) // PARTS
        elif self._convicted > 1:
            # many are guilty: run as many as were settled per guilty one
            size = self._settled // self._convicted
        else:
            size = self.left
        return max(1, min(size, self._fits, self.left))

    def passed(self, count: int) -> None:
        """Record that the next `count` were served."""
        self._settle(count)
        if self._together:
            self._together -= count
            if self._together <= 0:
                # every one of them passed: their number was the problem
                self._together = 0
                self._fits = max(1, self._failed // 2)

    def failed(self, count: int) -> None:
        """Record that the next `count` failed together."""
        self._together = self._failed = count
        self._innocent = 0

    def named(self, position: int) -> None:
        """Record that the next ones failed together because of the one at this position among them."""
        self._together = self._failed = position + 1
        self._innocent = position

    def too_many(self, count: int) -> None:
        """Record that the next `count` failed because they were too many."""
        self._together = self._innocent = 0
        self._fits = max(1, count // 2)

    def too_big(self) -> None:
        """Record that the next one does not fit alone, so nothing is known about how many others fit."""
        self._fits = self._all

    def convicted(self) -> None:
        """Record that the next one failed alone and was answered."""
        self._settle(1)
        self._convicted += 1
        self._together = 0

    def _settle(self, count: int) -> None:
        self.left -= count
        self._settled += count
        self._innocent = 0
