"""The metrics page as sent: the application of its own port, and its compression, which the main port uses too.

For 300 models it has 2 MB, which gzip, accepted by Prometheus, reduces to a twentieth.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any

from penstock.server.errors import error_body
from penstock.server.http.coding import MIN_BYTES, choose_coding, compress

from .metrics import Metrics

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

_THREAD_BYTES = 64 << 10
"""A page of at least this size is compressed on a thread: 2 MB take 8 ms."""


async def encode_page(page: bytes, accept: bytes) -> tuple[bytes, dict[bytes, bytes]]:
    """Return the page encoded for a client's Accept-Encoding, and the corresponding headers."""
    headers = {b"vary": b"accept-encoding"}
    coding = choose_coding(accept) if len(page) >= MIN_BYTES else b""
    if not coding:
        return page, headers
    headers[b"content-encoding"] = coding
    if len(page) < _THREAD_BYTES:
        return compress(page, coding), headers
    return await asyncio.to_thread(compress, page, coding), headers


def make_metrics_app(metrics: Metrics, path: str = "/metrics") -> ASGIApp:
    """Make the ASGI application of the metrics port: GET of one path and nothing else."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _run_lifespan(receive, send)
            return
        if scope["type"] != "http":
            raise ValueError(f"the metrics port speaks HTTP, not {scope['type']}")
        if scope["path"] != path:
            await _send_response(send, 404, "application/json", error_body("Not Found"))
        elif scope["method"] != "GET":
            await _send_response(send, 405, "application/json", error_body("Method Not Allowed"))
        else:
            accept = b",".join(value for name, value in scope["headers"] if name == b"accept-encoding")
            body, headers = await encode_page(await metrics.render(), accept)
            await _send_response(send, 200, metrics.content_type, body, headers)

    return app


async def _run_lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": message["type"] + ".complete"})
        if message["type"] == "lifespan.shutdown":
            return


async def _send_response(
    send: Send, status: int, content_type: str, body: bytes, extra_headers: Mapping[bytes, bytes] = MappingProxyType({})
) -> None:
    length = str(len(body)).encode()
    headers = [(b"content-type", content_type.encode()), (b"content-length", length), *extra_headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
