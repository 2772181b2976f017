"""One connection of the fast lane without a socket: a fake transport, a Service, and an application beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httptools
from uvicorn.server import ServerState

from penstock.server.http.connection import Connection
from penstock.server.http.fastlane import FastLane
from penstock.server.http.head import Head
from penstock.server.http.limits import Limits
from penstock.server.http.service import HttpShared
from penstock.server.http.uvicorn_answers import PARTS
from penstock.server.listening.listener import make_config


def run(main: Callable[[], Awaitable[None]]) -> None:
    """Run a case on a loop of its own."""
    asyncio.run(main())  # type: ignore[arg-type]


async def turns(count: int = 20) -> None:
    """Let the loop run for some turns."""
    for _ in range(count):
        await asyncio.sleep(0)


class FakeTransport(asyncio.Transport):
    """Records what is written. `unsent` is what the client has not read; `closed` is set one turn after `close`."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self.written = bytearray()
        self.writes = 0
        self.unsent = 0
        self.reading = True
        self.ended = False
        self.closed = False
        self.aborted = False
        self.protocol: Any = protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)}.get(name, default)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.ended, "written after the end"
        if not self.closed:
            self.written += data
            self.writes += 1

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = True

    def get_write_buffer_size(self) -> int:
        return self.unsent

    @property
    def over(self) -> bool:
        """Whether nothing more can be written: the connection or its sending side is closed."""
        return self.ended or self.closed

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.lose(None)

    def abort(self) -> None:
        self.aborted = True
        self.lose(None)

    def lose(self, error: Exception | None) -> None:
        """Lose the connection, as when the client disconnects."""
        if not self.closed:
            self.closed = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, error)

    def pause_reading(self) -> None:
        assert self.reading
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.reading
        self.reading = True

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    @property
    def straight(self) -> bool:
        """Whether the protocol provides the buffer for arriving bytes."""
        return isinstance(self.protocol, asyncio.BufferedProtocol)

    def arrive(self, data: bytes) -> None:
        """Pass bytes to the protocol, in the way in which it currently reads."""
        while data and not self.closed:
            if not self.straight:
                self.protocol.data_received(data)
                return
            room = self.protocol.get_buffer(-1)
            part, data = data[: len(room)], data[len(room) :]
            room[: len(part)] = part
            self.protocol.buffer_updated(len(part))


@dataclass
class Own:
    """Answers paths below /own: at once, or when a test lets it. Counts the abandoned requests."""

    hold: bool = False
    full: bool = False
    bodies: list[bytes] = field(default_factory=list)
    waiting: list[FastLane] = field(default_factory=list)
    abandoned: int = 0

    def claim(self, head: Head) -> Any:
        return "own" if head.path.startswith(b"/own") else None

    def early_rejection(self, head: Head) -> Any:
        return "full" if self.full else None

    def answer_error(self, connection: FastLane, error: Any) -> None:
        connection.answer(503, error.encode(), b"text/plain")

    def begin(self, connection: FastLane, head: Head, body: bytes) -> None:
        assert type(body) is bytes
        self.bodies.append(body)
        if self.hold:
            self.waiting.append(connection)
        else:
            connection.answer(200, b"own " + head.path + b" " + body, b"text/plain")

    def abandon(self, connection: Connection) -> None:
        assert isinstance(connection, FastLane)
        self.abandoned += 1
        self.waiting.remove(connection)

    def let_go(self, text: bytes = b"{}") -> None:
        """Answer the request that has waited longest."""
        self.waiting.pop(0).answer_ok(text)


@dataclass
class App:
    """The application that uvicorn calls: answers with the path and the body that reached it, or in `parts`.

    It waits until it is `open`, and after the first part until it is `on`. `together`: all parts but the last are sent
    in one call, if the scope supports it. `headers` are those of the last request.
    """

    open: asyncio.Event = field(default_factory=asyncio.Event)
    on: asyncio.Event = field(default_factory=asyncio.Event)
    disconnects: int = 0
    parts: tuple[bytes, ...] = ()
    together: bool = False
    headers: dict[bytes, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.open.set()
        self.on.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.headers = dict(scope["headers"])
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.disconnects += 1
                return
            body += message["body"]
            more = message["more_body"]
        await self.open.wait()
        if self.parts:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            if self.together and PARTS in scope.get("extensions", {}):
                *before, last = self.parts
                await scope["extensions"][PARTS].send(before)
                await send({"type": "http.response.body", "body": last})
                return
            for number, part in enumerate(self.parts, 1):
                await send({"type": "http.response.body", "body": part, "more_body": number < len(self.parts)})
                await self.on.wait()
            return
        text = f"app {scope['path']} ".encode() + body
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(text))]})
        await send({"type": "http.response.body", "body": text})


@dataclass
class Answer:
    """One answer as a client reads it."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def closes(self) -> bool:
        return self.headers.get("connection") == "close"


class Lane:
    """One connection and everything that belongs to it. Must be created on a running loop."""

    def __init__(
        self, limits: Limits | None = None, own: Own | None = None, shared: HttpShared | None = None,
        app: App | None = None, kind: type[FastLane] = FastLane,
    ) -> None:  # fmt: skip
        self.own = own or Own()
        self.app = app or App()
        self.shared = shared or HttpShared(self.own, limits or Limits())
        self.state = ServerState()
        self.state.default_headers = [(b"date", b"today")]
        config = make_config(self.app, "httptools", idle_s=5, access_log=False)
        connection = type("Connection", (kind,), {"shared": self.shared})
        self.protocol: FastLane = connection(config=config, server_state=self.state, app_state={})
        self.transport = FakeTransport(self.protocol)
        self.protocol.connection_made(self.transport)

    def feed(self, *pieces: bytes) -> None:
        """Feed bytes as they arrive; none to a connection that is closed or paused."""
        for piece in pieces:
            if piece and not self.transport.closed:
                assert self.transport.reading, "fed while reading is paused"
                self.transport.arrive(piece)

    async def fed(self, *pieces: bytes) -> list[Answer]:
        """Feed bytes, with turns of the loop between the pieces, and read the answers."""
        for piece in pieces:
            self.feed(piece)
            await turns(1)
        await turns()
        return self.answers

    @property
    def answers(self) -> list[Answer]:
        """The answers written so far, as a client reads them."""
        return read_answers(bytes(self.transport.written))

    @property
    def statuses(self) -> list[int]:
        return [answer.status for answer in self.answers]

    @property
    def bodies(self) -> list[bytes]:
        return [answer.body for answer in self.answers]

    def tick(self, seconds: float) -> None:
        """Let time pass, a second at a time."""
        for _ in range(round(seconds)):
            self.shared.sweep(1.0)


class _Reader:
    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.headers: dict[str, str] = {}
        self.body = b""
        self.parser = httptools.HttpResponseParser(self)

    def on_message_begin(self) -> None:
        self.headers, self.body = {}, b""

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode().lower()] = value.decode()

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        if self.parser.get_status_code() != 100:
            self.answers.append(Answer(self.parser.get_status_code(), self.headers, self.body))


def read_answers(raw: bytes) -> list[Answer]:
    """Read complete answers, except `100 Continue`. Raises: httptools' errors for invalid HTTP."""
    reader = _Reader()
    reader.parser.set_dangerous_leniencies(lenient_data_after_close=True)
    reader.parser.feed_data(raw)
    return reader.answers


def request(path: str, body: bytes = b"", *lines: str, version: str = "1.1") -> bytes:
    """Write a request with a Content-Length."""
    head = [f"POST {path} HTTP/{version}", "host: x", f"content-length: {len(body)}", *lines, "", ""]
    return "\r\n".join(head).encode() + body


def in_chunks(path: str, *parts: bytes) -> bytes:
    """Write a request with a chunked body."""
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    return head + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
