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
from penstock.server.v2.rpc.services import InferenceParts, inference_methods
from penstock.server.v2.shared_memory import SharedMemory

from .calls import Asking, AskingApp, asking_methods
from .kinds import CONNECTIONS, END, MODELS, PART, STATE
from .placing import FrontModelTable
from .remote_engine import NO_ENGINE, RETRY_NS, RemoteEngine
from .shared_state import StateCopy
from .submission import trace_context

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

    from .spreading import ConnectionSpread

logger = logging.getLogger("penstock.fronts")

_GENERATE = re.compile(r"/v2/models/[^/]+(?:/versions/[^/]+)?/generate(?:_stream)?\Z")
COUNT_S = 1.0
"""How often changed connection counts are reported to the engine."""
LEAVE_S = 1.0
"""How long hooks may take to end when their engine has gone."""


class FrontServer:
    """One front end: `open`, `attach`, and finally `drain` and `close`.

    It survives the loss of its engine: requests are rejected at once (503) until the next `attach`. `lost` is called,
    once per attached socket, with the reason when the engine has gone; not after `close`. `apply` sets what this
    process logs when a client changes that. `spread` shares connections with other front ends.
    Invariants: it is not ready once `drain` has begun. Requests on accepted connections are still answered, and clients
    that connect later are rejected with the reason.
    Threads: the event loop's.
    """

    def __init__(
        self, settings: Settings, lost: Callable[[str], None] = lambda _: None,
        apply: Callable[[LogLevels], None] = lambda _: None, spread: ConnectionSpread | None = None,
    ) -> None:  # fmt: skip
        """Create it. `settings` are the server's; several front ends share its ports, which must then not be 0."""
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._lost = lost
        self._link: Link | None = None
        self._placing: FrontModelTable | None = None
        self._leaving: set[asyncio.Task[int]] = set()
        self._clock: asyncio.TimerHandle | None = None
        self._counted = [0, 0]
        self._joined = asyncio.Event()
        self.engine = RemoteEngine()
        if parse_tracing(settings.trace_config).mode == OPENTELEMETRY:
            self.engine.carried = trace_context
        self.health = Health(_Placed(self), self.engine)
        self.asking = Asking()
        self.shared_memory = SharedMemory(allowed=settings.allow_client_shm)
        self._environments = Environments.from_settings(settings)
        self._faults = Faults(settings, {"worker": own_workers}, str(os.getpid()))
        self._state = StateCopy(self.shared_memory, apply)
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
            spread.join((self._http, self._grpc))

    def _inference(self) -> Inference:
        settings = self._settings
        inference = Inference(
            self.engine, settings.limits(), self._hooks_of, self.shared_memory.regions,
            Forwarding.of(settings.http_header_forward_pattern),
        )  # fmt: skip
        inference.restricted = RestrictedApis.parse(settings.http_restricted_api)
        return inference

    def _app(self) -> FrontApp:
        settings = self._settings
        restricted = RestrictedApis.parse(settings.http_restricted_api)
        generate = make_app(Generate(self.engine, settings.limits(), self._hooks_of).routes())
        generate.state.restricted = restricted
        return FrontApp(AskingApp(self.asking, settings.http_max_input_size, restricted), generate)

    def _methods(self) -> dict[str, Method]:
        own = inference_methods(
            InferenceParts(
                engine=self.engine,
                health=self.health,
                hooks_of=self._hooks_of,
                regions=self.shared_memory.regions,
                forwarding=Forwarding.of(self._settings.grpc_header_forward_pattern),
                restricted=RestrictedApis.parse(self._settings.grpc_restricted_protocol, GRPC_PREFIX),
            )
        )
        return {**asking_methods(self.asking), **own}

    def _hooks_of(self, model: Model) -> Hooks:
        if self._placing is None:
            raise InferError(Code.NOT_READY, NO_ENGINE, RETRY_NS)
        return self._placing.hooks_of(model)

    # -- state and ports ---------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether there is an engine, everything it serves is in place here, and no drain has begun."""
        return self._joined.is_set() and not self.health.draining

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
        self._count()

    async def placed(self, timeout_s: float) -> bool:
        """Wait until it is `ready`, at most `timeout_s`. Returns: whether it is."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._joined.wait(), timeout_s)
            self._faults.start()
        return self.ready

    # -- the engine comes and goes -----------------------------------------------------------------------------

    def attach(self, sock: socket.socket) -> None:
        """Use the engine at the other end of this Unix stream socket, and take ownership of the socket.

        A previously attached engine is detached: requests in flight there fail (503).
        """
        self._leave()
        link = self._link = Link(sock, self._take, self._gone)
        self._placing = FrontModelTable(self.engine, link, self._environments.interpreter, self._joined.set)
        self._counted = [0, 0]
        self.engine.joined(link)
        self.asking.joined(link)

    def _gone(self, why: str) -> None:
        leaving = self._leave()
        if leaving is not None:
            # users' modules form cycles, the collector runs seldom, and nothing is served now
            leaving.add_done_callback(lambda _: gc.collect())
        self._lost(why)

    def _leave(self) -> asyncio.Task[int] | None:
        """Detach the engine. Returns: a task that ends when its hooks are closed; None if there was no engine."""
        link, self._link = self._link, None
        placing, self._placing = self._placing, None
        if link is None or placing is None:
            return None
        link.close()
        self._joined.clear()
        self.engine.lost()
        self.asking.lost()
        leaving = asyncio.ensure_future(placing.close(LEAVE_S))
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)
        return leaving

    def _take(self, messages: list[Message]) -> None:
        for kind, number, body, arrays, descriptors in self.engine.take(messages):
            link, placing = self._link, self._placing
            if link is None or placing is None:
                return
            try:
                if kind in {PART, END}:
                    self.asking.take(kind, number, body, arrays)
                elif kind == MODELS:
                    placing.take(number, body)
                elif kind == STATE:
                    self._state.take(link, number, body, descriptors)
            except Exception:
                logger.exception("the engine sent an invalid message (kind %d)", kind)

    def _count(self) -> None:
        self._clock = self._loop.call_later(COUNT_S, self._count)
        if self._spread is not None:
            self._spread.each_second()
        self._tell()

    def _tell(self) -> None:
        """Report the connections and the counts of the ports to the engine, if they have changed."""
        counted = [port.connections if port else 0 for port in (self._http, self._grpc)]
        if (counted != self._counted or self._totals) and self._link is not None:
            self._counted = counted
            self._link.send(CONNECTIONS, 0, json.dumps({"open": counted, "totals": self._totals}).encode())
            self._totals.clear()

    # -- the end -----------------------------------------------------------------------------------------------

    async def drain(self, *, last: bool = True) -> int:
        """Finish accepted requests within the exit timeout.

        `last`: no other process will accept connections. Probes therefore fail for the drain delay first, and clients
        that connect after it are rejected with the reason. Otherwise the port is closed, and no one need be notified.
        Returns: how much was dropped: requests, or connections with unfinished requests.
        """
        self.health.draining = True
        self._faults.stop()
        self.asking.drain(last=last)
        if last:
            await asyncio.sleep(self._settings.drain_delay_secs)
        self.health.disconnecting = True
        deadline = self._loop.time() + self._settings.exit_timeout_secs
        if self._spread is not None:
            self._spread.leave()
        if not last:
            for port in self._ports:
                await port.stop_accepting()
        if self._spread is not None:
            self._spread.finish()
        unfinished = sum(await asyncio.gather(*(port.drain(deadline) for port in self._ports)))
        self._environments.close()
        if self._placing is not None:
            hooked = await self._placing.close(max(0.0, deadline - self._loop.time()))
            unfinished = max(unfinished, hooked)
        await asyncio.gather(*(port.close_gracefully() for port in self._ports))
        dropped = self.engine.stop()
        self._tell()
        # the last counts leave at the end of the loop turn
        await asyncio.sleep(0)
        return max(unfinished, dropped)

    async def close(self) -> None:
        """End immediately, dropping everything."""
        if self._clock is not None:
            self._clock.cancel()
        self._faults.stop()
        self._environments.close()
        if self._spread is not None:
            self._spread.close()
        await asyncio.gather(*(port.close() for port in self._ports))
        self._leave()
        if self._leaving:
            await asyncio.wait(self._leaving)


class FrontApp:
    """The ASGI application: generate runs here, where the hooks are; everything else goes to the engine."""

    def __init__(self, asking: AskingApp, generate: ASGIApp) -> None:
        self._asking = asking
        self._generate = generate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request (called by uvicorn)."""
        here = scope["type"] == "http" and scope["method"] == "POST" and _GENERATE.fullmatch(scope["path"])
        await (self._generate if here else self._asking)(scope, receive, send)


class _Placed:
    """The Repository that Health sees: ready when everything is in place."""

    def __init__(self, front: FrontServer) -> None:
        self._front = front

    def ready(self, strict: bool = True) -> bool:
        return self._front.ready
