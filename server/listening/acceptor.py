"""Acceptor: accepts the connections of one port, and keeps each or passes it to another process before reading it.

Replaces the event loop's own server, which accepts one connection per turn of the loop: 200 a second while a model
makes turns of 5 ms. That server also keeps any number of clients that never finish a TLS handshake, and cannot pass
connections on. Made by a Port (listener.py).
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import sys
from collections.abc import Callable
from typing import Any

from .tally import Tally

logger = logging.getLogger("penstock.serve")

MAX_ACCEPTS = 64
"""The most connections accepted before the loop may do something else."""
RETRY_S = 1.0
"""How long to pause after the system has refused to accept, as asyncio does."""
HANDSHAKES_S = 1.0
"""How long a drain waits for TLS handshakes that clients have begun."""


class OpenConnections(set[Any]):
    """The open connections of a port; `on_change` is called with the connection on each change."""

    def __init__(self, on_change: Callable[[Any], None]) -> None:
        super().__init__()
        self._on_change = on_change

    def add(self, connection: Any) -> None:
        """Add a connection, and report it."""
        super().add(connection)
        self._on_change(connection)

    def discard(self, connection: Any) -> None:
        """Remove a connection, and report it."""
        super().discard(connection)
        self._on_change(connection)


class Acceptor:
    """Accepts connections on listening sockets. If `hand_off` takes a connection, this process closes its copy.

    `on_count` is called with the number of connections when it changes: those open, and those not yet at
    `connection_made`, including TLS handshakes. Above `max_connections`, new connections are closed and counted in
    `tally`. Threads: the event loop's.
    """

    max_connections = sys.maxsize

    def __init__(
        self, make_protocol: Callable[[], asyncio.BaseProtocol], hand_off: Callable[[socket.socket], bool],
        on_count: Callable[[int], None], tally: Tally,
    ) -> None:  # fmt: skip
        self._loop = asyncio.get_running_loop()
        self._make_protocol = make_protocol
        self._hand_off = hand_off
        self._on_count = on_count
        self._tally = tally
        self._tls: ssl.SSLContext | None = None
        self._listening: set[socket.socket] = set()
        self._handshakes: dict[Any, asyncio.Task[None]] = {}
        self._out_of_descriptors = False
        self.open = OpenConnections(self._on_change)

    def begin(self, listening: socket.socket, backlog: int, tls: ssl.SSLContext | None) -> None:
        """Listen on a bound socket, and start accepting. Raises: OSError."""
        self._tls = tls
        listening.setblocking(False)
        listening.listen(backlog)
        self._listening.add(listening)
        self._loop.add_reader(listening, self._accept, listening)

    def stop(self) -> None:
        """Stop accepting; accepted connections continue."""
        for listening in self._listening:
            self._loop.remove_reader(listening)
        self._listening.clear()

    def serve(self, sock: socket.socket) -> None:
        """Serve a connection in this process, which owns the socket and closes it in the end."""
        sock.setblocking(False)
        protocol = self._make_protocol()
        self._handshakes[protocol] = self._loop.create_task(self._connect(sock, protocol))
        self._report_count()

    async def wait_for_handshakes(self) -> None:
        """Wait for connections being set up; clients that do not finish their handshake in time are dropped."""
        pending = set(self._handshakes.values())
        if pending:
            await asyncio.wait(pending, timeout=HANDSHAKES_S)
        for task in pending:  # those that came meanwhile are told why they are not served, instead of being cut off
            task.cancel()

    def cancel_handshakes(self) -> None:
        """Drop connections being set up."""
        for task in self._handshakes.values():
            task.cancel()

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(MAX_ACCEPTS):
            try:
                sock, _ = listening.accept()
            except (BlockingIOError, InterruptedError):
                self._out_of_descriptors = False  # nobody waits
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                self._tally.count_no_descriptors()
                if not self._out_of_descriptors:
                    logger.error("connections cannot be accepted: %s", error.strerror)  # noqa: TRY400 - no traceback
                self._out_of_descriptors = True
                self._loop.remove_reader(listening)
                self._loop.call_later(RETRY_S, self._resume, listening)
                return
            if self._hand_off(sock):
                sock.close()
            elif self._count >= self.max_connections:
                sock.close()
                self._tally.count_over_limit(self.max_connections)
            else:
                self.serve(sock)

    def _resume(self, listening: socket.socket) -> None:
        if listening in self._listening:
            self._loop.add_reader(listening, self._accept, listening)

    async def _connect(self, sock: socket.socket, protocol: Any) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, sock, ssl=self._tls)
        except OSError:
            # the client is already gone, or does not speak TLS: not logged, as in the loop's own server
            sock.close()
        except BaseException:
            sock.close()
            raise
        finally:
            self._on_change(protocol)

    def _on_change(self, connection: Any) -> None:
        self._handshakes.pop(connection, None)
        self._report_count()

    def _report_count(self) -> None:
        self._on_count(self._count)

    @property
    def _count(self) -> int:
        return len(self.open) + len(self._handshakes)
