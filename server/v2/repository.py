"""The model repository extension over HTTP: index, load and unload. Its Routes are wired by the composition root.

Source: Triton server, http_server.cc (paths, codes, texts).
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from penstock.backends.errors import Code, InferError
from penstock.server.answering import LargeJsonReader

from . import openapi
from .parsing import parse
from .routes import MAX_JSON_DEPTH, Route, json_answer, read_body

_FILE = "file:"
_THREAD_BYTES = 256 << 10
"""Bodies of at least this size are parsed on a thread."""


class LoadsModels(Protocol):
    """The part of ModelControl used here."""

    async def load(self, name: str, config: str | None = None, files: Mapping[str, bytes] | None = None) -> None: ...
    async def unload(self, name: str, *, dependents: bool = False) -> None: ...
    async def index(self, ready: bool = False) -> list[dict[str, str]]: ...


class RepositoryEndpoints:
    """The endpoints. `max_bytes` is the largest body of a load request, which carries files in base64."""

    def __init__(self, control: LoadsModels, max_bytes: int) -> None:
        self._control = control
        self._max_bytes = max_bytes
        self._texts = LargeJsonReader()

    def routes(self) -> tuple[Route, ...]:
        """Return the endpoints as Routes."""
        model = "/v2/repository/models/{model}/"
        with_repository = "/v2/repository/{repository}/models/{model}/"
        errors = (400, 500, 503)
        return (
            Route(
                "POST", ("/v2/repository/index", "/v2/repository/{repository}/index"), self.index,
                "The models in the repository, and their states", openapi.INDEX, openapi.INDEX_REQUEST, (400,),
            ),
            Route(
                "POST", (model + "load",), self.load, "Load or reload a model", body=openapi.LOAD_REQUEST,
                errors=errors,
            ),
            Route(
                "POST", (model + "unload",), self.unload, "Unload a model", body=openapi.UNLOAD_REQUEST, errors=errors,
            ),
            Route(
                "POST", (with_repository + "load", with_repository + "unload"), self.named_repository,
                "Not supported", errors=(501,),
            ),
        )  # fmt: skip

    async def index(self, request: Request) -> Response:
        body = _parse_object(await read_body(request))
        ready = body.get("ready", False)
        if not isinstance(ready, bool):
            raise InferError(Code.INVALID, 'the request must be an object such as {"ready": true}, with true or false')
        return json_answer(await self._control.index(ready))

    async def load(self, request: Request) -> Response:
        body = await read_body(request, self._max_bytes)
        if len(body) < _THREAD_BYTES:
            config, files = _load_parameters(body)
        else:
            config, files = await self._texts.read(len(body), _load_parameters, body)
        del body
        await self._control.load(request.path_params["model"], config, files)
        return Response()

    async def unload(self, request: Request) -> Response:
        parameters = _parse_parameters(await read_body(request))
        dependents = parameters.pop("unload_dependents", False)
        if not isinstance(dependents, bool):
            raise InferError(Code.INVALID, "invalid value type for 'unload_dependents' parameter, expected bool.")
        if parameters:
            raise InferError(Code.INVALID, f"unrecognized unload parameter '{next(iter(parameters))}'.")
        await self._control.unload(request.path_params["model"], dependents=dependents)
        return Response()

    async def named_repository(self, request: Request) -> Response:
        raise InferError(Code.UNSUPPORTED, "'repository_name' specification is not supported")


def _load_parameters(body: bytes) -> tuple[str | None, dict[str, bytes]]:
    """Return a load request's `config` and files. Slow for a large body."""
    parameters = _parse_parameters(body)
    for name, value in parameters.items():
        if name != "config" and not name.startswith(_FILE):
            # Triton's text and code for an unknown parameter
            raise InferError(Code.INTERNAL, "unexpected error on creating Triton parameter")
        if not isinstance(value, str):
            raise InferError(Code.INVALID, f"invalid value type for load parameter '{name}', expected string.")
    config = parameters.pop("config", None)
    return config, {name.removeprefix(_FILE): _decode_file(name, text) for name, text in parameters.items()}


def _decode_file(name: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InferError(Code.INVALID, f"load parameter '{name}' is not base64: {error}") from None


def _parse_parameters(body: bytes) -> dict[str, Any]:
    parameters = _parse_object(body, frozenset({"parameters"})).get("parameters", {})
    if not isinstance(parameters, dict):
        raise InferError(Code.INVALID, "'parameters' must be an object")
    return parameters


def _parse_object(body: bytes, known: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Parse a body: an object, or empty. Raises: InferError (INVALID), also for members outside a nonempty `known`."""
    if not body:
        return {}
    document = parse(body, MAX_JSON_DEPTH, simd=False)
    if not isinstance(document, dict):
        raise InferError(Code.INVALID, 'the request must be an object such as {"ready": true}')
    unknown = document.keys() - known
    if known and unknown:
        raise InferError(Code.INVALID, f"unexpected member '{min(unknown)}' in the request")
    return document
