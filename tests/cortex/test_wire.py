"""HTTP itself on Cortex's paths: one live server, reached over bare sockets."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Iterator
from typing import Any

import aiohttp
import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.server.cortex.paths import is_penstock_path
from tests.cortex.projects import FLOWER, JSON, Answer, Project, ask, post, write_iris
from tests.live import Live, live_server

pytestmark = pytest.mark.slow

HOOKS = """
import time


def pre_inference(sample, signature, metadata):
    if isinstance(sample, dict) and "pause_s" in sample:
        time.sleep(sample["pause_s"])
    return [5.2, 3.6, 1.4, 0.3]


def post_inference(prediction, signature, metadata):
    return "done"
"""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    project = Project(tmp_path_factory.mktemp("cortex"))
    path = write_iris(project.model("m.onnx"), "N")
    project.api("plain", path)
    project.api("hooked", path, HOOKS)
    with live_server(project.folder, dialect="cortex") as served:
        yield served


def exchange(live: Live, *parts: bytes) -> bytes:
    """Send bytes over one connection, and read until the server closes it."""
    with socket.create_connection(("127.0.0.1", live.http_port), timeout=10) as connection:
        for part in parts:
            connection.sendall(part)
        found = []
        while part := connection.recv(65536):
            found.append(part)
    return b"".join(found)


def head(path: str, *fields: str, method: str = "POST", version: str = "1.1") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/{version}", "host: x", *fields, "", ""]).encode()


def test_every_path_of_the_control_plane_is_a_penstock_path(live: Live) -> None:
    paths = [getattr(route, "path", "") for route in live.server.app().routes]

    assert len(paths) > 20
    assert all(map(is_penstock_path, paths))


def test_a_connection_is_kept_alive_and_answers_in_order(live: Live) -> None:
    body = json.dumps(FLOWER).encode()
    sized = head("/iris/hooked", JSON, f"content-length: {len(body)}") + body
    chunked = head("/iris/hooked", JSON, "transfer-encoding: chunked") + b"2\r\n[5\r\n1\r\n]\r\n0\r\n\r\n"
    last = head("/healthz", "connection: close", method="GET")
    found = exchange(live, sized + chunked + head("/nothing", method="GET"), last)

    assert re.findall(rb"HTTP/1\.1 (\d+) ", found) == [b"200", b"200", b"500", b"200"]
    assert found.endswith(b'{"ok":true}\n')


def test_http_1_0_and_expect_are_served(live: Live) -> None:
    body = json.dumps(FLOWER).encode()
    old = exchange(live, head("/iris/hooked", JSON, f"content-length: {len(body)}", version="1.0") + body)
    head_bytes = head("/iris/hooked", JSON, f"content-length: {len(body)}", "expect: 100-continue", "connection: close")
    expecting = exchange(live, head_bytes, body)

    assert old.startswith(b"HTTP/1.1 200 OK\r\n")
    assert old.endswith(b'"done"\n')
    assert expecting.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize("target", ["http://x/iris/plain/signature", "https://other:99/iris/plain/signature"])
def test_a_request_target_can_be_an_absolute_url(live: Live, target: str) -> None:
    assert ask(live.http_port, "GET", target).body == ask(live.http_port, "GET", "/iris/plain/signature").body
    assert ask(live.http_port, "GET", "http://x").status == 500


@pytest.mark.parametrize("path", ["/healthz", "/iris/plain", "/iris/plain/signature", "/nothing"])
def test_a_head_request_is_answered_like_get_without_the_body(live: Live, path: str) -> None:
    get, answered = ask(live.http_port, "GET", path), ask(live.http_port, "HEAD", path)

    assert answered.body == b""
    assert answered.line == get.line
    assert answered.headers | {"date": ""} == get.headers | {"date": ""}


def test_cross_origin_requests_are_allowed(live: Live) -> None:
    fields = {"origin": "http://elsewhere", "access-control-request-method": "POST",
              "access-control-request-headers": "content-type,x-mine"}  # fmt: skip
    with httpx.Client(base_url=live.url) as client:
        allowed = client.options("/iris/plain", headers=fields)
        refused = client.post("/iris/plain", json=[1], headers={"origin": "http://elsewhere"})

    assert (allowed.status_code, allowed.content) == (200, b"")
    assert allowed.headers["access-control-allow-origin"] == "*"
    assert allowed.headers["access-control-allow-headers"] == "*"
    assert set(allowed.headers["allow"].split(", ")) == {"GET", "HEAD", "OPTIONS", "POST"}
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (406, "*")


def test_healthz_is_503_while_the_server_drains(live: Live) -> None:
    async def draining(value: bool) -> None:
        live.server.health.draining = value

    live.call(draining(value=True))
    try:
        assert ask(live.http_port, "GET", "/healthz").status == 503
    finally:
        live.call(draining(value=False))
    assert ask(live.http_port, "GET", "/healthz").status == 200


@settings(max_examples=60)
@given(st.binary(max_size=60) | st.text('[]{}":,0123456789.eE-NaN ', max_size=60).map(str.encode))
def test_any_body_is_answered_with_200_400_or_406(live: Live, body: bytes) -> None:
    answer: Answer = ask(live.http_port, "POST", "/iris/plain", body, JSON)

    assert answer.status in {200, 400, 406}
    assert answer.status != 400 or answer.body == b"malformed json"


def test_a_json_body_in_another_unicode_encoding_is_read(live: Live) -> None:
    for encoding in ("utf-8-sig", "utf-16", "utf-32-be"):
        answer = ask(live.http_port, "POST", "/iris/plain", json.dumps(FLOWER).encode(encoding), JSON)
        assert answer.json[0] == [0]


def test_clients_that_disconnect_do_not_affect_later_requests(live: Live) -> None:
    body = json.dumps({"pause_s": 0.05}).encode()
    raw = head("/iris/hooked", JSON, f"content-length: {len(body)}") + body
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", live.http_port), timeout=10) as connection:
            connection.sendall(raw)

    assert post(live.http_port, "/iris/hooked", 1).json == "done"


def test_both_protocols_are_served_over_the_same_connections(live: Live) -> None:
    tensor = {"name": "input", "datatype": "FP32", "shape": [1, 4], "data": FLOWER}
    requests: list[tuple[str, Any]] = [
        ("/iris/plain", FLOWER), ("/v2/models/plain/infer", {"inputs": [tensor]}), ("/iris/hooked", 1),
        ("/v2/models/hooked/predict", 1),
    ]  # fmt: skip

    async def main() -> list[tuple[int, Any]]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=16)) as session:

            async def one(number: int) -> tuple[int, Any]:
                path, value = requests[number % len(requests)]
                async with session.post(live.url + path, json=value) as response:
                    return response.status, await response.json()

            return await asyncio.gather(*map(one, range(400)))

    answers = asyncio.run(main())
    for number, (status, answer) in enumerate(answers):
        assert status == 200
        if number % 4 == 0:
            assert answer[0] == [0]
        elif number % 4 == 1:
            assert answer["outputs"][0]["data"] == [0]
        else:
            assert answer == "done"


def test_large_samples_are_accepted_and_samples_over_the_limit_are_rejected(live: Live) -> None:
    answer = post(live.http_port, "/iris/hooked", ["x" * 1000] * 4000)
    with httpx.Client(base_url=live.url, timeout=60) as client:
        refused = client.post(
            "/iris/hooked", content=b"[" + b"1," * (33 << 20) + b"1]", headers={"content-type": "application/json"}
        )

    assert answer.json == "done"
    assert refused.status_code == 400
    assert "exceeds the maximum allowed input size" in refused.text
