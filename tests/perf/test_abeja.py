"""What perf/abeja.py asks, and its plain front for the original's runtime."""

from __future__ import annotations

import io
import json
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from penstock.perf.abeja import ANSWER, CALL, HANDLER, Front, read_request, sides_of

REQUEST = b"PUT /any HTTP/1.1\r\nHost: a\r\nContent-Type: text/plain\r\nContent-Length: 5\r\n\r\nhello"


@pytest.fixture
def wire() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a runtime's socket."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_the_handler_gives_the_expected_answer() -> None:
    names: dict[str, Any] = {}
    exec(HANDLER, names)

    reply = names["handler"](io.BytesIO(CALL.bodies[0]), {})

    assert (reply["status_code"], reply["content"]) == (200, ANSWER)


def test_a_request_is_read_completely() -> None:
    headers = {"host": "a", "content-type": "text/plain", "content-length": "5"}

    assert read_request(io.BytesIO(REQUEST)) == ("PUT", headers, b"hello")


def test_a_connection_without_data_is_not_a_request() -> None:
    assert read_request(io.BytesIO()) is None


def test_the_front_passes_a_request_to_the_runtime_and_returns_its_answer(
    tmp_path: Path, wire: tuple[socket.socket, socket.socket]
) -> None:
    content = tmp_path / "content"
    content.write_bytes(b"\x00\xff")
    reply = {"content_type": "image/png", "metadata": {"x-a": "b"}, "path": str(content), "status_code": 201}

    request, answer = exchanged(Front(wire[0], tmp_path), wire[1], reply)

    assert (request["method"], request["content_type"], request["body"]) == (
        "PUT",
        "text/plain",
        b"hello",
    )
    assert request["headers"] == [
        {"key": "content-length", "values": ["5"]},
        {"key": "content-type", "values": ["text/plain"]},
        {"key": "host", "values": ["a"]},
    ]
    assert answer == (
        b"HTTP/1.1 201 -\r\nContent-Type: image/png\r\nx-a: b\r\nContent-Length: 2\r\nConnection: close\r\n\r\n\x00\xff"
    )
    assert not list(tmp_path.iterdir())


def test_the_front_answers_failures_of_the_runtime(tmp_path: Path, wire: tuple[socket.socket, socket.socket]) -> None:
    reply = {"content_type": "application/json", "error_message": "unexpected error occurred", "status_code": 500}

    _, answer = exchanged(Front(wire[0], tmp_path), wire[1], reply)

    assert answer.startswith(b"HTTP/1.1 500 -\r\nContent-Type: application/json\r\n")
    assert answer.endswith(b'\r\n\r\n{"status": "unexpected error occurred"}')


def test_the_front_continues_after_a_client_has_disconnected(
    tmp_path: Path, wire: tuple[socket.socket, socket.socket]
) -> None:
    client, server_side = socket.socketpair()
    client.close()

    Front(wire[0], tmp_path).take(server_side)

    assert server_side.fileno() == -1


@pytest.mark.parametrize(
    ("original", "proxy", "expected"),
    [
        ("", "", ["penstock"]),
        ("", "/p", ["penstock"]),
        ("/e/bin/python", "", ["penstock", "runtime 1.1.1, plain front"]),
        ("/e/bin/python", "/p", ["penstock", "runtime 1.1.1, plain front", "runtime 1.1.1, its proxy"]),
    ],
)
def test_only_the_sides_that_are_available_are_measured(
    tmp_path: Path, original: str, proxy: str, expected: list[str]
) -> None:
    assert list(sides_of(tmp_path, original, proxy)) == expected


def exchanged(front: Front, runtime: socket.socket, reply: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """Have the front take REQUEST. Returns: what the runtime was asked, its body too; and what the client was told."""
    client, server_side = socket.socketpair()
    with client, ThreadPoolExecutor(1) as pool, runtime.makefile("rb") as runtime_file:
        client.sendall(REQUEST)
        ended = pool.submit(front.take, server_side)
        mark, nbytes = struct.unpack(">4sI", runtime_file.read(8))
        request = json.loads(runtime_file.read(nbytes))
        request["body"] = Path(request["contents"][0]["path"]).read_bytes()
        answer = json.dumps(reply).encode()
        runtime.sendall(mark + struct.pack(">I", len(answer)) + answer)
        ended.result(timeout=30)
        assert mark == b"\xab\xe9\xa0\x01"
        with client.makefile("rb") as client_file:
            return request, client_file.read()
