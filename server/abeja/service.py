"""AbejaService: the Service that sends every request to the handler. Made by dialect.py.

Source: abeja-platform-model-proxy 2.6.5, by observed behavior.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backends.errors import Code
from penstock.server.answering import internal_error
from penstock.server.carrying.service import CarryingService, ModelLookup
from penstock.server.errors import HTTP_STATUS, retry_after_line
from penstock.server.workers.order import WorkerLost

from .folder import NAME
from .health import HEALTH, UNAVAILABLE, answer_health
from .media import FORM, parse_media, text_of
from .messages import JSON, WORKER_DIED, pack_head, status_body

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.backends.errors import InferError
    from penstock.server.engines import ServingEngine
    from penstock.server.http.fastlane import FastLane
    from penstock.server.http.head import Head
    from penstock.server.http.service import Service

    from .messages import Headers

_URLENCODED = "application/x-www-form-urlencoded"
_HIDDEN_HEADERS = frozenset((b"host", b"transfer-encoding"))
"""Headers that Go's server does not pass on. It also removes Trailer if the body is chunked."""
_CHUNKED = -1
_NO_BOUNDARY = ": no multipart boundary param in Content-Type"


class AbejaClaim:
    """What a request head says. Cached with the head's bytes.

    `packed_head` precedes the body of the call. `query` is that body for a GET, otherwise None. `rejection` is the
    status and body of the answer to a request that is not sent to the handler; None for a call.
    """

    __slots__ = ("lookup", "packed_head", "query", "rejection")

    def __init__(
        self, lookup: ModelLookup | None, packed_head: bytes = b"", query: bytes | None = None,
        rejection: tuple[int, bytes] | None = None,
    ) -> None:  # fmt: skip
        self.lookup = lookup
        self.packed_head = packed_head
        self.query = query
        self.rejection = rejection


class AbejaService(CarryingService[AbejaClaim]):
    """Answers for the handler of one server, which does not receive `hidden_headers`. Threads: the event loop's."""

    claim_type = AbejaClaim

    def __init__(
        self, engine: ServingEngine, fallback: Service, ready: Callable[[], bool], hidden_headers: Sequence[str]
    ) -> None:
        super().__init__(engine, fallback)
        self._ready = ready
        self._lookup = ModelLookup(engine, NAME)
        self._hidden_headers = _HIDDEN_HEADERS | {name.strip().lower().encode() for name in hidden_headers}

    def claim(self, head: Head) -> AbejaClaim:
        """Claim every path: all but one are the handler's."""
        if head.path == HEALTH:
            self.restricted.require("health", head.header)
            return AbejaClaim(None)
        self.restricted.require("inference", head.header)
        raw_content_type = next((value for name, value in head.fields if name == b"content-type"), b"").strip(b" \t")
        content_type = text_of(raw_content_type)
        headers = self._headers(head)
        if head.method == b"GET":
            return AbejaClaim(self._lookup, pack_head("GET", _URLENCODED, headers, None), head.query)
        media = parse_media(raw_content_type.decode("latin-1")) if head.method in {b"POST", b"PUT"} else None
        if media is None:
            return _reject(501, f"Content-Type: [{content_type}] is not supported")
        boundary = None
        if media[0] == FORM and (boundary := media[1].get("boundary")) is None:
            return _reject(503, _NO_BOUNDARY)
        return AbejaClaim(self._lookup, pack_head(head.method.decode(), content_type, headers, boundary))

    def _headers(self, head: Head) -> Headers:
        headers: dict[bytes, list[str]] = {}
        for name, value in head.fields:
            if name not in self._hidden_headers and (name != b"trailer" or head.length != _CHUNKED):
                headers.setdefault(name, []).append(text_of(value.strip(b" \t")))
        return [(name.decode("latin-1"), values) for name, values in sorted(headers.items())]

    def answer(self, connection: FastLane, claim: AbejaClaim, body: bytes) -> None:
        """Send a request to the handler."""
        if claim.lookup is not None:
            content = body if claim.query is None else claim.query
            self.submit_body(connection, claim.lookup, claim.packed_head + content)
        elif claim.rejection is not None:
            connection.answer(claim.rejection[0], claim.rejection[1], JSON)
        else:
            answer_health(connection, self._ready())

    def answer_failure(self, connection: FastLane, claim: AbejaClaim, error: InferError) -> None:
        """Answer with an error of the server's own; the log has the reason why a running call ended."""
        if error.code is Code.INTERNAL or (isinstance(error, WorkerLost) and error.code is Code.NOT_READY):
            connection.answer(500, status_body(WORKER_DIED), JSON)
        elif error.code is Code.NOT_READY:
            connection.answer(503, UNAVAILABLE, JSON, retry_after_line(error))
        else:
            status = HTTP_STATUS[error.code]
            connection.answer(status, status_body(error.message), JSON, retry_after_line(error))

    def log_internal_error(self, claim: AbejaClaim, error: Exception) -> InferError:
        """Log a failure of the server's own, and return the error for the client."""
        return internal_error(error, claim.lookup.name if claim.lookup is not None else "", "")


def _reject(status: int, text: str) -> AbejaClaim:
    return AbejaClaim(None, rejection=(status, status_body(text)))
