"""Neighbours: what front ends need to hand connections to each other. Made by `supervisor.py`.

Memory in which each says how many it has (fronts/spreading.py), and a mailbox for each, which the others send to.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from typing import TYPE_CHECKING, NamedTuple

from penstock.server.fronts.spreading import Board, board_bytes

from .kinds import BOARD, NEIGHBOUR

if TYPE_CHECKING:
    from .children import Child

_PLACES_EACH = 4
"""Places for each front end: those that finish, while all are replaced more than once, have theirs too."""


class _Member(NamedTuple):
    place: int
    child: Child
    way: socket.socket
    """What leads to its mailbox."""


class Neighbours:
    """The places of front ends, by the number of the process. A place is used again when its process has ended."""

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
        """Give a front end a place, before it is started, and have the others meet it. Raises: OSError.

        Without a place, when there is none, it keeps what it accepts.
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
        """Take the place of a front end that has ended; nothing happens to one that has none."""
        member = self._members.pop(number, None)
        if member is not None:
            self._board.clear(member.place)
            member.way.close()
            self._free.append(member.place)

    def close(self) -> None:
        """Let go of all."""
        for number in list(self._members):
            self.leave(number)
        if self._memory >= 0:
            self._board.close()
            os.close(self._memory)
            self._memory = -1
