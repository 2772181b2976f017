"""Front ends and an engine on one loop, used like a live server: clients must see the same."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from penstock.backends.backend import Loader
from penstock.backends.loading import LOADERS
from penstock.server.fronts.engine_server import EngineServer
from penstock.server.fronts.front import FrontServer
from penstock.server.serve import Server
from penstock.server.settings import Settings
from tests.live import Live, settings_for


@dataclass(kw_only=True)
class LiveFronts(Live):
    """What a test may use; ports and addresses are the first front end's."""

    fronts: list[FrontServer]
    engine_server: EngineServer

    @property
    def draining(self) -> bool:
        """Whether the first front end is draining."""
        return self.fronts[0].health.draining

    def url_of(self, position: int) -> str:
        """Return the URL of one front end for HTTP clients."""
        return f"http://127.0.0.1:{self.fronts[position].http_port}"


@asynccontextmanager
async def running_fronts(
    settings: Settings, loaders: Mapping[str, Loader] = LOADERS, count: int = 1
) -> AsyncIterator[tuple[list[FrontServer], EngineServer]]:
    """Run an engine and front ends, all models in place, for as long as the block lasts; drain them in the end."""
    engine = EngineServer(settings, loaders)
    fronts = [FrontServer(settings) for _ in range(count)]
    try:
        await engine.open()
        for front in fronts:
            attach(engine, front)
            await front.open()
        await engine.load()
        for front in fronts:
            assert await front.wait_ready(10)
        yield fronts, engine
        engine.engine.flush()  # as the supervisor does
        for front in fronts:
            await front.drain()
        await engine.drain()
    finally:
        for front in fronts:
            await front.close()
        await engine.close()


def attach(engine: EngineServer, front: FrontServer) -> int:
    """Connect a front end to an engine."""
    here, there = socket.socketpair()
    front.attach(there)
    return engine.attach(here)


@contextmanager
def live_front(
    *paths: Path, loaders: Mapping[str, Loader] = LOADERS, count: int = 1, **settings: Any
) -> Iterator[LiveFronts]:
    """Serve the paths through front ends for as long as the block lasts."""
    loop = uvloop.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="live-fronts", daemon=True)
    thread.start()
    running = running_fronts(settings_for(*paths, **settings), loaders, count)
    try:
        fronts, engine = asyncio.run_coroutine_threadsafe(running.__aenter__(), loop).result(60)
        try:
            server: Server = engine.server
            ports = fronts[0].http_port, engine.server.metrics_port, fronts[0].grpc_port
            yield LiveFronts(server, loop, *ports, fronts=fronts, engine_server=engine)
        finally:
            asyncio.run_coroutine_threadsafe(running.__aexit__(None, None, None), loop).result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
