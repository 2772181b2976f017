"""The application of the control plane, and when FastAPI is imported."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from penstock.server.restricted import RestrictedApis
from penstock.server.v2 import plane
from penstock.server.v2.plane import is_served, make_app
from penstock.server.v2.routes import Route


async def _same(request: Request) -> Response:
    return Response(request.method + " " + request.path_params.get("model", ""))


GENERAL = Route("GET", ("/v2/models/{model}", "/v2"), _same, "What is asked of every server")
LOADING = Route("POST", ("/v2/repository/models/{model}/load",), _same, "What an administrator asks")


def ask(app: Starlette, *requests: tuple[str, str]) -> list[httpx.Response]:
    """Send all requests in parallel."""

    async def main() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://penstock") as client:
            return await asyncio.gather(*(client.request(method, path) for method, path in requests))

    return asyncio.run(main())


@pytest.fixture
def app() -> Starlette:
    return make_app([GENERAL, LOADING], pages=True)


def test_routes_and_errors_are_served_without_importing_fastapi(
    app: Starlette, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fastapi", None)
    load = "POST", "/v2/repository/models/iris/load"

    answers = ask(app, ("GET", "/v2/models/iris"), ("HEAD", "/v2/models/iris"), ("GET", "/v2"), load)
    wrong = ask(app, ("DELETE", "/v2"), ("GET", "/nothing"), ("GET", "/v2/"))

    assert [answer.status_code for answer in answers] == [200, 200, 200, 200]
    assert [answers[at].text for at in (0, 2, 3)] == ["GET iris", "GET ", "POST iris"]
    assert [(answer.status_code, answer.json()["error"]) for answer in wrong] == [
        (405, "Method Not Allowed"), (404, "Not Found"), (404, "Not Found"),
    ]  # fmt: skip


def test_the_openapi_pages_list_all_routes_and_are_rendered_once_on_a_thread(
    app: Starlette, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def render(*arguments: Any, make: Any = plane._openapi_document) -> Any:
        threads.append(threading.current_thread())
        return make(*arguments)

    monkeypatch.setattr(plane, "_openapi_document", render)

    docs, schema = ask(app, ("GET", "/docs"), ("GET", "/openapi.json"))

    assert "GET /v2/models/{model}" in docs.text
    assert list(schema.json()["paths"]) == ["/v2/models/{model}", "/v2", "/v2/repository/models/{model}/load"]
    assert len(threads) == 1
    assert threads != [threading.main_thread()]


def test_restricted_endpoints_are_forbidden_without_their_key(app: Starlette) -> None:
    app.state.restricted = RestrictedApis.parse(["metadata,model-repository:key=value"])

    answers = ask(app, ("GET", "/v2"), ("POST", "/v2/repository/models/iris/load"))

    assert [answer.status_code for answer in answers] == [403, 403]


def test_is_served_recognizes_the_routes_and_the_openapi_pages(app: Starlette) -> None:
    served = ["/v2", "/v2/models/a", "/v2/repository/models/a/load", "/docs", "/openapi.json"]

    assert [path for path in (*served, "/", "/v2/models", "/redoc") if is_served(app, path)] == served


def test_a_server_starts_without_importing_fastapi_or_a_model_runtime() -> None:
    heavy = ("fastapi", "pydantic", "onnxruntime", "tensorflow", "tritonclient")
    program = (
        "import sys, penstock.server.serve, penstock.server.fronts.front, penstock.server.fronts.engine_server\n"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert ended.stdout.strip() == "[]"
