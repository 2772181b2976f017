"""DeepaasService: the Service that answers DEEPaaS's URLs on the fast lane. Made by dialect.py.

Predictions are forwarded to their workers unread. The other requests that need a worker run as tasks: metadata and
trainings query the Desk.
Source: deepaas 2.6.0 on aiohttp, by observed behavior.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

from penstock.backends.errors import InferError
from penstock.server.answering import clear_task, internal_error, read_compressed
from penstock.server.carrying.messages import pack_answer, read_answer
from penstock.server.carrying.service import CarryingService, ModelLookup
from penstock.server.errors import retry_after_line
from penstock.server.http.head import HttpError

from . import console, openapi, pages, swagger
from .debugging import Debugging
from .messages import JSON, METADATA, TEXT, ModelDescription
from .pages import FRESH
from .paths import PREDICTIONS, TRAININGS, DeepaasPaths, DeepaasRoute, Purpose

if TYPE_CHECKING:
    from penstock.server.dialects import DialectParts
    from penstock.server.http.fastlane import FastLane
    from penstock.server.http.head import Head
    from penstock.server.settings import Settings

    from .loading import DeepaasModels

_CATEGORIES = {
    **dict.fromkeys((*PREDICTIONS, *TRAININGS, Purpose.TENSORS), "inference"),
    **dict.fromkeys((Purpose.MODELS, Purpose.METADATA, Purpose.API, Purpose.SWAGGER, Purpose.OPENAPI), "metadata"),
    Purpose.DEBUG: "logging",
}
"""The categories by which access to these purposes can be restricted."""
_STATUSES = {Purpose.SWITCHED_OFF: 402, Purpose.NOT_FOUND: 404, Purpose.NOT_ALLOWED: 405, Purpose.REDIRECT: 308}
_UNCODED = (b"", b"identity")
_HTML = b"text/html; charset=utf-8"


class DeepaasClaim:
    """What a request head says. Cached with the head's bytes.

    `found` is the model of a prediction, None for other requests. `described` precedes the body of a call. `plain`: the
    body is forwarded as it is.
    """

    __slots__ = ("coding", "described", "found", "place", "plain", "request_id")

    def __init__(self, head: Head, place: DeepaasRoute, found: ModelLookup | None) -> None:
        self.place, self.found = place, found
        self.coding = head.header.get(b"content-encoding", b"").strip().lower()
        self.plain = self.coding in _UNCODED
        self.request_id = head.header.get(b"x-request-id", b"").decode("latin-1")[:128]
        self.described = _described(head) if place.purpose in (Purpose.PREDICT, Purpose.TRAIN) else b""


class DeepaasService(CarryingService):
    """Answers for the models of one server. Threads: the event loop's, except that others decompress bodies."""

    claims = DeepaasClaim

    def __init__(self, parts: DialectParts, models: DeepaasModels, settings: Settings) -> None:
        super().__init__(parts.engine, parts.inference)
        self.restricted = parts.inference.restricted
        self._models = models
        self._limits = settings.limits()
        self._base = settings.deepaas_base_path.rstrip("/")
        self._predict, self._train = settings.deepaas_predict_endpoint, settings.deepaas_train_endpoint
        self._documents = settings.deepaas_doc_endpoint
        self._repository = parts.repository
        self._debugging = Debugging() if settings.deepaas_debug_endpoint else None
        self._later: dict[Purpose, Callable[[DeepaasClaim, bytes], Awaitable[bytes]]] = {
            Purpose.METADATA: self._metadata,
            Purpose.MODELS: self._every_metadata,
            Purpose.SWAGGER: self._swagger,
            Purpose.OPENAPI: self._openapi,
            Purpose.API: self._api,
            Purpose.TRAIN: self._begin_training,
            **dict.fromkeys(TRAININGS - {Purpose.TRAIN}, self._training),
        }

    @cached_property
    def _founds(self) -> dict[str, ModelLookup]:
        """The models: they are known only once the server listens."""
        return {name: ModelLookup(self.engine, name) for name in self._repository.names()}

    @cached_property
    def _paths(self) -> DeepaasPaths:
        off = (frozenset() if self._predict else PREDICTIONS) | (frozenset() if self._train else TRAININGS)
        return DeepaasPaths(self._founds, self._base, self._documents, off)

    def close(self) -> None:
        """Stop collecting the log."""
        if self._debugging is not None:
            self._debugging.close()

    # -- the Service -------------------------------------------------------------------------------------------

    def claim(self, head: Head) -> Any:
        """Claim every path except Penstock's own."""
        place = self._paths.find(head.method, head.path, head.query)
        if place.purpose is Purpose.OURS:
            return self.others.claim(head)
        self.restricted.require(_CATEGORIES.get(place.purpose, ""), head.header)
        return DeepaasClaim(head, place, self._founds[place.name] if place.purpose is Purpose.PREDICT else None)

    def answer(self, connection: FastLane, claim: Any, body: bytes) -> None:
        """Answer a request, or send it on."""
        if claim.found is not None and claim.plain:
            self.ask(connection, claim.found, claim.described + body)
            return
        purpose: Purpose = claim.place.purpose
        if purpose is Purpose.PREDICT or purpose in self._later:
            connection.task = connection.loop.create_task(self._answer_later(connection, claim, body))
        else:
            self._answer_now(connection, claim)

    def answer_failure(self, connection: FastLane, claim: Any, error: InferError) -> None:
        """Answer with an error of the server's own."""
        status, body = pages.refused(error)
        connection.answer(status, body, TEXT, retry_after_line(error) if status == 503 else b"")

    def trouble(self, claim: Any, error: Exception) -> InferError:
        """Log a failure under the client's request id, if it sent one."""
        return internal_error(error, claim.place.name, claim.request_id)

    # -- answers of the server's own ---------------------------------------------------------------------------

    def _answer_now(self, connection: FastLane, claim: DeepaasClaim) -> None:
        place = claim.place
        if place.purpose in _STATUSES:
            status = _STATUSES[place.purpose]
            field = {308: b"location", 405: b"allow"}.get(status)
            line = b"%b: %b\r\n" % (field, place.location.encode("latin-1")) if field else b""
            connection.answer(status, pages.status_text(status), TEXT, line)
        elif place.purpose is Purpose.TENSORS:
            connection.answer(501, pages.no_tensors(self._base, place.name), b"application/json")
        elif place.purpose is Purpose.UI:
            connection.answer(302, pages.status_text(302), TEXT, f"location: {self._base}/api\r\n".encode())
        elif place.purpose is Purpose.VERSION:
            connection.answer(200, pages.written(pages.version(self._base)), JSON)
        elif place.purpose is Purpose.VERSIONS:
            connection.answer(200, pages.written(pages.versions(self._base, documents=self._documents)), JSON)
        elif self._debugging is None:
            connection.answer(204, b"", b"")
        else:
            connection.answer(200, self._debugging.text(), TEXT, FRESH)

    # -- answers from workers ----------------------------------------------------------------------------------

    async def _answer_later(self, connection: FastLane, claim: DeepaasClaim, body: bytes) -> None:
        try:
            if not claim.plain and body:
                body = await read_compressed(body, claim.coding, self._limits, bytes)
            if claim.found is not None:
                self.ask(connection, claim.found, claim.described + body)
            else:
                self.answer_reply(connection, await self._later[claim.place.purpose](claim, body))
        except HttpError as error:
            status, content_type, text = pages.refusal(error, self._limits.max_body_bytes)
            accepted = b"accept-encoding: gzip, deflate\r\n" if status == 501 else b""
            connection.answer(status, text, content_type, accepted)
        except Exception as error:  # noqa: BLE001 - as in begin
            self.fail(connection, claim, error)
        finally:
            clear_task(connection)

    async def _metadata(self, claim: DeepaasClaim, body: bytes) -> bytes:
        return await self._metadata_of(claim.place.name)

    async def _metadata_of(self, name: str) -> bytes:
        return await self._models.desk_of(name).ask(METADATA, pages.link_of(self._base, name).encode())

    async def _every_metadata(self, claim: DeepaasClaim, body: bytes) -> bytes:
        replies = await asyncio.gather(*(self._metadata_of(name) for name in self._loaded()))
        said = []
        for reply in replies:
            status, _, _, metadata = read_answer(reply)
            if status != 200:
                return reply
            said.append(metadata)
        return pack_answer(200, JSON, b'{"models": [%b]}' % b", ".join(said))

    async def _swagger(self, claim: DeepaasClaim, body: bytes) -> bytes:
        return pack_answer(200, JSON, pages.written(self._document()))

    async def _openapi(self, claim: DeepaasClaim, body: bytes) -> bytes:
        return pack_answer(200, JSON, pages.written(openapi.document(self._document())))

    async def _api(self, claim: DeepaasClaim, body: bytes) -> bytes:
        """Make the page of the API, with the current state of the models and their trainings."""
        shown = []
        for name, description in self._described():
            metadata = _said(await self._metadata_of(name), {})
            trainings = _said(await self._models.jobs.list(name), []) if self._train else []
            shown.append(console.Shown(name, description, metadata, trainings))
        page = console.page(self._base, shown, predict=self._predict, train=self._train)
        return pack_answer(200, b"%b\r\n%b%b" % (_HTML, console.LINES, FRESH), page)

    async def _begin_training(self, claim: DeepaasClaim, body: bytes) -> bytes:
        return await self._models.jobs.start(claim.place.name, claim.described + body)

    async def _training(self, claim: DeepaasClaim, body: bytes) -> bytes:
        jobs, place = self._models.jobs, claim.place
        if place.purpose is Purpose.TRAININGS:
            return await jobs.list(place.name)
        ask = {
            Purpose.TRAINING: jobs.get,
            Purpose.END_TRAINING: jobs.delete,
            Purpose.LOG: jobs.log,
            Purpose.PROGRESS: jobs.progress,
            Purpose.PAGE: jobs.page,
        }[place.purpose]
        return await ask(place.name, place.uuid)

    def _document(self) -> dict[str, Any]:
        return swagger.document(self._base, self._described(), predict=self._predict, train=self._train)

    def _described(self) -> list[tuple[str, ModelDescription]]:
        return [(name, self._models.desk_of(name).description) for name in self._loaded()]

    def _loaded(self) -> list[str]:
        """List the models that can be called. Raises: InferError (NOT_READY) if there is none yet."""
        names, failure = [], None
        for name, found in self._founds.items():
            try:
                found.find()
                names.append(name)
            except InferError as error:
                failure = error
        if failure is not None and not names:
            raise failure
        return names


def _said(reply: bytes, otherwise: Any) -> Any:
    """Return the JSON of an answer, or `otherwise` if the model failed: its page is shown in any case."""
    status, _, _, body = read_answer(reply)
    return json.loads(body) if status == 200 else otherwise


def _described(head: Head) -> bytes:
    """Encode the parts of a head that a worker needs (messages.py)."""
    headers = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in head.fields]
    said = {"method": head.method.decode(), "query": head.query.decode("latin-1"), "headers": headers}
    return json.dumps(said).encode() + b"\n"
