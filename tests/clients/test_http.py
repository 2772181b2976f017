"""HTTP from http.client, httpx, aiohttp, curl and plain sockets, on the fast lane and the control plane."""

from __future__ import annotations

import asyncio
import http.client
import json
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import numpy as np
import pytest

from tests.clients import models
from tests.clients.tensors import document
from tests.live import Live, live_server

pytestmark = pytest.mark.slow

PATH = "/v2/models/identity_FP32/infer"
ARRAY = np.array([[1.5, -2]], np.float32)
BODY = json.dumps(document(ARRAY)).encode()
ANSWER = {
    "model_name": "identity_FP32",
    "model_version": "1",
    "outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 2], "data": [1.5, -2.0]}],
}
ENDPOINTS = {  # path: its methods
    "/v2": {"GET", "HEAD"},
    "/v2/health/live": {"GET", "HEAD"},
    "/v2/health/ready": {"GET", "HEAD"},
    "/v2/models/stats": {"GET", "HEAD"},
    "/v2/models/identity_FP32": {"GET", "HEAD"},
    "/v2/models/identity_FP32/config": {"GET", "HEAD"},
    "/v2/models/identity_FP32/ready": {"GET", "HEAD"},
    "/v2/models/identity_FP32/versions/1/stats": {"GET", "HEAD"},
    "/metrics": {"GET", "HEAD"},
    "/v2/repository/index": {"POST"},
    PATH: {"POST"},
    "/v2/models/identity_FP32/versions/1/infer": {"POST"},
    "/v2/models/identity_FP32/predict": {"POST"},
}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live_server(models.write_identities(tmp_path_factory.mktemp("repository"))) as server:
        yield server


@pytest.fixture
def connection(live: Live) -> Iterator[http.client.HTTPConnection]:
    new_connection = http.client.HTTPConnection("127.0.0.1", live.http_port, timeout=20)
    yield new_connection
    new_connection.close()


def ask(connection: http.client.HTTPConnection, *request: Any, **options: Any) -> tuple[int, bytes]:
    connection.request(*request, **options)
    response = connection.getresponse()
    return response.status, response.read()


def exchange(live: Live, *parts: bytes) -> bytes:
    """Send parts on a new socket, then read until the server closes it."""
    with socket.create_connection(("127.0.0.1", live.http_port), timeout=20) as sock:
        for part in parts:
            sock.sendall(part)
        received = b""
        while piece := sock.recv(1 << 16):
            received += piece
        return received


def head(method: str, path: str, *fields: str) -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "host: x", *fields, "", ""]).encode()


def request(path: str = PATH, body: bytes = BODY, *fields: str) -> bytes:
    return head("POST", path, f"content-length: {len(body)}", *fields) + body


CLOSE = "connection: close"


class TestConnections:
    def test_one_connection_carries_inference_and_control_requests(
        self, connection: http.client.HTTPConnection
    ) -> None:
        for _ in range(5):
            assert json.loads(ask(connection, "POST", PATH, BODY)[1]) == ANSWER
            own = connection.sock
            assert ask(connection, "GET", "/v2/health/live") == (200, b"")
            assert json.loads(ask(connection, "GET", "/v2/models/identity_FP32")[1])["name"] == "identity_FP32"
            assert ask(connection, "GET", "/nowhere")[0] == 404
            assert ask(connection, "POST", PATH, b"{")[0] == 400
            assert connection.sock is own is not None

    def test_a_connection_is_closed_when_the_client_sends_connection_close(self, live: Live) -> None:
        for message in (request(PATH, BODY, CLOSE), head("GET", "/v2", CLOSE)):
            answer = exchange(live, message)

            assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
            assert b"\r\nconnection: close\r\n" in answer.lower()

    def test_an_http_1_0_request_is_answered_and_its_connection_closed(self, live: Live) -> None:
        message = request().replace(b"HTTP/1.1", b"HTTP/1.0")

        assert json.loads(exchange(live, message).partition(b"\r\n\r\n")[2]) == ANSWER

    def test_pipelined_requests_are_answered_in_order(self, live: Live) -> None:
        messages = b"".join(
            request(PATH, json.dumps(document(ARRAY * i, id=str(i))).encode()) + head("GET", f"/nowhere/{i}")
            for i in range(40)
        )
        answers = _split(exchange(live, messages + head("GET", "/v2/health/live", CLOSE)))

        assert [status for status, _ in answers] == [200, 404] * 40 + [200]
        assert [json.loads(body)["id"] for status, body in answers if status == 200 and body] == [
            str(i) for i in range(40)
        ]

    @pytest.mark.parametrize("size", [1, 7, 64])
    def test_a_request_may_arrive_in_pieces_of_any_size(self, live: Live, size: int) -> None:
        messages = request() + request(PATH, BODY, CLOSE)
        answers = _split(exchange(live, *(messages[at : at + size] for at in range(0, len(messages), size))))

        assert [json.loads(body) for _, body in answers] == [ANSWER, ANSWER]

    def test_a_client_that_shuts_down_its_sending_side_receives_its_answer(self, live: Live) -> None:
        with socket.create_connection(("127.0.0.1", live.http_port), timeout=20) as sock:
            sock.sendall(request())
            sock.shutdown(socket.SHUT_WR)
            received = b""
            while piece := sock.recv(1 << 16):
                received += piece

        assert json.loads(received.partition(b"\r\n\r\n")[2]) == ANSWER


def _split(received: bytes) -> list[tuple[int, bytes]]:
    """Split answers by their lengths."""
    answers = []
    while received:
        first, _, received = received.partition(b"\r\n\r\n")
        lines = first.split(b"\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in lines[1:])
        length = int(fields[b"content-length"])
        answers.append((int(lines[0].split()[1]), received[:length]))
        received = received[length:]
    return answers


class TestRouting:
    @pytest.mark.parametrize("path", ENDPOINTS)
    @pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
    def test_a_wrong_method_is_rejected_and_head_is_get_without_a_body(
        self, connection: http.client.HTTPConnection, path: str, method: str
    ) -> None:
        status, body = ask(connection, method, path)

        if method in ENDPOINTS[path]:
            assert status == (400 if path.endswith(("/infer", "/predict")) else 200)
            assert not (method == "HEAD" and body)
        else:
            assert status == 405
            assert body == (b"" if method == "HEAD" else b'{"error":"Method Not Allowed"}')

    @pytest.mark.parametrize("target", ["/v2", "x:443"])
    @pytest.mark.parametrize("body", [b"", b"abc"])
    def test_connect_is_rejected_without_a_warning_in_the_log(
        self, live: Live, caplog: pytest.LogCaptureFixture, target: str, body: bytes
    ) -> None:
        answer = exchange(live, head("CONNECT", target, f"content-length: {len(body)}") + body)

        assert answer.startswith(b"HTTP/1.1 405 Method Not Allowed\r\n")
        assert answer.endswith(b'{"error":"Method Not Allowed"}')
        assert not caplog.records

    def test_head_reports_the_length_of_the_omitted_body(self, connection: http.client.HTTPConnection) -> None:
        _, body = ask(connection, "GET", "/v2")
        connection.request("HEAD", "/v2")
        response = connection.getresponse()

        assert (response.read(), response.headers["content-length"]) == (b"", str(len(body)))

    @pytest.mark.parametrize(
        "path",
        ["/", "/v1", "/v2/", "/v2/models", "/v2/models/", "/v2/models//infer", f"{PATH}/", f"/base{PATH}",
         "/v2/models/identity_FP32/versions//infer"],
    )  # fmt: skip
    @pytest.mark.parametrize("method", ["GET", "POST"])
    def test_an_unknown_path_is_not_found(self, connection: http.client.HTTPConnection, path: str, method: str) -> None:
        assert ask(connection, method, path, BODY) == (404, b'{"error":"Not Found"}')

    @pytest.mark.parametrize(("path", "method"), [(path, min(verbs)) for path, verbs in ENDPOINTS.items()])
    def test_a_query_string_is_ignored(self, connection: http.client.HTTPConnection, path: str, method: str) -> None:
        body = BODY if path.endswith("infer") else b""

        assert ask(connection, method, f"{path}?test_1=1&test_2=%2F", body)[0] == ask(connection, method, path, body)[0]

    def test_a_model_name_may_be_percent_encoded_and_a_version_may_have_leading_zeros(
        self, connection: http.client.HTTPConnection
    ) -> None:
        for path in ("/v2/models/identity%5FFP32/infer", "/v2/models/identity_FP32/versions/001/infer"):
            assert json.loads(ask(connection, "POST", path, BODY)[1]) == ANSWER


class TestBodies:
    @pytest.mark.parametrize("path", [PATH, "/v2/repository/index"])
    @pytest.mark.parametrize("size", [1, 10, 1000])
    def test_a_chunked_body_is_reassembled(self, connection: http.client.HTTPConnection, path: str, size: int) -> None:
        body = BODY if path == PATH else b'{"ready": true}'
        for _ in range(3):
            pieces = (body[at : at + size] for at in range(0, len(body), size))
            status, answer = ask(connection, "POST", path, pieces, encode_chunked=True)

            assert status == 200
            assert path != PATH or json.loads(answer) == ANSWER

    def test_extensions_and_trailers_of_chunks_are_ignored(self, live: Live) -> None:
        chunked = b"%x;name=value\r\n%b\r\n0\r\nafter: all\r\n\r\n" % (len(BODY), BODY)
        message = head("POST", PATH, "transfer-encoding: chunked") + chunked + head("GET", "/v2/health/live", CLOSE)
        answers = _split(exchange(live, message))

        assert [status for status, _ in answers] == [200, 200]
        assert json.loads(answers[0][1]) == ANSWER

    @pytest.mark.parametrize("path", [PATH, "/v2/repository/index"])
    def test_a_client_that_expects_100_continue_receives_it(self, live: Live, path: str) -> None:
        body = BODY if path == PATH else b'{"ready": true}'
        with socket.create_connection(("127.0.0.1", live.http_port), timeout=20) as sock:
            sock.sendall(head("POST", path, f"content-length: {len(body)}", "expect: 100-continue", CLOSE))
            assert sock.recv(1 << 16).startswith(b"HTTP/1.1 100 Continue\r\n\r\n")
            sock.sendall(body)
            received = b""
            while piece := sock.recv(1 << 16):
                received += piece

        assert received.startswith(b"HTTP/1.1 200 OK\r\n")

    def test_a_body_that_is_too_large_is_rejected_instead_of_100_continue(self, live: Live) -> None:
        fields = (f"content-length: {(64 << 20) + 1}", "expect: 100-continue")
        answer = exchange(live, head("POST", PATH, *fields))

        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"exceeds the maximum allowed input size of 67108864 bytes" in answer

    @pytest.mark.parametrize("fields", [{"Expect": ""}, {"Content-Type": "text/plain"}, {"Accept": "image/png"}])
    def test_unusual_header_fields_are_ignored(
        self, connection: http.client.HTTPConnection, fields: dict[str, str]
    ) -> None:
        assert json.loads(ask(connection, "POST", PATH, BODY, fields)[1]) == ANSWER

    def test_the_json_length_may_be_given_when_no_binary_data_follows(
        self, connection: http.client.HTTPConnection
    ) -> None:
        fields = {"Inference-Header-Content-Length": str(len(BODY)), "Expect": ""}

        assert json.loads(ask(connection, "POST", PATH, BODY, fields)[1]) == ANSWER

    @pytest.mark.parametrize(
        ("accept", "coding"),
        [("gzip", "gzip"), ("deflate", "deflate"), ("gzip;q=0.5, deflate", "deflate"), ("br, zstd", None),
         ("gzip;q=0", None), ("*", "gzip"), ("identity", None)],
    )  # fmt: skip
    def test_an_answer_is_compressed_with_the_clients_preferred_coding(
        self, live: Live, accept: str, coding: str | None
    ) -> None:
        body = json.dumps(document(np.ones((1, 500), np.float32)))
        response = httpx.post(live.url + PATH, content=body, headers={"accept-encoding": accept})

        assert response.headers.get("content-encoding") == coding
        assert response.json()["outputs"][0]["data"] == [1.0] * 500


class TestHttpClients:
    def test_httpx_requests_are_answered(self, live: Live) -> None:
        with httpx.Client(base_url=live.url) as client:
            for _ in range(3):
                assert client.post(PATH, json=document(ARRAY)).json() == ANSWER
            assert client.get("/v2/health/ready").status_code == 200

    def test_a_body_streamed_by_httpx_is_received(self, live: Live) -> None:
        pieces = (BODY[at : at + 9] for at in range(0, len(BODY), 9))

        assert httpx.post(live.url + PATH, content=pieces).json() == ANSWER

    def test_aiohttp_requests_are_answered_at_a_concurrency_of_64(self, live: Live) -> None:
        async def pieces(body: bytes) -> AsyncIterator[bytes]:
            for at in range(0, len(body), 50):
                yield body[at : at + 50]

        async def one(session: aiohttp.ClientSession, number: int) -> None:
            body = json.dumps(document(ARRAY * number, id=str(number))).encode()
            async with session.post(live.url + PATH, data=pieces(body) if number % 3 else body) as response:
                answer = await response.json()

            assert answer["id"] == str(number)
            assert answer["outputs"][0]["data"] == (ARRAY * number).ravel().tolist()

        async def main() -> None:
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=64)) as session:
                await asyncio.gather(*(one(session, number) for number in range(256)))

        asyncio.run(main())

    @pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
    @pytest.mark.parametrize("options", [[], ["--http1.0"], ["--compressed"], ["-H", "Transfer-Encoding: chunked"]])
    @pytest.mark.parametrize("count", [2, 300_000])
    def test_curl_requests_are_answered(self, live: Live, tmp_path: Path, options: list[str], count: int) -> None:
        if "--http1.0" in options and count > 2:
            options = [*options, "-H", "Expect:"]
        body = tmp_path / "body"
        body.write_text(json.dumps(document(np.ones((1, count), np.float32))))
        command = ["curl", "-sS", "--max-time", "20", *options, "--data-binary", f"@{body}", live.url + PATH]
        ended = subprocess.run(command, capture_output=True, check=True)

        assert json.loads(ended.stdout)["outputs"][0]["data"] == [1.0] * count
