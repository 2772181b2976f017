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
from .debugging import DebugLog
from .messages import JSON, METADATA, TEXT, ModelDescription
from .pages import NO_STORE
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
_STATUSES = {Purpose.DISABLED: 402, Purpose.NOT_FOUND: 404, Purpose.NOT_ALLOWED: 405, Purpose.REDIRECT: 308}
_NO_CODING = (b"", b"identity")
_HTML = b"text/html; charset=utf-8"


class DeepaasClaim:
    """What a request head says. Cached with the head's bytes.

    `lookup` is the model of a prediction, None for other requests. `prefix` precedes the body of a call.
    `uncompressed`: the body is forwarded as it is.
    """

    __slots__ = ("coding", "lookup", "prefix", "request_id", "route", "uncompressed")

    def __init__(self, head: Head, route: DeepaasRoute, lookup: ModelLookup | None) -> None:
        self.route, self.lookup = route, lookup
        self.coding = head.header.get(b"content-encoding", b"").strip().lower()
        self.uncompressed = self.coding in _NO_CODING
        self.request_id = head.header.get(b"x-request-id", b"").decode("latin-1")[:128]
        self.prefix = _encode_head(head) if route.purpose in (Purpose.PREDICT, Purpose.TRAIN) else b""


class DeepaasService(CarryingService[DeepaasClaim]):
    """Answers for the models of one server. Threads: the event loop's, except that others decompress bodies."""

    claim_type = DeepaasClaim

    def __init__(self, parts: DialectParts, models: DeepaasModels, settings: Settings) -> None:
        super().__init__(parts.engine, parts.inference)
        self.restricted = parts.inference.restricted
        self._models = models
        self._limits = settings.limits()
        self._base = settings.deepaas_base_path.rstrip("/")
        self._serves_predict, self._serves_train = settings.deepaas_predict_endpoint, settings.deepaas_train_endpoint
        self._serves_documents = settings.deepaas_doc_endpoint
        self._repository = parts.repository
        self._debugging = DebugLog() if settings.deepaas_debug_endpoint else None
        self._async_answers: dict[Purpose, Callable[[DeepaasClaim, bytes], Awaitable[bytes]]] = {
            Purpose.METADATA: self._metadata,
            Purpose.MODELS: self._all_metadata,
            Purpose.SWAGGER: self._swagger,
            Purpose.OPENAPI: self._openapi,
            Purpose.API: self._api,
            Purpose.TRAIN: self._start_training,
            **dict.fromkeys(TRAININGS - {Purpose.TRAIN}, self._training),
        }

    @cached_property
    def _lookups(self) -> dict[str, ModelLookup]:
        """The models: they are known only once the server listens."""
        return {name: ModelLookup(self.engine, name) for name in self._repository.names()}

    @cached_property
    def _paths(self) -> DeepaasPaths:
        disabled = (frozenset() if self._serves_predict else PREDICTIONS) | (
            frozenset() if self._serves_train else TRAININGS
        )
        return DeepaasPaths(self._lookups, self._base, self._serves_documents, disabled)

    def close(self) -> None:
        """Stop collecting the log."""
        if self._debugging is not None:
            self._debugging.close()

    # -- the Service -------------------------------------------------------------------------------------------

    def claim(self, head: Head) -> Any:
        """Claim every path except Penstock's own."""
        route = self._paths.find(head.method, head.path, head.query)
        if route.purpose is Purpose.PENSTOCK:
            return self.fallback.claim(head)
        self.restricted.require(_CATEGORIES.get(route.purpose, ""), head.header)
        return DeepaasClaim(head, route, self._lookups[route.name] if route.purpose is Purpose.PREDICT else None)

    def answer(self, connection: FastLane, claim: DeepaasClaim, body: bytes) -> None:
        """Answer a request, or send it on."""
        if claim.lookup is not None and claim.uncompressed:
            self.submit_body(connection, claim.lookup, claim.prefix + body)
            return
        purpose: Purpose = claim.route.purpose
        if purpose is Purpose.PREDICT or purpose in self._async_answers:
            connection.task = connection.loop.create_task(self._answer_later(connection, claim, body))
        else:
            self._answer_now(connection, claim)

    def answer_failure(self, connection: FastLane, claim: DeepaasClaim, error: InferError) -> None:
        """Answer with an error of the server's own."""
        status, body = pages.error_text(error)
        connection.answer(status, body, TEXT, retry_after_line(error) if status == 503 else b"")

    def log_internal_error(self, claim: DeepaasClaim, error: Exception) -> InferError:
        """Log a failure under the client's request id, if it sent one."""
        return internal_error(error, claim.route.name, claim.request_id)

    # -- answers of the server's own ---------------------------------------------------------------------------

    def _answer_now(self, connection: FastLane, claim: DeepaasClaim) -> None:
        route = claim.route
        if route.purpose in _STATUSES:
            status = _STATUSES[route.purpose]
            field = {308: b"location", 405: b"allow"}.get(status)
            line = b"%b: %b\r\n" % (field, route.location.encode("latin-1")) if field else b""
            connection.answer(status, pages.status_text(status), TEXT, line)
        elif route.purpose is Purpose.TENSORS:
            connection.answer(501, pages.no_tensors_error(self._base, route.name), b"application/json")
        elif route.purpose is Purpose.UI:
            connection.answer(302, pages.status_text(302), TEXT, f"location: {self._base}/api\r\n".encode())
        elif route.purpose is Purpose.VERSION:
            connection.answer(200, pages.write_json(pages.version(self._base)), JSON)
        elif route.purpose is Purpose.VERSIONS:
            connection.answer(200, pages.write_json(pages.versions(self._base, documents=self._serves_documents)), JSON)
        elif self._debugging is None:
            connection.answer(204, b"", b"")
        else:
            connection.answer(200, self._debugging.text(), TEXT, NO_STORE)

    # -- answers from workers ----------------------------------------------------------------------------------

    async def _answer_later(self, connection: FastLane, claim: DeepaasClaim, body: bytes) -> None:
        try:
            if not claim.uncompressed and body:
                body = await read_compressed(body, claim.coding, self._limits, bytes)
            if claim.lookup is not None:
                self.submit_body(connection, claim.lookup, claim.prefix + body)
            else:
                self.answer_reply(connection, await self._async_answers[claim.route.purpose](claim, body))
        except HttpError as error:
            status, content_type, text = pages.malformed_answer(error, self._limits.max_body_bytes)
            accepted = b"accept-encoding: gzip, deflate\r\n" if status == 501 else b""
            connection.answer(status, text, content_type, accepted)
        except Exception as error:  # noqa: BLE001 - as in begin
            self.fail(connection, claim, error)
        finally:
            clear_task(connection)

    async def _metadata(self, claim: DeepaasClaim, body: bytes) -> bytes:
        return await self._metadata_of(claim.route.name)

    async def _metadata_of(self, name: str) -> bytes:
        return await self._models.desk_of(name).call(METADATA, pages.link_of(self._base, name).encode())

    async def _all_metadata(self, claim: DeepaasClaim, body: bytes) -> bytes:
        replies = await asyncio.gather(*(self._metadata_of(name) for name in self._loaded_names()))
        all_metadata = []
        for reply in replies:
            status, _, _, metadata = read_answer(reply)
            if status != 200:
                return reply
            all_metadata.append(metadata)
        return pack_answer(200, JSON, b'{"models": [%b]}' % b", ".join(all_metadata))

    async def _swagger(self, claim: DeepaasClaim, body: bytes) -> bytes:
        return pack_answer(200, JSON, pages.write_json(self._document()))

    async def _openapi(self, claim: DeepaasClaim, body: bytes) -> bytes:
        return pack_answer(200, JSON, pages.write_json(openapi.document(self._document())))

    async def _api(self, claim: DeepaasClaim, body: bytes) -> bytes:
        """Make the page of the API, with the current state of the models and their trainings."""
        models = []
        for name, description in self._descriptions():
            metadata = _json_of(await self._metadata_of(name), {})
            trainings = _json_of(await self._models.jobs.list(name), []) if self._serves_train else []
            models.append(console.ModelState(name, description, metadata, trainings))
        page = console.page(self._base, models, predict=self._serves_predict, train=self._serves_train)
        return pack_answer(200, b"%b\r\n%b%b" % (_HTML, console.HEADER_LINES, NO_STORE), page)

    async def _start_training(self, claim: DeepaasClaim, body: bytes) -> bytes:
        return await self._models.jobs.start(claim.route.name, claim.prefix + body)

    async def _training(self, claim: DeepaasClaim, body: bytes) -> bytes:
        jobs, route = self._models.jobs, claim.route
        if route.purpose is Purpose.TRAININGS:
            return await jobs.list(route.name)
        answer = {
            Purpose.TRAINING: jobs.get,
            Purpose.END_TRAINING: jobs.delete,
            Purpose.LOG: jobs.log,
            Purpose.PROGRESS: jobs.progress,
            Purpose.PAGE: jobs.page,
        }[route.purpose]
        return await answer(route.name, route.uuid)

    def _document(self) -> dict[str, Any]:
        return swagger.document(
            self._base, self._descriptions(), predict=self._serves_predict, train=self._serves_train
        )

    def _descriptions(self) -> list[tuple[str, ModelDescription]]:
        return [(name, self._models.desk_of(name).description) for name in self._loaded_names()]

    def _loaded_names(self) -> list[str]:
        """List the models that can be called. Raises: InferError (NOT_READY) if there is none yet."""
        names, failure = [], None
        for name, lookup in self._lookups.items():
            try:
                lookup.find()
                names.append(name)
            except InferError as error:
                failure = error
        if failure is not None and not names:
            raise failure
        return names


def _json_of(reply: bytes, default: Any) -> Any:
    """Return the JSON of an answer, or `default` if the model failed: its page is shown in any case."""
    status, _, _, body = read_answer(reply)
    return json.loads(body) if status == 200 else default


def _encode_head(head: Head) -> bytes:
    """Encode the parts of a head that a worker needs (messages.py)."""
    headers = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in head.fields]
    parts = {"method": head.method.decode(), "query": head.query.decode("latin-1"), "headers": headers}
    return json.dumps(parts).encode() + b"\n"
