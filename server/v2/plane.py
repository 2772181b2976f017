"""ControlPlane: the control plane as one ASGI application, which uvicorn calls for what the fast lane does not answer.

Made by the composition root. FastAPI takes as long to import as all the rest of a server. So what nearly every client
asks is answered without it: by Starlette, on which it stands, from the same Routes.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.metadata
import logging
import secrets
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.datastructures import State
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as Quick
from starlette.routing import compile_path

from penstock.backends.errors import InferError, bare
from penstock.server.errors import HTTP_STATUS, error_body, retry_after_s
from penstock.server.restricted import guarded

from . import openapi
from .routes import JSON, MEANING, Route

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.types import Receive, Scope, Send

logger = logging.getLogger("penstock.server")

_PAGES = ("/docs", "/openapi.json")
"""What is served beside the Routes, and tells of them."""


class ControlPlane:
    """All Routes: `routes`, which are there at once, and `others`, which are once FastAPI is.

    FastAPI is imported, and its application made, with the first request that none of `routes` is for: an
    administrator's, a reader's of the pages, or one that is wrong. That takes half a second or more, on a thread.
    """

    def __init__(self, routes: Iterable[Route], others: Iterable[Route] = ()) -> None:
        routes = tuple(routes)
        self._all = (*others, *routes)
        self._quick = make_quick_app(routes)
        served = (route for route in self._quick.routes if isinstance(route, Quick))
        self._known = [(route.path_regex, route.methods or set()) for route in served]
        self._whole: FastAPI | None = None
        self._thread = ThreadPoolExecutor(1, "penstock-pages")

    @property
    def state(self) -> State:
        """What both applications have as theirs; `restricted` are the rules of restricted APIs, if there are any."""
        return self._quick.state

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths that are served, as patterns."""
        return (*_PAGES, *(path for route in self._all for path in route.paths))

    @functools.cached_property
    def _patterns(self) -> list[Any]:
        return [compile_path(path)[0] for path in self.paths]

    def serves(self, path: str) -> bool:
        """Tell whether a path is one of them, whatever the method."""
        return any(pattern.match(path) for pattern in self._patterns)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request (called by uvicorn)."""
        path, method = scope["path"], scope["method"]
        if any(pattern.match(path) and method in methods for pattern, methods in self._known):
            await self._quick(scope, receive, send)
        elif self._whole is not None:
            await self._whole(scope, receive, send)
        else:
            # a thread that no load of a model holds up
            whole = await asyncio.get_running_loop().run_in_executor(self._thread, self._make_whole)
            self._thread.shutdown(wait=False)  # what it was for is done
            await whole(scope, receive, send)

    def _make_whole(self) -> FastAPI:
        if self._whole is None:
            self._whole = _make_app(self._all, self.state)
        return self._whole


def make_quick_app(routes: Iterable[Route]) -> Starlette:
    """Make an application of routes alone, without pages."""
    return Starlette(
        routes=[
            Quick(path, guarded(path, route.endpoint), methods=[route.method])
            for route in routes
            for path in route.paths
        ],
        exception_handlers=_HANDLERS,
    )


def _make_app(routes: Iterable[Route], state: State) -> FastAPI:
    """Make an application of routes, with pages."""
    from fastapi import FastAPI  # as said above

    app = FastAPI(
        title="Penstock", version=importlib.metadata.version("penstock"), docs_url=None, redoc_url=None,
        redirect_slashes=False, exception_handlers=_HANDLERS,
    )  # fmt: skip
    app.state = state

    async def docs(request: Request) -> Response:
        return Response(openapi.page(app.openapi()), media_type="text/html")

    app.add_api_route("/docs", docs, methods=["GET"], include_in_schema=False)
    for route in routes:
        for path in route.paths:
            endpoint = guarded(path, route.endpoint)
            app.add_api_route(
                path, endpoint, methods=[route.method], summary=route.summary, response_model=None,
                response_class=Response,
                openapi_extra=openapi.described(path, route.body, binary=path.endswith("/infer")),
                responses=openapi.answers(
                    route.answer, route.content_type, {status: MEANING[status] for status in route.errors}
                ),
            )  # fmt: skip
            if route.method == "GET":
                app.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False)
    return app


async def _refused(request: Request, error: Exception) -> Response:
    if not isinstance(error, InferError):
        raise error
    seconds = retry_after_s(bare(error))
    headers = {"retry-after": str(seconds)} if seconds else None
    return Response(error_body(error.message), HTTP_STATUS[error.code], headers=headers, media_type=JSON)


async def _unrouted(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 404
    text = "Method Not Allowed" if status == 405 else "Not Found"
    headers = error.headers if isinstance(error, HTTPException) else None
    return Response(error_body(text), status, headers=headers, media_type=JSON)


async def _failed(request: Request, error: Exception) -> Response:
    # the traceback is logged by uvicorn, to whom the error goes on
    number = secrets.token_hex(4)
    logger.error("%s %s failed, error id %s", request.method, request.url.path, number)
    return Response(error_body(f"internal error, id {number}"), 500, media_type=JSON)


_HANDLERS: dict[Any, Any] = {InferError: _refused, HTTPException: _unrouted, Exception: _failed}
