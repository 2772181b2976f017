"""A front end's calls and an engine that answers them, on one loop; shared by the tests of this folder."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.backends.signature import Signature, TensorSpec
from penstock.server.fronts.control_calls import ControlApp, ControlCalls, control_methods
from penstock.server.fronts.control_service import ControlService
from penstock.server.fronts.message_kinds import STATE, STATE_APPLIED
from penstock.server.fronts.shared_state import SharedState, StateCopy
from penstock.server.grpc.method import Method
from penstock.server.ipc.link import Link
from penstock.server.ipc.wire import Message
from penstock.server.restricted import RestrictedApis
from penstock.server.serve import Server
from penstock.server.settings import Settings
from penstock.server.telemetry.logs import LogLevels
from penstock.server.v2.logging_settings import LogSettings
from penstock.server.v2.shared_memory import SharedMemory
from tests.fakes import FakeBackend, fake_loader
from tests.live import settings_for

GRAPH = Signature((TensorSpec("x", "FP32", (-1, 2)),), (TensorSpec("y", "FP32", (-1, 2)),))
PATIENCE_S = 10.0


@asynccontextmanager
async def engine_of(root: Path, **settings: Any) -> AsyncIterator[Server]:
    """Run a Server without ports that serves `m`."""
    (root / "m" / "1").mkdir(parents=True)
    (root / "m" / "1" / "model.onnx").touch()
    closed: dict[str, Any] = {"allow_http": False, "allow_grpc": False, "allow_metrics": False}
    server = Server(settings_for(root, **(closed | settings)), {"onnxruntime": fake_loader(FakeBackend(GRAPH, list))})
    try:
        await server.open()
        assert await server.load() == []
        yield server
    finally:
        await server.close()


class FrontEnd:
    """One front end: its calls, regions and log levels. `mute`: it receives STATE and does not confirm it."""

    def __init__(
        self, app: Any, methods: Mapping[str, Method], state: SharedState | None = None,
        most_body_bytes: int = 1 << 20, restricted: RestrictedApis | None = None,
    ) -> None:  # fmt: skip
        mine, other = socket.socketpair()
        self.control = ControlCalls()
        self.app = ControlApp(self.control, most_body_bytes, restricted)
        self.methods = control_methods(self.control)
        self.memory = SharedMemory(allowed=True)
        self.levels: list[LogLevels] = []
        self.copy = StateCopy(self.memory, self.levels.append)
        self.state = state
        self.mute = False
        self.lost: list[str] = []
        self.link = Link(mine, self._take, self._lost)
        self.engine_link = Link(other, self._take_there, self._lost_there)
        unchanged = SharedState(SharedMemory(allowed=False), LogSettings(Settings()))
        self.answers = ControlService(self.engine_link, app, methods, state or unchanged)
        if state is not None:
            state.attach(self.engine_link)
        self.control.attach(self.link)

    def _take(self, messages: list[Message]) -> None:
        for kind, number, body, arrays, descriptors in messages:
            if kind != STATE:
                self.control.receive(kind, number, body, arrays)
            elif not self.mute:
                self.copy.receive(self.link, number, body, descriptors)

    def _take_there(self, messages: list[Message]) -> None:
        for kind, number, body, arrays, _ in messages:
            if kind == STATE_APPLIED and self.state is not None:
                self.state.receive(self.engine_link, number, body)
            else:
                self.answers.receive(kind, number, body, arrays)

    def _lost(self, why: str) -> None:
        self.lost.append(why)
        self.control.detach()

    def _lost_there(self, why: str) -> None:
        self.answers.close()
        if self.state is not None:
            self.state.detach(self.engine_link)

    def close(self) -> None:
        """End both sides, the engine's first."""
        self.engine_link.close()
        self._lost_there("closed")
        self.link.close()
        self.control.detach()

    async def settled(self) -> None:
        """Wait until no call is in progress on either side."""
        await turns(lambda: not len(self.control) and not len(self.answers))


async def turns(true: Any) -> None:
    """Let the loop turn until a condition holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not true():  # noqa: ASYNC110 - only turns of the loop are needed
            await asyncio.sleep(0)


@dataclass
class Client:
    """One HTTP client, as uvicorn shows it to an application."""

    method: str = "GET"
    path: str = "/"
    body: bytes = b""
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    sent: list[Any] = field(default_factory=list)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    reads: asyncio.Event = field(default_factory=asyncio.Event)
    _parts: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reads.set()
        half = len(self.body) // 2
        self._parts = [self.body[:half], self.body[half:]]

    async def ask(self, app: Any) -> Client:
        """Send the request to an application and receive the answer."""
        path, _, query = self.path.partition("?")
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": self.method, "path": path,
            "raw_path": path.encode(), "query_string": query.encode(), "root_path": "", "scheme": "http",
            "headers": self.headers, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
        }  # fmt: skip
        await app(scope, self._receive, self._send)
        return self

    async def _receive(self) -> Any:
        if self._parts:
            return {"type": "http.request", "body": self._parts.pop(0), "more_body": bool(self._parts)}
        await self.closed.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)
        await self.reads.wait()

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def header(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])

    @property
    def answer(self) -> bytes:
        """The body received so far."""
        return b"".join(message.get("body", b"") for message in self.sent[1:])

    @property
    def is_complete(self) -> bool:
        """Whether the answer is complete."""
        return len(self.sent) > 1 and not self.sent[-1].get("more_body")
