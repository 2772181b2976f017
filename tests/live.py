"""A live server for tests that talk to it over a socket: on its own thread and loop, on ports the system chooses."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from penstock.backends.backend import Loader
from penstock.backends.loading import LOADERS
from penstock.server.serve import Server
from penstock.server.settings import Settings

T = TypeVar("T")


@dataclass
class Live:
    """What a test may use. `server` belongs to its loop: access it only through `call`."""

    server: Server
    loop: asyncio.AbstractEventLoop
    http_port: int
    metrics_port: int
    grpc_port: int = 0

    @property
    def address(self) -> str:
        """The address for tritonclient."""
        return f"127.0.0.1:{self.http_port}"

    @property
    def grpc_address(self) -> str:
        """The address for tritonclient.grpc."""
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def draining(self) -> bool:
        """Whether the server that clients talk to is draining."""
        return self.server.health.draining

    @property
    def url(self) -> str:
        """The URL for everything else."""
        return f"http://{self.address}"

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the server's loop and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)


def settings_for(*paths: Path, **settings: Any) -> Settings:
    """Return settings with ports that the system chooses."""
    fixed: dict[str, Any] = {
        "http_port": 0,
        "metrics_port": 0,
        "grpc_port": 0,
        "model_repository": tuple(str(path) for path in paths),
    }
    return Settings(**(fixed | settings))


@asynccontextmanager
async def running_server(settings: Settings, loaders: Mapping[str, Loader]) -> AsyncIterator[Server]:
    """Run a server with its models loaded until the block ends, and drain it at the end."""
    server = Server(settings, loaders)
    try:
        await server.open()
        await server.load()
        yield server
        await server.drain()
    finally:
        await server.close()


@contextmanager
def live_server(*paths: Path, loaders: Mapping[str, Loader] = LOADERS, **settings: Any) -> Iterator[Live]:
    """Serve the paths until the block ends.

    With PENSTOCK_TEST_FRONTS that many front ends and an engine serve them, as if they were separate processes: a
    client must not see the difference.
    """
    if count := int(os.environ.get("PENSTOCK_TEST_FRONTS", "0")):
        from tests.server.fronts.live_fronts import live_front

        with live_front(*paths, loaders=loaders, count=count, **settings) as live:
            yield live
        return
    loop = uvloop.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="live-server", daemon=True)
    thread.start()
    running = running_server(settings_for(*paths, **settings), loaders)
    try:
        server = asyncio.run_coroutine_threadsafe(running.__aenter__(), loop).result(60)
        try:
            yield Live(server, loop, server.http_port, server.metrics_port, server.grpc_port)
        finally:
            asyncio.run_coroutine_threadsafe(running.__aexit__(None, None, None), loop).result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
