"""Pages: what the server of DEEPaaS models answers itself, but for the documents of its API. Pure.

Source: deepaas 2.6.0 on aiohttp 3.14, as they answer: api/versions.py, api/v2.
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

FRESH = b"cache-control: no-store\r\nx-content-type-options: nosniff\r\n"
"""Lines of what shows how things are now, with texts of others in it."""


def written(document: Any) -> bytes:
    """Write a document as all JSON here is written: nothing but ASCII, a blank after each comma and colon."""
    return json.dumps(document).encode()


def status_text(status: int) -> bytes:
    """Write what stands in an answer that is nothing but its status."""
    return f"{status}: {HTTPStatus(status).phrase}".encode()


def version(base: str) -> dict[str, Any]:
    """Say which version of the API there is."""
    link = {"rel": "self", "type": "application/json", "href": f"{base}/v2/"}
    return {"version": "stable", "id": "v2", "links": [link]}


def versions(base: str, *, documents: bool) -> dict[str, Any]:
    """Say which versions there are, and where they are documented."""
    links = [{"rel": "describedby", "type": "application/json", "href": f"{base}/swagger.json"}]
    if documents:
        links.insert(0, {"rel": "help", "type": "text/html", "href": f"{base}/api"})
    return {"versions": [version(base)], "links": links}


def link_of(base: str, name: str) -> str:
    """Give the link that a model's metadata has to itself."""
    return f"{base}/v2/models/{name}"


def no_tensors(base: str, name: str) -> bytes:
    """Write what a client of the v2 protocol is told that sends tensors, in that protocol's way."""
    return error_body(f"model '{name}' does not take tensors: POST its arguments to {link_of(base, name)}/predict/")


def refused(error: InferError) -> tuple[int, bytes]:
    """Give the status and the text of what the server itself refuses or fails in.

    A prediction whose worker has died is the model's failure, as the original has it: the next one is answered.
    """
    if isinstance(error, WorkerLost) or error.code is Code.INTERNAL:
        return 500, TROUBLE
    status = HTTP_STATUS[error.code]
    return status, f"{status}: {error.message}".encode("utf-8", "replace")


def refusal(error: HttpError, most_bytes: int) -> tuple[int, bytes, bytes]:
    """Give the status, the content type and the text of what is refused as no request. `most_bytes`: of a body."""
    if isinstance(error, TooLargeError):
        return 413, TEXT, f"Maximum request body size {most_bytes} exceeded.".encode()
    return error.status, TEXT, f"{error.status}: {error.text}".encode("utf-8", "replace")
