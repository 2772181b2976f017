from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import uvloop

from penstock.server.ipc import link as link_module
from penstock.server.ipc.arena import MAX_IDLE_BYTES, SEGMENT_BYTES
from penstock.server.ipc.channel import Channel
from penstock.server.ipc.link import Link
from penstock.server.ipc.sockets import send_once
from penstock.server.ipc.wire import FIRST_KIND, Message, Wire
from tests.server.ipc.wire_pairs import memory_use, same, sockets

PATIENCE_S = 10.0
ECHO = """
import socket, sys
from penstock.server.ipc.channel import Channel
channel, held = Channel(socket.socket(fileno=int(sys.argv[1]))), []
while True:
    for message in channel.receive():
        held.append(message)
        channel.send(*message[:4])
"""


class End:
    """A Link, the messages it has received, and why it was lost."""

    def __init__(self, sock: socket.socket, arena_bytes: int = 64 << 20) -> None:
        self.messages: list[Message] = []
        self.lost: list[str] = []
        self._look = asyncio.Event()
        self.link = Link(sock, self._take, self._lose, arena_bytes)

    def _take(self, messages: list[Message]) -> None:
        for *message, descriptors in messages:
            self.messages.append((*message, descriptors[:]))  # type: ignore[arg-type]
            descriptors.clear()
        self._look.set()

    def _lose(self, why: str) -> None:
        self.lost.append(why)
        self._look.set()

    async def until(self, true: Callable[[], Any]) -> None:
        """Wait until a condition holds, which is checked after every event of the link."""
        async with asyncio.timeout(PATIENCE_S):
            while not true():
                self._look.clear()
                await self._look.wait()

    async def message(self, count: int = 1) -> list[Message]:
        await self.until(lambda: len(self.messages) >= count)
        return self.messages


@asynccontextmanager
async def ends(arena_bytes: int = 64 << 20) -> AsyncIterator[tuple[End, End]]:
    one, other = (End(sock, arena_bytes) for sock in sockets())
    try:
        yield one, other
    finally:
        one.link.close()
        other.link.close()


async def turns(true: Callable[[], Any]) -> None:
    """Let the event loop turn until a condition holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not true():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0)


def test_messages_arrive_in_order_with_their_tensors() -> None:
    async def main() -> None:
        async with ends() as (here, there):
            for number in range(100):
                here.link.send(FIRST_KIND, number, b"%d" % number, [np.full(number * 200, number, np.float32)])
            come = await there.message(100)
            for number, message in enumerate(come):
                assert message[:3] == (FIRST_KIND, number, b"%d" % number)
                assert same(np.full(number * 200, number, np.float32), message[3][0])

    uvloop.run(main())


def test_all_messages_of_a_loop_turn_are_sent_in_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    writes = []

    def counted(sock: socket.socket, *rest: Any) -> int:
        writes.append(sock)
        return send_once(sock, *rest)

    monkeypatch.setattr(link_module, "send_once", counted)

    async def main() -> None:
        async with ends() as (here, there):
            for number in range(50):
                here.link.send(FIRST_KIND, number)
            await there.message(50)
            assert len(writes) == 1

    uvloop.run(main())


def test_a_slot_is_released_from_any_thread() -> None:
    async def main() -> None:
        async with ends() as (here, there):
            here.link.send(FIRST_KIND, 1, b"", [np.ones(100_000)])
            held = [(await there.message())[0][3][0]]
            there.messages.clear()
            await turns(lambda: here.link.arena.leases == 1)
            await asyncio.to_thread(held.clear)
            await turns(lambda: here.link.arena.leases == 0)

    uvloop.run(main())


def test_both_sides_unmap_removed_segments_without_further_messages() -> None:
    async def main() -> None:
        async with ends(256 << 20) as (here, there):
            for number in range(40):
                here.link.send(FIRST_KIND, number, b"", [np.zeros(SEGMENT_BYTES, np.uint8)])
            (await there.message(40)).clear()
            await turns(lambda: here.link.arena.leases == 0)
            assert here.link.arena.total_bytes == MAX_IDLE_BYTES
            await turns(lambda: len(there.link._wire.mirror._segments) == MAX_IDLE_BYTES // SEGMENT_BYTES)

    uvloop.run(main())


def test_a_view_can_outlive_its_link_and_event_loop() -> None:
    held: list[Any] = []
    before = memory_use()

    async def main() -> None:
        async with ends() as (here, there):
            here.link.send(FIRST_KIND, 1, b"", [np.ones(100_000)])
            held.append((await there.message())[0][3][0])

    uvloop.run(main())
    assert held[0].sum() == 100_000
    held.clear()
    assert memory_use() == before


def test_messages_to_a_peer_that_does_not_read_wait_without_blocking_the_loop() -> None:
    async def main() -> None:
        mine, other = sockets()
        here = End(mine, arena_bytes=0)
        for number in range(50):
            here.link.send(FIRST_KIND, number, b"", [np.full(1_000_000, number, np.uint8)])
        await turns(lambda: here.link.unsent_bytes < 51_000_000 and not here.link._wire.out)
        assert here.link.unsent_bytes > 40_000_000
        for number in range(50, 100):  # behind the unsent messages
            here.link.send(FIRST_KIND, number, b"small")
            await asyncio.sleep(0)
        unsent: list[int] = []
        here.link.when_drained(lambda: unsent.append(here.link.unsent_bytes))
        assert not unsent

        there = End(other)
        come = await there.message(100)
        assert [message[1] for message in come] == list(range(100))
        assert all(set(message[3][0][::9999].tolist()) == {number} for number, message in enumerate(come[:50]))  # type: ignore[index]
        assert here.link.unsent_bytes == 0
        assert unsent == [0]
        here.link.close()
        there.link.close()

    uvloop.run(main())


def test_messages_stay_in_order_when_the_socket_has_room_again() -> None:
    async def main() -> None:
        mine, other = sockets()
        other.setblocking(False)
        here, there = End(mine), Wire(lambda: None)
        here.link.send(FIRST_KIND, 0, bytes(5_000_000))
        await turns(lambda: not here.link._wire.out)
        come = there.feed(memoryview(other.recv(4_000_000)), [])  # makes room
        here.link.send(FIRST_KIND, 1, b"behind it")
        here.link._flush()
        async with asyncio.timeout(PATIENCE_S):
            while len(come) < 2:
                await asyncio.sleep(0)
                with contextlib.suppress(BlockingIOError):
                    come += there.feed(memoryview(other.recv(1_000_000)), [])

        assert [(number, len(body)) for _, number, body, _, _ in come] == [(0, 5_000_000), (1, 9)]
        here.link.close()
        there.close()
        other.close()

    uvloop.run(main())


def test_descriptors_wait_with_the_bytes_of_a_peer_that_does_not_read() -> None:
    before = memory_use()

    async def main() -> None:
        mine, other = sockets()
        here = End(mine, arena_bytes=0)
        here.link.send(FIRST_KIND, 0, bytes(5_000_000))
        await asyncio.sleep(0)
        ends_of_pipes = [os.pipe() for _ in range(250)]  # more than fit in one write
        here.link.send(FIRST_KIND, 1, b"", None, [reading for reading, _ in ends_of_pipes])
        await asyncio.sleep(0)
        there = End(other)
        come = await there.message(2)
        assert len(come[1][4]) == 250
        os.write(ends_of_pipes[249][1], b"last")
        assert os.read(come[1][4][249], 10) == b"last"
        for descriptor in (*come[1][4], *(each for both in ends_of_pipes for each in both)):
            os.close(descriptor)
        here.link.close()
        there.link.close()

    uvloop.run(main())
    assert memory_use() == before


def test_a_closed_link_with_unsent_messages_leaves_no_descriptors_or_mappings() -> None:
    before = memory_use()

    async def main() -> None:
        mine, other = sockets()
        here = End(mine)
        here.link.send(FIRST_KIND, 0, bytes(5_000_000))
        await asyncio.sleep(0)
        here.link.send(FIRST_KIND, 1, b"", [np.zeros(100_000)], [0])
        await asyncio.sleep(0)
        here.link.close()
        assert here.link.unsent_bytes == 0
        here.link.send(FIRST_KIND, 2, b"to nobody")
        await asyncio.sleep(0)
        assert here.lost == []
        other.close()

    uvloop.run(main())
    assert memory_use() == before


def test_a_message_sent_in_the_turn_of_the_close_is_delivered() -> None:
    async def main() -> None:
        async with ends() as (here, there):
            here.link.send(FIRST_KIND, 7, b"last words", [np.ones(20_000)])
            here.link.close()
            await there.until(lambda: there.lost)
            assert there.messages[0][2] == b"last words"
            assert there.lost == ["the process is gone"]
            assert there.messages[0][3][0].sum() == 20_000  # type: ignore[union-attr]

    uvloop.run(main())


def test_messages_of_an_ended_process_are_received_before_the_link_is_lost() -> None:
    async def main() -> None:
        mine, other = sockets()
        there = Channel(other)
        there.send(FIRST_KIND, 1, b"answer")
        there.close()
        here = End(mine)
        here.link.send(FIRST_KIND, 2, b"a question that comes too late")
        here.link._flush()
        await here.until(lambda: here.lost)
        assert [message[2] for message in here.messages] == [b"answer"]
        assert len(here.lost) == 1

    uvloop.run(main())


def test_read_remaining_reads_received_messages_while_the_socket_is_still_open() -> None:
    async def main() -> None:
        mine, other = sockets()
        here = End(mine)
        for number in range(50):
            other.send(struct.pack("<IHHQII", 1000, FIRST_KIND, 0, number, 1000, 0) + bytes(1000))
        here.link.read_remaining()
        assert [message[1] for message in here.messages] == list(range(50))
        assert here.lost == []
        other.close()
        here.link.read_remaining()
        assert here.link.closed
        here.link.read_remaining()

    uvloop.run(main())


def test_a_flood_of_messages_does_not_starve_other_links() -> None:
    async def main() -> None:
        mine, other = sockets()
        here = End(mine)
        other.setblocking(True)
        flood = threading.Thread(target=_flood, args=(other, 20_000_000), daemon=True)
        async with ends() as (one, two):
            flood.start()
            rounds = 0
            while len(here.messages) < 20_000_000 // 50_024:
                one.link.send(FIRST_KIND, rounds)
                await two.message(rounds + 1)
                rounds += 1
            assert rounds > 5
        flood.join(PATIENCE_S)
        here.link.close()

    uvloop.run(main())


def _flood(sock: socket.socket, nbytes: int) -> None:
    frame = struct.pack("<IHHQII", 50_000, FIRST_KIND, 0, 1, 50_000, 0) + bytes(50_000)
    sock.sendall(frame * (nbytes // len(frame)))
    sock.close()


def test_an_invalid_frame_closes_the_link_once_and_leaves_no_resources() -> None:
    before = memory_use()

    async def main() -> None:
        mine, other = sockets()
        here = End(mine)
        here.link.send(FIRST_KIND, 1, b"", [np.zeros(100_000)])
        await asyncio.sleep(0)
        socket.send_fds(other, [struct.pack("<IHHQII", 4, 9, 1, 0, 4, 0) + b"lies"], [0])
        await here.until(lambda: here.lost)
        assert here.lost == ["a frame of kind 9 that cannot be read"]
        assert here.link.closed
        other.close()

    uvloop.run(main())
    assert memory_use() == before


def test_the_lost_callback_is_not_called_after_close() -> None:
    async def main() -> None:
        async with ends() as (here, there):
            there.link.close()
            here.link.read_remaining()
            assert here.link.closed
            here.link.close()
            await asyncio.sleep(0)
            assert here.lost == []

    uvloop.run(main())


def test_a_frame_cut_off_by_the_end_of_its_process_is_discarded() -> None:
    async def main() -> None:
        mine, other = sockets()
        here = End(mine)
        other.send(struct.pack("<IHHQII", 100, FIRST_KIND, 0, 0, 100, 0) + b"half of it")
        other.close()
        await here.until(lambda: here.lost)
        assert (here.messages, here.lost) == ([], ["the process is gone"])

    uvloop.run(main())


def test_a_link_is_lost_when_there_are_too_many_open_files_for_its_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    before = memory_use()

    async def main() -> None:
        mine, other = sockets()
        here = End(mine)

        def cut(buffers: Any, ancillary: int, flags: int) -> Any:
            return *socket.socket.recvmsg_into(mine, buffers, socket.CMSG_LEN(4), flags)[:2], socket.MSG_CTRUNC, None

        class Small:
            recvmsg_into = staticmethod(cut)

        socket.send_fds(other, [b"abc"], [0, 0])
        monkeypatch.setattr(here.link, "_sock", _Instead(mine, Small.recvmsg_into))
        await here.until(lambda: here.lost)
        assert here.lost == ["too many open files to receive a message"]
        other.close()

    uvloop.run(main())
    assert memory_use() == before


class _Instead:
    """A socket with another `recvmsg_into`."""

    def __init__(self, sock: socket.socket, recvmsg_into: Any) -> None:
        self._sock = sock
        self.recvmsg_into = recvmsg_into

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        self._sock.close()


@pytest.mark.slow
def test_a_killed_process_leaves_no_mappings_or_leases_in_its_peer() -> None:
    before = memory_use()

    async def main() -> None:
        mine, other = sockets()
        number = other.fileno()
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", ECHO, str(number), pass_fds=[number])
        other.close()
        here = End(mine)
        here.link.send(FIRST_KIND, 1, b"", [np.arange(100_000)])
        (message,) = await here.message()
        assert same(np.arange(100_000), message[3][0])
        assert here.link.arena.leases == 1
        child.kill()
        await child.wait()
        await here.until(lambda: here.lost)
        assert message[3][0].sum() == sum(range(100_000))  # type: ignore[union-attr]

    uvloop.run(main())
    assert memory_use() == before
