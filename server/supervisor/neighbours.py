"""Neighbours: what front ends need to hand connections to each other. Created by `supervisor.py`.

Shared memory in which each publishes its number of connections (fronts/connection_spread.py), and a mailbox for each,
to which the others send.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from typing import TYPE_CHECKING, NamedTuple

from penstock.server.fronts.connection_spread import Board, board_bytes

from .kinds import BOARD, NEIGHBOUR

if TYPE_CHECKING:
    from .children import Child

_PLACES_EACH = 4
"""Places per front end, since those that are finishing, if all are replaced more than once, keep theirs."""


class _Member(NamedTuple):
    place: int
    child: Child
    way: socket.socket
    """The socket that sends to its mailbox."""


class Neighbours:
    """The places of front ends, by process number. A place is reused when its process has ended."""

    def __init__(self, fronts: int) -> None:
        places = _PLACES_EACH * fronts
        self._memory = os.memfd_create("penstock-fronts", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._memory, board_bytes(places))
        fcntl.fcntl(self._memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self._board = Board(self._memory, places)
        self._places = places
        self._free = list(range(places))
        self._members: dict[int, _Member] = {}

    def enter(self, number: int, child: Child) -> None:
        """Assign a place to a front end, before it is started, and introduce it to the others. Raises: OSError.

        If no place is free, it keeps the connections it accepts.
        """
        if not self._free:
            return
        way, mailbox = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        way.setblocking(False)
        place, others = self._free.pop(0), list(self._members.values())
        self._members[number] = _Member(place, child, way)
        with mailbox:
            said = {"places": [place, self._places], "others": [other.place for other in others]}
            ways = [other.way.fileno() for other in others]
            child.tell(BOARD, 0, json.dumps(said).encode(), [self._memory, mailbox.fileno(), *ways])
        for other in others:
            other.child.tell(NEIGHBOUR, place, descriptors=[way.fileno()])

    def leave(self, number: int) -> None:
        """Free the place of a front end that has ended; does nothing if it has none."""
        member = self._members.pop(number, None)
        if member is not None:
            self._board.clear(member.place)
            member.way.close()
            self._free.append(member.place)

    def close(self) -> None:
        """Release everything."""
        for number in list(self._members):
            self.leave(number)
        if self._memory >= 0:
            self._board.close()
            os.close(self._memory)
            self._memory = -1
