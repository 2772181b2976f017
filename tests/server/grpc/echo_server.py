"""The gRPC lane on a port, with methods that echo, for third-party clients."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvloop

from penstock.server.grpc.connection import GrpcListener, GrpcShared
from penstock.server.grpc.limits import GrpcLimits
from penstock.server.grpc.method import Call, Method
from tests.server.http2.wire import BIDI, ECHO, GIVE, HOLD, Echo


class Served:
    """A listener on a loop of its own. `began` and `cancelled` count the calls of HOLD, `message_count`
    those of ECHO, of which the first are rejected with `refusals`."""

    def __init__(self, limits: GrpcLimits, tls: ssl.SSLContext | None) -> None:
        self.began = threading.Semaphore(0)
        self.cancelled = threading.Semaphore(0)
        self.held: list[Any] = []
        self.message_count = 0
        self.refusals: list[Exception] = []
        methods = [
            Method(ECHO, self._echo),
            Method(BIDI, streaming=Echo),
            Method(HOLD, self._hold),
            Method(GIVE, lambda call, message: call.answer(bytes(int(message)))),
        ]
        self.shared = GrpcShared({method.path: method for method in methods}, limits)
        self.listener = GrpcListener("127.0.0.1", 0, self.shared)
        self.listener.tls = tls

    def _echo(self, call: Call, message: bytes) -> None:
        self.message_count += 1
        if self.refusals:
            raise self.refusals.pop(0)
        call.answer(message)

    def _hold(self, call: Call, message: bytes) -> None:
        call.on_cancel = self.cancelled.release
        self.held.append(call)
        self.began.release()


class Live:
    """What a test may use from its own thread."""

    def __init__(self, served: Served, loop: asyncio.AbstractEventLoop) -> None:
        self.served = served
        self.loop = loop
        self.address = f"127.0.0.1:{served.listener.port}"

    def drain(self, seconds: float = 5.0) -> asyncio.Future[int]:
        """Begin to drain; the result is the number of unfinished connections."""

        async def finish() -> int:
            await self.served.listener.stop_accepting()
            return await self.served.listener.drain(self.loop.time() + seconds)

        return asyncio.run_coroutine_threadsafe(finish(), self.loop)  # type: ignore[return-value]

    def call(self, function: Any, *args: Any) -> None:
        self.loop.call_soon_threadsafe(function, *args)


@contextmanager
def served(limits: GrpcLimits | None = None, tls: ssl.SSLContext | None = None) -> Iterator[Live]:
    """Serve for as long as the block lasts."""
    loop = uvloop.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="grpc-lane", daemon=True)
    thread.start()

    async def begin() -> Served:
        server = Served(limits or GrpcLimits(), tls)
        await server.listener.open()
        return server

    server = asyncio.run_coroutine_threadsafe(begin(), loop).result(10)
    try:
        yield Live(server, loop)
    finally:
        asyncio.run_coroutine_threadsafe(server.listener.close(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
