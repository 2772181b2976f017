"""SageMaker: /ping, /invocations, and the models of a multi-model endpoint. Created by clouds.py.

SageMakerService handles inference on the fast lane, SageMakerApp everything else. Source: Triton server,
sagemaker_server.cc (paths, codes, texts).
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import unquote

from starlette.requests import Request
from starlette.responses import Response

from penstock.backends.errors import Code, InferError, OutOfMemory
from penstock.server.errors import HTTP_STATUS, error_body, retry_after_line
from penstock.server.restricted import restriction_text
from penstock.server.v2.inference import Inference
from penstock.server.v2.parsing import parse
from penstock.server.v2.routes import JSON, MAX_JSON_DEPTH, json_answer, read_body

from .archives import NOT_EXPLICIT, escape_target
from .forwarded import CODINGS, ForwardingService, answer, forward, infer_path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import Receive, Scope, Send

    from penstock.batching.request import InferRequest
    from penstock.server.http.fastlane import FastLane
    from penstock.server.http.head import Head
    from penstock.server.listening.mapped_buffer import Body
    from penstock.server.restricted import RestrictedApis
    from penstock.server.settings import Settings
    from penstock.server.telemetry.page import ASGIApp
    from penstock.server.v2.claims import InferenceClaim

    from .archives import Archives

logger = logging.getLogger("penstock.clouds")

MIME = b"application/vnd.sagemaker-triton.binary+json;json-header-size="
TARGET = "X-Amzn-SageMaker-Target-Model"
UNSPECIFIED = "unspecified_SAGEMAKER_TRITON_DEFAULT_MODEL_NAME"
NO_MEMORY_STATUS = 507
"""Tells SageMaker to unload other models and try again."""
_TARGET = TARGET.lower().encode()
_MODELS = re.compile(r"/models(?:/([^/]+)?(?:/invoke)?)?")
_INVOKE = re.compile(rb"/models/([^/]+)/invoke\Z")
_NO_MEMORY = re.compile(
    "[Oo]ut [Oo]f [Mm]emory|OUT_OF_MEMORY|OutOfMemory|MemoryError|OOM|bad_alloc|[Ff]ailed to allocate memory|"
    "(?:Dst|Src) tensor is not initialized|CU(?:BLAS|DNN)_STATUS_(?:ALLOC_FAILED|NOT_INITIALIZED)|"
    "No space left on device"
)
"""Messages of runtimes that are out of memory."""


@dataclass(frozen=True, slots=True)
class SageMakerPaths:
    """Where /ping and /invocations lead: a health path, the model's name, and the kind of inference."""

    health: str
    model: str
    inference: str

    @classmethod
    def from_settings(cls, settings: Settings) -> SageMakerPaths:
        """Read them from a server's settings."""
        model = settings.sagemaker_default_model or UNSPECIFIED
        return cls(f"/v2/health/{settings.sagemaker_ping_mode}", model, settings.sagemaker_inference_type)


class SageMakerInference(Inference):
    """Inference with SageMaker's content type for its binary answers, and with Triton's statuses there.

    Requests that fail after acceptance get 400, whatever the error; so do all failures of a model invoked by name.
    """

    def deliver(self, requests: Sequence[InferRequest]) -> None:
        """Answer one batch."""
        for request in requests:
            error = request.error
            if error is not None and not is_out_of_memory(error):
                request.error = InferError(Code.INVALID, error.message)
        super().deliver(requests)

    def _answer_body(self, connection: FastLane, claim: InferenceClaim, body: Body, json_bytes: int) -> None:
        if json_bytes:
            connection.answer(200, body, MIME + b"%d" % json_bytes)
        else:
            connection.answer_ok(body)

    @staticmethod
    def answer_error(connection: FastLane, error: InferError) -> None:
        """Answer with an error."""
        head = connection.head
        if is_out_of_memory(error):
            status = NO_MEMORY_STATUS
        else:
            status = 400 if head is not None and _INVOKE.match(head.path) else HTTP_STATUS[error.code]
        retry_after = retry_after_line(error) if status == HTTP_STATUS[error.code] else b""
        connection.answer(status, error_body(error.message), b"application/json", retry_after)


class SageMakerService(ForwardingService):
    """The Service of the port. `archives` are the models that may be invoked by name, None if the port has none."""

    def __init__(self, inference: SageMakerInference, paths: SageMakerPaths, archives: Archives | None) -> None:
        super().__init__(inference, MIME, CODINGS)
        self._paths = paths
        self._archives = archives

    def claim(self, head: Head) -> InferenceClaim | None:
        """Claim inference."""
        if head.method != b"POST":
            return None
        if head.path == b"/invocations":
            infers = self._paths.inference == "infer"
            return self.claim_path(head, infer_path(self._paths.model)) if infers else None
        match = _INVOKE.match(head.path)
        if match is None:
            return None
        target = head.header.get(_TARGET, match[1]).decode("latin-1")
        return self.claim_path(head, infer_path(escape_target(target)))

    def begin(self, connection: FastLane, head: Head, body: bytes) -> None:
        """Answer one request; a model invoked by name must have been loaded."""
        match = _INVOKE.match(head.path)
        if match is None or (self._archives is not None and unquote(match[1].decode()) in self._archives.loaded):
            super().begin(connection, head, body)
        else:
            connection.answer(404, b"", b"")


class SageMakerApp:
    """The application of the port, for everything except inference. Penstock's `app` answers health and generate."""

    def __init__(
        self, app: ASGIApp, paths: SageMakerPaths, archives: Archives | None, restricted: RestrictedApis
    ) -> None:
        self._app = app
        self._paths = paths
        self._archives = archives
        self._restricted = restricted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request (called by uvicorn)."""
        path, method, paths = scope["path"], scope["method"], self._paths
        if path == "/ping":
            await forward(self._app, scope, method, paths.health, (receive, send))
        elif path == "/invocations" and method == "POST" and paths.inference != "infer":
            inner_path = f"/v2/models/{paths.model}/{paths.inference}"
            await forward(self._app, scope, "POST", inner_path, (receive, send))
        elif path == "/invocations":
            await answer(send, 405)
        elif match := _MODELS.fullmatch(path):
            response = await self._manage_models(Request(scope, receive), match[1] or "")
            await response(scope, receive, send)
        else:
            await answer(send, 400)

    async def _manage_models(self, request: Request, name: str) -> Response:
        header = self._restricted.check("model-repository", request.headers.get)
        if header is not None:
            return _refusal(403, restriction_text(header))
        try:
            if request.method == "GET":
                return self._describe_model(name) if name else self._list_models()
            if request.method == "POST":
                return await self._load(request)
            if request.method == "DELETE":
                return await self._unload(request, name)
        except InferError as error:
            status = 409 if error.code is Code.ALREADY_EXISTS else NO_MEMORY_STATUS if is_out_of_memory(error) else 400
            return _refusal(status, error.message)
        return Response(status_code=400)

    def _list_models(self) -> Response:
        archives = self._archives
        loaded = {} if archives is None else archives.loaded
        return json_answer(
            {
                "models": [
                    {"modelName": name, "modelUrl": str(archive.folder)}
                    for name, archive in loaded.items()
                    if archives is not None and archives.is_ready(archive)
                ]
            }
        )

    def _describe_model(self, name: str) -> Response:
        archive = None if self._archives is None else self._archives.loaded.get(name)
        if archive is None:
            return Response(status_code=404)
        return json_answer({"modelName": name, "modelUrl": str(archive.folder)})

    async def _load(self, request: Request) -> Response:
        parsed = parse(await read_body(request), MAX_JSON_DEPTH, simd=False)
        name, url = (parsed.get(key) for key in ("model_name", "url")) if isinstance(parsed, dict) else (None, None)
        if not (isinstance(name, str) and isinstance(url, str) and name and url):
            raise InferError(Code.INVALID, 'the request must be an object such as {"model_name": "m", "url": "/path"}')
        if self._archives is None:
            raise InferError(Code.UNSUPPORTED, NOT_EXPLICIT)
        target = request.headers.get(TARGET, name)
        logger.info("loading SageMaker's model %s", target)
        if not await self._archives.load(name, url, target):
            return Response(status_code=400)
        return Response()

    async def _unload(self, request: Request, name: str) -> Response:
        logger.info("unloading SageMaker's model %s", request.headers.get(TARGET, name))
        found = self._archives is not None and await self._archives.unload(name)
        return Response(status_code=200 if found else 404)


def is_out_of_memory(error: InferError) -> bool:
    """Return whether an error is a lack of memory, judging by its text."""
    return isinstance(error, OutOfMemory) or _NO_MEMORY.search(error.message) is not None


def _refusal(status: int, text: str) -> Response:
    return Response(error_body(text), status, media_type=JSON)
