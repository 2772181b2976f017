"""The control plane's two applications: what is answered without FastAPI, and how FastAPI comes to be there."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response

from penstock.server.restricted import Restricted
from penstock.server.v2 import plane
from penstock.server.v2.plane import ControlPlane
from penstock.server.v2.routes import Route


async def _same(request: Request) -> Response:
    return Response(request.method + " " + request.path_params.get("model", ""))


ASKED = Route("GET", ("/v2/models/{model}", "/v2"), _same, "What is asked of every server")
LOADING = Route("POST", ("/v2/repository/models/{model}/load",), _same, "What an administrator asks")


def ask(app: ControlPlane, *asked: tuple[str, str]) -> list[httpx.Response]:
    """Ask all of it at once."""

    async def main() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://penstock") as client:
            return await asyncio.gather(*(client.request(method, path) for method, path in asked))

    return asyncio.run(main())


@pytest.fixture
def app() -> ControlPlane:
    return ControlPlane([ASKED], [LOADING])


def test_what_every_server_is_asked_needs_no_fastapi(app: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastapi", None)

    answers = ask(app, ("GET", "/v2/models/iris"), ("HEAD", "/v2/models/iris"), ("GET", "/v2"))

    assert [answer.status_code for answer in answers] == [200, 200, 200]
    assert [answer.text for answer in answers][::2] == ["GET iris", "GET "]


def test_all_else_is_fastapi_s_which_is_made_once_and_not_on_the_loop(
    app: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def made(*said: Any, make: Any = plane._make_app) -> Any:
        threads.append(threading.current_thread())
        return make(*said)

    monkeypatch.setattr(plane, "_make_app", made)
    load, wrong, docs = ("POST", "/v2/repository/models/iris/load"), ("GET", "/nothing"), ("GET", "/docs")

    answers = ask(app, load, ("DELETE", "/v2"), wrong, docs) + ask(app, load)

    assert [answer.status_code for answer in answers] == [200, 405, 404, 200, 200]
    assert answers[0].text == answers[4].text == "POST iris"
    assert "GET /v2/models/{model}" in answers[3].text
    assert "POST /v2/repository/models/{model}/load" in answers[3].text
    assert len(threads) == 1
    assert threads != [threading.main_thread()]
    threads[0].join(10)
    assert not threads[0].is_alive()


def test_both_keep_what_is_restricted(app: ControlPlane) -> None:
    app.state.restricted = Restricted.parse(["metadata,model-repository:key=value"])

    answers = ask(app, ("GET", "/v2"), ("POST", "/v2/repository/models/iris/load"))

    assert [answer.status_code for answer in answers] == [403, 403]


def test_its_paths_are_those_of_both_and_the_pages(app: ControlPlane) -> None:
    served = ["/v2", "/v2/models/a", "/v2/repository/models/a/load", "/docs", "/openapi.json"]

    assert [path for path in (*served, "/", "/v2/models", "/redoc") if app.serves(path)] == served


def test_a_server_starts_without_fastapi_and_without_a_runtime() -> None:
    heavy = ("fastapi", "pydantic", "onnxruntime", "tensorflow", "tritonclient")
    program = (
        "import sys, penstock.server.serve, penstock.server.fronts.front, penstock.server.fronts.engine_server\n"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert ended.stdout.strip() == "[]"
