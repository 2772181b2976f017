"""Suspects: of a batch that has failed, how many requests run together next. Called by isolation.py."""

from __future__ import annotations

PARTS = 3
"""Of what has failed together a third is tried, or two thirds where a failure costs next to nothing: either is within a
few percent of the best there is. Halves take 6 to 19% more of small models (docs/adr/0011)."""


class Suspects:
    """The requests of a failed batch that are not settled yet, from the first to the last. Pure: told how runs went.

    A part of those that failed together is run, from the first on. When it passes, its requests are served, and the
    guilty one is known to be among the others, which are not run whole again; when it fails, it is cut further. What
    stands behind a guilty request was never tried without it: it runs as one.

    `cheap`: a run that fails takes much less time than one that passes. `left`: those not settled. `depth`: how many
    failures it takes at most to find one guilty request where failures are not cheap, the first included.
    """

    __slots__ = (
        "_all", "_cheap", "_convicted", "_failed", "_fits", "_innocent", "_settled", "_together", "depth", "left"
    )  # fmt: skip

    def __init__(self, count: int, *, cheap: bool = False) -> None:
        self.left = count
        self._cheap = cheap
        self.depth = (count - 1).bit_length() + 1
        self._together = 0
        """So many that are next have failed together, so that one of them is guilty; 0: nothing is known."""
        self._innocent = 0
        """So many of those are not, since it is known who is."""
        self._failed = count
        self._all = count
        self._fits = count
        self._settled = 0
        self._convicted = 0

    def next(self) -> int:
        """Give how many to run now; at least one, since some are left."""
        if self._innocent:
            size = self._innocent
        elif self._together:
            size = (self._together * 2 if self._cheap else self._together) // PARTS
        elif self._convicted > 1:
            # many are guilty: so many as have been met per guilty one
            size = self._settled // self._convicted
        else:
            size = self.left
        return max(1, min(size, self._fits, self.left))

    def passed(self, count: int) -> None:
        """Note that the next `count` were served."""
        self._settle(count)
        if self._together:
            self._together -= count
            if self._together <= 0:
                # every one of them passed: it was their number
                self._together = 0
                self._fits = max(1, self._failed // 2)

    def failed(self, count: int) -> None:
        """Note that the next `count` failed together."""
        self._together = self._failed = count
        self._innocent = 0

    def named(self, position: int) -> None:
        """Note that the next ones failed together because of the one at a position among them."""
        self._together = self._failed = position + 1
        self._innocent = position

    def too_many(self, count: int) -> None:
        """Note that the next `count` failed because they were so many."""
        self._together = self._innocent = 0
        self._fits = max(1, count // 2)

    def too_big(self) -> None:
        """Note that the next one does not fit by itself, so that nothing is known of how many others fit."""
        self._fits = self._all

    def convicted(self) -> None:
        """Note that the next one failed alone and was answered."""
        self._settle(1)
        self._convicted += 1
        self._together = 0

    def _settle(self, count: int) -> None:
        self.left -= count
        self._settled += count
        self._innocent = 0
