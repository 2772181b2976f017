"""Connections are spread evenly, by front ends that know only what each says of itself."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import ssl
import subprocess
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvloop

from penstock.server.fronts.connection_spread import (
    MAX_PENDING,
    SLOW_S,
    Board,
    ConnectionSpread,
    board_bytes,
    choose_slot,
)
from penstock.server.listening import acceptor
from penstock.server.listening.listener import Port
from tests.processes import descriptors

HTTP = 0


def test_whoever_accepts_keeps_a_connection_unless_another_has_fewer() -> None:
    assert choose_slot(0, {0: 3, 1: 3, 2: 3}) == 0
    assert choose_slot(0, {0: 3, 1: 3, 2: 2}) == 2
    assert choose_slot(2, {0: 3, 1: 2, 2: 2}) == 2
    assert choose_slot(1, {0: 0, 1: 2, 2: 1}) == 0


def test_those_who_accept_at_the_same_time_choose_different_ones_of_several_with_as_few() -> None:
    assert [choose_slot(own, {0: 5, 1: 0, 2: 5, 3: 0}) for own in (0, 2)] == [1, 3]
    assert choose_slot(3, {0: 0, 1: 0, 2: 0, 3: 1}) == 0


def test_one_that_takes_none_is_given_none_and_gives_its_own_away() -> None:
    assert choose_slot(0, {0: 3, 2: 4}) == 0
    assert choose_slot(1, {0: 3, 2: 4}) == 0
    assert choose_slot(1, {}) == 1


@pytest.mark.parametrize("fronts", [1, 2, 3, 4, 7])
def test_whoever_the_kernel_chooses_no_two_front_ends_are_further_apart_than_one(fronts: int) -> None:
    luck = random.Random(fronts)
    loads = dict.fromkeys(range(fronts), 0)
    for number in range(1, 400):
        kernels = luck.choice([0, luck.randrange(fronts)])  # and it has a favourite
        place = choose_slot(kernels, loads)
        loads[place] += 1
        assert sum(loads.values()) == number
        assert max(loads.values()) - min(loads.values()) <= 1


def test_those_that_are_emptier_catch_up_before_others_get_any() -> None:
    luck = random.Random(1)
    loads = {0: 20, 1: 20, 2: 0}
    for _ in range(20):
        place = choose_slot(luck.randrange(3), loads)
        assert place == 2
        loads[2] += 1


# -- with sockets --------------------------------------------------------------------------------------------------


def run(main: Callable[[], Awaitable[None]], make: Callable[[], asyncio.AbstractEventLoop]) -> None:
    first = make()
    first.run_until_complete(asyncio.sleep(0))  # uvloop makes what it keeps for good
    first.close()
    before = descriptors()
    loop = make()
    try:
        loop.run_until_complete(asyncio.wait_for(main(), 20))
    finally:
        loop.close()
    assert descriptors() == before


@pytest.fixture(params=[uvloop.new_event_loop, asyncio.SelectorEventLoop], ids=["uvloop", "asyncio"])
def loops(request: pytest.FixtureRequest) -> Any:
    return request.param


class Named(asyncio.Protocol):
    """Says which front end has it, and echoes."""

    def __init__(self, port: NamedPort) -> None:
        self.port = port
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.port.lines.add(self)
        self.transport.write(bytes([self.port.place]))

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.port.lines.discard(self)

    def shutdown(self) -> None:
        self.transport.close()


class NamedPort(Port):
    reuse_port = True

    def __init__(self, place: int, port: int) -> None:
        super().__init__("HTTP", "127.0.0.1", port)
        self.place = place
        self.lines: set[Any] = set()

    def make_protocol(self) -> asyncio.BaseProtocol:
        return Named(self)

    def open_connections(self) -> Collection[Any]:
        return self.lines

    def use_connections(self, connections: set[Any]) -> None:
        self.lines = connections

    def begin_draining(self) -> None: ...


@dataclass
class Fronts:
    """Front ends that share a loop, a port and a board."""

    ports: list[NamedPort] = field(default_factory=list)
    spreads: list[ConnectionSpread] = field(default_factory=list)
    boards: list[Board] = field(default_factory=list)

    @classmethod
    async def of(cls, number: int, tls: ssl.SSLContext | None = None) -> Fronts:
        fronts = cls()
        memory = os.memfd_create("test", os.MFD_CLOEXEC)
        os.ftruncate(memory, board_bytes(number))
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(number)]
        for place, (_, mailbox) in enumerate(pairs):
            ways = {other: way.dup() for other, (way, _) in enumerate(pairs) if other != place}
            for way in ways.values():
                way.setblocking(False)
            fronts.boards.append(Board(memory, number))
            fronts.spreads.append(ConnectionSpread(fronts.boards[-1], place, mailbox, ways))
            fronts.ports.append(NamedPort(place, fronts.ports[0].port if place else 0))
            fronts.ports[-1].tls = tls
            fronts.spreads[-1].balance((fronts.ports[-1], None))
            await fronts.ports[-1].open()
            fronts.spreads[-1].open()
        for way, _ in pairs:
            way.close()
        os.close(memory)
        return fronts

    @property
    def counts(self) -> list[int]:
        return [port.connections for port in self.ports]

    async def connect(self, number: int, tls: ssl.SSLContext | None = None) -> list[Client]:
        address = "127.0.0.1", self.ports[0].port
        clients = await asyncio.gather(*(asyncio.open_connection(*address, ssl=tls) for _ in range(number)))
        for reader, _ in clients:
            await reader.readexactly(1)
        return list(clients)

    async def close(self) -> None:
        for spread in self.spreads:
            spread.close()
        for port in self.ports:
            await port.close()


Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0)


def leave(clients: list[Client]) -> None:
    for _, writer in clients:
        writer.close()


@pytest.mark.parametrize("fronts", [2, 4])
@pytest.mark.parametrize("number", [16, 64, 256])
def test_a_burst_of_connections_is_spread_evenly(loops: Any, number: int, fronts: int) -> None:
    async def main() -> None:
        served = await Fronts.of(fronts)
        clients = await served.connect(number)

        assert sum(served.counts) == number
        assert max(served.counts) <= number / fronts + 1

        leave(clients)
        await served.close()

    run(main, loops)


def test_what_has_closed_counts_no_more(loops: Any) -> None:
    async def main() -> None:
        served = await Fronts.of(2)
        clients = await served.connect(32)
        gone = [each for each in clients if each[1].get_extra_info("sockname") in peers(served.ports[0])]
        leave(gone)
        await until(lambda: not served.counts[0])

        again = await served.connect(len(gone))

        assert served.counts == [16, 16]
        leave([*clients, *again])
        await served.close()

    run(main, loops)


def peers(port: NamedPort) -> set[Any]:
    return {line.transport.get_extra_info("peername") for line in port.lines}


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Give the server's and the client's."""
    folder = tmp_path_factory.mktemp("keys")
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days",
            "2", "-subj", "/CN=x", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key", "-out", "made",
        ],
        check=True, capture_output=True, cwd=folder,
    )  # fmt: skip
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "made", folder / "key")
    return server, ssl.create_default_context(cafile=str(folder / "made"))


@pytest.mark.slow
def test_connections_are_handed_over_before_the_tls_handshake(
    loops: Any, contexts: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    async def main() -> None:
        served = await Fronts.of(2, contexts[0])
        clients = await served.connect(16, contexts[1])

        assert served.counts == [8, 8]
        for reader, writer in clients:
            writer.write(b"x")
            assert await reader.readexactly(1) == b"x"
        # one that does not speak TLS costs nothing
        reader, writer = await asyncio.open_connection("127.0.0.1", served.ports[0].port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await reader.read()
        await until(lambda: [served.boards[0].read(HTTP, place).total for place in (0, 1)] == [8, 8])

        leave([*clients, (reader, writer)])
        for _, each in clients:
            await each.wait_closed()
        await served.close()

    run(main, loops)


@pytest.mark.slow
def test_a_drain_does_not_wait_for_a_client_that_does_not_finish_its_handshake(
    monkeypatch: pytest.MonkeyPatch, contexts: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    monkeypatch.setattr(acceptor, "HANDSHAKES_S", 0.01)

    async def main() -> None:
        served = await Fronts.of(1, contexts[0])
        reader, writer = await asyncio.open_connection("127.0.0.1", served.ports[0].port)
        await until(lambda: served.boards[0].read(HTTP, 0).total == 1)
        await served.ports[0].stop_accepting()

        assert await served.ports[0].drain(asyncio.get_running_loop().time() + 20) == 0

        assert await reader.read() == b""
        assert served.boards[0].read(HTTP, 0).total == 0
        writer.close()
        await served.close()

    run(main, uvloop.new_event_loop)


@pytest.mark.slow
def test_who_comes_while_a_drain_waits_for_handshakes_may_finish_its_own(
    monkeypatch: pytest.MonkeyPatch, contexts: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    monkeypatch.setattr(acceptor, "HANDSHAKES_S", 10.0)

    async def main() -> None:
        served = await Fronts.of(1, contexts[0])
        (port,), (board,) = served.ports, served.boards
        early, late = socket.socket(), socket.socket()
        early.connect(("127.0.0.1", port.port))
        await until(lambda: board.read(HTTP, 0).total == 1)
        finishing = asyncio.ensure_future(port.drain(asyncio.get_running_loop().time() + 20))
        for _ in range(10):  # it has taken who waited, and waits for the first one's handshake
            await asyncio.sleep(0)
        late.connect(("127.0.0.1", port.port))
        await until(lambda: board.read(HTTP, 0).total == 2)
        early.close()
        assert await finishing == 0

        late.settimeout(10)
        wrapped = await asyncio.to_thread(contexts[1].wrap_socket, late, server_hostname="127.0.0.1")

        assert await asyncio.to_thread(wrapped.recv, 1) == bytes([0])
        wrapped.close()
        await until(lambda: not port.connections)
        await served.close()

    run(main, uvloop.new_event_loop)


def test_a_front_end_that_leaves_serves_what_it_has_been_sent_and_gives_away_what_it_accepts(loops: Any) -> None:
    async def main() -> None:
        served = await Fronts.of(2)
        first, second = served.spreads
        clients = await served.connect(8)
        second.stop_accepting()
        clients += await served.connect(8)
        assert served.counts == [12, 4]

        # one that was sent before it finished, and one that is sent too late
        served.boards[1].publish_accepting(1, accepting=True)
        early, late = socket.socketpair(), socket.socketpair()
        assert first._hand_over(HTTP, early[0])
        second.finish()
        assert not first._hand_over(HTTP, late[0])
        await until(lambda: served.counts[1] == 5)

        assert await asyncio.to_thread(early[1].recv, 1) == bytes([1])  # older uvloops write in the next turn
        for each in (*early, *late):
            each.close()
        leave(clients)
        await served.close()

    run(main, loops)


def test_a_front_end_that_has_died_is_sent_nothing_and_costs_nobody_else(loops: Any) -> None:
    async def main() -> None:
        served = await Fronts.of(2)
        # its memory still says that it takes connections
        served.spreads[1]._close_mailbox()
        await served.ports[1].stop_accepting()

        clients = await served.connect(10)

        assert served.counts == [10, 0]
        leave(clients)
        await served.close()

    run(main, loops)


def test_a_front_end_that_takes_nothing_is_sent_no_more_after_a_moment() -> None:
    async def main() -> None:
        served = await Fronts.of(2)
        loop, giver = asyncio.get_running_loop(), served.spreads[0]
        loop.remove_reader(served.spreads[1]._mailbox)  # as one that is stopped
        served.boards[0].publish_connections(HTTP, 0, 1000)
        pairs = [socket.socketpair() for _ in range(MAX_PENDING + 2)]

        assert [giver._hand_over(HTTP, here) for here, _ in pairs] == [True] * MAX_PENDING + [False] * 2
        served.spreads[1].refresh()
        assert giver._hand_over(HTTP, pairs[-1][0])
        now = loop.time()
        assert 1 in giver._loads(HTTP)
        giver._loop = Later(now + 1.01 * SLOW_S)  # type: ignore[assignment]
        assert 1 not in giver._loads(HTTP)

        giver._loop = loop
        for pair in pairs:
            for end in pair:
                end.close()
        await served.close()

    run(main, uvloop.new_event_loop)


def test_one_that_leaves_gives_what_it_would_refuse_to_one_that_is_slow() -> None:
    async def main() -> None:
        served = await Fronts.of(2)
        loop, giver = asyncio.get_running_loop(), served.spreads[0]
        loop.remove_reader(served.spreads[1]._mailbox)
        giver.stop_accepting()
        pairs = [socket.socketpair() for _ in range(MAX_PENDING + 2)]

        assert all(giver._hand_over(HTTP, here) for here, _ in pairs)
        giver._loop = Later(loop.time() + 1.01 * SLOW_S)  # type: ignore[assignment]
        assert 1 in giver._loads(HTTP)

        giver._loop = loop
        for pair in pairs:
            for end in pair:
                end.close()
        await served.close()

    run(main, uvloop.new_event_loop)


def test_one_that_leaves_asks_the_next_one_where_the_first_has_died() -> None:
    async def main() -> None:
        served = await Fronts.of(3)
        served.spreads[1]._close_mailbox()  # and its memory still says that it takes connections
        served.boards[2].publish_connections(HTTP, 2, 7)
        served.spreads[0].stop_accepting()
        here, there = socket.socketpair()

        assert served.spreads[0]._hand_over(HTTP, here)

        await until(lambda: served.ports[2].connections == 1)
        assert there.recv(1) == bytes([2])
        for end in (here, there):
            end.close()
        await served.close()

    run(main, uvloop.new_event_loop)


class Later:
    def __init__(self, now_s: float) -> None:
        self.time = lambda: now_s


def test_what_a_killed_sender_has_counted_and_not_sent_is_put_right() -> None:
    async def main() -> None:
        served = await Fronts.of(2)
        served.boards[0].count_sent(HTTP, 0, 1)
        assert served.boards[0].read(HTTP, 1).pending == 1

        served.spreads[1].refresh()

        assert served.boards[0].read(HTTP, 1).pending == 0
        await served.close()

    run(main, uvloop.new_event_loop)


def test_a_connection_that_was_handed_over_is_no_more_inherited_than_one_that_was_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        served = await Fronts.of(2)
        inherited: list[bool] = []

        def serve(_lane: int, sock: socket.socket) -> None:
            inherited.append(sock.get_inheritable())
            sock.close()

        monkeypatch.setattr(served.spreads[1], "_serve", serve)
        served.boards[0].publish_connections(HTTP, 0, 1)
        here, there = socket.socketpair()

        assert served.spreads[0]._hand_over(HTTP, here)

        served.spreads[1].refresh()
        assert inherited == [False]
        for end in (here, there):
            end.close()
        await served.close()

    run(main, uvloop.new_event_loop)


def test_without_descriptors_left_a_front_end_asks_for_no_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        served = await Fronts.of(2)
        received: list[Any] = [(b"\0", [], socket.MSG_CTRUNC, None)]

        def without(*_: Any) -> Any:
            if not received:
                raise BlockingIOError
            return received.pop()

        with monkeypatch.context() as patched:
            patched.setattr(socket, "recv_fds", without)
            served.spreads[1]._receive_connections()
        assert [served.boards[0].read(HTTP, place).accepting for place in (0, 1)] == [1, 0]
        served.spreads[1].refresh()
        assert [served.boards[0].read(HTTP, place).accepting for place in (0, 1)] == [1, 1]
        await served.close()

    run(main, uvloop.new_event_loop)
    assert "too many open files" in caplog.text
