"""EngineServer: an engine's process on the running loop: models, repository, control plane, metrics, and front ends.

Created by the surrounding process (server/supervisor), which provides the sockets to front ends.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from penstock.backends.loading import LOADERS
from penstock.server.ipc.link import Link
from penstock.server.serve import Server

from .control_service import ControlService
from .engine_service import EngineService
from .message_kinds import ABANDON, CALL, CONNECTIONS, MODEL_RELEASED, MODELS_APPLIED, PART_CONFIRMED, STATE_APPLIED
from .published_engine import PublishedEngine
from .shared_state import SharedState

if TYPE_CHECKING:
    import socket

    from starlette.applications import Starlette

    from penstock.backends.backend import Array, Loader
    from penstock.batching.engine import Engine
    from penstock.server.environments.environments import Environments
    from penstock.server.grpc.method import Method
    from penstock.server.ipc.wire import Message
    from penstock.server.settings import Settings
    from penstock.server.telemetry.logs import LogLevels

logger = logging.getLogger("penstock.fronts")


async def _do_nothing() -> None:
    """Do nothing."""


class EngineServer:
    """One engine: `open`, `attach` for each front end, `load`, and finally `drain` and `close`.

    When a model with hooks is loaded, it waits for the first front end, and fails if front ends cannot load the hooks,
    as in a single process. A front end that joins later receives everything that is served. `on_front_lost` is called
    with the number of a front end that has gone, and the reason, after its requests have been cancelled; not for one
    that was detached. `apply_log_levels` sets what this process logs when a client changes that.
    Threads: the event loop's.
    """

    def __init__(
        self, settings: Settings, loaders: Mapping[str, Loader] = LOADERS,
        on_front_lost: Callable[[int, str], None] = lambda *_: None,
        apply_log_levels: Callable[[LogLevels], None] = lambda _: None,
    ) -> None:  # fmt: skip
        """Create it. `settings` are the server's; their HTTP and gRPC ports belong to the front ends."""
        self._on_front_lost = on_front_lost
        self._fronts: dict[int, FrontConnection] = {}
        self._last_number = 0
        # front ends have waited for load balancers by then
        engine_settings = replace(settings, allow_http=False, allow_grpc=False, drain_delay_secs=0.0)
        self.server = Server(engine_settings, loaders, self._make_published_engine)
        self.server.elsewhere = _ConnectionCounts(self._fronts, 0), _ConnectionCounts(self._fronts, 1)
        self.server.observability.logging.apply = apply_log_levels
        self.engine: Engine = self.server.engine
        self.state = SharedState(self.server.shared_memory, self.server.observability.logging)
        self.app: Starlette = self.server.app()
        self.methods: dict[str, Method] = self.server.grpc_methods()

    def _make_published_engine(self, engine: Engine, environments: Environments) -> PublishedEngine:
        self.published = PublishedEngine(engine)
        return self.published

    async def open(self) -> None:
        """Open the metrics port. Raises: StartError."""
        await self.server.open()

    async def load(self, after_load: Callable[[], Awaitable[None]] = _do_nothing) -> list[str]:
        """Load the models in the repository, then await `after_load`, and only then let front ends answer "not found".

        Returns: for each version that is not served, the reason.

        By then everything served is in place in all front ends, except those that do not answer.
        """
        reasons = await self.server.load()
        await after_load()
        self.published.complete_load()
        await self.published.wait_applied()
        return reasons

    def attach(self, sock: socket.socket) -> int:
        """Serve the front end at the other end of this Unix stream socket, and take ownership of the socket.

        Returns: its number.
        """
        self._last_number += 1
        front = self._fronts[self._last_number] = FrontConnection(
            self, sock, partial(self._on_disconnect, self._last_number)
        )
        self.state.attach(front.link)
        self.published.attach(front.link)
        return self._last_number

    def _on_disconnect(self, number: int, reason: str) -> None:
        front = self._fronts.pop(number, None)
        if front is not None:
            front.close()
            self._on_front_lost(number, reason)

    def detach(self, number: int) -> None:
        """Detach a front end: its requests are cancelled, its socket is closed."""
        front = self._fronts.pop(number, None)
        if front is not None:
            front.close()

    async def drain(self) -> int:
        """Stop being ready, and finish accepted requests within the exit timeout; front ends should have drained.

        Returns: how many requests were dropped.
        """
        dropped = await self.server.drain()
        # the last answers leave at the end of the loop turn
        await asyncio.sleep(0)
        return dropped

    async def close(self) -> None:
        """End immediately, dropping everything."""
        for number in list(self._fronts):
            self.detach(number)
        await self.server.close()


class FrontConnection:
    """One front end: its Link, and the receivers of its messages. `connections` are its counts, by protocol."""

    def __init__(self, owner: EngineServer, sock: socket.socket, on_disconnect: Callable[[str], None]) -> None:
        self._owner = owner
        self.connections = [0, 0]
        self.link = Link(sock, self._receive, on_disconnect)
        self.service = EngineService(owner.engine, self.link, owner.published.models)
        self._control = ControlService(
            self.link, owner.app, owner.methods, owner.state, lambda: not owner.published.load_complete
        )

    def _receive(self, messages: list[Message]) -> None:
        for kind, number, body, arrays, _ in self.service.receive(messages):
            try:
                self._receive_other(kind, number, body, arrays)
            except Exception:
                logger.exception("a front end sent an invalid message (kind %d)", kind)

    def _receive_other(self, kind: int, number: int, body: bytes, arrays: list[Array | None]) -> None:
        if kind in {CALL, ABANDON, PART_CONFIRMED}:
            self._control.receive(kind, number, body, arrays)
        elif kind == STATE_APPLIED:
            self._owner.state.receive(self.link, number, body)
        elif kind == MODELS_APPLIED:
            self._owner.published.receive(self.link, kind, number, body)
        elif kind == MODEL_RELEASED:
            model = self._owner.published.models.get(number)
            if model is not None:
                self.service.discard_templates(model)
            self._owner.published.receive(self.link, kind, number, body)
        elif kind == CONNECTIONS:
            counts = json.loads(body)
            self.connections = counts["open"]
            self._owner.server.metrics.totals.update(counts["totals"])

    def close(self) -> None:
        """Cancel its requests, and detach it."""
        self.link.close()
        self.service.close()
        self._control.close()
        self._owner.state.detach(self.link)
        self._owner.published.detach(self.link)


class _ConnectionCounts:
    """The connections of all front ends over one protocol, for the metrics page."""

    def __init__(self, fronts: Mapping[int, FrontConnection], position: int) -> None:
        self._fronts = fronts
        self._position = position

    @property
    def connections(self) -> int:
        return sum(front.connections[self._position] for front in self._fronts.values())
