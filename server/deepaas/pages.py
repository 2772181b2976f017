"""Pages: what the server itself answers for DEEPaaS models, except the documents of its API. Pure.

Source: deepaas 2.6.0 on aiohttp 3.14, by observed behavior: api/versions.py, api/v2.
"""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

from penstock.backends.errors import Code, InferError
from penstock.server.errors import HTTP_STATUS, error_body
from penstock.server.http.head import HttpError, TooLargeError
from penstock.server.workers.order import WorkerLost

from .messages import TEXT, TROUBLE

NO_STORE = b"cache-control: no-store\r\nx-content-type-options: nosniff\r\n"
"""Header lines for answers that show current state and contain texts of others."""


def write_json(document: Any) -> bytes:
    """Encode a document in the form of all JSON here: ASCII only, a space after each comma and colon."""
    return json.dumps(document).encode()


def status_text(status: int) -> bytes:
    """Return the body of an answer that consists of its status only."""
    return f"{status}: {HTTPStatus(status).phrase}".encode()


def version(base: str) -> dict[str, Any]:
    """Return the description of the API version."""
    link = {"rel": "self", "type": "application/json", "href": f"{base}/v2/"}
    return {"version": "stable", "id": "v2", "links": [link]}


def versions(base: str, *, documents: bool) -> dict[str, Any]:
    """Return the list of versions, and where they are documented."""
    links = [{"rel": "describedby", "type": "application/json", "href": f"{base}/swagger.json"}]
    if documents:
        links.insert(0, {"rel": "help", "type": "text/html", "href": f"{base}/api"})
    return {"versions": [version(base)], "links": links}


def link_of(base: str, name: str) -> str:
    """Return the link to itself in a model's metadata."""
    return f"{base}/v2/models/{name}"


def no_tensors_error(base: str, name: str) -> bytes:
    """Return the body, in the form of the v2 protocol, for a client of that protocol that sends tensors."""
    return error_body(f"model '{name}' does not accept tensors: POST its arguments to {link_of(base, name)}/predict/")


def error_text(error: InferError) -> tuple[int, bytes]:
    """Return the status and the text for what the server itself rejects or fails in.

    A prediction whose worker died is a failure of the model, as in the original: the next one is answered.
    """
    if isinstance(error, WorkerLost) or error.code is Code.INTERNAL:
        return 500, TROUBLE
    status = HTTP_STATUS[error.code]
    return status, f"{status}: {error.message}".encode("utf-8", "replace")


def malformed_answer(error: HttpError, max_bytes: int) -> tuple[int, bytes, bytes]:
    """Return the status, content type and text for a malformed request. `max_bytes` is the limit of a body."""
    if isinstance(error, TooLargeError):
        return 413, TEXT, f"Maximum request body size {max_bytes} exceeded.".encode()
    return error.status, TEXT, f"{error.status}: {error.text}".encode("utf-8", "replace")
