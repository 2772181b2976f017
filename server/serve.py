"""Serve: the composition root. Everything is made and wired here, and nowhere else.

`Server` is one server on the running loop, made and ended as often as a test likes; `process.py` is what is around it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from penstock.backends.backend import Loader
from penstock.backends.errors import Code, InferError
from penstock.backends.loading import LOADERS
from penstock.batching.engine import Engine
from penstock.batching.model import Model
from penstock.batching.spec import ModelSpec

from .hardware import Hardware
from .health import Health
from .hooks.runner import Hooks
from .http.access import LoggedFastLane
from .http.connection import Connection
from .http.fastlane import FastLane
from .http.service import Shared
from .listener import Listener, ListenError, make_config
from .metrics import ASGIApp, Metrics, create_metrics_app
from .repository.repository import Repository
from .repository.scan import Defaults
from .settings import Settings
from .v2.control import create_app
from .v2.inference import Inference
from .v2.routes import Route

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


class HookedEngine:
    """The Engine, and the Hooks of each Model that it has loaded. What Repository loads with.

    A model whose hooks cannot be loaded is not served: it is taken out again.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._hooks: dict[Model, Hooks] = {}

    async def load(self, spec: ModelSpec) -> Model:
        """Load a model and its hooks. Raises: InferError."""
        model = await self._engine.load(spec)
        try:
            self._hooks[model] = await Hooks.load(self._engine, model)
        except BaseException:
            await self._engine.unload(spec.name, spec.version)
            raise
        return model

    def hooks_of(self, model: Model) -> Hooks:
        """Give a model's Hooks, which may be none at all. Raises: InferError (NOT_READY) before they are loaded."""
        hooks = self._hooks.get(model)
        if hooks is None:
            raise InferError(Code.NOT_READY, f"the hooks of model '{model.name}' are being loaded")
        return hooks

    async def stop(self, grace_s: float) -> int:
        """Finish what was accepted, hooks first. Returns: how many requests were dropped."""
        deadline = time.monotonic() + grace_s
        closing = [asyncio.ensure_future(hooks.close()) for hooks in self._hooks.values()]
        unfinished = 0
        if closing:
            _, pending = await asyncio.wait(closing, timeout=grace_s)
            unfinished = len(pending)
            for task in pending:
                task.cancel()
        self._hooks.clear()
        return max(unfinished, await self._engine.stop(max(0.0, deadline - time.monotonic())))


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
        self._models = HookedEngine(self.engine)
        self.repository = Repository(
            [Path(path) for path in settings.model_repository],
            Defaults(max_batch_rows=settings.default_max_batch_size),
        )
        self.health = Health(self.repository, strict=settings.strict_readiness)
        self._http: Listener | None = None
        self._metrics: Listener | None = None
        metrics = Metrics(self.engine, Hardware(), lambda: self._http.connections if self._http else 0)
        if settings.allow_http:
            app = create_app(
                self.engine, self.repository, metrics, self.health, name=settings.id, extensions=self._extensions()
            )
            inference = Inference(self.engine, settings.limits(), self._models.hooks_of)
            shared = Shared(inference, settings.limits())
            self._http = self._listener("HTTP", settings.http_address, settings.http_port, app, shared)
        if settings.allow_metrics:
            address = settings.metrics_address or settings.http_address
            shared = Shared(Unclaimed(), settings.limits())
            self._metrics = self._listener(
                "metrics", address, settings.metrics_port, create_metrics_app(metrics), shared
            )

    def _extensions(self) -> list[Route]:
        """Give the endpoints of the protocol's extensions."""
        return []

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
    def metrics_port(self) -> int:
        """The port that metrics are served on, 0 for none."""
        return self._metrics.port if self._metrics else 0

    @property
    def places(self) -> str:
        """Where it listens, in words."""
        return ", ".join(f"{each.name} on {each.url}" for each in (self._http, self._metrics) if each) or "nowhere"

    async def open(self) -> None:
        """Listen, and answer: live, not yet ready.

        Raises: StartError.
        """
        # numpy's error state goes with the context, which connections inherit: a number that no float32 can hold is
        # the client's infinity, and not worth a warning per request
        np.seterr(all="ignore")
        for path in map(Path, self._settings.model_repository):
            if not path.exists():
                raise StartError(f"{path}: no such file or folder")
            if not path.is_dir() and path.suffix != ".onnx":
                raise StartError(f"{path}: neither a model repository nor an .onnx file")
        try:
            for listener in (self._http, self._metrics):
                if listener:
                    await listener.open()
        except ListenError as error:
            raise StartError(str(error)) from error

    async def load(self) -> list[str]:
        """Read the repository and load what is in it. Returns: why each version that is not served is not."""
        for finding in await asyncio.to_thread(self.repository.read):
            logger.log(logging.ERROR if finding.mistake else logging.WARNING, "%s", finding)
        return await self.repository.load_all(self._models, self._settings.model_load_thread_count)

    async def drain(self) -> int:
        """Stop being ready, stop accepting, and finish what was accepted, within the exit timeout.

        Returns: how much was dropped: requests, or connections that had not finished theirs.
        """
        self.health.draining = True
        await asyncio.sleep(self._settings.drain_delay_secs)
        deadline = self._loop.time() + self._settings.exit_timeout_secs
        unfinished = 0
        if self._http:
            await self._http.stop_accepting()
            unfinished = await self._http.finish(deadline)
        self._stopped = True
        dropped = await self._models.stop(max(0.0, deadline - self._loop.time()))
        if self._metrics:
            await self._metrics.stop_accepting()
            await self._metrics.finish(self._loop.time() + METRICS_GRACE_S)
        return max(unfinished, dropped)

    async def close(self) -> None:
        """End at once whatever is left."""
        for listener in (self._http, self._metrics):
            if listener:
                await listener.close()
        if not self._stopped:
            self._stopped = True
            await self._models.stop(0.0)


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
