"""Spreading: balances connections between front ends, whichever of them the kernel lets accept one.

Each publishes its number of connections in shared memory. One that accepts a connection while another has fewer hands
the socket to that one, before reading from it. Created by `roles.py`; the supervisor provides memory and mailboxes
(supervisor/neighbours.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.server.listening.listener import Port

logger = logging.getLogger("penstock.fronts")

LANES = 2
"""HTTP and gRPC: the connections of each are balanced separately."""
MOST_WAITING = 64
"""The limit of connections waiting to be taken by a front end; at the limit, it is handed no more."""
SLOW_S = 0.2
"""A front end that has taken nothing for this long while something waits is handed no more: it may be stopped."""
_WORD_BYTES = 8
_OPEN, _TAKES, _TAKEN, _SENT = range(4)
"""The words: connections, whether it takes others', how many of those it has taken; and how many each place sent."""


class Board:
    """What front ends publish about themselves, in memory that all share. Each word has one writer.

    For each lane and place: connections, whether it takes others', how many it has taken, and how many each place has
    sent there. Places are reused; the sent and taken counts continue, as only their difference matters.
    """

    def __init__(self, descriptor: int, places: int) -> None:
        """Map the memory behind a descriptor, which the caller must still close."""
        self._memory = mmap.mmap(descriptor, board_bytes(places))
        self._words = memoryview(self._memory).cast("q")
        self._places = places
        self._row = _SENT + places

    def close(self) -> None:
        """Unmap the memory; later writes have no effect."""
        words, self._words = self._words, memoryview(bytearray(self._words)).cast("q")
        words.release()
        self._memory.close()

    def _at(self, lane: int, place: int) -> int:
        return (lane * self._places + place) * self._row

    def count(self, lane: int, place: int, connections: int) -> None:
        """Publish a front end's number of connections."""
        self._words[self._at(lane, place) + _OPEN] = connections

    def says(self, place: int, *, takes: bool) -> None:
        """Publish whether a front end takes connections of others."""
        for lane in range(LANES):
            self._words[self._at(lane, place) + _TAKES] = takes

    def send(self, lane: int, sender: int, place: int, number: int = 1) -> None:
        """Count a connection before it is sent; -1 if sending failed."""
        self._words[self._at(lane, place) + _SENT + sender] += number

    def taken(self, place: int) -> None:
        """Count everything sent to a front end as taken. Nothing waits for it."""
        for lane in range(LANES):
            at = self._at(lane, place)
            self._words[at + _TAKEN] = sum(self._words[at + _SENT : at + self._row].tolist())

    def look(self, lane: int, place: int) -> FrontLoad:
        """Return the published state of a front end."""
        at = self._at(lane, place)
        connections, takes, taken, *sent = self._words[at : at + self._row].tolist()
        return FrontLoad(connections, takes, taken, max(0, sum(sent) - taken))

    def clear(self, place: int) -> None:
        """Clear the entry of a front end that has ended."""
        for lane in range(LANES):
            at = self._at(lane, place)
            self._words[at + _OPEN] = self._words[at + _TAKES] = 0


@dataclass(slots=True)
class FrontLoad:
    """The state of one front end: `waiting` connections were sent to it and have not been taken yet."""

    connections: int
    takes: int
    taken: int
    waiting: int

    @property
    def load(self) -> int:
        """Its connections, including those sent to it."""
        return self.connections + self.waiting


def board_bytes(places: int) -> int:
    """Return the size of a Board's memory."""
    return LANES * places * (_SENT + places) * _WORD_BYTES


def chosen(own: int, loads: Mapping[int, int]) -> int:
    """Return the place that should have a new connection; `own` is the place that accepted it.

    `loads` are the connections of the places that take any. The accepting one keeps it unless another has fewer. Among
    equals, the next place after its own is chosen, so that places accepting at the same time do not all choose the
    same.
    """
    return min(loads, key=lambda place: (loads[place], place < own, place), default=own)


class ConnectionSpread:
    """One front end's part: `join` its ports, `open`, and finally `leave`, `finish` and `close`.

    Invariants: a connection that was handed over is not handed on. One that arrived before `finish` is served here; one
    sent later stays with its sender. A drain therefore loses none.
    Ownership: it closes the mailbox and the sockets to the neighbors.
    Threads: the event loop's.
    """

    def __init__(
        self, board: Board, place: int, mailbox: socket.socket, neighbours: Mapping[int, socket.socket]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._board = board
        self._place = place
        self._mailbox = mailbox
        self._neighbours = dict(neighbours)
        self._ports: list[Port | None] = []
        self._taking = False
        self._slow: dict[tuple[int, int], tuple[int, float]] = {}

    @classmethod
    def of(cls, said: Mapping[str, list[int]], descriptors: list[int]) -> ConnectionSpread:
        """Create it from the supervisor's message (`Neighbours.enter`) and its descriptors."""
        memory, mailbox, *others = descriptors
        try:
            board = Board(memory, said["places"][1])
        finally:
            os.close(memory)
        neighbours = {place: socket.socket(fileno=each) for place, each in zip(said["others"], others, strict=True)}
        return cls(board, said["places"][0], socket.socket(fileno=mailbox), neighbours)

    def meet(self, place: int, sock: socket.socket) -> None:
        """Add the socket to a front end that was started after this one."""
        self._forget(place)
        self._neighbours[place] = sock

    def join(self, ports: Sequence[Port | None]) -> None:
        """Balance the connections of these ports, one for each lane; call before they are opened."""
        self._ports = list(ports)
        self._board.clear(self._place)
        for lane, port in enumerate(ports):
            if port is not None:
                port.share_connections(partial(self._elsewhere, lane), partial(self._board.count, lane, self._place))

    def open(self) -> None:
        """Start taking connections from others; the ports are open."""
        self._mailbox.setblocking(False)
        self._board.taken(self._place)
        self._taking = True
        self._board.says(self._place, takes=True)
        self._loop.add_reader(self._mailbox, self._take)

    def each_second(self) -> None:
        """Repair the counts left by a front end that was killed while sending, and accept connections again."""
        if self._mailbox.fileno() >= 0:
            self._take()
            self._board.says(self._place, takes=self._taking)

    def leave(self) -> None:
        """Take no more connections; those accepted from now on go to others, while there are any."""
        self._taking = False
        self._board.says(self._place, takes=False)

    def finish(self) -> None:
        """Take what was sent before now; the system refuses what is sent later."""
        if self._mailbox.fileno() < 0:
            return
        with contextlib.suppress(OSError):
            self._mailbox.shutdown(socket.SHUT_RD)
        self._take()
        self._close_mailbox()

    def close(self) -> None:
        """End at once."""
        self.leave()
        self._close_mailbox()
        for place in list(self._neighbours):
            self._forget(place)
        self._board.close()

    def _close_mailbox(self) -> None:
        if self._mailbox.fileno() >= 0:
            self._loop.remove_reader(self._mailbox)
            self._mailbox.close()

    def _forget(self, place: int) -> None:
        if place in self._neighbours:
            self._neighbours.pop(place).close()

    # -- handing over ------------------------------------------------------------------------------------------

    def _elsewhere(self, lane: int, sock: socket.socket) -> bool:
        place = chosen(self._place, self._loads(lane))
        if place == self._place:
            return False
        # counted first: if a front end is killed in between, the count is repaired within a second, while counting too
        # late would make it look less loaded than it is
        self._board.send(lane, self._place, place)
        try:
            socket.send_fds(self._neighbours[place], [bytes([lane])], [sock.fileno()])
        except OSError as error:
            self._board.send(lane, self._place, place, -1)
            if not isinstance(error, ConnectionError):
                return False
            self._forget(place)  # it has ended
            return self._elsewhere(lane, sock)
        return True

    def _loads(self, lane: int) -> dict[int, int]:
        """Return the connections of each front end that may take one more.

        A front end that is leaving would refuse the connection, and so prefers even a slow one.
        """
        now_s = self._loop.time()
        loads: dict[int, int] = {}
        slow: dict[int, int] = {}
        for place in (self._place, *self._neighbours):
            said = self._board.look(lane, place)
            if said.takes:
                quick = place == self._place or self._quick(lane, place, said, now_s)
                (loads if quick else slow)[place] = said.load
        return loads if loads or self._taking else slow

    def _quick(self, lane: int, place: int, said: FrontLoad, now_s: float) -> bool:
        """Return whether a front end takes what it is sent."""
        if not said.waiting:
            self._slow.pop((lane, place), None)
            return True
        taken, since_s = self._slow.get((lane, place), (-1, now_s))
        if taken != said.taken:
            self._slow[lane, place] = said.taken, now_s
            since_s = now_s
        return said.waiting < MOST_WAITING and now_s - since_s < SLOW_S

    # -- taking ------------------------------------------------------------------------------------------------

    def _take(self) -> None:
        """Serve everything that has been sent."""
        while True:
            try:
                body, descriptors, _, _ = socket.recv_fds(self._mailbox, 1, 1)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                logger.error("connections cannot be taken over from other front ends: %s", error.strerror)  # noqa: TRY400
                break
            if not body:  # shut down
                break
            if not descriptors:
                logger.error("too many open files to take over a connection from another front end: it is lost")
                self._board.says(self._place, takes=False)
            for descriptor in descriptors:
                os.set_inheritable(descriptor, False)  # as for an accepted socket; recv_fds takes no flags (3.11)
                self._serve(body[0], socket.socket(fileno=descriptor))
        self._board.taken(self._place)

    def _serve(self, lane: int, sock: socket.socket) -> None:
        port = self._ports[lane]
        if port is None or port.acceptor is None:
            sock.close()
        else:
            port.acceptor.serve(sock)
