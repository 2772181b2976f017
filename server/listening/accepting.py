"""Accepting: connections of one port, each kept here or given to another process before anything of it is read.

In place of the event loop's own server, for TLS and where several processes share a port. Made by a Port (listener.py).
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
"""How many connections are accepted before the loop may do something else."""
AGAIN_S = 1.0
"""How long nothing is accepted after the system has refused, as asyncio has it."""
SETTLE_S = 1.0
"""How long a drain waits for handshakes that clients have begun."""


class Open(set[Any]):
    """The open connections of a port: each change is told, with the connection."""

    def __init__(self, changed: Callable[[Any], None]) -> None:
        super().__init__()
        self._changed = changed

    def add(self, connection: Any) -> None:
        """Add it, and tell."""
        super().add(connection)
        self._changed(connection)

    def discard(self, connection: Any) -> None:
        """Take it out, and tell."""
        super().discard(connection)
        self._changed(connection)


class Accepting:
    """Accepts on listening sockets. `elsewhere` is asked first: where it takes a connection, this process forgets it.

    `counted` is told how many connections there are whenever that changes: those that are open, and those on their way
    to `connection_made`, handshakes of TLS included. Above `most` of them, further ones are closed,
    as `tally` counts.
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
        """Listen on a bound socket, and accept from now on. Raises: OSError."""
        self._tls = tls
        listening.setblocking(False)
        listening.listen(backlog)
        self._listening.add(listening)
        self._loop.add_reader(listening, self._accept, listening)

    def end(self) -> None:
        """Accept no more; what has been accepted goes on."""
        for each in self._listening:
            self._loop.remove_reader(each)
        self._listening.clear()

    def serve(self, sock: socket.socket) -> None:
        """Serve a connection here; the socket is this process's, and closed in the end."""
        sock.setblocking(False)
        protocol = self._make_protocol()
        self._arriving[protocol] = self._loop.create_task(self._connect(sock, protocol))
        self._tell()

    async def settle(self) -> None:
        """Wait for those on their way; of these, a client that does not finish its handshake is let go."""
        arriving = set(self._arriving.values())
        if arriving:
            await asyncio.wait(arriving, timeout=SETTLE_S)
        for task in arriving:  # who came meanwhile is told why it is not served, and not cut off
            task.cancel()

    def abandon(self) -> None:
        """Let go of those on their way."""
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
                logger.error("connections cannot be accepted: %s", error.strerror)  # noqa: TRY400 - that is all
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
            # the client has gone already, or does not speak TLS: nobody is told, as in the loop's own server
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
