"""AbejaService: the Service that sends every request to the handler. Made by dialect.py.

Source: abeja-platform-model-proxy 2.6.5, by observed behavior.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.backends.errors import Code
from penstock.server.carrying.service import CarryingService, ModelLookup
from penstock.server.errors import HTTP_STATUS, retry_after_line
from penstock.server.workers.order import WorkerLost

from .folder import NAME
from .health import HEALTH, UNAVAILABLE, answer_health
from .media import FORM, parse_media, text_of
from .messages import JSON, LOST, pack_head, status_body

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.backends.errors import InferError
    from penstock.server.engines import ServingEngine
    from penstock.server.http.fastlane import FastLane
    from penstock.server.http.head import Head
    from penstock.server.http.service import Service

    from .messages import Headers

_URLENCODED = "application/x-www-form-urlencoded"
_NOT_SHOWN = frozenset((b"host", b"transfer-encoding"))
"""Headers that Go's server does not pass on. It also removes Trailer if the body is chunked."""
_CHUNKED = -1
_NO_BOUNDARY = ": no multipart boundary param in Content-Type"


class AbejaClaim:
    """What a request head says. Cached with the head's bytes.

    `described` precedes the body of the call. `query` is that body for a GET, otherwise None. `refused` is the status
    and body of the answer to a request that is not sent to the handler; None for a call.
    """

    __slots__ = ("described", "found", "query", "refused")

    def __init__(
        self, found: ModelLookup | None, described: bytes = b"", query: bytes | None = None,
        refused: tuple[int, bytes] | None = None,
    ) -> None:  # fmt: skip
        self.found = found
        self.described = described
        self.query = query
        self.refused = refused


class AbejaService(CarryingService):
    """Answers for the handler of one server. `hidden` are headers it does not receive. Threads: the event loop's."""

    claims = AbejaClaim

    def __init__(
        self, engine: ServingEngine, others: Service, ready: Callable[[], bool], hidden: Sequence[str]
    ) -> None:
        super().__init__(engine, others)
        self._ready = ready
        self._found = ModelLookup(engine, NAME)
        self._hidden = _NOT_SHOWN | {name.strip().lower().encode() for name in hidden}

    def claim(self, head: Head) -> AbejaClaim:
        """Claim every path: all but one are the handler's."""
        if head.path == HEALTH:
            self.restricted.require("health", head.header)
            return AbejaClaim(None)
        self.restricted.require("inference", head.header)
        said_kind = next((value for name, value in head.fields if name == b"content-type"), b"").strip(b" \t")
        kind = text_of(said_kind)
        headers = self._headers(head)
        if head.method == b"GET":
            return AbejaClaim(self._found, pack_head("GET", _URLENCODED, headers, None), head.query)
        said = parse_media(said_kind.decode("latin-1")) if head.method in {b"POST", b"PUT"} else None
        if said is None:
            return _refused(501, f"Content-Type: [{kind}] is not supported")
        boundary = None
        if said[0] == FORM and (boundary := said[1].get("boundary")) is None:
            return _refused(503, _NO_BOUNDARY)
        return AbejaClaim(self._found, pack_head(head.method.decode(), kind, headers, boundary))

    def _headers(self, head: Head) -> Headers:
        found: dict[bytes, list[str]] = {}
        for name, value in head.fields:
            if name not in self._hidden and (name != b"trailer" or head.length != _CHUNKED):
                found.setdefault(name, []).append(text_of(value.strip(b" \t")))
        return [(name.decode("latin-1"), values) for name, values in sorted(found.items())]

    def answer(self, connection: FastLane, claim: AbejaClaim, body: bytes) -> None:
        """Send a request to the handler."""
        if claim.found is not None:
            self.ask(connection, claim.found, claim.described + (body if claim.query is None else claim.query))
        elif claim.refused is not None:
            connection.answer(claim.refused[0], claim.refused[1], JSON)
        else:
            answer_health(connection, self._ready())

    def answer_failure(self, connection: FastLane, claim: Any, error: InferError) -> None:
        """Answer with an error of the server's own; the log has the reason why a running call ended."""
        if error.code is Code.INTERNAL or (isinstance(error, WorkerLost) and error.code is Code.NOT_READY):
            connection.answer(500, status_body(LOST), JSON)
        elif error.code is Code.NOT_READY:
            connection.answer(503, UNAVAILABLE, JSON, retry_after_line(error))
        else:
            status = HTTP_STATUS[error.code]
            connection.answer(status, status_body(error.message), JSON, retry_after_line(error))


def _refused(status: int, text: str) -> AbejaClaim:
    return AbejaClaim(None, refused=(status, status_body(text)))
