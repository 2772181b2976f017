"""Places: the rows at each Instance of a model that its sequences occupy. Owned by Sequences."""

from __future__ import annotations

from collections.abc import Collection
from heapq import heapify, heappop, heappush


class Places:
    """The free places; the one with the lowest row is taken first. Pure.

    Each Instance has `rows` of them. `seats` are the numbers of the Instances where sequences may begin.
    """

    def __init__(self, rows: int, instances: int) -> None:
        self.rows = rows
        self.seats = frozenset(range(instances))
        self._shut: set[int] = set()
        self._unused, self._most = 0, rows * instances
        self._freed: list[tuple[int, int]] = []

    @property
    def free(self) -> bool:
        """Whether any place is free."""
        return bool(self._freed) or self._unused < self._most

    def take(self) -> tuple[int, int] | None:
        """Take the lowest place: its row and Instance; None if none is free. A shut Instance's only if all are shut."""
        shut = self._shut & self.seats
        if 0 < len(shut) < len(self.seats):
            self._list()
            found = min((place for place in self._freed if place[1] not in shut), default=None)
            if found is not None:
                self._freed.remove(found)
            heapify(self._freed)
            return found
        if self._freed:
            return heappop(self._freed)
        if self._unused == self._most:
            return None
        self._unused += 1
        return divmod(self._unused - 1, len(self.seats))

    def give_back(self, row: int, seat: int) -> bool:
        """Return a place. Returns: False if it no longer exists."""
        if seat in self.seats:
            heappush(self._freed, (row, seat))
        return seat in self.seats

    def shut(self, seat: int, *, shut: bool) -> None:
        """Stop giving away places at an Instance while others have some, or resume."""
        (self._shut.add if shut else self._shut.discard)(seat)

    def move(self, seats: Collection[int], taken: Collection[tuple[int, int]]) -> None:
        """Move the places to other Instances; `taken` are those of sequences under way, wherever they are."""
        self.seats = frozenset(seats)
        self._unused = self._most
        self._freed = sorted({(row, seat) for seat in self.seats for row in range(self.rows)}.difference(taken))

    def _list(self) -> None:
        self._freed += [divmod(number, len(self.seats)) for number in range(self._unused, self._most)]
        self._unused = self._most


def pin(instance: int) -> tuple[int]:
    """Return the last part of a Key that only this Instance may run."""
    return (instance,)
