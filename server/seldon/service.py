"""SeldonService: the Service that answers Seldon's URLs on the fast lane, ahead of the v2 protocol's.

Made by dialect.py. A call is forwarded to its component unread, unless it may share a batch.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from penstock.backends.errors import Code, InferError
from penstock.server.answering import (
    LARGE_BYTES,
    answer_compressed,
    clear_task,
    internal_error,
    off_loop,
    read_compressed,
)
from penstock.server.carrying.service import CarryingService
from penstock.server.errors import retry_after_line
from penstock.server.http.coding import choose_coding
from penstock.server.http.head import HttpError

from . import openapi, pages
from .calls import SeldonCall
from .messages import Endpoint, PayloadKind, read_answer
from .pages import JSON, TEXT
from .paths import (
    METADATA,
    NOT_ALLOWED,
    NOT_FOUND,
    OPENAPI,
    OPTIONS,
    PING,
    is_penstock_path,
    methods_of,
    purpose_of,
    split_target,
)

if TYPE_CHECKING:
    from penstock.server.engines import ServingEngine
    from penstock.server.http.fastlane import FastLane
    from penstock.server.http.head import Head
    from penstock.server.http.service import Service
    from penstock.server.settings import Settings

    from .current_component import CurrentComponent
    from .exposition import Exposition

_CATEGORIES = {Endpoint.HEALTH: "health", PING: "health", METADATA: "metadata"}
"""The categories by which access to these purposes can be restricted; the other Endpoints are inference."""
_DISPOSITION = b"content-disposition: inline; filename=seldon.json\r\ncache-control: no-cache\r\n"
_MAGIC = {b"gzip": b"\x1f\x8b", b"deflate": b"\x78"}
"""The first bytes of a compressed body, by content coding. A body that declares a coding but begins otherwise is passed
on as is; the original passes on every body as is."""


class SeldonClaim:
    """What a request head says. Cached with the head's bytes.

    `lookup` is the CurrentComponent to call, None for requests that the server can answer itself. `is_plain_json`: the
    payload of the call is the body alone, unless the component receives the whole `head`; otherwise the payload is
    `request_line` and the body. `header_lines` are those of the answer.
    """

    __slots__ = (
        "accept",
        "coding",
        "head",
        "header_lines",
        "is_plain_json",
        "lookup",
        "path",
        "purpose",
        "request_id",
        "request_line",
    )  # fmt: skip

    def __init__(self, head: Head, current: CurrentComponent, *, strict: bool) -> None:
        header = head.header
        self.path, query = split_target(head.path, head.query)
        self.purpose = purpose_of(head.method, self.path, strict=strict)
        calls_component = isinstance(self.purpose, Endpoint) and self.purpose is not Endpoint.HEALTH
        self.lookup = current if calls_component else None
        content_type = header.get(b"content-type", b"")
        self.is_plain_json = (
            head.method == b"POST" and _is_json(content_type) and b"json" not in query and b"%" not in query
        )
        self.request_line = b"" if self.is_plain_json else _encode_request_line(head.method, content_type, query)
        self.head = head
        coding = header.get(b"content-encoding", b"").strip().lower()
        self.coding = coding if coding in _MAGIC else b""
        self.accept = choose_coding(header.get(b"accept-encoding", b""))
        self.header_lines = pages.cors_lines(head.method, header)
        self.request_id = header.get(b"x-request-id", b"").decode("latin-1")[:128]


class SeldonService(CarryingService[SeldonClaim]):
    """Answers for the one component of a server, which `current` finds.

    Threads: the event loop's, except that large bodies are decoded on others.
    """

    claim_type = SeldonClaim

    def __init__(
        self,
        engine: ServingEngine,
        current: CurrentComponent,
        exposition: Exposition,
        others: Service,
        settings: Settings,
    ) -> None:
        super().__init__(engine, others)
        self._current = current
        self._exposition = exposition
        self._limits = settings.limits()
        self._strict = settings.seldon_strict

    # -- the Service -------------------------------------------------------------------------------------------

    def claim(self, head: Head) -> Any:
        """Claim every path except Penstock's own."""
        claim = SeldonClaim(head, self._current, strict=self._strict)
        if is_penstock_path(claim.path):
            return self.fallback.claim(head)
        category = _CATEGORIES.get(claim.purpose) or ("inference" if claim.lookup is not None else "")
        self.restricted.require(category, head.header)
        return claim

    def answer(self, connection: FastLane, claim: SeldonClaim, body: bytes) -> None:
        """Answer a request, or send it to the component."""
        endpoint = claim.purpose
        if claim.lookup is None or not isinstance(endpoint, Endpoint):
            self._answer_page(connection, claim)
        elif claim.coding or (self._current.sharing is not None and len(body) >= LARGE_BYTES):
            connection.task = connection.loop.create_task(self._send_call_in_task(connection, claim, endpoint, body))
        else:
            self._send_call(connection, claim, endpoint, body)

    def answer_failure(self, connection: FastLane, claim: SeldonClaim, error: InferError) -> None:
        """Answer with an error of the server's own."""
        status, body = pages.error_answer(error)
        connection.answer(status, body, JSON, claim.header_lines + (retry_after_line(error) if status == 503 else b""))

    def log_internal_error(self, claim: SeldonClaim, error: Exception) -> InferError:
        """Log a failure under the client's request id, if it sent one."""
        return internal_error(error, self._current.name(), claim.request_id)

    # -- calls of the component --------------------------------------------------------------------------------

    def _send_call(self, connection: FastLane, claim: SeldonClaim, endpoint: Endpoint, body: bytes) -> None:
        """Send a call to the component. Raises: InferError."""
        model = self._current.find()
        if self._current.reads_request:
            call = SeldonCall(model, endpoint, PayloadKind.HTTP, _encode_head(claim.head) + body, self)
        elif not claim.is_plain_json:
            call = SeldonCall(model, endpoint, PayloadKind.HTTP, claim.request_line + body, self)
        elif (sharing := self._current.sharing) is not None:
            call = sharing.make_call(model, endpoint, PayloadKind.JSON, body, self)
        else:
            call = SeldonCall(model, endpoint, PayloadKind.JSON, body, self)
        self.submit(connection, call)

    async def _send_call_in_task(
        self, connection: FastLane, claim: SeldonClaim, endpoint: Endpoint, body: bytes
    ) -> None:
        """Send a call that takes more than one step.

        A compressed body is decompressed, which the original never did. A large body that may share a batch is decoded
        on a thread.
        """
        try:
            if claim.coding and body.startswith(_MAGIC[claim.coding]):
                body = await read_compressed(body, claim.coding, self._limits, bytes)
            model, sharing = self._current.find(), self._current.sharing
            if sharing is not None and claim.is_plain_json and len(body) >= LARGE_BYTES:
                self.engine.hold(model)
                try:
                    call = await off_loop(len(body), sharing.make_call, model, endpoint, PayloadKind.JSON, body, self)
                    self.submit(connection, call)
                finally:
                    self.engine.release(model)
            else:
                self._send_call(connection, claim, endpoint, body)
        except HttpError as error:
            connection.answer(error.status, pages.failure(error.text, pages.BAD_DATA), JSON, claim.header_lines)
        except Exception as error:  # noqa: BLE001 - as in begin
            self.fail(connection, claim, error)
        finally:
            clear_task(connection)

    def answer_call(self, connection: FastLane, claim: SeldonClaim, call: SeldonCall) -> None:
        """Send the component's answer, and count the metrics it reported."""
        status, metrics, own_lines, body = read_answer(call.reply)
        content_type, extra = JSON, claim.header_lines
        if metrics:
            self._exposition.add(call.endpoint, metrics)
        if own_lines:
            content_type, _, other_lines = own_lines.partition(b"\r\n")
            extra = pages.join_lines(other_lines, extra)
        if claim.accept and status == 200:
            answer_compressed(connection, body, content_type, extra, claim.accept)
        else:
            connection.answer(status, body, content_type, extra)

    def discard_answer(self, call: SeldonCall) -> None:
        """Count the metrics of a call whose client has gone: the component has run it."""
        try:
            if call.error is None and (metrics := read_answer(call.reply)[1]):
                self._exposition.add(call.endpoint, metrics)
        except Exception as error:  # noqa: BLE001 - it must not lose the others' answers
            internal_error(error, call.model.name, "")

    # -- everything else ---------------------------------------------------------------------------------------

    def _answer_page(self, connection: FastLane, claim: SeldonClaim) -> None:
        purpose, lines = claim.purpose, claim.header_lines
        if purpose == PING:
            connection.answer(200, b"pong", TEXT, lines)
        elif purpose is Endpoint.HEALTH:
            self._answer_health(connection, claim)
        elif purpose == METADATA:
            self._answer_metadata(connection, claim)
        elif purpose == OPENAPI:
            answer_compressed(connection, openapi.page(), JSON, lines + _DISPOSITION, claim.accept)
        elif purpose == OPTIONS:
            connection.answer(200, b"", TEXT, b"allow: %b\r\n%b" % (self._methods(claim), lines))
        elif purpose == NOT_ALLOWED:
            allow = b"" if self._strict else b"allow: %b\r\n" % self._methods(claim)
            connection.answer(500 if self._strict else 405, pages.NOT_ALLOWED, JSON, lines + allow)
        elif purpose == NOT_FOUND:
            connection.answer(500 if self._strict else 404, pages.NOT_FOUND, JSON, lines)

    def _methods(self, claim: SeldonClaim) -> bytes:
        return methods_of(claim.path, strict=self._strict)

    def _answer_health(self, connection: FastLane, claim: SeldonClaim) -> None:
        """Answer at once if the answer is known and a worker serves; otherwise call the component."""
        description = self._current.description
        if description is not None and description.health and self._current.find().healthy:
            connection.answer(200, description.health.encode(), JSON, claim.header_lines)
        else:
            self._send_call(connection, claim, Endpoint.HEALTH, b"")

    def _answer_metadata(self, connection: FastLane, claim: SeldonClaim) -> None:
        description = self._current.description
        if description is None:
            raise InferError(Code.NOT_READY, "the component is not ready: its metadata is not known yet")
        if description.metadata is None:
            connection.answer(500, pages.NO_METADATA, JSON, claim.header_lines)
        else:
            connection.answer(200, description.page.encode(), JSON, claim.header_lines)


def _is_json(content_type: bytes) -> bool:
    """Return whether a body of this Content-Type is read as JSON, like Werkzeug's `is_json`."""
    media_type = content_type.partition(b";")[0].strip().lower()
    return media_type == JSON or (media_type.startswith(b"application/") and media_type.endswith(b"+json"))


def _encode_request_line(method: bytes, content_type: bytes, query: bytes) -> bytes:
    """Encode the parts of a head that a worker needs to read the body: a line of JSON."""
    fields = {"method": method, "type": content_type, "query": query}
    return json.dumps({name: value.decode("latin-1") for name, value in fields.items()}).encode() + b"\n"


def _encode_head(head: Head) -> bytes:
    """Encode the whole head in the same form."""
    path, query = split_target(head.path, head.query)
    fields = {"method": head.method, "type": head.header.get(b"content-type", b""), "query": query, "path": path}
    encoded: dict[str, Any] = {name: value.decode("latin-1") for name, value in fields.items()}
    encoded["headers"] = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in head.fields]
    return json.dumps(encoded).encode() + b"\n"
