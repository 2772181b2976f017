"""Serve: the composition root. Everything is made and wired here, and nowhere else.

`Server` is one server on the running loop, made and ended as often as a test likes; `process.py` is what is around it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from penstock.backends.backend import Loader
from penstock.backends.loading import LOADERS
from penstock.batching.cache import Cache
from penstock.batching.engine import Engine

from .cache_config import parse as parse_cache
from .grpc.connection import GrpcShared
from .grpc.listening import GrpcListener
from .grpc.method import Method
from .grpc.tls import TlsError, context_for
from .health import Health
from .hooks.engine import HookedEngine
from .http.access import LoggedFastLane
from .http.connection import Connection
from .http.fastlane import FastLane
from .http.service import Shared
from .listener import Listener, ListenError, Port, make_config
from .metrics import ASGIApp, create_metrics_app
from .observing import Observing, made_metrics
from .repository.control import EVERY, Choices, ModelControl
from .repository.fields.batching import hold_requests
from .repository.fields.sequences import HOLD_BACKLOG
from .repository.mirrors import Mirrors, defaults_of
from .repository.remote import RemoteError
from .settings import Settings
from .sharing import devices_of
from .v2.control import EXTENSIONS, create_app
from .v2.forwarding import Forwarding
from .v2.generate import Generate
from .v2.inference import Inference
from .v2.repository import RepositoryEndpoints
from .v2.routes import Route
from .v2.rpc.services import Parts, methods
from .v2.shared_memory import SharedMemory

logger = logging.getLogger("penstock.serve")

METRICS_GRACE_S = 1.0
"""How long the metrics port may take to finish a scrape, once all else has ended."""


class StartError(Exception):
    """Why a server cannot start, in one line for the operator."""


class Unclaimed:
    """The fast lane's Service of a port without inference: every request is left to uvicorn, limits apply."""

    def claim(self, head: Any) -> None:
        """Claim nothing."""

    def turn_away(self, head: Any) -> None:
        """Never called."""

    def refuse(self, connection: FastLane, error: Any) -> None:
        """Never called."""

    def begin(self, connection: FastLane, head: Any, body: bytes) -> None:
        """Never called."""

    def abandon(self, connection: Connection) -> None:
        """Never called."""


class Server:
    """One server on the running event loop: `open`, `load`, and in the end `drain` and `close`.

    Invariants: it answers from `open` on, and is ready once `load` has ended well. From the start of `drain` on it is
    not ready; whatever was sent on a connection that it had accepted is still answered.
    """

    def __init__(self, settings: Settings, loaders: Mapping[str, Loader] = LOADERS) -> None:
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._stopped = False
        self.engine = Engine(self._loop, loaders)
        self.engine.devices = devices_of(settings)
        if cache_bytes := parse_cache(settings.cache_config):
            self.engine.cache = Cache(cache_bytes)
        self._models = HookedEngine(self.engine)
        self._mirrors = Mirrors.of(settings.model_repository)
        held, backlog = hold_requests(os.environ), hold_requests(os.environ, HOLD_BACKLOG)
        defaults = replace(defaults_of(settings), hold_requests=held, hold_backlog=backlog)
        self.repository = self._mirrors.repository(defaults)
        self.control = ModelControl(self.repository, self._models, Choices.of(settings))
        self.health = Health(self.repository, self.engine, strict=settings.strict_readiness)
        self.observing = Observing(settings, self.engine)
        self.shared_memory = SharedMemory(allowed=settings.allow_client_shm)
        self._http: Listener | None = None
        self._grpc: GrpcListener | None = None
        self._metrics: Listener | None = None
        metrics = made_metrics(settings, self.engine, lambda: (self._http, self._grpc))
        if settings.allow_http:
            app = create_app(
                self.engine, self.repository, metrics, self.health, name=settings.id, extensions=self._extensions()
            )
            app.state.restricted = self.observing.http_restricted
            inference = Inference(
                self.engine, settings.limits(), self._models.hooks_of, self.shared_memory.regions,
                Forwarding.of(settings.http_header_forward_pattern),
            )  # fmt: skip
            inference.restricted = self.observing.http_restricted
            shared = Shared(inference, settings.limits())
            self._http = self._listener("HTTP", settings.http_address, settings.http_port, app, shared)
        if settings.allow_grpc:
            lane = GrpcShared(self._grpc_methods(), settings.grpc_limits(), loop=self._loop)
            self._grpc = GrpcListener(settings.grpc_address, settings.grpc_port, lane)
        if settings.allow_metrics:
            address = settings.metrics_address or settings.http_address
            shared = Shared(Unclaimed(), settings.limits())
            self._metrics = self._listener(
                "metrics", address, settings.metrics_port, create_metrics_app(metrics), shared
            )

    def _extensions(self) -> list[Route]:
        """Give the endpoints of the protocol's extensions."""
        repository = RepositoryEndpoints(self.control, self._settings.http_max_input_size)
        generate = Generate(self.engine, self._settings.limits(), self._models.hooks_of)
        return [
            *repository.routes(), *self.observing.routes(), *self.shared_memory.routes(), *generate.routes(),
        ]  # fmt: skip

    def _grpc_methods(self) -> dict[str, Method]:
        """Give the RPCs by path."""
        return methods(
            Parts(
                engine=self.engine,
                repository=self.repository,
                health=self.health,
                hooks_of=self._models.hooks_of,
                name=self._settings.id,
                extensions=EXTENSIONS,
                control=self.control,
                traces=self.observing.traces,
                logs=self.observing.logging,
                restricted=self.observing.grpc_restricted,
                regions=self.shared_memory.regions,
                system=self.shared_memory.system,
                cuda=self.shared_memory.cuda,
                forwarding=Forwarding.of(self._settings.grpc_header_forward_pattern),
            )
        )

    def _listener(self, name: str, address: str, port: int, app: ASGIApp, shared: Shared) -> Listener:
        lane = LoggedFastLane if self._settings.access_log else FastLane
        protocol = type("Connection", (lane,), {"shared": shared})
        config = make_config(
            app, protocol, idle_s=self._settings.http_idle_timeout_secs, access_log=self._settings.access_log
        )
        return Listener(name, address, port, config, shared.sweep)

    @property
    def http_port(self) -> int:
        """The port that HTTP is served on, 0 for none."""
        return self._http.port if self._http else 0

    @property
    def grpc_port(self) -> int:
        """The port that gRPC is served on, 0 for none."""
        return self._grpc.port if self._grpc else 0

    @property
    def metrics_port(self) -> int:
        """The port that metrics are served on, 0 for none."""
        return self._metrics.port if self._metrics else 0

    @property
    def places(self) -> str:
        """Where it listens, in words."""
        return ", ".join(f"{each.name} on {each.url}" for each in self._ports) or "nowhere"

    @property
    def _ports(self) -> list[Port]:
        return [port for port in (self._http, self._grpc, self._metrics) if port]

    async def open(self) -> None:
        """Listen, and answer: live, not yet ready.

        Raises: StartError.
        """
        # numpy's error state goes with the context, which connections inherit: a number that no float32 can hold is
        # the client's infinity, and not worth a warning per request
        np.seterr(all="ignore")
        for path in self._mirrors.local:
            if not path.exists():
                raise StartError(f"{path}: no such file or folder")
            if not path.is_dir() and path.suffix != ".onnx":
                raise StartError(f"{path}: neither a model repository nor an .onnx file")
        if self._settings.load_model and not self.control.allowed:
            raise StartError("--load-model needs --model-control-mode explicit")
        if EVERY in self._settings.load_model and len(self._settings.load_model) > 1:
            raise StartError(f"--load-model {EVERY} loads every model: it can not be given with another --load-model")
        try:
            await asyncio.to_thread(self._mirrors.open)
            if self._grpc:
                self._grpc.tls = context_for(self._settings)
            for port in self._ports:
                await port.open()
        except (ListenError, TlsError, RemoteError) as error:
            raise StartError(str(error)) from error

    async def load(self) -> list[str]:
        """Read the repository and load what is in it. Returns: why each version that is not served is not."""
        return await self.control.start()

    async def drain(self) -> int:
        """Stop being ready, stop accepting, and finish what was accepted, within the exit timeout.

        Returns: how much was dropped: requests, or connections that had not finished theirs.
        """
        self.health.draining = True
        await asyncio.sleep(self._settings.drain_delay_secs)
        deadline = self._loop.time() + self._settings.exit_timeout_secs
        serving = [port for port in (self._http, self._grpc) if port]
        for port in serving:
            await port.stop_accepting()
        self.engine.hurry()  # or connections would wait for batches that wait for more of them
        unfinished = sum(await asyncio.gather(*(port.finish(deadline) for port in serving)))
        self._stopped = True
        await self.control.stop()
        dropped = await self._models.stop(max(0.0, deadline - self._loop.time()))
        if self._metrics:
            await self._metrics.stop_accepting()
            await self._metrics.finish(self._loop.time() + METRICS_GRACE_S)
        return max(unfinished, dropped)

    async def close(self) -> None:
        """End at once whatever is left."""
        for port in self._ports:
            await port.close()
        if not self._stopped:
            self._stopped = True
            await self.control.stop()
            await self._models.stop(0.0)
        await asyncio.to_thread(self._mirrors.close)
        await self.observing.stop()


@asynccontextmanager
async def running_server(settings: Settings, loaders: Mapping[str, Loader] = LOADERS) -> AsyncIterator[Server]:
    """Run a server with its models loaded, for as long as the block lasts; drain it in the end."""
    server = Server(settings, loaders)
    try:
        await server.open()
        await server.load()
        yield server
        await server.drain()
    finally:
        await server.close()
