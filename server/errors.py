"""The one table from error codes to protocols, and the error body that Triton's protocols share."""

from __future__ import annotations

import orjson

from penstock.backends.errors import Code

from .grpc.method import Status

MAX_TEXT_CHARS = 4096
HTTP_STATUS: dict[Code, int] = {
    Code.INVALID: 400,
    Code.NOT_FOUND: 404,
    Code.ALREADY_EXISTS: 400,
    Code.NOT_READY: 503,
    Code.OVERLOADED: 503,
    Code.EXPIRED: 503,
    Code.CANCELLED: 400,
    Code.UNSUPPORTED: 501,
    Code.INTERNAL: 500,
}
"""Source: Triton's HTTP front end, which answers a full queue and an expired one with 503."""

GRPC_STATUS: dict[Code, Status] = {
    Code.INVALID: Status.INVALID_ARGUMENT,
    Code.NOT_FOUND: Status.NOT_FOUND,
    Code.ALREADY_EXISTS: Status.ALREADY_EXISTS,
    Code.NOT_READY: Status.UNAVAILABLE,
    Code.OVERLOADED: Status.UNAVAILABLE,
    Code.EXPIRED: Status.UNAVAILABLE,
    Code.CANCELLED: Status.CANCELLED,
    Code.UNSUPPORTED: Status.UNIMPLEMENTED,
    Code.INTERNAL: Status.INTERNAL,
}
"""Source: Triton's gRPC front end."""


def error_body(text: str) -> bytes:
    """Write an error as Triton does. What is no Unicode (a lone surrogate) is replaced, since JSON cannot carry it.

    A text may quote what the client sent: of a very long one the middle is left out.
    """
    if len(text) > MAX_TEXT_CHARS:
        half = MAX_TEXT_CHARS // 2
        text = f"{text[:half]} ... {text[-half:]}"
    return orjson.dumps({"error": text.encode("utf-8", "replace").decode()})
