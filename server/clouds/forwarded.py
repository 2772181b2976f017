"""ForwardingService: passes a request to a cloud's path on to the v2 protocol's Inference or its application.

Called by sagemaker.py and vertex_ai.py. Source: Triton server, sagemaker_server.cc and vertex_ai_server.cc.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from penstock.backends.errors import Code, InferError
from penstock.server.http.head import Head

if TYPE_CHECKING:
    from collections.abc import Collection

    from starlette.types import Receive, Scope, Send

    from penstock.server.http.connection import Connection
    from penstock.server.http.fastlane import FastLane
    from penstock.server.telemetry.page import ASGIApp
    from penstock.server.v2.claims import InferenceClaim
    from penstock.server.v2.inference import Inference

JSON_BYTES = b"inference-header-content-length"
CODINGS = (b"accept-encoding", b"content-encoding")
_NUMBER = re.compile(rb"\s*([+-]?\d+)")


class ForwardingService:
    """The part of a cloud's Service that passes claimed requests to Inference.

    `mime` is the content type of a JSON followed by tensors, up to its length: it replaces the header field that states
    the length on the HTTP port. `ignored` are further header fields that have no effect here.
    Threads: the event loop's.
    """

    def __init__(self, inference: Inference, mime: bytes, ignored: Collection[bytes] = ()) -> None:
        self._inference = inference
        self._mime = mime
        self._ignored = frozenset((JSON_BYTES, *ignored))

    def claim_path(self, head: Head, path: str) -> InferenceClaim | None:
        """Return the claim of a request as if sent to this path of the HTTP port. Raises: HttpError (403)."""
        forwarded_head = Head()
        forwarded_head.method, forwarded_head.path = b"POST", path.encode()
        forwarded_head.header = {name: value for name, value in head.header.items() if name not in self._ignored}
        content_type = head.header.get(b"content-type", b"")
        mime_at = content_type.find(self._mime)
        length = json_bytes(content_type[len(self._mime) :]) if not mime_at else 0
        if not mime_at:
            forwarded_head.header[JSON_BYTES] = b"%d" % length
        claim = self._inference.claim(forwarded_head)
        if claim is not None and (mime_at > 0 or length < 0):
            claim.is_simple, claim.error = False, self._header_error(content_type, head.length, misplaced=mime_at > 0)
        return claim

    def _header_error(self, content_type: bytes, body_bytes: int, *, misplaced: bool) -> InferError:
        content_type_text, mime = content_type.decode("latin-1"), self._mime.decode()
        if misplaced:
            text = f"expect MIME type for binary data starts with '{mime}', got: {content_type_text}"
        else:
            got = content_type_text.removeprefix(mime)
            text = f"inference header size should be in range (0, {max(0, body_bytes)}), got: {got}"
        return InferError(Code.INVALID, text)

    def early_rejection(self, head: Head) -> Any:
        """Reject what Inference rejects."""
        return self._inference.early_rejection(head)

    def answer_error(self, connection: FastLane, error: Any) -> None:
        """Answer a rejected request."""
        self._inference.answer_error(connection, error)

    def begin(self, connection: FastLane, head: Head, body: bytes) -> None:
        """Answer one request."""
        self._inference.begin(connection, head, body)

    def abandon(self, connection: Connection) -> None:
        """Drop the request of a client that has disconnected."""
        self._inference.abandon(connection)


def json_bytes(text: bytes) -> int:
    """Parse the length of the JSON like C's atoi: text after the number is ignored, and without a number it is 0.

    0 means that there is no JSON: the body is the only input's. A number too large for any body is truncated.
    """
    found = _NUMBER.match(text)
    return max(-1, int(found[1][:18])) if found else 0


def infer_path(model: str) -> str:
    """Return the inference path of a model."""
    return f"/v2/models/{quote(model, safe='')}/infer"


async def forward(app: ASGIApp, scope: Scope, method: str, path: str, io: tuple[Receive, Send]) -> None:
    """Have `app` answer a request as if it had been sent to this path, with this method."""
    raw_path = quote(path).encode()
    await app({**scope, "method": method, "path": path, "raw_path": raw_path, "query_string": b""}, *io)


async def answer(send: Send, status: int, body: bytes = b"") -> None:
    """Answer with a status and JSON, or without a body, as Triton does for an unknown path or method."""
    headers = [(b"content-length", b"%d" % len(body))]
    if body:
        headers.append((b"content-type", b"application/json"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
