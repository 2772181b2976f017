"""ConnectionSpread: balances connections between front ends, whichever of them the kernel lets accept one.

Each publishes its number of connections in shared memory. One that accepts a connection while another has fewer hands
the socket to that one, before reading from it. Created by `roles.py`; the supervisor provides memory and mailboxes
(supervisor/neighbors.py).
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
MAX_PENDING = 64
"""The limit of connections waiting to be taken by a front end; at the limit, it is handed no more."""
SLOW_S = 0.2
"""A front end that has taken nothing for this long while something waits is handed no more: it may be stopped."""
_WORD_BYTES = 8
_CONNECTIONS, _ACCEPTING, _RECEIVED, _SENT = range(4)
"""The words: connections, whether it takes others', how many of those it has taken; and how many each slot sent."""


class Board:
    """What front ends publish about themselves, in memory that all share. Each word has one writer.

    For each lane and slot: connections, whether it takes others', how many it has taken, and how many each slot has
    sent there. Slots are reused; the sent and taken counts continue, as only their difference matters.
    """

    def __init__(self, descriptor: int, slots: int) -> None:
        """Map the memory behind a descriptor, which the caller must still close."""
        self._memory = mmap.mmap(descriptor, board_bytes(slots))
        self._words = memoryview(self._memory).cast("q")
        self._slots = slots
        self._row_words = _SENT + slots

    def close(self) -> None:
        """Unmap the memory; later writes have no effect."""
        words, self._words = self._words, memoryview(bytearray(self._words)).cast("q")
        words.release()
        self._memory.close()

    def _offset(self, lane: int, slot: int) -> int:
        return (lane * self._slots + slot) * self._row_words

    def publish_connections(self, lane: int, slot: int, connections: int) -> None:
        """Publish a front end's number of connections."""
        self._words[self._offset(lane, slot) + _CONNECTIONS] = connections

    def publish_accepting(self, slot: int, *, accepting: bool) -> None:
        """Publish whether a front end takes connections of others."""
        for lane in range(LANES):
            self._words[self._offset(lane, slot) + _ACCEPTING] = accepting

    def count_sent(self, lane: int, sender: int, slot: int, count: int = 1) -> None:
        """Count a connection before it is sent; -1 if sending failed."""
        self._words[self._offset(lane, slot) + _SENT + sender] += count

    def mark_received(self, slot: int) -> None:
        """Count everything sent to a front end as taken. Nothing waits for it."""
        for lane in range(LANES):
            offset = self._offset(lane, slot)
            self._words[offset + _RECEIVED] = sum(self._words[offset + _SENT : offset + self._row_words].tolist())

    def read(self, lane: int, slot: int) -> FrontLoad:
        """Return the published state of a front end."""
        offset = self._offset(lane, slot)
        connections, accepting, received, *sent = self._words[offset : offset + self._row_words].tolist()
        return FrontLoad(connections, accepting, received, max(0, sum(sent) - received))

    def clear(self, slot: int) -> None:
        """Clear the entry of a front end that has ended."""
        for lane in range(LANES):
            offset = self._offset(lane, slot)
            self._words[offset + _CONNECTIONS] = self._words[offset + _ACCEPTING] = 0


@dataclass(slots=True)
class FrontLoad:
    """The state of one front end: `pending` connections were sent to it and have not been taken yet."""

    connections: int
    accepting: int
    received: int
    pending: int

    @property
    def total(self) -> int:
        """Its connections, including those sent to it."""
        return self.connections + self.pending


def board_bytes(slots: int) -> int:
    """Return the size of a Board's memory."""
    return LANES * slots * (_SENT + slots) * _WORD_BYTES


def choose_slot(own: int, loads: Mapping[int, int]) -> int:
    """Return the slot that should have a new connection; `own` is the slot that accepted it.

    `loads` are the connections of the slots that take any. The accepting one keeps it unless another has fewer. Among
    equals, the next slot after its own is chosen, so that slots accepting at the same time do not all choose the
    same.
    """
    return min(loads, key=lambda slot: (loads[slot], slot < own, slot), default=own)


class ConnectionSpread:
    """One front end's part: `balance` its ports, `open`, and finally `stop_accepting`, `finish` and `close`.

    Invariants: a connection that was handed over is not handed on. One that arrived before `finish` is served here; one
    sent later stays with its sender. A drain therefore loses none.
    Ownership: it closes the mailbox and the sockets to the neighbors.
    Threads: the event loop's.
    """

    def __init__(self, board: Board, slot: int, mailbox: socket.socket, neighbors: Mapping[int, socket.socket]) -> None:
        self._loop = asyncio.get_running_loop()
        self._board = board
        self._slot = slot
        self._mailbox = mailbox
        self._neighbors = dict(neighbors)
        self._ports: list[Port | None] = []
        self._accepting = False
        self._last_received: dict[tuple[int, int], tuple[int, float]] = {}

    @classmethod
    def of(cls, layout: Mapping[str, list[int]], descriptors: list[int]) -> ConnectionSpread:
        """Create it from the supervisor's message (`Neighbors.add`) and its descriptors."""
        memory, mailbox, *others = descriptors
        try:
            board = Board(memory, layout["places"][1])
        finally:
            os.close(memory)
        neighbors = {
            slot: socket.socket(fileno=descriptor) for slot, descriptor in zip(layout["others"], others, strict=True)
        }
        return cls(board, layout["places"][0], socket.socket(fileno=mailbox), neighbors)

    def add_neighbor(self, slot: int, sock: socket.socket) -> None:
        """Add the socket to a front end that was started after this one."""
        self._remove_neighbor(slot)
        self._neighbors[slot] = sock

    def balance(self, ports: Sequence[Port | None]) -> None:
        """Balance the connections of these ports, one for each lane; call before they are opened."""
        self._ports = list(ports)
        self._board.clear(self._slot)
        for lane, port in enumerate(ports):
            if port is not None:
                port.share_connections(
                    partial(self._hand_over, lane), partial(self._board.publish_connections, lane, self._slot)
                )

    def open(self) -> None:
        """Start taking connections from others; the ports are open."""
        self._mailbox.setblocking(False)
        self._board.mark_received(self._slot)
        self._accepting = True
        self._board.publish_accepting(self._slot, accepting=True)
        self._loop.add_reader(self._mailbox, self._receive_connections)

    def refresh(self) -> None:
        """Repair the counts left by a front end that was killed while sending, and accept connections again."""
        if self._mailbox.fileno() >= 0:
            self._receive_connections()
            self._board.publish_accepting(self._slot, accepting=self._accepting)

    def stop_accepting(self) -> None:
        """Take no more connections; those accepted from now on go to others, while there are any."""
        self._accepting = False
        self._board.publish_accepting(self._slot, accepting=False)

    def finish(self) -> None:
        """Take what was sent before now; the system refuses what is sent later."""
        if self._mailbox.fileno() < 0:
            return
        with contextlib.suppress(OSError):
            self._mailbox.shutdown(socket.SHUT_RD)
        self._receive_connections()
        self._close_mailbox()

    def close(self) -> None:
        """End at once."""
        self.stop_accepting()
        self._close_mailbox()
        for slot in list(self._neighbors):
            self._remove_neighbor(slot)
        self._board.close()

    def _close_mailbox(self) -> None:
        if self._mailbox.fileno() >= 0:
            self._loop.remove_reader(self._mailbox)
            self._mailbox.close()

    def _remove_neighbor(self, slot: int) -> None:
        if slot in self._neighbors:
            self._neighbors.pop(slot).close()

    # -- handing over ------------------------------------------------------------------------------------------

    def _hand_over(self, lane: int, sock: socket.socket) -> bool:
        slot = choose_slot(self._slot, self._loads(lane))
        if slot == self._slot:
            return False
        # counted first: if a front end is killed in between, the count is repaired within a second, while counting too
        # late would make it look less loaded than it is
        self._board.count_sent(lane, self._slot, slot)
        try:
            socket.send_fds(self._neighbors[slot], [bytes([lane])], [sock.fileno()])
        except OSError as error:
            self._board.count_sent(lane, self._slot, slot, -1)
            if not isinstance(error, ConnectionError):
                return False
            self._remove_neighbor(slot)  # it has ended
            return self._hand_over(lane, sock)
        return True

    def _loads(self, lane: int) -> dict[int, int]:
        """Return the connections of each front end that may take one more.

        A front end that is leaving would refuse the connection, and so prefers even a slow one.
        """
        now_s = self._loop.time()
        loads: dict[int, int] = {}
        slow: dict[int, int] = {}
        for slot in (self._slot, *self._neighbors):
            load = self._board.read(lane, slot)
            if load.accepting:
                is_responsive = slot == self._slot or self._is_responsive(lane, slot, load, now_s)
                (loads if is_responsive else slow)[slot] = load.total
        return loads if loads or self._accepting else slow

    def _is_responsive(self, lane: int, slot: int, load: FrontLoad, now_s: float) -> bool:
        """Return whether a front end takes what it is sent."""
        if not load.pending:
            self._last_received.pop((lane, slot), None)
            return True
        received, since_s = self._last_received.get((lane, slot), (-1, now_s))
        if received != load.received:
            self._last_received[lane, slot] = load.received, now_s
            since_s = now_s
        return load.pending < MAX_PENDING and now_s - since_s < SLOW_S

    # -- taking ------------------------------------------------------------------------------------------------

    def _receive_connections(self) -> None:
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
                self._board.publish_accepting(self._slot, accepting=False)
            for descriptor in descriptors:
                os.set_inheritable(descriptor, False)  # as for an accepted socket; recv_fds takes no flags (3.11)
                self._serve(body[0], socket.socket(fileno=descriptor))
        self._board.mark_received(self._slot)

    def _serve(self, lane: int, sock: socket.socket) -> None:
        port = self._ports[lane]
        if port is None or port.acceptor is None:
            sock.close()
        else:
            port.acceptor.serve(sock)
