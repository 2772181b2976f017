"""Roles without models: a front end answers each line with the engine's process id, or 503 without an engine."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Collection, Mapping
from typing import Any

from penstock.server.fronts.connection_spread import ConnectionSpread
from penstock.server.ipc.link import Link
from penstock.server.ipc.wire import Message
from penstock.server.listening.listener import Port
from penstock.server.listening.sockets import StartError
from penstock.server.settings import Settings
from penstock.server.supervisor.child import SupervisorLink
from penstock.server.supervisor.roles import Role

ASK, ANSWER, HELLO = 16, 17, 18


class Line(asyncio.Protocol):
    """One connection: a line is a request, answered "<line> <front's pid> <engine's pid>" or "<line> 503"."""

    def __init__(self, front: Front) -> None:
        self.front = front
        self.transport: Any = None
        self.waiting = 0
        self.closing = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.front.port.lines.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.front.port.lines.discard(self)

    def data_received(self, data: bytes) -> None:
        for line in data.split():
            self.waiting += 1
            self.front.ask(self, line)

    def answered(self, line: bytes, text: str) -> None:
        self.waiting -= 1
        closing = " closing" if self.closing else ""
        self.transport.write(line + f" {text}{closing}\n".encode())
        self.transport.close() if self.closing else None

    def shutdown(self) -> None:
        """Close with the next answer: a line may be in flight."""
        self.closing = True


class FakePort(Port):
    reuse_port = True

    def __init__(self, front: Front, port: int) -> None:
        super().__init__("HTTP", "127.0.0.1", port)
        self.front = front
        self.lines: set[Any] = set()

    def use_connections(self, connections: set[Any]) -> None:
        self.lines = connections

    def make_protocol(self) -> asyncio.BaseProtocol:
        return Line(self.front)

    def open_connections(self) -> Collection[Any]:
        return self.lines

    def begin_draining(self) -> None: ...


class Front(Role):
    def __init__(self, settings: Settings, supervisor: SupervisorLink, assignment: Mapping[str, Any]) -> None:
        self.supervisor = supervisor
        self.port = FakePort(self, settings.http_port)
        self.pending: dict[int, tuple[Line, bytes]] = {}
        self.last = 0
        self.link: Link | None = None
        self.placed = asyncio.Event()
        assert supervisor.board is not None
        self.spread = ConnectionSpread.of(*supervisor.board)
        self.spread.balance((self.port, None))

    def ask(self, connection: Line, line: bytes) -> None:
        if self.link is None or not self.placed.is_set():
            connection.answered(line, "503")
            return
        self.last += 1
        self.pending[self.last] = connection, line
        self.link.send(ASK, self.last)

    def attach(self, sock: socket.socket) -> None:
        self.link = Link(sock, self.take, self.lost)

    def take(self, messages: list[Message]) -> None:
        for kind, number, body, _, _ in messages:
            if kind == HELLO:
                self.placed.set()
                continue
            connection, line = self.pending.pop(number)
            connection.answered(line, f"{os.getpid()} {body.decode()}")

    def lost(self, why: str) -> None:
        self.link = None
        self.placed.clear()
        pending, self.pending = self.pending, {}
        for connection, line in pending.values():
            connection.answered(line, "503")
        self.supervisor.report_disconnect()

    def add_neighbor(self, slot: int, sock: socket.socket) -> None:
        self.spread.add_neighbor(slot, sock)

    async def listen(self) -> None:
        await self.port.open()
        self.spread.open()

    async def load(self) -> dict[str, Any]:
        await self.placed.wait()
        return {}

    async def drain(self, *, last: bool) -> int:
        self.spread.stop_accepting()
        await self.port.stop_accepting()
        self.spread.finish()
        return await self.port.drain(asyncio.get_running_loop().time() + 5)

    async def close(self) -> None:
        self.spread.close()
        await self.port.close()
        if self.link:
            self.link.close()


class Held(Front):
    """A front end that blocks as soon as it listens, as if by the garbage collector."""

    async def listen(self) -> None:
        await super().listen()
        threading.Event().wait()


class Engine(Role):
    def __init__(self, settings: Settings, supervisor: SupervisorLink, assignment: Mapping[str, Any]) -> None:
        self.links: set[Link] = set()
        self.alone = asyncio.Event()
        self.supervisor = supervisor
        self.journal = {key: value for key, (value, _) in supervisor.saved.items()}
        self.loaded = self.spent = False
        self.settings = settings
        self.answered = 0
        if settings.id == "broken":
            raise StartError("it is broken")
        if settings.id == "crash":
            os._exit(3)

    def attach(self, sock: socket.socket) -> None:
        link = Link(sock, lambda messages: self.take(link, messages), lambda _: self.lost(link))
        self.links.add(link)
        if self.loaded:
            link.send(HELLO, 0)

    def take(self, link: Link, messages: list[Message]) -> None:
        for _, number, _, _, _ in messages:
            link.send(ANSWER, number, str(os.getpid()).encode())
            self.answered += 1
        if self.settings.id == "spent" and self.answered > 100 and self.journal.get("starts", 0) == 0:
            self.spent = True
            self.supervisor.request_end()

    def lost(self, link: Link) -> None:
        self.links.discard(link)
        self.alone.set() if not self.links else None

    def on_saved_change(self, key: str) -> None:
        self.supervisor.save(f"heard {key}", True)

    async def listen(self) -> None: ...

    async def load(self) -> dict[str, Any]:
        self.loaded = True
        for link in self.links:
            link.send(HELLO, 0)
        starts = self.journal.get("starts", 0) + 1
        self.supervisor.save("starts", starts)
        return {"reasons": [], "serves": f"ready, start {starts}"}

    async def drain(self, *, last: bool) -> int:
        while self.links and not self.spent and not self.supervisor.drain_ordered.is_set():
            self.alone.clear()
            either = [asyncio.ensure_future(each.wait()) for each in (self.alone, self.supervisor.drain_ordered)]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            for each in either:
                each.cancel()
        return 0

    async def close(self) -> None: ...


def prepare() -> None:
    """Do nothing: no request takes long here."""
