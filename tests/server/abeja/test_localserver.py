"""The requests of `model run-local`, and how it treats the answers, without a handler."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from penstock.server.abeja.localserver import LocalServer, LocalServerError

ANSWERS: dict[str, tuple[int, dict[str, str], bytes]] = {
    "/": (200, {}, b"x"),
    "/see-other": (303, {"Location": "/asked"}, b""),
    "/same": (307, {"Location": "asked"}, b""),
    "/asking": (302, {"Location": "asked?x#y"}, b""),
    "/round": (302, {"Location": "/round"}, b""),
    "/nowhere": (302, {}, b"stays"),
    "/asked?x": (200, {}, b"with its query"),
}


class RequestHeaders(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status, headers, body = ANSWERS.get(self.path, (200, {}, self.command.encode()))
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalServer]:
    server = HTTPServer(("127.0.0.1", 0), RequestHeaders)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    local_server = LocalServer("m:h", "0", {})
    local_server._ports = {"HTTP": server.server_port, "health": 0}
    yield local_server
    server.shutdown()
    server.server_close()
    thread.join()


def first(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """Have `/` answer as another path does."""
    monkeypatch.setitem(ANSWERS, "/", ANSWERS[path])


def test_post_returns_the_body_of_the_answer(local: LocalServer) -> None:
    assert local.post("text/plain", b"body") == b"x"


@pytest.mark.parametrize(
    ("path", "method"), [("/see-other", b"GET"), ("/same", b"POST"), ("/asking", b"with its query")]
)
def test_post_follows_redirects(local: LocalServer, monkeypatch: pytest.MonkeyPatch, path: str, method: bytes) -> None:
    first(monkeypatch, path)

    assert local.post("text/plain", b"body") == method


def test_post_fails_after_30_redirects(local: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    first(monkeypatch, "/round")

    with pytest.raises(LocalServerError, match=r"^failed to send request : Exceeded 30 redirects\.$"):
        local.post("text/plain", b"body")


def test_post_does_not_follow_a_redirect_without_a_location(
    local: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first(monkeypatch, "/nowhere")

    assert local.post("text/plain", b"body") == b"stays"


def test_post_reports_an_error_status_as_the_original_did(local: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ANSWERS, "/", (503, {}, b"why"))

    with pytest.raises(LocalServerError) as failed:
        local.post("text/plain", b"body")
    assert str(failed.value) == (
        f"failed to send request : 503 Server Error: Service Unavailable for url: {local.endpoint}/"
    )


def test_the_message_of_a_json_log_line_is_shown(local: LocalServer) -> None:
    assert local._log_message('{"level": "INFO", "msg": "handler \'m:h\': printed"}') == "printed"
    assert local._log_message("no JSON") == "no JSON"
    assert local._log_message("[1]") == "[1]"
