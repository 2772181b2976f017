"""Neighbors: what front ends need to hand connections to each other. Created by `supervisor.py`.

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

from .message_kinds import BOARD, NEW_NEIGHBOR

if TYPE_CHECKING:
    from .child_process import Child

_SLOTS_PER_FRONT = 4
"""Slots per front end, since those that are finishing, if all are replaced more than once, keep theirs."""


class _Member(NamedTuple):
    slot: int
    child: Child
    sender: socket.socket
    """The socket that sends to its mailbox."""


class Neighbors:
    """The slots of front ends, by process number. A slot is reused when its process has ended."""

    def __init__(self, fronts: int) -> None:
        slots = _SLOTS_PER_FRONT * fronts
        self._memory = os.memfd_create("penstock-fronts", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._memory, board_bytes(slots))
        fcntl.fcntl(self._memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self._board = Board(self._memory, slots)
        self._slots = slots
        self._free = list(range(slots))
        self._members: dict[int, _Member] = {}

    def add(self, number: int, child: Child) -> None:
        """Assign a slot to a front end, before it is started, and introduce it to the others. Raises: OSError.

        If no slot is free, it keeps the connections it accepts.
        """
        if not self._free:
            return
        sender, mailbox = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        sender.setblocking(False)
        slot, others = self._free.pop(0), list(self._members.values())
        self._members[number] = _Member(slot, child, sender)
        with mailbox:
            body = {"places": [slot, self._slots], "others": [other.slot for other in others]}
            senders = [other.sender.fileno() for other in others]
            child.send(BOARD, 0, json.dumps(body).encode(), [self._memory, mailbox.fileno(), *senders])
        for other in others:
            other.child.send(NEW_NEIGHBOR, slot, descriptors=[sender.fileno()])

    def remove(self, number: int) -> None:
        """Free the slot of a front end that has ended; does nothing if it has none."""
        member = self._members.pop(number, None)
        if member is not None:
            self._board.clear(member.slot)
            member.sender.close()
            self._free.append(member.slot)

    def close(self) -> None:
        """Release everything."""
        for number in list(self._members):
            self.remove(number)
        if self._memory >= 0:
            self._board.close()
            os.close(self._memory)
            self._memory = -1
