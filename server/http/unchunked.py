"""Unchunked: what uvicorn writes of an answer without a length, for a client of HTTP/1.0, which knows no chunks."""

from __future__ import annotations

import asyncio

_CHUNKED = b"transfer-encoding: chunked\r\n"


class InFront(asyncio.WriteTransport):
    """Stands before the transport for one answer of uvicorn's, which asks no more of it; `write` is a descendant's."""

    def __init__(self, transport: asyncio.WriteTransport) -> None:
        super().__init__()
        self._transport = transport
        self._begun = False

    def close(self) -> None:
        """Close the transport."""
        self._transport.close()

    def is_closing(self) -> bool:
        """Tell whether the transport is closing."""
        return self._transport.is_closing()


class Unchunked(InFront):
    """What stands before the transport for an answer that ends with the connection. Source: RFC 9112, 6.1.

    Relies on how uvicorn writes: the head at once, then a chunk, or none, and perhaps the last one.
    """

    _chunked = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write the head without its chunks, and of each chunk what is in it."""
        if not self._begun:
            self._begun = True
            head = bytes(data)
            data = head.replace(_CHUNKED, b"", 1)
            self._chunked = data != head
        elif self._chunked:
            size, _, rest = bytes(data).partition(b"\r\n")
            data = rest[: int(size, 16)] if size else b""
        self._transport.write(data)
