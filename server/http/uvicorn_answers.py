"""Answers sent by way of uvicorn: several chunks at a time, and without chunks to HTTP/1.0 clients.

Made by the fast lane. An application finds its BodyParts among the extensions of its scope, under the name PARTS.
"""

from __future__ import annotations

import asyncio
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

PARTS = "penstock.parts"
_CHUNKED = b"transfer-encoding: chunked\r\n"


class BodyParts:
    """Sends parts of a chunked body. Its head and its end are sent through uvicorn's `send`.

    uvicorn would write each part separately, with a system call: 20 us of the 80 us that a generate_stream event takes.
    Ownership: the cycle's scope holds this object, so it does not hold the cycle.
    """

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = weakref.proxy(cycle)

    async def send(self, parts: Iterable[bytes]) -> None:
        """Write parts together, each as its own chunk, once the client has read most of what was sent before."""
        cycle = self._cycle
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        if not cycle.disconnected:
            cycle.transport.write(b"".join([b"%x\r\n%b\r\n" % (len(part), part) for part in parts]))


class TransportWrapper(asyncio.WriteTransport):
    """Wraps the transport for one answer of uvicorn's, with the methods uvicorn uses; subclasses define `write`."""

    def __init__(self, transport: asyncio.WriteTransport) -> None:
        super().__init__()
        self._transport = transport
        self._head_sent = False

    def close(self) -> None:
        """Close the transport."""
        self._transport.close()

    def is_closing(self) -> bool:
        """Return whether the transport is closing."""
        return self._transport.is_closing()


class Unchunked(TransportWrapper):
    """Wraps the transport for an answer that ends with the connection. Source: RFC 9112, 6.1.

    Relies on how uvicorn writes: first the head, then a chunk or nothing, possibly with the last chunk.
    """

    _chunked = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write the head without Transfer-Encoding, and only the content of each chunk."""
        if not self._head_sent:
            self._head_sent = True
            head = bytes(data)
            data = head.replace(_CHUNKED, b"", 1)
            self._chunked = data != head
        elif self._chunked:
            size, _, rest = bytes(data).partition(b"\r\n")
            data = rest[: int(size, 16)] if size else b""
        self._transport.write(data)
