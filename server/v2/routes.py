"""Routes of the control plane: how an endpoint describes itself, and helpers for reading requests and writing answers.

Each protocol extension has a file with its endpoints, which it provides as Routes; plane.py serves them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from penstock.backends.errors import Code, InferError

from .call_parameters import parse_version

if TYPE_CHECKING:
    from starlette.types import Receive

MAX_BODY_BYTES = 64 << 10
MAX_JSON_DEPTH = 100
JSON = "application/json"
STATUS_DESCRIPTIONS = {
    400: "the request is invalid, or the requested model is not ready",
    404: "no such model or version",
    500: "the server failed",
    501: "not supported",
    503: "the server cannot accept the request now",
}

Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Route:
    """One endpoint, under each of its paths, and its description for the OpenAPI page."""

    method: str
    paths: tuple[str, ...]
    endpoint: Endpoint
    summary: str
    answer: Any = None
    body: Any = None
    errors: tuple[int, ...] = ()
    content_type: str = JSON


def model_and_version(request: Request) -> tuple[str, str]:
    """Return the model and the version in a path; "" if there is no version."""
    name, text = request.path_params["model"], request.path_params.get("version")
    if text is None:
        return name, ""
    if not (text.isascii() and text.isdigit()):
        raise HTTPException(404)
    return name, parse_version(text)


async def read_body(request: Request, max_bytes: int = MAX_BODY_BYTES) -> bytes:
    """Read a body. Raises: InferError (INVALID: too long; CANCELLED: the client has disconnected)."""
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > max_bytes:
                text = f"request body exceeds the maximum of {max_bytes} bytes for '{request.scope['path']}'"
                raise InferError(Code.INVALID, text)
    except ClientDisconnect:
        raise InferError(Code.CANCELLED, "the client has disconnected") from None
    return bytes(body)


async def wait_disconnect(receive: Receive) -> None:
    """Wait until the client of a call has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


def json_answer(answer: Any) -> Response:
    """Answer with JSON."""
    return Response(orjson.dumps(answer), media_type=JSON)
