"""The control plane as an ASGI application, which uvicorn calls for what the fast lane does not answer.

Made by the composition root, of Routes, for Starlette. FastAPI, which stands on it, takes as long to import as all the
rest of a server: it makes the pages that tell of the Routes, and is imported for the first reader of one.
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
from starlette.routing import Route as Served

from penstock.backends.errors import InferError, bare
from penstock.server.errors import HTTP_STATUS, error_body, retry_after_s
from penstock.server.restricted import guarded

from . import openapi
from .routes import JSON, MEANING, Route

logger = logging.getLogger("penstock.server")


def make_app(routes: Iterable[Route], *, pages: bool = False) -> Starlette:
    """Make an application of routes. `pages`: with those that tell of them, /docs and /openapi.json."""
    routes = tuple(routes)
    served = [
        Served(path, guarded(path, route.endpoint), methods=[route.method]) for route in routes for path in route.paths
    ]
    if pages:
        told = _Pages(routes)
        served += [Served("/docs", told.docs), Served("/openapi.json", told.schema)]
    app = Starlette(
        routes=served, exception_handlers={InferError: _refused, HTTPException: _unrouted, Exception: _failed}
    )
    app.router.redirect_slashes = False
    return app


def is_served(app: Starlette, path: str) -> bool:
    """Tell whether an application has a path, whatever the method."""
    return any(isinstance(route, Served) and route.path_regex.match(path) for route in app.routes)


class _Pages:
    """What tells of some Routes. It is made for the first reader, in half a second or more, on a thread."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._routes = routes
        self._making: asyncio.Task[dict[str, Any]] | None = None

    async def schema(self, request: Request) -> Response:
        return Response(orjson.dumps(await self._described()), media_type=JSON)

    async def docs(self, request: Request) -> Response:
        return Response(openapi.page(await self._described()), media_type="text/html")

    async def _described(self) -> dict[str, Any]:
        if self._making is None:
            self._making = asyncio.create_task(asyncio.to_thread(_described, self._routes))
        # a reader that leaves takes it from nobody else
        return await asyncio.shield(self._making)


def _described(routes: Iterable[Route]) -> dict[str, Any]:
    """Give the OpenAPI document of routes."""
    from fastapi import FastAPI  # as said above

    app = FastAPI(title="Penstock", version=importlib.metadata.version("penstock"))
    for route in routes:
        for path in route.paths:
            app.add_api_route(
                path, route.endpoint, methods=[route.method], summary=route.summary, response_model=None,
                response_class=Response,
                openapi_extra=openapi.described(path, route.body, binary=path.endswith("/infer")),
                responses=openapi.answers(
                    route.answer, route.content_type, {status: MEANING[status] for status in route.errors}
                ),
            )  # fmt: skip
    return app.openapi()


async def _refused(request: Request, error: Exception) -> Response:
    if not isinstance(error, InferError):
        raise error
    seconds = retry_after_s(bare(error))
    headers = {"retry-after": str(seconds)} if seconds else None
    return Response(error_body(error.message), HTTP_STATUS[error.code], headers=headers, media_type=JSON)


async def _unrouted(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 404
    text = "Method Not Allowed" if status == 405 else "Not Found"
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    if "Allow" in headers:
        headers["Allow"] = ", ".join(sorted(headers["Allow"].split(", ")))  # it comes of a set
    return Response(error_body(text), status, headers=headers, media_type=JSON)


async def _failed(request: Request, error: Exception) -> Response:
    # the traceback is logged by uvicorn, to whom the error goes on
    number = secrets.token_hex(4)
    logger.error("%s %s failed, error id %s", request.method, request.url.path, number)
    return Response(error_body(f"internal error, id {number}"), 500, media_type=JSON)
