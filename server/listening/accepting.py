"""Accepting: accepts the connections of one port, and keeps each or passes it to another process before reading it.

Replaces the event loop's own server for TLS, and if several processes share a port. Made by a Port (listener.py).
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

AT_ONCE = 64
"""The most connections accepted before the loop may do something else."""
AGAIN_S = 1.0
"""How long to pause after the system has refused to accept, as asyncio does."""
SETTLE_S = 1.0
"""How long a drain waits for TLS handshakes that clients have begun."""


class Open(set[Any]):
    """The open connections of a port; `changed` is called with the connection on each change."""

    def __init__(self, changed: Callable[[Any], None]) -> None:
        super().__init__()
        self._changed = changed

    def add(self, connection: Any) -> None:
        """Add a connection, and report it."""
        super().add(connection)
        self._changed(connection)

    def discard(self, connection: Any) -> None:
        """Remove a connection, and report it."""
        super().discard(connection)
        self._changed(connection)


class Accepting:
    """Accepts connections on listening sockets. If `elsewhere` takes a connection, this process closes its copy.

    `counted` is called with the number of connections when it changes: those open, and those not yet at
    `connection_made`, including TLS handshakes. Above `most`, new connections are closed and counted in `tally`.
    Threads: the event loop's.
    """

    most = sys.maxsize

    def __init__(
        self, make_protocol: Callable[[], asyncio.BaseProtocol], elsewhere: Callable[[socket.socket], bool],
        counted: Callable[[int], None], tally: Tally,
    ) -> None:  # fmt: skip
        self._loop = asyncio.get_running_loop()
        self._make_protocol = make_protocol
        self._elsewhere = elsewhere
        self._counted = counted
        self._tally = tally
        self._tls: ssl.SSLContext | None = None
        self._listening: set[socket.socket] = set()
        self._arriving: dict[Any, asyncio.Task[None]] = {}
        self.open = Open(self._changed)

    def begin(self, listening: socket.socket, backlog: int, tls: ssl.SSLContext | None) -> None:
        """Listen on a bound socket, and start accepting. Raises: OSError."""
        self._tls = tls
        listening.setblocking(False)
        listening.listen(backlog)
        self._listening.add(listening)
        self._loop.add_reader(listening, self._accept, listening)

    def end(self) -> None:
        """Stop accepting; accepted connections continue."""
        for each in self._listening:
            self._loop.remove_reader(each)
        self._listening.clear()

    def serve(self, sock: socket.socket) -> None:
        """Serve a connection in this process, which owns the socket and closes it in the end."""
        sock.setblocking(False)
        protocol = self._make_protocol()
        self._arriving[protocol] = self._loop.create_task(self._connect(sock, protocol))
        self._tell()

    async def settle(self) -> None:
        """Wait for connections being set up; clients that do not finish their handshake in time are dropped."""
        arriving = set(self._arriving.values())
        if arriving:
            await asyncio.wait(arriving, timeout=SETTLE_S)
        for task in arriving:  # those that came meanwhile are told why they are not served, instead of being cut off
            task.cancel()

    def abandon(self) -> None:
        """Drop connections being set up."""
        for task in self._arriving.values():
            task.cancel()

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(AT_ONCE):
            try:
                sock, _ = listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                self._tally.exhausted()
                logger.error("connections cannot be accepted: %s", error.strerror)  # noqa: TRY400 - no traceback
                self._loop.remove_reader(listening)
                self._loop.call_later(AGAIN_S, self._resume, listening)
                return
            if self._elsewhere(sock):
                sock.close()
            elif self._count >= self.most:
                sock.close()
                self._tally.full(self.most)
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
            self._changed(protocol)

    def _changed(self, connection: Any) -> None:
        self._arriving.pop(connection, None)
        self._tell()

    def _tell(self) -> None:
        self._counted(self._count)

    @property
    def _count(self) -> int:
        return len(self.open) + len(self._arriving)
