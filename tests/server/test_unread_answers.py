"""Answers that clients do not read: their total limit, and which clients are dropped while others are answered."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import ssl
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
from hpack import Encoder

from penstock.backends.signature import Signature, TensorSpec
from penstock.server.http2 import frames
from penstock.server.http2.frames import FRAME_HEADER, FRAME_HEADER_BYTES, RST_STREAM, ErrorCode
from penstock.server.listening.unread_answers import UnreadAnswers
from tests.fakes import FakeBackend, fake_loader
from tests.keys import certificate
from tests.live import Live, live_server
from tests.server.fronts.live_fronts import live_front
from tests.server.http2.wire import REQUEST, FakeLoop, message_of, payload

MIB = 1 << 20
COLUMNS = 2 * MIB
"""The columns of an answer: 8 MiB for each row of 4 bytes. A socket that is not read buffers less."""
MOST = 32 * MIB
GRAPH = Signature((TensorSpec("x", "FP32", (-1, 1)),), (TensorSpec("y", "FP32", (-1, COLUMNS)),))
INFER = "/v2/models/m/infer"
PATIENCE_S = 20
SHUT = frames.settings({frames.INITIAL_WINDOW_SIZE: 0})
WIDE = frames.settings(
    {frames.INITIAL_WINDOW_SIZE: frames.MAX_WINDOW, frames.MAX_FRAME_SIZE: (1 << 24) - 1}
) + frames.window_update(0, frames.MAX_WINDOW - frames.DEFAULT_WINDOW)
"""The windows let nothing of an answer through (SHUT), or all of it in one frame (WIDE)."""


class Keeper:
    """A Holder that records when it is shed."""

    def __init__(self, given_up: list[Keeper]) -> None:
        self._given_up = given_up

    def shed(self) -> None:
        self._given_up.append(self)


class Stage:
    """An UnreadAnswers with a limit of 1000 bytes, and the Holders that were shed."""

    def __init__(self) -> None:
        self.loop = FakeLoop()
        loop: Any = self.loop
        self.unread = UnreadAnswers(1000, loop)
        self.given_up: list[Keeper] = []

    def keeper(self, size: int, waited_s: float = 0.0) -> Keeper:
        """Return a Holder that has held this many bytes for this long."""
        new_keeper = Keeper(self.given_up)
        self.unread.grow(new_keeper, size)
        self.loop.now += waited_s
        return new_keeper


def test_no_client_is_dropped_up_to_the_limit() -> None:
    stage = Stage()
    stage.keeper(600, 60.0)
    stage.keeper(400)
    stage.loop.turn()

    assert stage.given_up == []
    assert stage.unread.held_bytes == 1000


def test_the_client_with_the_most_unread_bytes_is_dropped_over_the_limit(caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage()
    _, large, _ = stage.keeper(300), stage.keeper(400), stage.keeper(301)
    stage.loop.now += 1.0
    with caplog.at_level(logging.WARNING, "penstock.serve"):
        stage.loop.turn()

    assert stage.given_up == [large]
    assert stage.unread.held_bytes == 601
    assert "exceed the 1000 bytes of --write-memory-bytes: dropped 1 of them" in caplog.text


def test_a_large_answer_just_written_is_not_dropped_before_older_answers() -> None:
    stage = Stage()
    old = [stage.keeper(100, 1.0) for _ in range(5)]
    stage.keeper(800)
    stage.loop.turn()

    assert stage.given_up == old


def test_a_client_that_keeps_reading_is_not_dropped_before_an_idle_client() -> None:
    stage = Stage()
    reading, idle = stage.keeper(300), stage.keeper(300)
    for _ in range(100):
        stage.loop.now += 1.0
        stage.unread.shrink(reading, 10)
        stage.unread.grow(reading, 300)
    stage.keeper(500)
    stage.loop.turn()

    assert stage.given_up == [idle]


def test_an_answer_read_within_the_same_turn_drops_no_client() -> None:
    stage = Stage()
    stage.keeper(900, 60.0)
    quick = stage.keeper(900)
    stage.unread.shrink(quick)
    stage.loop.turn()

    assert stage.given_up == []
    assert stage.unread.held_bytes == 900


def test_the_limit_holds_for_very_many_small_answers_with_a_bounded_number_per_turn() -> None:
    stage = Stage()
    held = []
    for _ in range(20_000):
        stage.keeper(1)
    while stage.loop.soon:
        soon, stage.loop.soon = stage.loop.soon, []
        for function, args in soon:
            function(*args)
        held.append(stage.unread.held_bytes)

    assert held[-1] <= 1000
    assert all(before - after < 5000 for before, after in pairwise([20_000, *held]))


def test_a_client_with_much_unread_data_is_dropped_before_many_with_little() -> None:
    stage = Stage()
    little = [stage.keeper(1) for _ in range(10)]
    for _ in range(5000):
        stage.unread.grow(Keeper([]), 0)
    large = stage.keeper(2000, waited_s=60)
    stage.loop.turn()

    assert stage.given_up == [large]
    assert stage.unread.held_bytes == len(little)


def test_a_client_that_fails_to_be_dropped_does_not_keep_others_from_being_dropped() -> None:
    class Broken:
        def shed(self) -> None:
            raise RuntimeError("broken")

    stage = Stage()
    stage.unread.grow(Broken(), 1500)
    other = stage.keeper(1000)
    stage.loop.turn()

    assert stage.given_up == [other]
    assert stage.unread.held_bytes == 0


# -- over sockets ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def served(root: Path, **settings: Any) -> Iterator[Live]:
    """Serve a model whose answers are large."""
    backend = FakeBackend(GRAPH, lambda arrays: [np.repeat(np.asarray(arrays[0]), COLUMNS, axis=1)])
    (root / "m" / "1").mkdir(parents=True)
    (root / "m" / "1" / "model.onnx").touch()
    (root / "m" / "config.pbtxt").write_text("max_batch_size: 1")
    with live_server(root, loaders={"onnxruntime": fake_loader(backend)}, write_memory_bytes=MOST, **settings) as live:
        yield live


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with served(tmp_path_factory.mktemp("models")) as started:
        yield started


def unread_answers_of(live: Live) -> UnreadAnswers:
    """Return the UnreadAnswers that the server's ports share."""
    port = live.server._http
    assert port is not None
    assert port.shared is not None
    return port.shared.unread


async def until(met: Callable[[], bool]) -> None:
    """Wait on the server's own loop."""
    async with asyncio.timeout(PATIENCE_S):
        while not met():  # noqa: ASYNC110 - nobody is told
            await asyncio.sleep(0)


def document(value: float) -> dict[str, Any]:
    return {
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [value]}],
        "outputs": [{"name": "y", "parameters": {"binary_data": True}}],
    }


def http_answer(live: Live, value: float) -> bytes:
    """Send a request and read the answer; return the tensor."""
    answer = httpx.post(live.url + INFER, json=document(value), timeout=PATIENCE_S)
    assert answer.status_code == 200
    return answer.content[int(answer.headers["inference-header-content-length"]) :]


def grpc_answer(live: Live, value: float) -> bytes:
    """Do the same over gRPC."""
    tensor = triton.InferInput("x", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.full((1, 1), value, np.float32))
    with triton.InferenceServerClient(live.grpc_address) as client:
        found = client.infer("m", [tensor], client_timeout=PATIENCE_S).as_numpy("y")
    assert found is not None
    return bytes(found.tobytes())


def tensor(value: float) -> bytes:
    return np.full(COLUMNS, value, np.float32).tobytes()


def unread_http(live: Live) -> socket.socket:
    """Send a request, and read nothing."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    sock.settimeout(PATIENCE_S)
    sock.connect(("127.0.0.1", live.http_port))
    body = json.dumps(document(1.0)).encode()
    sock.sendall(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (INFER.encode(), len(body), body))
    return sock


def unread_grpc(live: Live, calls: int, opening: bytes = SHUT, tls: ssl.SSLContext | None = None) -> socket.socket:
    """Send this many calls on one connection, and read nothing. `opening`: the frames that set the windows."""
    request = triton.service_pb2.ModelInferRequest(model_name="m")
    request.inputs.add(name="x", datatype="FP32", shape=[1, 1]).contents.fp32_contents.append(1.0)
    fields = [*(REQUEST | {":path": "/inference.GRPCInferenceService/ModelInfer"}).items()]
    encoder = Encoder()
    sock = socket.create_connection(("127.0.0.1", live.grpc_port), PATIENCE_S)
    sent = frames.PREFACE + opening
    for stream in range(1, 2 * calls, 2):
        sent += frames.frame(frames.HEADERS, frames.END_HEADERS, stream, encoder.encode(fields))
        sent += payload(message_of(request.SerializeToString()), stream, end=True)
    if tls is not None:
        sock = tls.wrap_socket(sock)
    sock.sendall(sent)
    return sock


def resets(sock: socket.socket, count: int) -> dict[int, int]:
    """Read until this many streams have been reset. Returns: their error codes."""
    found: dict[int, int] = {}
    with sock.makefile("rb") as stream:
        while len(found) < count:
            word, _, stream_id = FRAME_HEADER.unpack(stream.read(FRAME_HEADER_BYTES))
            content = stream.read(word >> 8)
            if word & 0xFF == RST_STREAM:
                found[stream_id] = int.from_bytes(content, "big")
    return found


def is_complete(sock: socket.socket) -> bool:
    """Read the answer. Returns: whether it is complete."""
    received_bytes = 0
    with contextlib.suppress(ConnectionResetError):
        while received_bytes < COLUMNS * 4:
            part = sock.recv(MIB)
            if not part:
                return False
            received_bytes += len(part)
        return True
    return False


@pytest.mark.parametrize("answer", [http_answer, grpc_answer])
def test_http_clients_that_never_read_stay_within_the_limit_and_others_are_answered(
    live: Live, answer: Callable[[Live, float], bytes]
) -> None:
    unread, most = unread_answers_of(live), 0
    with contextlib.ExitStack() as stack:
        silent: list[socket.socket] = []
        for number in range(16):
            silent.append(stack.enter_context(unread_http(live)))
            # clients over the limit are dropped in the next turn of the loop
            live.call(until(lambda: 0 < unread.held_bytes <= MOST))
            most = max(most, unread.held_bytes)
            assert answer(live, number) == tensor(number)
        outcomes = [is_complete(sock) for sock in silent]

        assert most > MOST // 2
        assert not outcomes[0]
        assert outcomes[-1]
    live.call(until(lambda: unread.held_bytes == 0))


@pytest.mark.parametrize("answer", [http_answer, grpc_answer])
def test_grpc_calls_whose_window_stays_closed_are_reset_and_others_are_answered(
    live: Live, answer: Callable[[Live, float], bytes]
) -> None:
    unread = unread_answers_of(live)
    with unread_grpc(live, 16) as silent:
        found = resets(silent, 12)
        live.call(until(lambda: 0 < unread.held_bytes <= MOST))
        assert answer(live, 5.0) == tensor(5.0)

        assert set(found.values()) == {ErrorCode.ENHANCE_YOUR_CALM}
    live.call(until(lambda: unread.held_bytes == 0))


@pytest.mark.parametrize("tls", [False, True])
def test_grpc_clients_with_open_windows_that_never_read_are_dropped(tmp_path: Path, tls: bool) -> None:
    certified, key = certificate(tmp_path)
    settings = {"grpc_use_ssl": True, "grpc_server_cert": certified, "grpc_server_key": key} if tls else {}
    context = ssl.create_default_context(cafile=certified) if tls else None
    if context is not None:
        context.check_hostname = False
        context.set_alpn_protocols(["h2"])
    with served(tmp_path / "models", **settings) as live, contextlib.ExitStack() as stack:
        unread = unread_answers_of(live)
        for _ in range(8):
            stack.enter_context(unread_grpc(live, 1, WIDE, context))
        grpc = live.server._grpc
        assert grpc is not None
        live.call(until(lambda: 0 < unread.held_bytes <= MOST and grpc.connections < 8))


def test_each_front_end_has_one_limit_for_both_its_ports(tmp_path: Path) -> None:
    with live_front(tmp_path, loaders={}, count=2, write_memory_bytes=MOST) as live:
        shares = [port.shared.unread for front in live.fronts for port in front._ports if port.shared is not None]

    assert [unread.max_bytes for unread in shares] == [MOST] * 4
    assert len(set(shares)) == 2


def test_a_client_that_reads_late_receives_its_answer_while_the_limit_is_not_exceeded(live: Live) -> None:
    unread = unread_answers_of(live)
    with unread_http(live) as silent:
        live.call(until(lambda: unread.held_bytes > 0))
        for number in range(8):
            assert http_answer(live, number) == tensor(number)

        assert is_complete(silent)
    live.call(until(lambda: unread.held_bytes == 0))
