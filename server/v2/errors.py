"""The one table from error codes to HTTP, and the v2 error body. Read by the fast lane and the control plane."""

from __future__ import annotations

import orjson

from penstock.backends.errors import Code

# Source: Triton server, http_server.cc: its UNAVAILABLE covers a full queue, a queue timeout and a model not ready.
HTTP_STATUS: dict[Code, int] = {
    Code.INVALID: 400,
    Code.NOT_FOUND: 404,
    Code.NOT_READY: 503,
    Code.OVERLOADED: 503,
    Code.EXPIRED: 503,
    Code.CANCELLED: 400,
    Code.UNSUPPORTED: 501,
    Code.INTERNAL: 500,
}


def error_body(message: str) -> bytes:
    """Give `{"error": message}`."""
    return orjson.dumps({"error": message.encode("utf-8", "replace").decode()})
