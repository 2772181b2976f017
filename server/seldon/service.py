"""SeldonService: the Service that answers Seldon's URLs on the fast lane, in front of the v2 protocol's.

Made by the composition root. A call goes to its component as it came; nothing here reads a body, logs, or starts a task
for a plain one. It is also the sink of what it has asked.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from penstock.backends.errors import Code, InferError
from penstock.server.answering import LARGE_BYTES, answer_coded, internal, off_loop, off_task
from penstock.server.errors import retry_after_line
from penstock.server.http.coding import choose, decompress
from penstock.server.http.head import HttpError
from penstock.server.restricted import Restricted

from . import openapi, pages
from .calls import SeldonCall
from .messages import Endpoint, Form, read_answer
from .pages import JSON, TEXT
from .paths import METADATA, NOT_ALLOWED, NOT_FOUND, OPENAPI, OPTIONS, PING, is_ours, methods_of, parted, purpose_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.batching.request import InferRequest
    from penstock.server.engines import Serves
    from penstock.server.http.connection import Connection
    from penstock.server.http.fastlane import FastLane
    from penstock.server.http.head import Head
    from penstock.server.http.service import Service
    from penstock.server.settings import Settings

    from .current import Current
    from .exposition import Exposition

_CATEGORIES = {Endpoint.HEALTH: "health", PING: "health", METADATA: "metadata"}
"""As what the purposes of paths can be restricted; other Endpoints are inference."""
_DISPOSITION = b"content-disposition: inline; filename=seldon.json\r\ncache-control: no-cache\r\n"
_BODILESS = (204, 304)
_MAGIC = {b"gzip": b"\x1f\x8b", b"deflate": b"\x78"}
"""How a body begins that has a coding. One that only says so is taken as it is, which the original does with all."""


class Claim:
    """What a head says. Kept with the head's bytes.

    `endpoint` is what is asked of the component, None for what the server answers itself. `plain`: the payload of its
    call is the body as it is; `described` is what stands before it otherwise. `lines` are the header lines of its
    answer.
    """

    __slots__ = ("accept", "coding", "described", "endpoint", "lines", "path", "plain", "purpose", "request_id")

    def __init__(self, head: Head, *, strict: bool) -> None:
        header = head.header
        self.path, query = parted(head.path, head.query)
        self.purpose = purpose_of(head.method, self.path, strict=strict)
        health = self.purpose is Endpoint.HEALTH
        self.endpoint = self.purpose if isinstance(self.purpose, Endpoint) and not health else None
        content_type = header.get(b"content-type", b"")
        self.plain = head.method == b"POST" and _is_json(content_type) and b"json" not in query and b"%" not in query
        self.described = b"" if self.plain else _described(head.method, content_type, query)
        coding = header.get(b"content-encoding", b"").strip().lower()
        self.coding = coding if coding in _MAGIC else b""
        self.accept = choose(header.get(b"accept-encoding", b""))
        self.lines = pages.lines_for(head.method, header)
        self.request_id = header.get(b"x-request-id", b"").decode("latin-1")[:128]


class SeldonService:
    """Answers for the component of one server, which `current` finds.

    `others` answers what is Penstock's own. Threads: the event loop's, but for large bodies that are decoded.
    """

    def __init__(
        self, engine: Serves, current: Current, exposition: Exposition, others: Service, settings: Settings
    ) -> None:
        self._engine = engine
        self._current = current
        self._exposition = exposition
        self._others = others
        self._limits = settings.limits()
        self._strict = settings.seldon_strict
        self.restricted = Restricted()

    # -- the Service -------------------------------------------------------------------------------------------

    def claim(self, head: Head) -> Any:
        """Claim every path, but for those that are Penstock's own."""
        claim = Claim(head, strict=self._strict)
        if is_ours(claim.path):
            return self._others.claim(head)
        category = _CATEGORIES.get(claim.purpose) or ("inference" if claim.endpoint is not None else "")
        self.restricted.demand(category, head.header)
        return claim

    def turn_away(self, head: Head) -> Any:
        """Give the error of a call that is refused whatever it brings: its body need not be kept."""
        claim = head.route
        if type(claim) is not Claim:
            return self._others.turn_away(head)
        if claim.endpoint is None:
            return None
        try:
            return self._engine.turn_away(self._current.find())
        except InferError as error:
            return error

    def refuse(self, connection: FastLane, error: Any) -> None:
        """Answer with an error."""
        claim = connection.head.route if connection.head is not None else None
        if type(claim) is Claim:
            status, body = pages.refused(error)
            connection.answer(status, body, JSON, claim.lines + (retry_after_line(error) if status == 503 else b""))
        else:
            self._others.refuse(connection, error)

    def begin(self, connection: FastLane, head: Head, body: bytes) -> None:
        """Answer one request, or send it on."""
        claim = head.route
        if type(claim) is not Claim:
            self._others.begin(connection, head, body)
            return
        if claim.endpoint is None:
            self._answer_page(connection, claim)
        elif claim.coding or (self._current.sharing is not None and len(body) >= LARGE_BYTES):
            connection.task = asyncio.get_running_loop().create_task(self._ask_later(connection, claim, body))
        else:
            self._ask(connection, claim, claim.endpoint, body)

    def abandon(self, connection: Connection) -> None:
        """Cancel what a gone client asked for."""
        if connection.request is not None:
            self._engine.cancel(connection.request)
        if connection.task is not None:
            connection.task.cancel()

    # -- calls of the component --------------------------------------------------------------------------------

    def _ask(self, connection: FastLane, claim: Claim, endpoint: Endpoint, body: bytes) -> None:
        try:
            model = self._current.find()
            if not claim.plain:
                call = SeldonCall(model, endpoint, Form.HTTP, claim.described + body, self)
            elif (sharing := self._current.sharing) is not None:
                call = sharing.call_of(model, endpoint, Form.JSON, body, self)
            else:
                call = SeldonCall(model, endpoint, Form.JSON, body, self)
            self._submit(connection, call)
        except InferError as error:
            self.refuse(connection, error)
        except Exception as error:  # noqa: BLE001 - logged under an id, and the client gets an answer whatever it is
            self.refuse(connection, internal(error, self._current.name(), claim.request_id))

    def _submit(self, connection: FastLane, call: SeldonCall) -> None:
        call.context = connection
        connection.request = call
        try:
            self._engine.submit(call)
        except BaseException:
            connection.request = None
            raise

    async def _ask_later(self, connection: FastLane, claim: Claim, body: bytes) -> None:
        """Ask what takes more than one step.

        A coding is taken off its body, which the original never did, and a large one is read for the batch that it may
        share on a thread.
        """
        endpoint: Endpoint = claim.endpoint  # type: ignore[assignment]
        try:
            if claim.coding and body.startswith(_MAGIC[claim.coding]):
                body = await off_loop(len(body), decompress, body, claim.coding, self._limits)
            model, sharing = self._current.find(), self._current.sharing
            if sharing is not None and claim.plain and len(body) >= LARGE_BYTES:
                self._engine.hold(model)
                try:
                    call = await off_loop(len(body), sharing.call_of, model, endpoint, Form.JSON, body, self)
                    self._submit(connection, call)
                finally:
                    self._engine.release(model)
            else:
                self._ask(connection, claim, endpoint, body)
        except HttpError as error:
            connection.answer(error.status, pages.failure(error.text, pages.BAD_DATA), JSON, claim.lines)
        except InferError as error:
            self.refuse(connection, error)
        except Exception as error:  # noqa: BLE001 - as in _ask
            self.refuse(connection, internal(error, self._current.name(), claim.request_id))
        finally:
            off_task(connection)

    # -- the sink ----------------------------------------------------------------------------------------------

    def deliver(self, requests: Sequence[InferRequest]) -> None:
        """Write the answers of one delivery."""
        for request in requests:
            connection: FastLane = request.context
            if connection.request is not request:
                self._count_unread(request)  # type: ignore[arg-type]
                continue
            connection.request = None
            if request.error is not None:
                self.refuse(connection, request.error)
                continue
            claim: Claim = connection.head.route  # type: ignore[union-attr]
            try:
                self._answer(connection, claim, request)
            except Exception as error:  # noqa: BLE001 - one answer's failure must not take the others'
                self.refuse(connection, internal(error, request.model.name, claim.request_id))

    def _answer(self, connection: FastLane, claim: Claim, call: SeldonCall) -> None:
        status, metrics, lines, body = read_answer(call.reply)
        content_type, extra = JSON, claim.lines
        if metrics:
            self._exposition.add(call.endpoint, metrics)
        if lines:
            content_type, _, own = lines.partition(b"\r\n")
            extra = pages.joined(own, extra)
        if status in _BODILESS:
            body = b""
        elif status < 200:
            # the client would take the next answer for this one's
            raise ValueError(f"the component answered with status {status}")
        if claim.accept and status == 200:
            answer_coded(connection, body, content_type, extra, claim.accept)
        else:
            connection.answer(status, body, content_type, extra)

    def _count_unread(self, call: SeldonCall) -> None:
        """Count what a call has said whose client has gone: the component has done it all the same."""
        try:
            if call.error is None and (metrics := read_answer(call.reply)[1]):
                self._exposition.add(call.endpoint, metrics)
        except Exception as error:  # noqa: BLE001 - as in deliver, but for the answer
            internal(error, call.model.name, "")

    # -- everything else ---------------------------------------------------------------------------------------

    def _answer_page(self, connection: FastLane, claim: Claim) -> None:
        purpose, lines = claim.purpose, claim.lines
        if purpose == PING:
            connection.answer(200, b"pong", TEXT, lines)
        elif purpose is Endpoint.HEALTH:
            self._answer_health(connection, claim)
        elif purpose == METADATA:
            self._answer_metadata(connection, claim)
        elif purpose == OPENAPI:
            answer_coded(connection, openapi.page(), JSON, lines + _DISPOSITION, claim.accept)
        elif purpose == OPTIONS:
            connection.answer(200, b"", TEXT, b"allow: %b\r\n%b" % (self._methods(claim), lines))
        elif purpose == NOT_ALLOWED:
            allow = b"" if self._strict else b"allow: %b\r\n" % self._methods(claim)
            connection.answer(500 if self._strict else 405, pages.NOT_ALLOWED, JSON, lines + allow)
        elif purpose == NOT_FOUND:
            connection.answer(500 if self._strict else 404, pages.NOT_FOUND, JSON, lines)

    def _methods(self, claim: Claim) -> bytes:
        return methods_of(claim.path, strict=self._strict)

    def _answer_health(self, connection: FastLane, claim: Claim) -> None:
        """Answer at once where that is known, and a worker serves; otherwise the component is asked."""
        described = self._current.description
        try:
            if described is not None and described.health and self._current.find().healthy:
                connection.answer(200, described.health.encode(), JSON, claim.lines)
            else:
                self._ask(connection, claim, Endpoint.HEALTH, b"")
        except InferError as error:
            self.refuse(connection, error)

    def _answer_metadata(self, connection: FastLane, claim: Claim) -> None:
        described = self._current.description
        if described is None:
            self.refuse(connection, InferError(Code.NOT_READY, "the component is not ready: it says what it is later"))
        elif described.metadata is None:
            connection.answer(500, pages.NO_METADATA, JSON, claim.lines)
        else:
            connection.answer(200, described.page.encode(), JSON, claim.lines)


def _is_json(content_type: bytes) -> bool:
    """Whether a body of a Content-Type is read as JSON: as Werkzeug's `is_json`."""
    kind = content_type.partition(b";")[0].strip().lower()
    return kind == JSON or (kind.startswith(b"application/") and kind.endswith(b"+json"))


def _described(method: bytes, content_type: bytes, query: bytes) -> bytes:
    """Write what a worker must know of a head to read the body: a line of JSON."""
    said = {"method": method, "type": content_type, "query": query}
    return json.dumps({name: value.decode("latin-1") for name, value in said.items()}).encode() + b"\n"
