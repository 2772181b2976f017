from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
import uvloop

from penstock.server.listening.listener import TICK_S, Listener, Port, make_config
from penstock.server.listening.sockets import ListenError, bind_one
from penstock.server.listening.tally import Tally
from tests.server.http.lane import turns


def run(main: Callable[[], Awaitable[None]]) -> None:
    """Run a test on uvloop, the event loop that the server uses."""
    loop = uvloop.new_event_loop()
    try:
        loop.run_until_complete(main())
    finally:
        loop.close()


class Gate:
    """An application that answers once the gate is open, and counts the requests that reached it."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.reached = 0

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        self.reached += 1
        await self.open.wait()
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})


@asynccontextmanager
async def listening(gate: Gate) -> AsyncIterator[Listener]:
    config = make_config(gate.app, "httptools", idle_s=5, access_log=False)
    listener = Listener("test", "127.0.0.1", 0, config)
    await listener.open()
    try:
        yield listener
    finally:
        await listener.close()


class Swept:
    """Stands in for the shared state of connections, and for an event loop that stood still."""

    now_s = 100.0

    def __init__(self) -> None:
        self.elapsed: list[float] = []
        self.tally = Tally("http")

    def sweep(self, elapsed_s: float) -> None:
        self.elapsed.append(elapsed_s)

    def time(self) -> float:
        return self.now_s

    def call_later(self, *_: Any) -> None:
        pass


def test_time_while_the_process_stood_still_does_not_count_toward_client_timeouts() -> None:
    swept = Swept()
    port = Port("test", "127.0.0.1", 0, cast(Any, swept))
    for since_s in (99.0, 98.5, 20.0):
        port._tick(cast(Any, swept), since_s)

    assert swept.elapsed == [1.0, 1.5, 2 * TICK_S]


REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0)


def test_a_port_chosen_by_the_system_answers_with_a_date_and_no_server_header() -> None:
    async def main() -> None:
        async with listening(Gate()) as listener:
            reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
            writer.write(REQUEST)
            head = await reader.readuntil(b"\r\n\r\n")
            writer.close()

        assert listener.url == f"http://127.0.0.1:{listener.port}"
        assert head.startswith(b"HTTP/1.1 200 OK\r\ndate: ")
        assert b"server:" not in head

    run(main)


def test_a_port_already_in_use_is_a_one_line_listen_error() -> None:
    async def main() -> None:
        async with listening(Gate()) as first:
            config = make_config(Gate().app, "httptools", idle_s=5, access_log=False)
            second = Listener("HTTP", "127.0.0.1", first.port, config)

            with pytest.raises(ListenError) as caught:
                await second.open()
            await second.close()

        place = f"127.0.0.1:{first.port}"
        assert str(caught.value) == f"failed to start HTTP service: Unavailable - Socket '{place}' already in use"

    run(main)


@pytest.mark.parametrize("address", ["256.0.0.1", "192.0.2.1", "a..b"])
def test_an_address_of_another_machine_is_a_listen_error(address: str) -> None:
    async def main() -> None:
        config = make_config(Gate().app, "httptools", idle_s=5, access_log=False)
        listener = Listener("HTTP", address, 0, config)

        with pytest.raises(ListenError, match=f"cannot listen for HTTP on {address}, port 0: "):
            await listener.open()
        await listener.close()

    run(main)


def test_localhost_listens_on_every_address_of_localhost_on_one_port() -> None:
    async def main() -> None:
        config = make_config(Gate().app, "httptools", idle_s=5, access_log=False)
        listener = Listener("HTTP", "localhost", 0, config)
        await listener.open()
        for _, _, _, _, address in set(socket.getaddrinfo("localhost", listener.port, type=socket.SOCK_STREAM)):
            _, writer = await asyncio.open_connection(str(address[0]), listener.port)
            writer.close()
        await listener.close()

    run(main)


def test_the_ipv6_wildcard_address_also_accepts_ipv4_clients() -> None:
    async def main() -> None:
        config = make_config(Gate().app, "httptools", idle_s=5, access_log=False)
        listener = Listener("HTTP", "::", 0, config)
        await listener.open()
        reached = []
        for address in ("::1", "127.0.0.1"):
            with contextlib.suppress(ConnectionError):
                _, writer = await asyncio.open_connection(address, listener.port)
                writer.close()
                reached.append(address)
        await listener.close()

        assert reached == ["::1", "127.0.0.1"]

    if socket.has_dualstack_ipv6():
        run(main)


def test_the_kernel_buffers_little_unsent_data_per_connection() -> None:
    with bind_one(socket.AF_INET, ("127.0.0.1", 0)) as bound, socket.socket() as client:
        bound.listen()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        client.connect(bound.getsockname())
        accepted, _ = bound.accept()
        with accepted:
            accepted.setblocking(False)

            assert accepted.send(bytes(8 << 20)) < 1 << 20


@pytest.mark.parametrize("closes", [True, False], ids=["closed", "open"])
def test_connections_still_in_the_kernel_backlog_are_served_before_the_listener_ends(closes: bool) -> None:
    async def main() -> None:
        gate = Gate()
        gate.open.clear()
        async with listening(gate) as listener:
            # Blocking connects: the loop has not had a turn, so all of these wait in the kernel's queue.
            clients = [socket.create_connection(("127.0.0.1", listener.port)) for _ in range(50)]
            for client in clients:
                client.sendall(REQUEST)

            if closes:
                await listener.stop_accepting()
            finishing = asyncio.ensure_future(listener.drain(asyncio.get_running_loop().time() + 5))
            await until(lambda: gate.reached == 50)
            gate.open.set()

            assert await finishing == 0
            for client in clients:
                client.settimeout(5)
                assert client.recv(4096).endswith(b"ok")
                client.close()

    run(main)


@pytest.mark.parametrize("ended", [Listener.stop_accepting, Listener.close_gracefully])
def test_connections_are_refused_after_the_listener_stops_accepting(
    ended: Callable[[Listener], Awaitable[None]],
) -> None:
    async def main() -> None:
        async with listening(Gate()) as listener:
            await ended(listener)

            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", listener.port))

    run(main)


def test_connections_that_arrive_together_are_accepted_together() -> None:
    async def main() -> None:
        async with listening(Gate()) as listener:
            clients = [socket.create_connection(("127.0.0.1", listener.port)) for _ in range(50)]
            await turns()
            assert listener.connections == 50
            for client in clients:
                client.close()

    run(main)


def test_drain_waits_for_requests_in_progress() -> None:
    async def main() -> None:
        gate = Gate()
        gate.open.clear()
        async with listening(gate) as listener:
            reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
            writer.write(REQUEST)
            await until(lambda: gate.reached == 1)
            await listener.stop_accepting()
            finishing = asyncio.ensure_future(listener.drain(asyncio.get_running_loop().time() + 5))
            await turns()
            assert not finishing.done()

            gate.open.set()

            assert await finishing == 0
            answer = await reader.read()
            assert answer.endswith(b"ok")
            assert b"connection: close" in answer
            writer.close()

    run(main)


def test_drain_does_not_wait_for_connections_accepted_after_it_began() -> None:
    async def main() -> None:
        gate = Gate()
        gate.open.clear()
        async with listening(gate) as listener:
            early: list[Any] = []
            late: list[Any] = []
            for clients in (early, late):
                reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
                writer.write(REQUEST)
                clients += [reader, writer]
                await until(lambda: gate.reached == 1 + bool(late))
                if not late:
                    finishing = asyncio.ensure_future(listener.drain(asyncio.get_running_loop().time() + 5))
                    await turns()
            early[1].close()

            assert await finishing == 0
            assert listener.connections == 1
            late[1].close()

    run(main)


def test_drain_returns_the_requests_unfinished_at_the_deadline_and_close_ends_them() -> None:
    async def main() -> None:
        gate = Gate()
        gate.open.clear()
        async with listening(gate) as listener:
            reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
            writer.write(REQUEST)
            await until(lambda: gate.reached == 1)

            assert await listener.drain(asyncio.get_running_loop().time()) == 1

            await listener.close()
            assert listener.connections == 0
            assert await reader.read() == b""
            writer.close()

    run(main)
