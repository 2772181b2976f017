"""Pages: what a component server itself answers, and the header lines and errors of all answers. Pure.

Source: seldon-core 1.17.1 with flask-cors 3.0, by observed behavior.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from penstock.backends.errors import InferError
from penstock.server.errors import HTTP_STATUS

JSON, TEXT = b"application/json", b"text/html; charset=utf-8"
INTERNAL, BAD_DATA, BAD_METADATA = (
    "MICROSERVICE_INTERNAL_ERROR",
    "MICROSERVICE_BAD_DATA",
    "MICROSERVICE_BAD_METADATA",
)
_ALLOW_ORIGIN = b"access-control-allow-origin"
_METHODS = b"DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT"


def encode_json(document: Any) -> bytes:
    """Encode a document in the form of all JSON here: sorted keys, ASCII only, a final line end."""
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def failure(text: str, reason: str = INTERNAL) -> bytes:
    """Encode the body of an error."""
    status = {"code": -1, "info": text, "reason": reason, "status": 1}
    return encode_json({"status": status})


NOT_FOUND = failure(
    "404 Not Found: The requested URL was not found on the server. If you entered the URL manually please check your "
    "spelling and try again."
)
NOT_ALLOWED = failure("405 Method Not Allowed: The method is not allowed for the requested URL.")
NO_METADATA = failure("Model metadata unavailable", BAD_METADATA)


def error_answer(error: InferError) -> tuple[int, bytes]:
    """Return the status and body for what the server itself rejects or fails in."""
    status = HTTP_STATUS[error.code]
    return status, failure(error.message, BAD_DATA if status == 400 else INTERNAL)


def cors_lines(method: bytes, header: Mapping[bytes, bytes]) -> bytes:
    """Return the CORS header lines of the answer to a head: every origin is allowed."""
    origin = header.get(b"origin", b"")
    lines = b"%b: %b\r\n" % (_ALLOW_ORIGIN, origin or b"*")
    requested_method = header.get(b"access-control-request-method", b"").upper()
    if method == b"OPTIONS" and requested_method in _METHODS.split(b", "):
        requested_headers = header.get(b"access-control-request-headers", b"")
        if requested_headers:
            names = sorted(name.strip() for name in requested_headers.split(b","))
            lines += b"access-control-allow-headers: %b\r\n" % b", ".join(names)
        lines += b"access-control-allow-methods: %b\r\n" % _METHODS
    return lines + b"vary: Origin\r\n" if origin not in (b"", b"*") else lines


def join_lines(own_lines: bytes, lines: bytes) -> bytes:
    """Append the lines of all answers to a component's own, unless its own set Access-Control-Allow-Origin."""
    return own_lines if _ALLOW_ORIGIN in own_lines.lower() else own_lines + lines
