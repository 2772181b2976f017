"""A peer that sends invalid frames loses its link, and does no harm to the process at the other end."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable

import pytest
import uvloop

from penstock.server.ipc import arena
from penstock.server.ipc.arena import Arena, Mirror, WireError
from penstock.server.ipc.link import Link
from penstock.server.ipc.wire import FIRST_KIND, Message
from tests.server.ipc.wire_pairs import sockets

HEADER = struct.Struct("<IHHQII")
KIND = FIRST_KIND + 1


async def lost_of(lie: Callable[[socket.socket], object], take: Callable[[list[Message]], None]) -> str:
    """Return why a link is lost when its peer sends an invalid frame."""
    here, there = sockets()
    lost_reason: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    link = Link(here, take, lost_reason.set_result)
    try:
        lie(there)
        return await asyncio.wait_for(lost_reason, 10)
    finally:
        link.close()
        there.close()


@pytest.mark.parametrize(
    "frame",
    [
        HEADER.pack(0xFFFF_FFFF, 0xFFFF, 0xFFFF, 0, 0xFFFF_FFFF, 0xFFFF_FFFF),
        HEADER.pack(1 << 30, KIND, 0, 0, 1 << 31, 0),
        HEADER.pack(1 << 30, KIND, 0, 0, 0, 77),
        HEADER.pack(0, KIND, 3, 0, 0, 0),
        b"\n".join([b"a line that was printed to the wrong descriptor"] * 3),
    ],
)
def test_a_frame_that_cannot_become_a_message_closes_the_link(frame: bytes) -> None:
    assert uvloop.run(lost_of(lambda there: there.send(frame), lambda _: None))


def test_a_message_that_cannot_be_handled_closes_the_link_and_its_descriptors() -> None:
    came: list[int] = []

    def take(messages: list[Message]) -> None:
        came.extend(messages[0][4])
        raise KeyError("what")

    def lie(there: socket.socket) -> None:
        socket.send_fds(there, [HEADER.pack(0, KIND, 2, 0, 0, 0)], [there.fileno()] * 2)

    assert "could not be handled" in uvloop.run(lost_of(lie, take))
    for descriptor in came:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
    assert len(came) == 2


def test_a_descriptor_removed_from_its_message_stays_open() -> None:
    async def main() -> None:
        here, there = sockets()
        came: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        link = Link(here, lambda messages: came.set_result([messages[0][4].pop(0), *messages[0][4]]), lambda _: None)
        socket.send_fds(there, [HEADER.pack(0, KIND, 2, 0, 0, 0)], [there.fileno()] * 2)
        read_end, write_end = await came
        os.close(read_end)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.close(write_end)
        link.close()
        there.close()

    uvloop.run(main())


def test_a_peer_cannot_exhaust_the_mappings_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "_MAX_MAPPED", 3)
    lent, mirror = Arena(1 << 30), Mirror(lambda: None)
    slots = [lent.lease(arena.SEGMENT_BYTES) for _ in range(4)]
    assert all(slots)
    *first, last = lent.new_segments
    for segment in first:
        mirror.map(segment.number, segment.slot_bytes, os.dup(segment.fd))
    with pytest.raises(WireError):
        mirror.map(last.number, last.slot_bytes, os.dup(last.fd))
    mirror.close()
    lent.close()
