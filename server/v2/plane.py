"""The control plane as an ASGI application, which uvicorn calls for requests that the fast lane does not answer.

Made by the composition root from Routes, with Starlette. FastAPI, which is built on it, takes as long to import as the
rest of a server: it only generates the documentation pages, and is imported on first use.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as StarletteRoute

from penstock.backends.errors import InferError, without_traceback
from penstock.server.errors import HTTP_STATUS, error_body, retry_after_s
from penstock.server.restricted import with_access_check

from . import openapi
from .routes import JSON, STATUS_DESCRIPTIONS, Route

logger = logging.getLogger("penstock.server")


def make_app(routes: Iterable[Route], *, pages: bool = False) -> Starlette:
    """Make an application from routes. `pages`: also serve their documentation, /docs and /openapi.json."""
    routes = tuple(routes)
    served = [
        StarletteRoute(path, with_access_check(path, route.endpoint), methods=[route.method])
        for route in routes
        for path in route.paths
    ]
    if pages:
        documentation = _DocumentationPages(routes)
        served += [StarletteRoute("/docs", documentation.docs), StarletteRoute("/openapi.json", documentation.schema)]
    app = Starlette(
        routes=served,
        exception_handlers={
            InferError: _answer_infer_error,
            HTTPException: _answer_http_error,
            Exception: _answer_unexpected_error,
        },
    )
    app.router.redirect_slashes = False
    return app


def is_served(app: Starlette, path: str) -> bool:
    """Return whether an application has a path, for any method."""
    return any(isinstance(route, StarletteRoute) and route.path_regex.match(path) for route in app.routes)


class _DocumentationPages:
    """The documentation of some Routes, generated on a thread on first use, which takes half a second or more."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._routes = routes
        self._making: asyncio.Task[dict[str, Any]] | None = None

    async def schema(self, request: Request) -> Response:
        return Response(orjson.dumps(await self._openapi_document()), media_type=JSON)

    async def docs(self, request: Request) -> Response:
        return Response(openapi.page(await self._openapi_document()), media_type="text/html")

    async def _openapi_document(self) -> dict[str, Any]:
        if self._making is None:
            self._making = asyncio.create_task(asyncio.to_thread(_openapi_document, self._routes))
        # a reader that disconnects must not cancel it for the others
        return await asyncio.shield(self._making)


def _openapi_document(routes: Iterable[Route]) -> dict[str, Any]:
    """Return the OpenAPI document of routes."""
    from fastapi import FastAPI  # imported on first use, see above

    app = FastAPI(title="Penstock", version=importlib.metadata.version("penstock"))
    for route in routes:
        for path in route.paths:
            app.add_api_route(
                path, route.endpoint, methods=[route.method], summary=route.summary, response_model=None,
                response_class=Response,
                openapi_extra=openapi.describe_request(path, route.body, binary=path.endswith("/infer")),
                responses=openapi.describe_answers(
                    route.answer, route.content_type, {status: STATUS_DESCRIPTIONS[status] for status in route.errors}
                ),
            )  # fmt: skip
    return app.openapi()


async def _answer_infer_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, InferError):
        raise error
    seconds = retry_after_s(without_traceback(error))
    headers = {"retry-after": str(seconds)} if seconds else None
    return Response(error_body(error.message), HTTP_STATUS[error.code], headers=headers, media_type=JSON)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 404
    text = "Method Not Allowed" if status == 405 else "Not Found"
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    if "Allow" in headers:
        headers["Allow"] = ", ".join(sorted(headers["Allow"].split(", ")))  # Starlette builds it from a set
    return Response(error_body(text), status, headers=headers, media_type=JSON)


async def _answer_unexpected_error(request: Request, error: Exception) -> Response:
    # uvicorn logs the traceback, because the error is raised again to it
    error_id = secrets.token_hex(4)
    logger.error("%s %s failed, error id %s", request.method, request.url.path, error_id)
    return Response(error_body(f"internal error, id {error_id}"), 500, media_type=JSON)
