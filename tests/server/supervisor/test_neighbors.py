"""Front ends are introduced to each other, and their places are reused."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Sequence
from typing import cast

import pytest

from penstock.server.fronts.connection_spread import Board, ConnectionSpread
from penstock.server.supervisor.child_process import Child
from penstock.server.supervisor.message_kinds import BOARD
from penstock.server.supervisor.neighbors import Neighbors
from tests.processes import descriptors


class Introduced:
    """A process that is introduced to its neighbors, and makes a ConnectionSpread as a front end does."""

    def __init__(self) -> None:
        self.spread: ConnectionSpread | None = None
        self.place = -1

    def send(self, kind: int, number: int = 0, body: bytes = b"", descriptors: Sequence[int] = ()) -> None:
        own = [os.dup(each) for each in descriptors]
        if kind == BOARD:
            message = json.loads(body)
            self.spread, self.place = ConnectionSpread.of(message, own), message["places"][0]
            self.spread.balance((None, None))
            self.spread.open()
        elif self.spread is not None:
            self.spread.add_neighbor(number, socket.socket(fileno=own[0]))

    def reaches(self) -> set[int]:
        """Return the places to which it would hand connections over."""
        if self.spread is None:
            raise AssertionError("it was not introduced")
        return self.spread._loads(0).keys() - {self.place}

    def close(self) -> None:
        if self.spread is not None:
            self.spread.close()


def add(neighbors: Neighbors, number: int) -> Introduced:
    introduced = Introduced()
    neighbors.add(number, cast("Child", introduced))
    return introduced


def test_front_ends_reach_each_other_in_any_order_of_starting() -> None:
    async def main() -> None:
        before = descriptors()
        neighbors = Neighbors(2)
        fronts = [add(neighbors, number) for number in range(3)]

        assert [front.reaches() for front in fronts] == [{1, 2}, {0, 2}, {0, 1}]

        fronts[1].close()
        neighbors.remove(1)
        assert [front.reaches() for front in (fronts[0], fronts[2])] == [{2}, {0}]
        again = add(neighbors, 3)
        assert again.reaches() == {0, 2}
        assert fronts[0].reaches() == {2, again.place}
        for front in (*fronts, again):
            front.close()
        neighbors.close()
        assert descriptors() == before

    asyncio.run(main())


def test_a_front_end_beyond_the_limit_is_not_introduced_until_another_leaves() -> None:
    async def main() -> None:
        neighbors = Neighbors(1)
        fronts = [add(neighbors, number) for number in range(5)]
        assert [front.spread is None for front in fronts] == [False] * 4 + [True]

        neighbors.remove(4)
        neighbors.remove(0)
        fronts[0].close()
        last = add(neighbors, 5)

        assert last.place == fronts[0].place
        for front in (*fronts, last):
            front.close()
        neighbors.close()

    asyncio.run(main())


def test_the_shared_memory_of_front_ends_cannot_be_truncated() -> None:
    neighbors = Neighbors(1)
    with pytest.raises(PermissionError):
        os.ftruncate(neighbors._memory, 0)
    Board(neighbors._memory, 4).close()
    neighbors.close()
