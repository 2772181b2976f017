"""Vertex AI: the health route, predictions, and Triton's endpoints selected by a header. Created by clouds.py.

VertexService handles inference on the fast lane, VertexApp everything else. Source: Triton server, vertex_ai_server.cc
(routes, codes, texts).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import unquote

from penstock.server.errors import error_body

from .forwarded import ForwardingService, answer, forward, infer_path

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.types import Receive, Scope, Send

    from penstock.server.http.head import Head
    from penstock.server.telemetry.page import ASGIApp
    from penstock.server.v2.claims import InferenceClaim
    from penstock.server.v2.inference import Inference

MIME = b"application/vnd.vertex-ai-triton.binary+json;json-header-size="
LOADING = "models are being loaded"
_REDIRECT = b"x-vertex-ai-triton-redirect"
_INFER = re.compile("v2/models/[^/]+(?:/versions/[0-9]+)?/infer")
_MODEL = "v2/models/[^/]+(?:/versions/[0-9]+)?"
_REGION = "v2/(?:system|cuda)sharedmemory(?:/region/[^/]+)?"
_REPOSITORY = "v2/repository(?:/[^/]+)?"
_GET_PATHS = re.compile(
    f"metrics|v2|v2/health/(?:live|ready)|v2/models/stats|{_MODEL}(?:/(?:ready|config|stats))?|{_REGION}/status"
)
"""Paths of the HTTP port that take GET."""
_POST_PATHS = re.compile(f"{_REGION}/(?:un)?register|{_REPOSITORY}/index|{_REPOSITORY}/models/[^/]+/(?:un)?load")
"""Paths of the HTTP port that take POST."""


@dataclass(slots=True)
class PredictRoutes:
    """The two routes, and the model for predictions that name none: "" until it is known."""

    health: str
    route: str
    model: str

    def choose(self, names: Iterable[str]) -> str:
        """Choose the model from those that are ready. Returns: why there is none, in Triton's words; "" if there is."""
        ready = sorted(set(names))
        if self.model:
            return "" if self.model in ready else f"Expect the default model '{self.model}' is loaded"
        if len(ready) != 1:
            return "Expect the model repository contains only a single model if default model is not specified"
        self.model = ready[0]
        return ""


class VertexService(ForwardingService):
    """The Service of the port."""

    def __init__(self, inference: Inference, routes: PredictRoutes) -> None:
        super().__init__(inference, MIME)
        self._routes = routes

    def claim(self, head: Head) -> InferenceClaim | None:
        """Claim inference: of the default model, or as a header says."""
        routes = self._routes
        if head.method != b"POST" or unquote(head.path.decode("latin-1")) != routes.route:
            return None
        redirect = head.header.get(_REDIRECT)
        if redirect is None:
            return self.claim_path(head, infer_path(routes.model)) if routes.model else None
        path = redirect.decode("latin-1")
        return self.claim_path(head, f"/{path}") if _INFER.fullmatch(path) else None


class VertexApp:
    """The application of the port, for everything except inference. Penstock's `app` answers the requests."""

    def __init__(self, app: ASGIApp, routes: PredictRoutes) -> None:
        self._app = app
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request (called by uvicorn)."""
        path, method, routes = scope["path"], scope["method"], self._routes
        redirect = next((value for name, value in scope["headers"] if name == _REDIRECT), None)
        if path == routes.health:
            await forward(self._app, scope, method, "/v2/health/ready", (receive, send))
        elif path != routes.route:
            await answer(send, 400)
        elif method != "POST":
            await answer(send, 405)
        elif redirect is None:
            await answer(send, 503, error_body(LOADING))
        else:
            await self._redirect(scope, receive, send, unquote(redirect.decode("latin-1")))

    async def _redirect(self, scope: Scope, receive: Receive, send: Send, path: str) -> None:
        if _GET_PATHS.fullmatch(path):
            await forward(self._app, scope, "GET", f"/{path}", (receive, send))
        elif _POST_PATHS.fullmatch(path):
            await forward(self._app, scope, "POST", f"/{path}", (receive, send))
        else:
            await answer(send, 400)
