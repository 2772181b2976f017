"""UnderWay: one sequence between its first request and its last. Places and Rows: where it stands. See sequences.py."""

from __future__ import annotations

from collections import deque
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.backends.backend import Array

    from .request import InferRequest


class UnderWay:
    """One sequence, from its first request to its last.

    Invariants: `current` is the one request that is in a Lane or in a Batch, `waiting` are those behind it. `slot` is
    its place among those of all Instances, -1 while it waits for one; `row` is where it stands in a run. `open`: more
    requests of it may come. `states`: what the model gave last, by the output's name; empty: as it begins. `home`:
    where a model that remembers for itself has begun it (homes.py).
    """

    __slots__ = ("current", "home", "id", "instance", "open", "row", "slot", "states", "waiting")

    def __init__(self, identity: int | str) -> None:
        self.id = identity
        self.home: object = None
        self.open = True
        self.slot = -1
        self.instance = 0
        self.row = 0
        self.current: InferRequest | None = None
        self.waiting: deque[InferRequest] = deque()
        self.states: dict[str, Array] = {}


class Places:
    """The places that sequences have on all Instances: `place % instances` is the Instance, the lowest goes first.

    Those of an Instance that is `shut` are taken only if all are.
    """

    def __init__(self, count: int, instances: int) -> None:
        self.shut: set[int] = set()
        self._count = count
        self._instances = instances
        self._unused = 0
        self._freed: list[int] = []

    @property
    def full(self) -> bool:
        """Whether there is none left."""
        return not self._freed and self._unused == self._count

    def take(self) -> int:
        """Take the lowest place that is free; -1: there is none."""
        if 0 < len(self.shut) < self._instances:
            self._freed += range(self._unused, self._count)
            self._unused = self._count
            found = min((place for place in self._freed if place % self._instances not in self.shut), default=-1)
            if found >= 0:
                self._freed.remove(found)
            heapify(self._freed)
            return found
        if self._freed:
            return heappop(self._freed)
        if self._unused == self._count:
            return -1
        self._unused += 1
        return self._unused - 1

    def free(self, place: int) -> None:
        """Give a place back."""
        heappush(self._freed, place)


class Rows:
    """The rows of one Instance, direct strategy: it runs one batch of its sequences at a time.

    `heads` are the sequences with a request that may go next. `issued` counts those in a Lane, `running` those in a
    Batch.
    """

    __slots__ = ("heads", "issued", "running")

    def __init__(self) -> None:
        self.heads: dict[UnderWay, None] = {}
        self.issued = 0
        self.running = 0
