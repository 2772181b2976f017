"""FrontServer: one front end on the running loop: HTTP and gRPC lanes, dialects and hooks, and its Link to the engine.

Created by the surrounding process (server/supervisor), which provides the sockets to the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from penstock.backends.errors import Code, InferError
from penstock.server.dialects import dialect_of
from penstock.server.environments.environments import Environments
from penstock.server.faults import Faults, own_workers
from penstock.server.grpc.tls import TlsError, context_for
from penstock.server.health import Health
from penstock.server.ipc.link import Link
from penstock.server.listening.listener import Port
from penstock.server.listening.ports import make_grpc_port, make_http_port, share_totals, share_unread_limit
from penstock.server.listening.sockets import StartError
from penstock.server.restricted import GRPC_PREFIX, RestrictedApis
from penstock.server.tracing.config import OPENTELEMETRY
from penstock.server.tracing.config import parse as parse_tracing
from penstock.server.v2.forwarding import Forwarding
from penstock.server.v2.generate import Generate
from penstock.server.v2.inference import Inference
from penstock.server.v2.plane import make_app
from penstock.server.v2.rpc.services import InferenceDependencies, inference_methods
from penstock.server.v2.shared_memory import SharedMemory

from .control_calls import ControlApp, ControlCalls, control_methods
from .message_kinds import CONNECTIONS, END, MODELS, PART, STATE
from .model_table import FrontModelTable
from .remote_engine import NO_ENGINE, RETRY_NS, RemoteEngine
from .shared_state import StateCopy

if TYPE_CHECKING:
    import socket

    from starlette.types import Receive, Scope, Send

    from penstock.batching.model import Model
    from penstock.server.grpc.method import Method
    from penstock.server.hooks.runner import Hooks
    from penstock.server.ipc.wire import Message
    from penstock.server.settings import Settings
    from penstock.server.telemetry.logs import LogLevels
    from penstock.server.telemetry.page import ASGIApp

    from .connection_spread import ConnectionSpread

logger = logging.getLogger("penstock.fronts")

_GENERATE = re.compile(r"/v2/models/[^/]+(?:/versions/[^/]+)?/generate(?:_stream)?\Z")
REPORT_INTERVAL_S = 1.0
"""How often changed connection counts are reported to the engine."""
HOOKS_CLOSE_S = 1.0
"""How long hooks may take to end when their engine has gone."""


class FrontServer:
    """One front end: `open`, `attach`, and finally `drain` and `close`.

    It survives the loss of its engine: requests are rejected at once (503) until the next `attach`. `on_engine_lost` is
    called, once per attached socket, with the reason when the engine has gone; not after `close`. `apply_log_levels`
    sets what this process logs when a client changes that. `spread` shares connections with other front ends.
    Invariants: it is not ready once `drain` has begun. Requests on accepted connections are still answered, and clients
    that connect later are rejected with the reason.
    Threads: the event loop's.
    """

    def __init__(
        self, settings: Settings, on_engine_lost: Callable[[str], None] = lambda _: None,
        apply_log_levels: Callable[[LogLevels], None] = lambda _: None, spread: ConnectionSpread | None = None,
    ) -> None:  # fmt: skip
        """Create it. `settings` are the server's; several front ends share its ports, which must then not be 0."""
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._on_engine_lost = on_engine_lost
        self._link: Link | None = None
        self._model_table: FrontModelTable | None = None
        self._detaching: set[asyncio.Task[int]] = set()
        self._report_timer: asyncio.TimerHandle | None = None
        self._reported_connections = [0, 0]
        self._models_ready = asyncio.Event()
        self.engine = RemoteEngine()
        if parse_tracing(settings.trace_config).mode == OPENTELEMETRY:
            self.engine.forwards_trace = True
        self.health = Health(lambda _strict: self.ready, self.engine)
        self.control = ControlCalls()
        self.shared_memory = SharedMemory(allowed=settings.allow_client_shm)
        self._environments = Environments.from_settings(settings)
        self._faults = Faults(settings, {"worker": own_workers}, str(os.getpid()))
        self._state = StateCopy(self.shared_memory, apply_log_levels)
        self._http_restricted = RestrictedApis.parse(settings.http_restricted_api)
        self._http = None
        if settings.allow_http:
            self._http = make_http_port(settings, self._app(), self._inference(), dialect_of(settings))
        self._grpc = make_grpc_port(settings, self._methods(), self._loop) if settings.allow_grpc else None
        for port in self._ports:
            port.reuse_port = True
        share_unread_limit(settings, self._ports)
        self._totals: Counter[str] = Counter()
        share_totals(self._totals, self._ports)
        self._spread = spread
        if spread is not None:
            spread.balance((self._http, self._grpc))

    def _inference(self) -> Inference:
        settings = self._settings
        inference = Inference(
            self.engine, settings.limits(), self._hooks_of, self.shared_memory.regions,
            Forwarding.of(settings.http_header_forward_pattern),
        )  # fmt: skip
        inference.restricted = self._http_restricted
        return inference

    def _app(self) -> ASGIApp:
        """Return the ASGI application: generate runs here, where the hooks are; everything else goes to the engine."""
        settings = self._settings
        generate = make_app(Generate(self.engine, settings.limits(), self._hooks_of).routes())
        generate.state.restricted = self._http_restricted
        control = ControlApp(self.control, settings.http_max_input_size, self._http_restricted)

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            is_generate = scope["type"] == "http" and scope["method"] == "POST" and _GENERATE.fullmatch(scope["path"])
            await (generate if is_generate else control)(scope, receive, send)

        return app

    def _methods(self) -> dict[str, Method]:
        inference = inference_methods(
            InferenceDependencies(
                engine=self.engine,
                health=self.health,
                hooks_of=self._hooks_of,
                regions=self.shared_memory.regions,
                forwarding=Forwarding.of(self._settings.grpc_header_forward_pattern),
                restricted=RestrictedApis.parse(self._settings.grpc_restricted_protocol, GRPC_PREFIX),
            )
        )
        return {**control_methods(self.control), **inference}

    def _hooks_of(self, model: Model) -> Hooks:
        if self._model_table is None:
            raise InferError(Code.NOT_READY, NO_ENGINE, RETRY_NS)
        return self._model_table.hooks_of(model)

    # -- state and ports ---------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether there is an engine, everything it serves is in place here, and no drain has begun."""
        return self._models_ready.is_set() and not self.health.draining

    @property
    def http_port(self) -> int:
        """The HTTP port, 0 for none."""
        return self._http.port if self._http else 0

    @property
    def grpc_port(self) -> int:
        """The gRPC port, 0 for none."""
        return self._grpc.port if self._grpc else 0

    @property
    def _ports(self) -> list[Port]:
        return [port for port in (self._http, self._grpc) if port]

    async def open(self) -> None:
        """Listen; requests that need an engine are rejected until there is one. Raises: StartError."""
        # as in Server: a number too large for float32 is the client's infinity
        np.seterr(all="ignore")
        try:
            if self._grpc:
                self._grpc.tls = context_for(self._settings)
            for port in self._ports:
                await port.open()
        except TlsError as error:
            raise StartError(str(error)) from error
        if self._spread is not None:
            self._spread.open()
        self._report_periodically()

    async def wait_ready(self, timeout_s: float) -> bool:
        """Wait until it is `ready`, at most `timeout_s`. Returns: whether it is."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._models_ready.wait(), timeout_s)
            self._faults.start()
        return self.ready

    # -- the engine comes and goes -----------------------------------------------------------------------------

    def attach(self, sock: socket.socket) -> None:
        """Use the engine at the other end of this Unix stream socket, and take ownership of the socket.

        A previously attached engine is detached: requests in flight there fail (503).
        """
        self._detach()
        link = self._link = Link(sock, self._receive, self._on_disconnect)
        self._model_table = FrontModelTable(self.engine, link, self._environments.interpreter, self._models_ready.set)
        self._reported_connections = [0, 0]
        self.engine.attach(link)
        self.control.attach(link)

    def _on_disconnect(self, reason: str) -> None:
        detaching = self._detach()
        if detaching is not None:
            # users' modules form cycles, the collector runs seldom, and nothing is served now
            detaching.add_done_callback(lambda _: gc.collect())
        self._on_engine_lost(reason)

    def _detach(self) -> asyncio.Task[int] | None:
        """Detach the engine. Returns: a task that ends when its hooks are closed; None if there was no engine."""
        link, self._link = self._link, None
        model_table, self._model_table = self._model_table, None
        if link is None or model_table is None:
            return None
        link.close()
        self._models_ready.clear()
        self.engine.detach()
        self.control.detach()
        detaching = asyncio.ensure_future(model_table.close(HOOKS_CLOSE_S))
        self._detaching.add(detaching)
        detaching.add_done_callback(self._detaching.discard)
        return detaching

    def _receive(self, messages: list[Message]) -> None:
        for kind, number, body, arrays, descriptors in self.engine.receive(messages):
            link, model_table = self._link, self._model_table
            if link is None or model_table is None:
                return
            try:
                if kind in {PART, END}:
                    self.control.receive(kind, number, body, arrays)
                elif kind == MODELS:
                    model_table.receive(number, body)
                elif kind == STATE:
                    self._state.receive(link, number, body, descriptors)
            except Exception:
                logger.exception("the engine sent an invalid message (kind %d)", kind)

    def _report_periodically(self) -> None:
        self._report_timer = self._loop.call_later(REPORT_INTERVAL_S, self._report_periodically)
        if self._spread is not None:
            self._spread.refresh()
        self._report_connections()

    def _report_connections(self) -> None:
        """Report the connections and the counts of the ports to the engine, if they have changed."""
        connections = [port.connections if port else 0 for port in (self._http, self._grpc)]
        if (connections != self._reported_connections or self._totals) and self._link is not None:
            self._reported_connections = connections
            self._link.send(CONNECTIONS, 0, json.dumps({"open": connections, "totals": self._totals}).encode())
            self._totals.clear()

    # -- the end -----------------------------------------------------------------------------------------------

    async def drain(self, *, server_stopping: bool = True) -> int:
        """Finish accepted requests within the exit timeout.

        `server_stopping`: no other process will accept connections. Probes therefore fail for the drain delay first,
        and clients that connect after it are rejected with the reason. Otherwise the port is closed, and no one need be
        notified.
        Returns: how much was dropped: requests, or connections with unfinished requests.
        """
        self.health.draining = True
        self._faults.stop()
        self.control.drain(server_stopping=server_stopping)
        if server_stopping:
            await asyncio.sleep(self._settings.drain_delay_secs)
        self.health.disconnecting = True
        deadline = self._loop.time() + self._settings.exit_timeout_secs
        if self._spread is not None:
            self._spread.stop_accepting()
        if not server_stopping:
            for port in self._ports:
                await port.stop_accepting()
        if self._spread is not None:
            self._spread.finish()
        unfinished = sum(await asyncio.gather(*(port.drain(deadline) for port in self._ports)))
        self._environments.close()
        if self._model_table is not None:
            unfinished_hooks = await self._model_table.close(max(0.0, deadline - self._loop.time()))
            unfinished = max(unfinished, unfinished_hooks)
        await asyncio.gather(*(port.close_gracefully() for port in self._ports))
        dropped = self.engine.stop()
        self._report_connections()
        # the last counts leave at the end of the loop turn
        await asyncio.sleep(0)
        return max(unfinished, dropped)

    async def close(self) -> None:
        """End immediately, dropping everything."""
        if self._report_timer is not None:
            self._report_timer.cancel()
        self._faults.stop()
        self._environments.close()
        if self._spread is not None:
            self._spread.close()
        await asyncio.gather(*(port.close() for port in self._ports))
        self._detach()
        if self._detaching:
            await asyncio.wait(self._detaching)
