"""Listener: one port, served by a uvicorn protocol class, and closed without losing accepted connections.

Port is the part shared by all protocols; the gRPC lane has its own subclass. Listener replaces `uvicorn.Server`, which
takes over its process's signals and closes idle connections at once. From uvicorn it uses Config, ServerState and the
constructor of its HTTP protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable, Collection
from email.utils import formatdate
from functools import partial
from typing import TYPE_CHECKING, Any

from uvicorn.config import Config
from uvicorn.server import ServerState

from .acceptor import Acceptor
from .sockets import bind_all, bind_one, block_new_connections, has_pending_connections, listen_error
from .tally import Tally

if TYPE_CHECKING:
    from penstock.server.http.service import HttpShared
    from penstock.server.http2.shared import Http2Shared

BACKLOG = 4096
TICK_S = 1.0
POLL_S = 0.01
"""How often a draining Listener checks whether its connections have ended."""
REJECT_S = 1.0
"""How long connections accepted while draining may take to close, once the port is closed."""
_MAX_LOOP_TURNS = 1000
_ABANDON_S = 1.0
"""How long work for disconnected clients may take to end."""


class Port:
    """One port.

    Invariant: a connection whose handshake the kernel has completed is accepted and passed to a protocol, until
    `stop_accepting` returns; later ones are refused by the kernel. Connections accepted after `drain` has begun get
    answers, but no work is started for them. `shared` is the common state of the protocol's connections, if any: its
    `sweep` is called every second with the elapsed seconds, for time limits. `tls` applies to every connection, or is
    None. `max_connections` limits the number of connections where Acceptor counts them, not only the protocol.
    `reuse_port`: other processes of the same user listen on the port too, and the kernel distributes connections.
    `acceptor` accepts them, once it is open; if those processes pass connections to each other, it is set before.
    Threads: the event loop's.
    """

    scheme = "http"
    tls: ssl.SSLContext | None = None
    max_connections = sys.maxsize
    reuse_port = False
    acceptor: Acceptor | None = None

    def __init__(self, name: str, address: str, port: int, shared: HttpShared | Http2Shared | None = None) -> None:
        self.name = name
        self.address, self.port = address, port
        self.shared = shared
        self.tally = shared.tally if shared is not None else Tally("http")
        self._bound: list[socket.socket] = []
        self._sockets: list[socket.socket] = []
        self._tick_timer: asyncio.TimerHandle | None = None

    def make_protocol(self) -> asyncio.BaseProtocol:
        """Make the protocol of a new connection."""
        raise NotImplementedError

    def open_connections(self) -> Collection[Any]:
        """Return the protocols of the open connections; each has `transport`, and `shutdown` to drain it."""
        raise NotImplementedError

    def use_connections(self, connections: set[Any]) -> None:
        """Use this set for the open connections from now on; there are none yet."""
        raise NotImplementedError

    def share_connections(self, hand_off: Callable[[socket.socket], bool], on_count: Callable[[int], None]) -> Acceptor:
        """Let other processes take connections accepted here, as described in Acceptor. To be called before `open`."""
        acceptor = self.acceptor = Acceptor(self.make_protocol, hand_off, on_count, self.tally)
        self.use_connections(acceptor.open)
        return acceptor

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return len(self.open_connections())

    @property
    def url(self) -> str:
        """The URL it listens on, once it does."""
        address = f"[{self.address}]" if ":" in self.address else self.address
        return f"{self.scheme}://{address}:{self.port}"

    async def bind(self) -> None:
        """Bind the port, to which nobody can connect yet; port 0 becomes the port the system chose.

        Raises: ListenError.
        """
        if not self._bound:
            bind = partial(bind_one, reuse_port=self.reuse_port)
            self._bound = await bind_all(self.name, self.address, self.port, bind)
            self.port = self._bound[0].getsockname()[1]

    async def open(self) -> None:
        """Bind the port if that has not been done, and start accepting connections. Raises: ListenError."""
        loop = asyncio.get_running_loop()
        self._tick(loop, loop.time())
        acceptor = self.acceptor or self.share_connections(lambda _sock: False, lambda _count: None)
        acceptor.max_connections = self.max_connections
        await self.bind()
        self._sockets, self._bound = self._bound, []
        try:
            for bound in self._sockets:
                acceptor.begin(bound, BACKLOG, self.tls)
        except OSError as error:  # another process has started listening there since the bind
            raise listen_error(self.name, self.address, self.port, error) from error

    def _tick(self, loop: asyncio.AbstractEventLoop, last_s: float) -> None:
        now_s = loop.time()
        self.on_tick()
        self._tick_timer = loop.call_later(TICK_S, self._tick, loop, now_s)
        if self.shared is not None:
            # while this process was stopped it read nothing, so clients are not charged for that time
            self.shared.sweep(min(now_s - last_s, 2 * TICK_S))

    def on_tick(self) -> None:
        """Do what is due every second, with or without connections."""

    async def abandon(self) -> None:
        """Stop the work for connections that have been aborted."""

    def begin_draining(self) -> None:
        """Start no work for connections accepted from now on."""
        if self.shared is not None:
            self.shared.draining = True

    async def stop_accepting(self) -> None:
        """Accept connections that are already established, then close the port.

        Closing a port resets the connections still in the kernel's queue, whose clients may have sent a request. So new
        handshakes are blocked first (clients retry a second later and are then refused), and the queue is emptied.
        """
        for bound in self._sockets:
            block_new_connections(bound)
        await self._accept_pending()
        closing = self._sockets + self._bound
        self._sockets, self._bound = [], []
        if self.acceptor is not None:
            self.acceptor.stop()
        await asyncio.sleep(0)
        for bound in closing:
            with contextlib.suppress(OSError):
                bound.close()

    async def _accept_pending(self) -> None:
        """Let the loop accept what the kernel has connected."""
        for _ in range(_MAX_LOOP_TURNS):
            await asyncio.sleep(0)
            if not has_pending_connections(self._sockets):
                break
        await asyncio.sleep(0)  # for `connection_made` of the last ones

    async def drain(self, deadline_s: float) -> int:
        """Let connections finish their work and close; return how many had not by `deadline_s` (the loop's time).

        Connections accepted meanwhile, if the port is open, are turned away and not waited for.
        """
        loop = asyncio.get_running_loop()
        await self._accept_pending()
        if self.acceptor is not None:
            await self.acceptor.wait_for_handshakes()
        self.begin_draining()
        remaining = set(self.open_connections())
        for connection in remaining:
            connection.shutdown()
        while remaining and loop.time() < deadline_s:
            await asyncio.sleep(POLL_S)
            remaining.intersection_update(self.open_connections())
        return len(remaining)

    async def close_gracefully(self) -> None:
        """Close the port after `drain`, and let connections that were turned away close."""
        await self.stop_accepting()
        await self.drain(asyncio.get_running_loop().time() + REJECT_S)

    async def close(self) -> None:
        """Close the port and every connection immediately."""
        await self.stop_accepting()
        if self.acceptor is not None:
            self.acceptor.cancel_handshakes()
        if self._tick_timer is not None:
            self._tick_timer.cancel()
        for connection in list(self.open_connections()):
            transport: asyncio.Transport | None = connection.transport
            if transport is not None:
                transport.abort()
        for _ in range(_MAX_LOOP_TURNS):
            if not self.open_connections():
                break
            await asyncio.sleep(0)
        await self.abandon()


class Listener(Port):
    """A Port whose protocol is one of uvicorn's kind."""

    def __init__(self, name: str, address: str, port: int, config: Config, shared: HttpShared | None = None) -> None:
        """`shared` is set if the protocol is the fast lane's."""
        super().__init__(name, address, port, shared)
        if not config.loaded:
            config.load()
        self._config = config
        self._state = ServerState()

    def make_protocol(self) -> asyncio.BaseProtocol:
        """Make uvicorn's protocol."""
        make: Any = self._config.http_protocol_class
        protocol: asyncio.BaseProtocol = make(config=self._config, server_state=self._state, app_state={})
        return protocol

    def open_connections(self) -> Collection[Any]:
        """Return uvicorn's connections."""
        return self._state.connections

    def use_connections(self, connections: set[Any]) -> None:
        """Have uvicorn use this set for its connections."""
        self._state.connections = connections

    def on_tick(self) -> None:
        """Update the date sent in answers."""
        self._state.default_headers = [(b"date", formatdate(usegmt=True).encode())]

    async def abandon(self) -> None:
        """Let uvicorn's tasks notice that their clients are gone; cancel the rest, which it logs as errors."""
        if self._state.tasks:
            await asyncio.wait(self._state.tasks, timeout=_ABANDON_S)
        for task in list(self._state.tasks):
            task.cancel()


def make_config(
    app: Callable[..., Awaitable[None]], http: type[asyncio.Protocol] | str, *, idle_s: float, access_log: bool
) -> Config:
    """Return uvicorn's Config, without what Penstock does: logging, signals, websockets, lifespan, proxies."""
    return Config(
        app,
        http=http,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=access_log,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=idle_s,  # type: ignore[arg-type]  # passed to loop.call_later, which accepts fractions
    )
