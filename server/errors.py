"""The table from error codes to protocol statuses, and the error body shared by Triton's protocols."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson

from penstock.backends.errors import Code, InferError

from .grpc.method import Status

if TYPE_CHECKING:
    from .http.head import HttpError

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
    Code.UNKNOWN: 400,
}
"""Source: Triton's HTTP front end, which answers 503 for a full queue and for an expired request."""

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
    Code.UNKNOWN: Status.UNKNOWN,
}
"""Source: Triton's gRPC front end."""


_TRANSIENT = frozenset((Code.NOT_READY, Code.OVERLOADED))
"""Errors that are likely to pass soon, even if the delay is unknown. An expired request may expire again."""


def retry_after_s(error: InferError) -> int:
    """Return after how many whole seconds to retry, for HTTP; 0 means do not retry.

    Source: RFC 9110 10.2.3. If the delay is unknown, 1 stands for "soon".
    """
    after_ns = error.retry_after_ns
    return -(-after_ns // 1_000_000_000) if after_ns > 0 else int(after_ns == 0 and error.code in _TRANSIENT)


def retry_after_line(error: InferError) -> bytes:
    """Return the Retry-After header line, or b"" if there is none."""
    seconds = retry_after_s(error)
    return b"retry-after: %d\r\n" % seconds if seconds else b""


def pushback_ms(error: InferError) -> int:
    """Return after how many milliseconds to retry, for gRPC; -1 means never, 0 means unknown.

    Source: gRFC A6, grpc-retry-pushback-ms. If the delay is unknown, the client's own backoff is better than a guess.
    """
    return -1 if error.retry_after_ns < 0 else -(-error.retry_after_ns // 1_000_000)


def error_body(text: str) -> bytes:
    """Return an error body in Triton's format, with lone surrogates replaced because JSON cannot carry them."""
    return orjson.dumps({"error": shorten(text).encode("utf-8", "replace").decode()})


def json_error(error: HttpError) -> tuple[int, bytes, bytes]:
    """Return the status, content type and body for input rejected before it is a request."""
    return error.status, b"application/json", error_body(error.text)


def shorten(text: str) -> str:
    """Leave out the middle of a very long text, which may quote what the client sent."""
    if len(text) <= MAX_TEXT_CHARS:
        return text
    half = MAX_TEXT_CHARS // 2
    return f"{text[:half]} ... {text[-half:]}"
