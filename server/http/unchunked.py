"""Unchunked: sends uvicorn's answers without a length to HTTP/1.0 clients, which do not support chunks."""

from __future__ import annotations

import asyncio

_CHUNKED = b"transfer-encoding: chunked\r\n"


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
