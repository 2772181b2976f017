"""Connections are spread evenly by front ends that know only the counts each of them publishes."""

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

from penstock.server.fronts import connection_spread
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


def test_an_accepting_front_end_keeps_a_connection_unless_another_has_fewer() -> None:
    assert choose_slot(0, {0: 3, 1: 3, 2: 3}) == 0
    assert choose_slot(0, {0: 3, 1: 3, 2: 2}) == 2
    assert choose_slot(2, {0: 3, 1: 2, 2: 2}) == 2
    assert choose_slot(1, {0: 0, 1: 2, 2: 1}) == 0


def test_front_ends_accepting_at_the_same_time_choose_different_targets_on_a_tie() -> None:
    assert [choose_slot(own, {0: 5, 1: 0, 2: 5, 3: 0}) for own in (0, 2)] == [1, 3]
    assert choose_slot(3, {0: 0, 1: 0, 2: 0, 3: 1}) == 0


def test_a_front_end_that_stopped_accepting_receives_none_and_hands_its_own_over() -> None:
    assert choose_slot(0, {0: 3, 2: 4}) == 0
    assert choose_slot(1, {0: 3, 2: 4}) == 0
    assert choose_slot(1, {}) == 1


@pytest.mark.parametrize("fronts", [1, 2, 3, 4, 7])
def test_connection_counts_differ_by_at_most_one_whichever_front_end_the_kernel_chooses(fronts: int) -> None:
    luck = random.Random(fronts)
    loads = dict.fromkeys(range(fronts), 0)
    for number in range(1, 400):
        kernels = luck.choice([0, luck.randrange(fronts)])  # the kernel prefers front end 0
        place = choose_slot(kernels, loads)
        loads[place] += 1
        assert sum(loads.values()) == number
        assert max(loads.values()) - min(loads.values()) <= 1


def test_an_empty_front_end_gets_every_new_connection_until_it_has_caught_up() -> None:
    luck = random.Random(1)
    loads = {0: 20, 1: 20, 2: 0}
    for _ in range(20):
        place = choose_slot(luck.randrange(3), loads)
        assert place == 2
        loads[2] += 1


# -- with sockets --------------------------------------------------------------------------------------------------


def run(main: Callable[[], Awaitable[None]], make: Callable[[], asyncio.AbstractEventLoop]) -> None:
    first = make()
    first.run_until_complete(asyncio.sleep(0))  # uvloop creates what it keeps until the process ends
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
    """Sends the number of its front end, and echoes."""

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
    while not condition():  # noqa: ASYNC110 - the condition has no event
        await asyncio.sleep(0)


def leave(clients: list[Client]) -> None:
    for _, writer in clients:
        writer.close()


@pytest.mark.parametrize("fronts", [2, 4])
@pytest.mark.parametrize("number", [16, 64, 256])
def test_a_burst_of_connections_is_spread_evenly(
    loops: Any, number: int, fronts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_spread, "SLOW_S", 60.0)  # all run on one loop: none is slower than the others

    async def main() -> None:
        served = await Fronts.of(fronts)
        clients = await served.connect(number)

        assert sum(served.counts) == number
        assert max(served.counts) <= number / fronts + 1

        leave(clients)
        await served.close()

    run(main, loops)


def test_closed_connections_are_no_longer_counted(loops: Any) -> None:
    async def main() -> None:
        served = await Fronts.of(2)
        clients = await served.connect(32)
        leaving = [each for each in clients if each[1].get_extra_info("sockname") in peers(served.ports[0])]
        leave(leaving)
        await until(lambda: not served.counts[0])

        again = await served.connect(len(leaving))

        assert served.counts == [16, 16]
        leave([*clients, *again])
        await served.close()

    run(main, loops)


def peers(port: NamedPort) -> set[Any]:
    return {line.transport.get_extra_info("peername") for line in port.lines}


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the server's and the client's contexts."""
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
        # a client that does not speak TLS leaves no count behind
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
def test_a_drain_does_not_wait_for_a_client_that_never_finishes_its_handshake(
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
def test_a_client_that_connects_while_a_drain_waits_for_handshakes_is_served(
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
        for _ in range(10):  # the drain has accepted waiting clients, and waits for the first handshake
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


def test_a_draining_front_end_serves_handed_over_connections_and_hands_new_ones_over(loops: Any) -> None:
    async def main() -> None:
        served = await Fronts.of(2)
        first, second = served.spreads
        clients = await served.connect(8)
        second.stop_accepting()
        clients += await served.connect(8)
        assert served.counts == [12, 4]

        # one connection is sent before the second finishes, and one too late
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


def test_a_dead_front_end_receives_no_connections_and_none_are_lost(loops: Any) -> None:
    async def main() -> None:
        served = await Fronts.of(2)
        # its shared memory still reports that it accepts connections
        served.spreads[1]._close_mailbox()
        await served.ports[1].stop_accepting()

        clients = await served.connect(10)

        assert served.counts == [10, 0]
        leave(clients)
        await served.close()

    run(main, loops)


def test_a_front_end_that_does_not_receive_connections_is_soon_sent_no_more() -> None:
    async def main() -> None:
        served = await Fronts.of(2)
        loop, giver = asyncio.get_running_loop(), served.spreads[0]
        loop.remove_reader(served.spreads[1]._mailbox)  # as if it were stopped
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


def test_a_draining_front_end_hands_connections_even_to_a_slow_front_end() -> None:
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


def test_a_draining_front_end_tries_the_next_front_end_when_the_first_has_died() -> None:
    async def main() -> None:
        served = await Fronts.of(3)
        served.spreads[1]._close_mailbox()  # its shared memory still reports that it accepts connections
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


def test_a_connection_counted_but_never_sent_by_a_killed_front_end_is_uncounted() -> None:
    async def main() -> None:
        served = await Fronts.of(2)
        served.boards[0].count_sent(HTTP, 0, 1)
        assert served.boards[0].read(HTTP, 1).pending == 1

        served.spreads[1].refresh()

        assert served.boards[0].read(HTTP, 1).pending == 0
        await served.close()

    run(main, uvloop.new_event_loop)


def test_a_handed_over_connection_is_not_inherited_by_child_processes(
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


def test_a_front_end_out_of_file_descriptors_stops_accepting_until_it_recovers(
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
