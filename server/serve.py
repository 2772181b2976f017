"""Serve: the composition root. Everything is made and wired here, and nowhere else.

`Server` is one server on the running loop, made and ended as often as a test likes; `run` is the process around it:
loop, signals, logs and exit status.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.metadata
import logging
import signal
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from penstock.backends.backend import Loader
from penstock.backends.errors import Code, InferError
from penstock.backends.loading import LOADERS
from penstock.batching.engine import Engine
from penstock.batching.model import Model
from penstock.batching.spec import ModelSpec

from .hardware import Hardware
from .hooks.runner import Hooks
from .http.access import LoggedFastLane
from .http.connection import Connection
from .http.fastlane import FastLane
from .http.service import Shared
from .listener import Listener, ListenError, make_config
from .logs import Logs
from .metrics import ASGIApp, Metrics, create_metrics_app
from .repository.repository import Repository
from .repository.scan import Defaults
from .settings import Settings
from .v2.control import create_app
from .v2.inference import Inference

logger = logging.getLogger("penstock.serve")

FORCE_AFTER_S = 0.3
"""A second signal counts from here on: `timeout`, `make` and init systems send the first one twice."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
CANCEL_GRACE_S = 1.0
"""How long what a signal interrupts may take to notice."""
GC_THRESHOLD = (20_000, 20, 50)
SWITCH_S = 0.0005
"""How soon a thread that computes gives way to one that waits; Python's own 5 ms are longer than most runs of a model.
mlp at 32 connections: 10% more requests/s, p99 12 ms instead of 53; while it refuses 20,000 requests/s: 12% more."""
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
        self.draining = False
        self._stopped = False
        self.engine = Engine(self._loop, loaders)
        self._models = HookedEngine(self.engine)
        self.repository = Repository(
            [Path(path) for path in settings.model_repository],
            Defaults(max_batch_rows=settings.default_max_batch_size),
        )
        self._http: Listener | None = None
        self._metrics: Listener | None = None
        metrics = Metrics(self.engine, Hardware(), lambda: self._http.connections if self._http else 0)
        if settings.allow_http:
            app = create_app(
                self.engine, self.repository, metrics, name=settings.id, draining=lambda: self.draining,
                strict=settings.strict_readiness,
            )  # fmt: skip
            inference = Inference(self.engine, settings.limits(), self._models.hooks_of)
            shared = Shared(inference, settings.limits())
            self._http = self._listener("HTTP", settings.http_address, settings.http_port, app, shared)
        if settings.allow_metrics:
            address = settings.metrics_address or settings.http_address
            shared = Shared(Unclaimed(), settings.limits())
            self._metrics = self._listener(
                "metrics", address, settings.metrics_port, create_metrics_app(metrics), shared
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
        self.draining = True
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


def run(settings: Settings) -> int:
    """Serve until a signal says otherwise, and leave SIGINT and SIGTERM ignored: the process is about to end.

    Returns: the exit status, 0 only if nothing accepted was lost.
    """
    logs = Logs(settings, sys.stderr)
    logs.start()
    sys.setswitchinterval(SWITCH_S)
    loop = uvloop.new_event_loop()
    try:
        return loop.run_until_complete(_Process(settings).run())
    finally:
        # with the default action, one signal more would end the process with a status of its own
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        loop.close()
        logs.stop()


class _Process:
    """The life of one process. The first SIGTERM or SIGINT drains it, the second ends it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._asked = asyncio.Event()
        self._asked_s = 0.0
        self._forced = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            # not the loop's own handlers: between the loop's end and the process's there would be none
            signal.signal(number, lambda number, _frame: loop.call_soon_threadsafe(self._signalled, number))
        serving = asyncio.ensure_future(self._serve(Server(self._settings)))
        if await _first(serving, self._forced.wait()):
            return serving.result()
        logger.critical("forced to stop: what was under way is lost")
        return 1

    def _signalled(self, number: int) -> None:
        now = time.monotonic()
        if self._asked.is_set():
            if now - self._asked_s > FORCE_AFTER_S:
                self._forced.set()
            return
        self._asked_s = now
        logger.info("%s: finishing what was accepted; again to force", signal.Signals(number).name)
        self._asked.set()

    async def _serve(self, server: Server) -> int:
        try:
            await server.open()
        except StartError as error:
            logger.critical("%s", error)
            return 1
        version = importlib.metadata.version("penstock")
        logger.info("penstock %s: %s", version, server.places)
        loading = asyncio.ensure_future(server.load())
        failed = False
        if await _first(loading, self._asked.wait()):
            _settle_memory()
            self._announce(server)
            failed = self._settings.exit_on_error and bool(loading.result())
            if failed:
                logger.critical("stopping, as --exit-on-error says: %s", "; ".join(loading.result()))
            else:
                await self._asked.wait()
        dropped = await server.drain()
        await server.close()
        if dropped:
            logger.critical("exit timeout: %d requests or connections were unfinished and are dropped", dropped)
        return 1 if dropped or failed else 0

    def _announce(self, server: Server) -> None:
        names = ", ".join(f"{model.name}/{model.version}" for model in server.engine.models()) or "nothing"
        word = "ready" if server.repository.ready(self._settings.strict_readiness) else "not ready"
        logger.info("%s, serving %s", word, names)


def _settle_memory() -> None:
    """Keep the collector from walking, again and again, over what lives as long as the process.

    Requests make no cycles; the default threshold would look for some every hundred requests, and a full collection
    would walk over every module for tens of milliseconds.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLD)


async def _first(work: asyncio.Future[Any], signal_given: Coroutine[Any, Any, Any]) -> bool:
    """Wait for work or a signal, cancel the other, and tell whether it was the work that ended."""
    waiting = asyncio.ensure_future(signal_given)
    await asyncio.wait((work, waiting), return_when=asyncio.FIRST_COMPLETED)
    ended = work.done()
    pending = waiting if ended else work
    pending.cancel()
    await asyncio.wait((pending,), timeout=CANCEL_GRACE_S)
    return ended
