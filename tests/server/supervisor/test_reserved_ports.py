"""Ports stay reserved as long as the supervisor lives, and a port in use is detected at once."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from penstock.server.listening.sockets import ListenError, bind_one
from penstock.server.options.start_checks import start_problems
from penstock.server.settings import Settings
from penstock.server.supervisor.reserved_ports import ReservedPorts


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def run_main() -> None:
        await main()

    asyncio.run(run_main())


async def held(port: int = 0, address: str = "127.0.0.1") -> tuple[ReservedPorts, int]:
    ports = ReservedPorts()
    numbers = await ports.reserve({"HTTP": (address, port)})
    return ports, numbers["HTTP"]


def test_front_ends_can_listen_on_a_reserved_port() -> None:
    async def main() -> None:
        ports, port = await held()
        fronts = [bind_one(socket.AF_INET, ("127.0.0.1", port), reuse_port=True) for _ in range(2)]
        for front in fronts:
            front.listen()
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(8)]

        for each in (*fronts, *clients):
            each.close()
        ports.close()

    run(main)


def test_connections_to_a_reserved_port_without_a_listener_are_refused() -> None:
    async def main() -> None:
        ports, port = await held()

        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        ports.close()

    run(main)


@pytest.mark.parametrize("listening", [True, False])
def test_a_port_reserved_by_another_penstock_is_in_use_even_without_a_listener(listening: bool) -> None:
    async def main() -> None:
        ports, port = await held()
        front = bind_one(socket.AF_INET, ("127.0.0.1", port), reuse_port=True)
        if listening:
            front.listen()
        else:
            front.close()

        with pytest.raises(ListenError, match=f"Socket '127.0.0.1:{port}' already in use"):
            await held(port)
        front.close()
        ports.close()

    run(main)


def test_a_port_on_which_another_program_listens_is_in_use() -> None:
    async def main() -> None:
        other = socket.create_server(("127.0.0.1", 0))

        with pytest.raises(ListenError, match="already in use"):
            await held(other.getsockname()[1])
        other.close()

    run(main)


def test_connections_left_in_time_wait_do_not_block_a_reservation() -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as earlier:
            port = earlier.getsockname()[1]
            client = socket.create_connection(("127.0.0.1", port))
            accepted, _ = earlier.accept()
            accepted.close()  # first, so that this end enters TIME_WAIT
            client.close()

        ports, number = await held(port)

        assert number == port
        ports.close()

    run(main)


def test_a_port_can_be_reserved_again_after_it_is_released() -> None:
    async def main() -> None:
        ports, port = await held()
        ports.close()

        again, number = await held(port)

        assert number == port
        again.close()

    run(main)


def test_localhost_is_reserved_on_all_its_addresses() -> None:
    async def main() -> None:
        ports, port = await held(address="localhost")
        for family, _, _, _, address in set(socket.getaddrinfo("localhost", port, type=socket.SOCK_STREAM)):
            with pytest.raises(OSError, match="in use"):
                bind_one(family, address).close()
        ports.close()

    run(main)


@pytest.mark.parametrize("flag", ["reuse_http_port", "reuse_grpc_port"])
def test_http_workers_cannot_be_combined_with_reuse_port_settings(flag: str) -> None:
    options: dict[str, Any] = {flag: True}

    assert start_problems(Settings(http_workers=2, **options)) == [
        "--http-workers cannot be combined with --reuse-http-port or --reuse-grpc-port: its processes own their ports"
    ]
    assert start_problems(Settings(**options)) == []
