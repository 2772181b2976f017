"""The one table from error codes to protocols, and the error body that Triton's protocols share."""

from __future__ import annotations

import orjson

from penstock.backends.errors import Code, InferError

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
    Code.UNKNOWN: 400,
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
    Code.UNKNOWN: Status.UNKNOWN,
}
"""Source: Triton's gRPC front end."""


_FOR_NOW = frozenset((Code.NOT_READY, Code.OVERLOADED))
"""What is otherwise in a moment, even if nobody says in which. What has expired may do so again."""


def retry_after_s(error: InferError) -> int:
    """Tell after how many whole seconds a call is worth repeating, for HTTP; 0 for not at all.

    Source: RFC 9110 10.2.3. 1 stands for "soon" where nobody knows better.
    """
    after_ns = error.retry_after_ns
    return -(-after_ns // 1_000_000_000) if after_ns > 0 else int(after_ns == 0 and error.code in _FOR_NOW)


def retry_after_line(error: InferError) -> bytes:
    """Give the header line that says so, empty for none."""
    seconds = retry_after_s(error)
    return b"retry-after: %d\r\n" % seconds if seconds else b""


def pushback_ms(error: InferError) -> int:
    """Tell after how many milliseconds a call is worth repeating, for gRPC; -1: never, 0: nobody knows.

    Source: gRFC A6, grpc-retry-pushback-ms. Where nobody knows, the client's own backoff is better than a guess.
    """
    return -1 if error.retry_after_ns < 0 else -(-error.retry_after_ns // 1_000_000)


def error_body(text: str) -> bytes:
    """Write an error as Triton does. What is no Unicode (a lone surrogate) is replaced, since JSON cannot carry it.

    A text may quote what the client sent: of a very long one the middle is left out.
    """
    if len(text) > MAX_TEXT_CHARS:
        half = MAX_TEXT_CHARS // 2
        text = f"{text[:half]} ... {text[-half:]}"
    return orjson.dumps({"error": text.encode("utf-8", "replace").decode()})
