"""SeldonService with a running component: what a call does to other calls and to other requests."""

from __future__ import annotations

import gzip
import http.client
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.live import Live, live_server

pytestmark = pytest.mark.slow

MOODY = '''
import os
import pathlib


class Moody:
    """Does what it is told."""

    def predict(self, X, names):
        if X == "exit":
            os._exit(3)
        if X == "raise":
            raise ValueError("not today")
        if X.startswith("/"):
            pathlib.Path(X, "begun").write_bytes(b"")  # pipes: each end waits for the other
            pathlib.Path(X, "enough").read_bytes()
        return X
'''


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("moody")
    (folder / "Moody.py").write_text(MOODY, "utf-8")
    with live_server(folder, dialect="seldon", seldon_component="Moody") as live:
        yield live


def ask(live: Live, method: str, path: str, body: bytes | None = None, **fields: str) -> tuple[int, bytes]:
    """Send a request on its own connection."""
    with closing(http.client.HTTPConnection("127.0.0.1", live.http_port, timeout=30)) as connection:
        connection.request(method, path, body, {"Content-Type": "application/json"} | fields)
        with connection.getresponse() as answer:
            return answer.status, answer.read()


def predict(live: Live, text: str) -> tuple[int, Any]:
    """Have the component do something."""
    status, body = ask(live, "POST", "/predict", json.dumps({"strData": text}).encode())
    answer = json.loads(body)
    return status, answer.get("strData") or answer["status"]["info"]


def test_a_component_that_raises_or_exits_fails_only_its_own_call(live: Live) -> None:
    words = ["a", "raise", "b", "exit", "c", "exit", "d"]
    with ThreadPoolExecutor(len(words)) as threads:
        found = list(threads.map(lambda word: predict(live, word), words))

    dead = 503, "component 'Moody' ended: exit status 3"
    assert found == [(200, "a"), (500, "not today"), (200, "b"), dead, (200, "c"), dead, (200, "d")]


def test_health_and_metadata_are_answered_while_a_call_is_running(live: Live, tmp_path: Path) -> None:
    begun, enough = tmp_path / "begun", tmp_path / "enough"
    os.mkfifo(begun)
    os.mkfifo(enough)
    with ThreadPoolExecutor(1) as thread:
        busy = thread.submit(predict, live, str(tmp_path))
        begun.read_bytes()
        assert ask(live, "GET", "/health/ping") == (200, b"pong")
        assert ask(live, "GET", "/health/status") == (200, b'{"meta":{},"strData":"healthy"}\n')
        assert ask(live, "GET", "/metadata")[0] == 200
        assert not busy.done()
        enough.write_bytes(b"")
        assert busy.result(30) == (200, str(tmp_path))


def test_one_connection_serves_many_calls(live: Live) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", live.http_port, timeout=30)) as connection:
        sockets = []
        for text in ("a", "b", "c"):
            connection.request("POST", "/predict", json.dumps({"strData": text}), {"Content-Type": "application/json"})
            sockets.append(connection.sock)
            with connection.getresponse() as answer:
                assert json.load(answer)["strData"] == text

    assert sockets == [sockets[0]] * 3


def test_a_compressed_body_is_read(live: Live) -> None:
    body = gzip.compress(b'{"strData":"x"}')

    assert ask(live, "POST", "/predict", body, **{"Content-Encoding": "gzip"}) == (200, b'{"meta":{},"strData":"x"}\n')


@pytest.mark.parametrize("path", ["/nope", "/v2x"])
def test_an_unknown_path_is_answered_as_in_seldon_core(live: Live, path: str) -> None:
    status, body = ask(live, "GET", path)

    assert (status, json.loads(body)["status"]["info"][:14]) == (500, "404 Not Found:")


def test_the_v2_protocol_is_served_beside_seldons(live: Live) -> None:
    assert ask(live, "GET", "/v2/health/ready")[0] == 200


LOOKING = """
from flask import request


class Looking:
    def predict(self, X, names):
        return f"{request.headers.get('X-Tenant')} {request.method} {request.path} {request.get_json()}"
"""


def test_a_component_reads_the_clients_headers_from_flasks_request(tmp_path: Path) -> None:
    pytest.importorskip("flask")
    (tmp_path / "Looking.py").write_text(LOOKING, "utf-8")
    with live_server(tmp_path, dialect="seldon", seldon_component="Looking") as live:
        path, body = "/api/v1.0/predictions", b'{"strData": "a"}'
        answers = [ask(live, "POST", path, body, **{"X-Tenant": each})[1] for each in ("acme", "other")]

    texts = [json.loads(each)["strData"] for each in answers]
    assert texts == [f"{each} POST {path} {{'strData': 'a'}}" for each in ("acme", "other")]
