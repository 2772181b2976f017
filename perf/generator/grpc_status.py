"""gRPC's status: how a call ended, from header blocks and resets. Used by `grpc_calls.py`.

Source: grpc/doc/PROTOCOL-HTTP2.md, http-grpc-status-mapping.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

from penstock.server.grpc.method import Status
from penstock.server.http2.frames import ErrorCode
from penstock.server.http2.headers import Fields

_ERROR_CHARACTERS = 200
_OF_HTTP = {
    400: Status.INTERNAL, 401: Status.UNAUTHENTICATED, 403: Status.PERMISSION_DENIED, 404: Status.UNIMPLEMENTED,
    429: Status.UNAVAILABLE, 502: Status.UNAVAILABLE, 503: Status.UNAVAILABLE, 504: Status.UNAVAILABLE,
}  # fmt: skip
_OF_RESET = {
    ErrorCode.REFUSED_STREAM: Status.UNAVAILABLE, ErrorCode.CANCEL: Status.CANCELLED,
    ErrorCode.ENHANCE_YOUR_CALM: Status.RESOURCE_EXHAUSTED, ErrorCode.INADEQUATE_SECURITY: Status.PERMISSION_DENIED,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Head:
    """The content of an answer's header block. `error`: empty is OK, None not known yet. `coding`: of its messages."""

    error: str | None
    coding: str = ""


NOTHING = f"{Status.UNKNOWN.name}: the answer has no status"


def head_of(fields: Fields) -> Head:
    """Make a Head from header fields."""
    fields_by_name = dict(fields)
    status = fields_by_name.get(b"grpc-status")
    if status is not None:
        return Head("" if status == b"0" else error_of(status, fields_by_name.get(b"grpc-message", b"")))
    http = fields_by_name.get(b":status", b"200")
    if http != b"200":
        code = _OF_HTTP.get(int(http), Status.UNKNOWN) if http.isdigit() else Status.UNKNOWN
        return Head(f"{code.name}: HTTP status {http.decode('ascii', 'replace')}")
    return Head(None, fields_by_name.get(b"grpc-encoding", b"").decode("ascii", "replace"))


def error_of(status: bytes, message: bytes) -> str:
    """Format a status and its percent-encoded text, such as `UNAVAILABLE: no more`."""
    is_known = status.isdigit() and int(status) in set(Status)
    name = Status(int(status)).name if is_known else f"status {status.decode('ascii', 'replace')}"
    text = unquote_to_bytes(message).decode("utf-8", "replace")[:_ERROR_CHARACTERS]
    return f"{name}: {text}" if text else name


def reset_error(code: int) -> str:
    """Describe the meaning of a stream reset."""
    is_known = code in set(ErrorCode)
    status = _OF_RESET.get(ErrorCode(code), Status.INTERNAL) if is_known else Status.UNKNOWN
    return f"{status.name}: the server reset the stream ({ErrorCode(code).name if is_known else code})"
