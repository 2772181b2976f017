"""Bad input over raw sockets to a server process: an answer or a close, soon, and with little memory."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import random
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.backends.onnx_models import contract_model
from tests.server.http.lane import Answer, in_chunks, read_answers, request
from tests.server.v2.documents import ANYTHING, mutated

pytestmark = pytest.mark.slow

MIB = 1 << 20
MAX_BODY = 16 * MIB
RECEIVE_TIMEOUT_S = 0.5
PATIENCE_S = 20
FLAGS = (
    "--http-port=0", "--allow-metrics=false", "--allow-grpc=false",
    f"--http-max-input-size={MAX_BODY}", "--http-idle-timeout-secs=30",
    f"--http-receive-timeout-secs={RECEIVE_TIMEOUT_S}", "--http-max-connections=500", "--log-format=json",
)  # fmt: skip
INFER = "/v2/models/rows/infer"
GET = b"GET /v2/health/ready HTTP/1.1\r\nhost: x\r\n\r\n"
TOO_LARGE = "exceeds the maximum allowed input size"
UNSIGNED = "Unable to parse 'shape': attempt to access JSON non-unsigned-integer as unsigned-integer"


@dataclass
class Target:
    """The server's port and process."""

    port: int
    process: Path

    @property
    def rss_mib(self) -> float:
        [line] = [line for line in (self.process / "status").read_text().splitlines() if line.startswith("VmRSS:")]
        return int(line.split()[1]) / 1024

    @property
    def open_files(self) -> int:
        return len(list((self.process / "fd").iterdir()))

    def connect(self) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.port), PATIENCE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def talk(self, *pieces: bytes, end: bool = True) -> list[Answer]:
        """Send pieces, close the sending side unless told otherwise, and read until the server closes.

        Raises: TimeoutError, if the server neither answers nor closes.
        """
        with self.connect() as sock:
            try:
                for piece in pieces:
                    sock.sendall(piece)
                if end:
                    sock.shutdown(socket.SHUT_WR)
            except OSError:
                end = False
            return read_answers(read_all(sock))

    def ask(self, raw: bytes) -> Answer:
        """Send one request and read its one answer."""
        [answer] = self.talk(raw)
        return answer

    def wait(self, raw: bytes) -> Answer:
        """Send one request and read its one answer, however long that takes.

        The server treats a half-closed client as one that disconnects, and answers it only if the answer comes soon.
        """
        [answer] = self.talk(raw, end=False)
        return answer

    def infer(self, document: Any, model: str = "rows", *lines: str) -> tuple[int, Any]:
        """Send a document, or a raw body; return the status and the answer."""
        body = document if isinstance(document, bytes) else json.dumps(document).encode()
        answer = self.wait(request(f"/v2/models/{model}/infer", body, "connection: close", *lines))
        return answer.status, json.loads(answer.body)


def read_all(sock: socket.socket) -> bytes:
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := sock.recv(MIB):
            parts.append(part)
    return b"".join(parts)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    root = tmp_path_factory.mktemp("repository")
    for name in ("rows", "free", "strings", "picky", "optional"):
        (root / name / "1").mkdir(parents=True)
        contract_model(name, root / name / "1" / "model.onnx")
    words = (sys.executable, "-m", "penstock.server.cli", "serve", str(root), *FLAGS)
    # with one malloc arena, so that freed memory shows in the RSS
    process = subprocess.Popen(words, stderr=subprocess.PIPE, env=os.environ | {"MALLOC_ARENA_MAX": "1"})
    try:
        assert process.stderr is not None
        port = 0
        for line in process.stderr:
            message: str = json.loads(line)["msg"]
            if "HTTP on" in message:
                port = int(message.rpartition(":")[2])
            if message.startswith("ready"):
                break
        yield Target(port, Path("/proc", str(process.pid)))
    finally:
        process.terminate()
        process.communicate()


@pytest.fixture(autouse=True)
def unharmed(server: Target) -> Iterator[None]:
    """After each case the server serves as before, in time, and has kept little memory."""
    before = server.rss_mib
    yield
    assert server.infer(good()) == (200, SERVED)
    assert server.rss_mib - before < 150


def entry(**changes: Any) -> dict[str, Any]:
    members = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4], **changes}
    return {key: value for key, value in members.items() if value is not None}


def good(**changes: Any) -> dict[str, Any]:
    return {"inputs": [entry(**changes)], "outputs": [{"name": "total"}]}


SERVED = {
    "model_name": "rows",
    "model_version": "1",
    "outputs": [{"name": "total", "datatype": "FP32", "shape": [1], "data": [10.0]}],
}
BODY = json.dumps(good()).encode()
GZIPPED = gzip.compress(BODY, mtime=0)  # test IDs contain it, so it must be the same in each process


def head(*lines: str, first: str = f"POST {INFER} HTTP/1.1") -> bytes:
    return "\r\n".join([first, "host: x", *lines, "", ""]).encode("latin-1")


def binary(size: int, raw: bytes, **changes: Any) -> tuple[bytes, str]:
    """Return a body with a binary tensor, and the header line with the length of its JSON."""
    text = json.dumps(good(data=None, parameters={"binary_data_size": size}, **changes)).encode()
    return text + raw, f"inference-header-content-length: {len(text)}"


class TestFraming:
    def test_a_content_length_that_is_too_short_makes_two_bad_requests(self, server: Target) -> None:
        answers = server.talk(head("content-length: 5") + BODY)

        assert [answer.status for answer in answers] == [400, 400]
        assert json.loads(answers[0].body)["error"].startswith("failed to parse the request JSON buffer: ")

    @pytest.mark.parametrize(
        "raw",
        [
            head("content-length: 3", "transfer-encoding: chunked") + b"0\r\n\r\n" + GET,
            head("transfer-encoding: chunked", "content-length: 3") + b"0\r\n\r\n" + GET,
            head("content-length: 3", "content-length: 3") + b"abc" + GET,
            head("content-length: 3", "content-length: 4") + b"abcd" + GET,
            head("content-length: 3, 3") + b"abc" + GET,
            head("content-length: -3") + b"abc" + GET,
            head("content-length: +3") + b"abc" + GET,
            head("content-length: 3e0") + b"abc" + GET,
            head("content-length: " + "9" * 30) + b"abc" + GET,
            head("content-length: 9223372036854775807") + b"abc" + GET,
            head("transfer-encoding: gzip, chunked") + b"0\r\n\r\n" + GET,
            head("transfer-encoding: chunked", "transfer-encoding: chunked") + b"0\r\n\r\n" + GET,
            head("transfer-encoding:\tchunked\x0b") + b"0\r\n\r\n" + GET,
            head("transfer-encoding: \x00chunked") + b"0\r\n\r\n" + GET,
            head("transfer-encoding : chunked") + b"0\r\n\r\n" + GET,
            head("transfer-encoding: chunked") + b"-1\r\n" + GET,
            head("transfer-encoding: chunked") + b"ffffffffffffffff\r\n" + GET,
            head("transfer-encoding: chunked") + b"10000000000000000\r\n" + GET,
            head("transfer-encoding: chunked") + b"3\r\nabcdef\r\n0\r\n\r\n" + GET,
            head("transfer-encoding: chunked") + b"3\n" + GET,
            head("transfer-encoding: chunked") + b"0;" + b"a" * 10_000 + b"\r\n\r\n" + GET,
            head("transfer-encoding: chunked") + b"0\r\n" + b"a: b\r\n" * 1000 + b"\r\n" + GET,
            head("x: y", first=f"POST {INFER} HTTP/1.0") + GET[:-2] + b"transfer-encoding: chunked\r\n\r\n",
            head("x: a\rb: c") + GET,
            head("x: a\nb: c") + GET,
            head("x\r\n : a") + GET,
            head("x: a\r\n folded") + GET,
            head("x", first=f"POST {INFER} HTTP/1.1") + GET,
            head(": x") + GET,
            b"POST " + INFER.encode() + b" HTTP/1.1\ncontent-length: 0\n\n\r\n\r\n" + GET,
            head("expect: a-miracle") + GET,
        ],
    )
    def test_an_ambiguous_request_is_rejected_and_no_later_request_is_answered(
        self, server: Target, raw: bytes
    ) -> None:
        answers = server.talk(raw)

        assert answers[-1].status in {400, 417, 431}
        assert answers[-1].closes
        assert 200 not in {answer.status for answer in answers}

    @pytest.mark.parametrize(
        ("raw", "statuses"),
        [
            (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(100), [505]),
            (b"GET / HTTP/0.9\r\n\r\n", [505]),
            (b"GET /\r\n\r\n", [505]),
            (b"GET / HTTP/3.0\r\n\r\n", [400]),
            (b"GET / HTTP/1.\xff\r\n\r\n", [400]),
            (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500), [400]),
            (b"\x80\x2e\x01\x00\x02", [400]),
            (b"\x00" * 10_000, [400]),
            (b"\xff" * 10_000, [400]),
            (b"A" * 200_000, [431]),
            (b"\r\n" * 10_000, [400]),
            (b"POST\r\n\r\n", [400]),
            (b"get / HTTP/1.1\r\n\r\n", [400]),
            (b"SSH-2.0-OpenSSH_9.9\r\n", []),
            (b"POST / HTTP/1.1\r\n", []),
            (b"", []),
        ],
    )
    def test_a_request_that_is_not_http_1_is_answered_with_an_error_or_closed(
        self, server: Target, raw: bytes, statuses: list[int]
    ) -> None:
        answers = server.talk(raw)

        assert [answer.status for answer in answers] == statuses

    @pytest.mark.parametrize("raw", [b"\x16\x03\x01\x02\x00\x01", b"PRI * HTTP/2.0\r\n\r\n", b"\x00"])
    def test_a_client_of_another_protocol_is_answered_in_http(self, server: Target, raw: bytes) -> None:
        with server.connect() as sock:
            sock.sendall(raw)
            assert read_all(sock).startswith(b"HTTP/1.1 ")

    @pytest.mark.parametrize(
        "raw",
        [
            head("x: " + "y" * 200_000),
            head(first=f"POST {INFER}?{'y' * 200_000} HTTP/1.1"),
            head(*[f"x{number}: y" for number in range(500)]),
            head(*["x: y"] * 500),
            head(*["x: y"] * 100_000),
        ],
    )
    def test_a_too_large_request_head_is_answered_431(self, server: Target, raw: bytes) -> None:
        answer = server.ask(raw + GET)

        assert answer.status == 431
        assert answer.closes

    def test_an_incomplete_request_is_answered_408(self, server: Target) -> None:
        index = "POST /v2/repository/index HTTP/1.1"
        stalled = [
            b"P",
            head()[:-2],
            head("content-length: 1000") + BODY,
            head("transfer-encoding: chunked"),
            head("transfer-encoding: chunked") + b"5\r\n{",
            head("transfer-encoding: chunked") + b"0\r\n",
            head("content-length: 1000", first=index) + BODY,
            head("transfer-encoding: chunked", first=index) + b"5\r\n{",
            head("content-length: 9", "expect: 100-continue"),
        ]
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(server.connect()) for _ in stalled]
            for sock, raw in zip(sockets, stalled, strict=True):
                sock.sendall(raw)
            answers = [read_answers(read_all(sock)) for sock in sockets]

        assert [[answer.status for answer in each] for each in answers] == [[408]] * len(stalled)
        assert {answer.body for [answer] in answers} == {b'{"error":"request was not received within 0.5 s"}'}

    def test_a_request_sent_one_byte_at_a_time_is_answered_408(self, server: Target) -> None:
        with server.connect() as sock:
            sock.settimeout(0.05)
            start, received = time.monotonic(), b""
            while not received and time.monotonic() - start < PATIENCE_S:
                with contextlib.suppress(TimeoutError):
                    sock.sendall(b"A")
                    received = sock.recv(1000)

        assert received.startswith(b"HTTP/1.1 408 ")

    @pytest.mark.parametrize("method", ["CONNECT a:443", "TRACE /", "OPTIONS *", "DELETE /v2", f"GET {INFER}", "PRI *"])
    def test_unusual_methods_are_answered_with_a_client_error(self, server: Target, method: str) -> None:
        answer = server.ask(head("connection: close", first=f"{method} HTTP/1.1"))

        assert 400 <= answer.status < 500

    @pytest.mark.parametrize("protocol", ["websocket", "h2c", "nonsense"])
    @pytest.mark.parametrize("path", [INFER, "/v2/health/live"])
    def test_a_request_to_upgrade_the_protocol_is_answered_without_an_upgrade(
        self, server: Target, protocol: str, path: str
    ) -> None:
        lines = ("connection: upgrade", f"upgrade: {protocol}", "sec-websocket-key: x", "http2-settings: AAMAAABk")
        first = server.ask(request(path, BODY, *lines))

        assert first.status == (200 if path == INFER else 405)

    @pytest.mark.parametrize(
        "path", ["%0d%0aset-cookie:a", "%00", "%ff%fe", "..%2f..%2fetc", "%", "a%2", "é", "x" * 9000]
    )
    def test_a_path_cannot_inject_fields_into_the_head_of_an_answer(self, server: Target, path: str) -> None:
        for end in ("infer", "ready", "versions/9/infer", f"versions/{'9' * 5000}/infer"):
            [answer] = server.talk(request(f"/v2/models/{path}/{end}", BODY))

            assert answer.status in {400, 404, 405}
            assert answer.headers.keys() <= {"date", "content-type", "content-length", "connection", "allow"}
            assert len(answer.body) < 30_000

    @pytest.mark.parametrize("value", ["a\x0bb", "\xff" * 100, "9" * 9000, "-1", "", "0x10", "1e3", "\u0661"])
    @pytest.mark.parametrize(
        "name",
        [
            "inference-header-content-length", "content-encoding", "accept-encoding", "x-request-id", "content-type",
            "expect", "connection", "host",
        ],
    )  # fmt: skip
    def test_unusual_header_values_are_accepted_or_rejected(self, server: Target, name: str, value: str) -> None:
        field = value.encode("utf-8", "replace").decode("latin-1")
        for document in (BODY, b""):
            [answer] = server.talk(head(f"{name}: {field}", f"content-length: {len(document)}") + document)

            assert answer.status in {200, 400, 417, 501}

    @given(st.binary(max_size=300) | st.lists(st.sampled_from(
        [b"POST ", b"GET ", b"/v2/models/rows/infer ", b"HTTP/1.1", b"\r\n", b"\r\n\r\n", b"content-length: ", b"5",
         b"transfer-encoding: chunked", b"\r", b"\n", b":", b" ", b"\x00", b"{}", b"0\r\n\r\n"]), max_size=14,
    ).map(b"".join))  # fmt: skip
    @settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_random_bytes_are_answered_with_an_error_or_closed(self, server: Target, raw: bytes) -> None:
        assert {answer.status for answer in server.talk(raw)} <= {400, 404, 405, 408, 417, 431, 505}


class TestSizes:
    def test_a_client_that_sends_a_too_large_body_receives_the_reason(self, server: Target) -> None:
        size = MAX_BODY + 1
        for raw in (head(f"content-length: {size}"), head(f"content-length: {size}", "expect: 100-continue")):
            answer = server.ask(raw + bytes(size))

            assert answer.status == 400
            assert TOO_LARGE in json.loads(answer.body)["error"]

    def test_a_body_of_100000_chunks_is_rejected(self, server: Target) -> None:
        answer = server.ask(head("transfer-encoding: chunked") + b"1\r\n \r\n" * 100_000 + b"0\r\n\r\n")

        assert answer.status == 400
        assert json.loads(answer.body)["error"] == (
            "Chunked request body exceeds maximum of 65536 non-empty chunks. Send fewer or larger HTTP chunks."
        )

    def test_a_body_of_65536_chunks_is_served(self, server: Target) -> None:
        spaced = BODY + b" " * (65536 - len(BODY))

        assert server.ask(in_chunks(INFER, *[spaced[i : i + 1] for i in range(65536)])).status == 200

    @pytest.mark.parametrize("path", [INFER, "/v2/repository/index"])
    def test_a_chunked_body_over_the_size_limit_is_rejected(self, server: Target, path: str) -> None:
        answer = server.ask(in_chunks(path, *[bytes(MIB)] * 17))

        assert answer.status == 400

    @pytest.mark.parametrize("path", [INFER, "/v2/models/rows/predict"])
    def test_a_gzip_bomb_of_a_gibibyte_is_rejected_without_using_much_memory(self, server: Target, path: str) -> None:
        packer = zlib.compressobj(9, wbits=31)
        start = packer.compress(bytes(MIB)) + packer.flush(zlib.Z_FULL_FLUSH)
        block = packer.compress(bytes(MIB)) + packer.flush(zlib.Z_FULL_FLUSH)
        before = server.rss_mib
        answer = server.wait(request(path, start + block * 1023, "content-encoding: gzip", "connection: close"))

        assert answer.status == 400
        assert TOO_LARGE in json.loads(answer.body)["error"]
        assert server.rss_mib - before < 100

    @pytest.mark.parametrize(
        ("coding", "body", "status"),
        [
            ("deflate", b"\x00\x01garbage", 400),
            ("gzip", b"garbage", 400),
            ("gzip", b"", 400),
            ("gzip", GZIPPED[:-1], 400),
            ("gzip", GZIPPED + b"more", 400),
            ("gzip", GZIPPED[:-8] + bytes(8), 400),
            ("deflate", GZIPPED, 400),
            ("gzip", zlib.compress(BODY), 400),
            ("gzip", gzip.compress(GZIPPED, mtime=0), 400),
            ("br", BODY, 501),
            ("gzip, gzip", gzip.compress(GZIPPED, mtime=0), 501),
            ("gzip", GZIPPED, 200),
            ("deflate", zlib.compress(BODY), 200),
            ("identity", BODY, 200),
        ],
    )
    def test_a_content_encoding_is_decoded_or_rejected(
        self, server: Target, coding: str, body: bytes, status: int
    ) -> None:
        answer = server.wait(request(INFER, body, f"content-encoding: {coding}", "connection: close"))

        assert answer.status == status
        if status == 501:
            assert answer.headers["accept-encoding"] == "gzip, deflate"

    def test_text_quoted_from_a_request_in_an_error_is_truncated(self, server: Target) -> None:
        for document in (good(name="n" * MIB), good(datatype="d" * MIB), {**good(shape=[9]), "id": "i" * MIB}):
            body = json.dumps(document).encode()
            answer = server.wait(request(INFER, body, "connection: close"))

            assert answer.status == 400
            assert len(answer.body) < 10_000

    def test_a_large_array_of_small_numbers_is_parsed_in_bounded_memory(self, server: Target) -> None:
        values = b"0," * (4 * MIB)
        body = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,4],"data":[' + values + b"0]}]}"
        status, answer = server.infer(body)

        assert (status, answer) == (
            400, {"error": "Unable to parse 'data': Shape does not match true shape of 'data' field"},
        )  # fmt: skip

    def test_too_many_empty_strings_are_rejected(self, server: Target) -> None:
        raw = bytes(8 * MIB)
        string_input = entry(datatype="BYTES", shape=[1, 2], data=None, parameters={"binary_data_size": len(raw)})
        text = json.dumps({"inputs": [string_input]}).encode()
        status, answer = server.infer(text + raw, "strings", f"inference-header-content-length: {len(text)}")

        assert status == 400
        assert "expected 2 strings" in answer["error"]


class TestDocuments:
    @pytest.mark.parametrize("body", [b"[" * 250_000, b'{"a":' * 250_000, b'{"inputs":' + b"[" * 250_000])
    def test_json_nested_250000_levels_deep_is_rejected(self, server: Target, body: bytes) -> None:
        assert server.infer(body) == (400, {"error": "JSON nesting depth exceeds maximum allowed limit (100)"})

    @pytest.mark.parametrize("inside", [b'\\"', b'"a', b"\\\\"])
    def test_json_with_an_unterminated_string_is_rejected_quickly(self, server: Target, inside: bytes) -> None:
        # matching again from every quote would take minutes
        assert server.infer(b"[" * 101 + b'"' + inside * 100_000)[0] == 400

    @pytest.mark.parametrize(
        ("changes", "text"),
        [
            ({"shape": [-1, 4]}, UNSIGNED),
            ({"shape": [1, -4]}, UNSIGNED),
            ({"shape": [2**63, 4]}, UNSIGNED),
            ({"shape": [1e30, 4]}, UNSIGNED),
            ({"shape": [2**62, 4]}, "causes total element count to exceed maximum size"),
            ({"shape": [2**32, 2**32]}, "causes total element count to exceed maximum size"),
            ({"shape": [2**63 - 1]}, "byte size overflow"),
            ({"shape": [2**61 - 1]}, "Shape does not match true shape of 'data' field"),
            ({"shape": [1] * 100_000}, "unexpected shape"),
            ({"shape": [2**63 - 1] * 50_000}, "unexpected shape"),
            ({"shape": [10**7, 0], "data": []}, "unexpected shape"),
            ({"shape": [0, 10**7], "data": []}, "unexpected shape"),
            ({"shape": [0, 2**62], "data": []}, "Shape does not match"),
            ({"shape": [100, 4], "data": [0] * 400}, "inference request batch-size must be <= 64 for 'rows'"),
            ({"name": "a\0b"}, "unexpected inference input 'a\0b' for model 'rows'"),
            ({"name": "\ud800"}, "failed to parse the request JSON buffer"),
            ({"datatype": "FP31"}, "data-type is 'FP31'"),
            ({"datatype": "INT64"}, "data-type is 'INT64', but model 'rows' expects 'FP32'"),
            ({"data": ["1", "2", "3", "4"]}, "takes FP32 values"),
            ({"data": [1, 2, 3, None]}, "takes FP32 values"),
            ({"data": ["x" * 100_000, *[""] * 50_000]}, "takes FP32 values"),
            ({"data": {"0": 1}}, "attempt to access JSON non-array as array"),
            ({"parameters": {"binary_data_size": 16}}, "must set only one of"),
            ({"parameters": {"binary_data_size": -1}, "data": None}, "non-unsigned-integer"),
            ({"parameters": {"binary_data_size": 2**63 - 1}, "data": None}, "additional bytes"),
        ],
    )
    def test_a_document_with_an_invalid_input_is_rejected(self, server: Target, changes: Any, text: str) -> None:
        status, answer = server.infer(good(**changes))

        assert status == 400
        assert text in answer["error"]

    @pytest.mark.parametrize(
        "body",
        [
            b"", b"\x00", b"{", b'{"inputs":[]}', b"null", b'"\xff"', b'{"id":"\\ud800","a":NaN}', b"[NaN]",
            json.dumps({"inputs": [entry()] * 2}).encode(),
            b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,4],"data":[NaN,1,1,' + b"9" * 5000 + b'"]}]}',
        ],
    )  # fmt: skip
    def test_a_body_that_is_not_a_valid_document_is_rejected(self, server: Target, body: bytes) -> None:
        status, answer = server.infer(body)

        assert status == 400
        assert answer.keys() == {"error"}

    @pytest.mark.parametrize(
        ("size", "raw", "text"),
        [
            (16, bytes(15), "unexpected size for input 'x', expecting 1 additional bytes for model 'rows'"),
            (16, bytes(17), "unexpected additional input data for model 'rows'"),
            (15, bytes(15), "input byte size mismatch for input 'x' for model 'rows'. Expected 16, got 15"),
            (0, b"", "input byte size mismatch for input 'x' for model 'rows'. Expected 16, got 0"),
            (2**62, bytes(16), "additional bytes for model 'rows'"),
        ],
    )
    def test_a_binary_tensor_of_the_wrong_size_is_rejected(
        self, server: Target, size: int, raw: bytes, text: str
    ) -> None:
        body, line = binary(size, raw)
        status, answer = server.infer(body, "rows", line)

        assert status == 400
        assert text in answer["error"]

    @pytest.mark.parametrize(
        ("value", "status"), [("0", 400), ("-1", 400), ("x", 400), ("9" * 18, 400), ("9" * 5000, 400), ("1", 400)]
    )
    def test_an_invalid_inference_header_content_length_is_rejected(
        self, server: Target, value: str, status: int
    ) -> None:
        assert server.infer(BODY, "rows", f"inference-header-content-length: {value}")[0] == status

    def test_a_string_tensor_that_is_not_utf_8_is_rejected(self, server: Target) -> None:
        raw = struct.pack("<I", 2) + b"\xff\xfe" + struct.pack("<I", 0)
        document = {"inputs": [entry(datatype="BYTES", shape=[1, 2], data=None, parameters={"binary_data_size": 10})]}
        text = json.dumps(document).encode()
        status, _ = server.infer(text + raw, "strings", f"inference-header-content-length: {len(text)}")

        assert status == 400

    @pytest.mark.parametrize("index", [3, -4, 2**63 - 1, -(2**63)])
    def test_values_that_the_model_cannot_process_are_rejected(self, server: Target, index: int) -> None:
        document = {"inputs": [entry(datatype="INT64", shape=[1], data=[index])]}

        assert server.infer(document, "picky")[0] == 400

    @pytest.mark.parametrize("timeout", [1, 2**31, 2**53, 2**63, 2**64 - 1])
    def test_a_document_with_any_timeout_is_served_or_expires(self, server: Target, timeout: int) -> None:
        assert server.infer({**good(), "parameters": {"timeout": timeout}})[0] in {200, 503}

    @given(st.data())
    @settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_mutated_documents_are_served_or_rejected(self, server: Target, data: st.DataObject) -> None:
        document = {**good(), "id": "1", "parameters": {"timeout": 10**9}}
        body = json.dumps(data.draw(mutated(document) | ANYTHING)).encode() + b" " * data.draw(
            st.sampled_from([0, 800])
        )

        assert server.infer(body)[0] in {200, 400, 501}

    @given(st.data())
    @settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_binary_requests_with_mutated_bytes_are_served_or_rejected(
        self, server: Target, data: st.DataObject
    ) -> None:
        body, line = binary(16, bytes(16))
        at = data.draw(st.integers(0, len(body)))
        put = data.draw(st.binary(max_size=20))
        broken = body[:at] + put + body[at + data.draw(st.integers(0, 5)) :]
        lines = data.draw(st.sampled_from([(line,), (), (f"inference-header-content-length: {len(broken)}",)]))

        assert server.ask(request(INFER, broken, *lines)).status in {200, 400, 501}


class TestConnections:
    def test_a_client_that_reads_late_uses_little_memory_and_receives_every_answer(self, server: Target) -> None:
        raw = request(INFER, BODY)
        before, sent, received = server.rss_mib, 0, []
        with server.connect() as sock:
            sock.settimeout(1)
            with contextlib.suppress(TimeoutError):
                while sent < 64 * MIB:
                    sent += sock.send((raw * 100)[sent % len(raw) :])
            assert sent < 64 * MIB
            assert server.rss_mib - before < 60

            sock.settimeout(PATIENCE_S)
            reading = threading.Thread(target=lambda: received.append(read_all(sock)))
            reading.start()
            # only the rest of the request that was cut off
            sock.sendall(raw[sent % len(raw) :] if sent % len(raw) else b"")
            sock.shutdown(socket.SHUT_WR)
            reading.join()
        answers = read_answers(received[0])

        assert len(answers) == -(-sent // len(raw))
        assert {answer.status for answer in answers} == {200}

    def test_a_client_of_the_control_plane_that_never_reads_uses_little_memory(self, server: Target) -> None:
        raw = b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n"
        before = server.rss_mib
        with server.connect() as sock:
            sock.settimeout(1)
            sent = 0
            with contextlib.suppress(TimeoutError):
                while sent < 64 * MIB:
                    sent += sock.send(raw * 1000)

            assert sent < 64 * MIB
            assert server.rss_mib - before < 60

    def test_clients_that_reset_their_connections_leave_no_open_files_behind(self, server: Target) -> None:
        before = server.open_files
        for number in range(200):
            with server.connect() as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                sock.sendall(request(INFER, BODY)[: random.Random(number).randrange(300)] or b"x")

        assert server.infer(good())[0] == 200
        assert server.open_files - before < 20

    def test_one_connection_more_than_the_limit_is_answered_503(self, server: Target) -> None:
        metrics = b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        end_s = time.monotonic() + PATIENCE_S
        # the server may not yet have noticed that the clients of earlier tests have gone
        while b"\npenstock_connections 1\n" not in server.wait(metrics).body:
            assert time.monotonic() < end_s
        with contextlib.ExitStack() as stack:
            idle = [stack.enter_context(server.connect()) for _ in range(500)]
            for sock in idle:
                sock.sendall(b"P")
            extra = stack.enter_context(server.connect())
            [answer] = read_answers(read_all(extra))
            assert answer.status == 503
            assert json.loads(answer.body) == {"error": "too many connections"}
            for sock in idle:
                assert read_all(sock).startswith(b"HTTP/1.1 408 ")

    def test_request_heads_with_ever_new_names_are_not_kept_in_memory(self, server: Target) -> None:
        before = server.rss_mib
        raw = b"".join(request(f"/v2/models/{'m' * 500}{number}/infer", BODY) for number in range(5000))
        answers = server.talk(raw)

        assert {answer.status for answer in answers} == {404}
        assert len(answers) == 5000
        assert server.rss_mib - before < 40
