from __future__ import annotations

import asyncio
import http.client
import json
import logging
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
import uvloop
from tritonclient.grpc import service_pb2, service_pb2_grpc

from penstock.backends.backend import Array, Backend, Loader
from penstock.backends.errors import Code, InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.server.listening.listener import Listener, Port
from penstock.server.listening.sockets import StartError
from penstock.server.process import triton_log_lines
from penstock.server.serve import Server
from tests.fakes import FakeBackend, fake_loader
from tests.forking import the_forker
from tests.live import live_server, settings_for
from tests.originals import free_port
from tests.server.http.lane import turns

IRIS = Path(__file__).parents[2] / "examples" / "iris"
GRAPH = Signature((TensorSpec("x", "FP32", (-1, 2)),), (TensorSpec("y", "FP32", (-1, 2)),))
BODY = json.dumps({"id": "7", "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]})


class Gate:
    """A model whose runs wait while the gate is closed."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Event()

    def run(self, inputs: list[Array | None]) -> list[Any]:
        if not self.open.is_set():
            self.entered.set()
            self.open.wait(30)
        return list(inputs)

    @property
    def loaders(self) -> Mapping[str, Loader]:
        return {"onnxruntime": fake_loader(FakeBackend(GRAPH, self.run))}


def write_models(root: Path, *names: str) -> Path:
    """Write a repository of models that run on threads, so that a gate does not block the loop."""
    for name in names:
        (root / name / "1").mkdir(parents=True)
        (root / name / "1" / "model.onnx").touch()
        (root / name / "penstock.toml").write_text('[batching]\nexecutor = "thread"\n')
    return root


def ask(port: int, method: str, path: str, body: str | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path, body)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def run(main: Callable[[], Awaitable[None]]) -> None:
    loop = uvloop.new_event_loop()
    try:
        loop.run_until_complete(main())
    finally:
        loop.close()


def test_two_servers_in_one_process_are_independent(tmp_path: Path) -> None:
    first = write_models(tmp_path / "first", "a")
    second = write_models(tmp_path / "second", "b")
    with (
        live_server(first, loaders=Gate().loaders) as one,
        live_server(second, loaders=Gate().loaders, id="two") as two,
    ):
        assert ask(one.http_port, "POST", "/v2/models/a/infer", BODY)[0] == 200
        assert ask(one.http_port, "POST", "/v2/models/b/infer", BODY)[0] == 404
        assert ask(two.http_port, "POST", "/v2/models/b/infer", BODY)[0] == 200
        assert json.loads(ask(one.http_port, "GET", "/v2")[1])["name"] == "triton"
        assert json.loads(ask(two.http_port, "GET", "/v2")[1])["name"] == "two"
        assert b'nv_inference_request_success{model="a",version="1"} 1' in ask(one.metrics_port, "GET", "/metrics")[1]


def test_a_server_is_live_before_and_ready_after_its_models_are_loaded(tmp_path: Path) -> None:
    async def main() -> None:
        server = Server(settings_for(write_models(tmp_path, "a")), Gate().loaders)
        await server.open()
        before = [await asyncio.to_thread(ask, server.http_port, "GET", path) for path in HEALTH]
        await server.load()
        after = [await asyncio.to_thread(ask, server.http_port, "GET", path) for path in HEALTH]
        await server.close()

        assert [status for status, _ in before] == [200, 400]
        assert [status for status, _ in after] == [200, 200]

    run(main)


HEALTH = ("/v2/health/live", "/v2/health/ready")


def test_requests_are_unavailable_instead_of_not_found_while_models_are_loading(
    tmp_path: Path,
) -> None:
    def ask_grpc(port: int) -> tuple[grpc.StatusCode, bool]:
        request = service_pb2.ModelInferRequest(model_name="a")
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            ready = stub.ModelReady(service_pb2.ModelReadyRequest(name="a"), timeout=30).ready
            with pytest.raises(grpc.RpcError) as refused:
                stub.ModelInfer(request, timeout=30)
        return refused.value.code(), ready

    async def main() -> None:
        server = Server(settings_for(write_models(tmp_path, "a")), Gate().loaders)
        await server.open()
        for_work = await asyncio.to_thread(ask, server.http_port, "POST", "/v2/models/a/infer", BODY)
        for_config = await asyncio.to_thread(ask, server.http_port, "GET", "/v2/models/a/config")
        for_ready = await asyncio.to_thread(ask, server.http_port, "GET", "/v2/models/a/ready")
        by_grpc = await asyncio.to_thread(ask_grpc, server.grpc_port)
        await server.load()
        unknown = await asyncio.to_thread(ask, server.http_port, "POST", "/v2/models/b/infer", BODY)
        known = await asyncio.to_thread(ask, server.http_port, "POST", "/v2/models/a/infer", BODY)
        await server.close()

        loading = (503, b'{"error":"the server is loading its models, try again soon"}')
        assert [for_work, for_config] == [loading, loading]
        assert for_ready[0] == 400
        assert by_grpc == (grpc.StatusCode.UNAVAILABLE, False)
        assert unknown[0] == 404
        assert known[0] == 200

    run(main)


def test_a_broken_model_does_not_keep_other_models_from_being_served(tmp_path: Path) -> None:
    fine = fake_loader(FakeBackend(GRAPH, list))

    def load(path: Path, device: str, options: Mapping[str, str]) -> Backend:
        if path.parts[-3] == "broken":
            raise InferError(Code.INVALID, "no good")
        return fine(path, device, options)

    root = write_models(tmp_path, "broken", "fine")
    with live_server(root, loaders={"onnxruntime": load}) as live:
        assert ask(live.http_port, "POST", "/v2/models/fine/infer", BODY)[0] == 200
        assert ask(live.http_port, "GET", "/v2/health/ready")[0] == 400
        index = json.loads(ask(live.http_port, "POST", "/v2/repository/index")[1])
        assert {"name": "broken", "version": "1", "state": "UNAVAILABLE", "reason": "no good"} in index
        assert live.server.status_line == "not ready, serving fine/1; unavailable: broken/1"
    with live_server(root, loaders={"onnxruntime": load}, strict_readiness=False) as live:
        assert ask(live.http_port, "GET", "/v2/health/ready")[0] == 200


def test_a_model_whose_hooks_do_not_load_is_not_served(tmp_path: Path) -> None:
    root = write_models(tmp_path, "a")
    (root / "a" / "hooks.py").write_text("def pre_inference(wrong):\n    return wrong\n")
    (root / "a" / "penstock.toml").write_text('[hooks]\nfile = "hooks.py"\n')
    with live_server(root, loaders=Gate().loaders) as live:
        status, body = ask(live.http_port, "POST", "/v2/models/a/infer", BODY)
        index = json.loads(ask(live.http_port, "POST", "/v2/repository/index")[1])

    assert status == 404, body
    assert "pre_inference" in index[0]["reason"]


def test_ports_that_are_not_allowed_are_not_opened(tmp_path: Path) -> None:
    root = write_models(tmp_path, "a")
    with live_server(root, loaders=Gate().loaders, allow_metrics=False) as live:
        assert (live.http_port > 0, live.metrics_port) == (True, 0)
    with live_server(root, loaders=Gate().loaders, allow_http=False) as live:
        assert (live.http_port, live.metrics_port > 0) == (0, True)
        assert ask(live.metrics_port, "POST", "/v2/models/a/infer", BODY)[0] == 404


def test_http_limits_apply_to_the_metrics_port(tmp_path: Path) -> None:
    with live_server(write_models(tmp_path, "a"), loaders=Gate().loaders, http_max_header_bytes=1000) as live:
        assert ask(live.metrics_port, "GET", "/metrics?" + "x" * 2000)[0] == 431


@asynccontextmanager
async def gated(gate: Gate, root: Path, **settings: Any) -> AsyncIterator[Server]:
    """A loaded server whose model's gate is closed, and opened at the end."""
    server = Server(settings_for(write_models(root, "a"), **settings), gate.loaders)
    try:
        await server.open()
        await server.load()
        gate.open.clear()
        yield server
    finally:
        gate.open.set()
        await server.close()
        await server.engine.stop(10)  # the thread behind the gate calls the loop once more


def test_ports_wait_in_parallel_for_the_work_of_disconnected_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disconnected: list[str] = []
    counts: list[int] = []

    async def main() -> None:
        all_of_them = asyncio.Event()

        async def abandon(port: Port) -> None:
            disconnected.append(port.name)
            if len(disconnected) == 3:
                all_of_them.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await all_of_them.wait()
            counts.append(len(disconnected))

        for kind in (Port, Listener):
            monkeypatch.setattr(kind, "abandon", abandon)
        async with gated(Gate(), tmp_path, allow_grpc=True):
            pass

    run(main)
    assert (sorted(disconnected), counts) == (["HTTP", "gRPC", "metrics"], [3, 3, 3])


def ask_until_closed(port: int) -> bytes:
    """Send a request on a connection that is kept alive, and read until the server closes it."""
    request = f"POST /v2/models/a/infer HTTP/1.1\r\nhost: x\r\ncontent-length: {len(BODY)}\r\n\r\n{BODY}"
    parts = []
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall(request.encode())
        while part := client.recv(65536):
            parts.append(part)
    return b"".join(parts)


def wait_until_turned_away(port: int) -> None:
    """Connect until the server drains, when the first answer on a new connection is also the last."""
    closes = None
    while closes != "close":
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", "/v2/health/ready")
        closes = connection.getresponse().getheader("connection")
        connection.close()


@pytest.mark.slow
def test_a_draining_server_is_not_ready_and_closes_after_the_accepted_requests(tmp_path: Path) -> None:
    gate = Gate()

    async def main() -> None:
        async with gated(gate, tmp_path, drain_delay_secs=0.2) as server:
            asking = asyncio.ensure_future(asyncio.to_thread(ask_until_closed, server.http_port))
            await asyncio.to_thread(gate.entered.wait, 10)

            draining = asyncio.ensure_future(server.drain())
            await asyncio.sleep(0)
            status, body = await asyncio.to_thread(ask, server.http_port, "GET", "/v2/health/ready")
            assert (status, body) == (503, b'{"error":"Server exiting"}')
            await asyncio.to_thread(wait_until_turned_away, server.http_port)
            assert not draining.done()
            gate.open.set()

            answer = await asking
            assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
            assert b"connection: close\r\n" in answer
            assert answer.endswith(b'"data":[1.0,2.0]}]}')
            assert await draining == 0
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", server.http_port)

    run(main)


def test_new_connections_to_a_shared_port_reach_the_other_server_while_one_drains(tmp_path: Path) -> None:
    gate = Gate()

    async def main() -> None:
        async with gated(gate, tmp_path, reuse_http_port=True) as server:
            asking = asyncio.ensure_future(asyncio.to_thread(ask_until_closed, server.http_port))
            await asyncio.to_thread(gate.entered.wait, 10)
            other = Server(settings_for(id="other", http_port=server.http_port, reuse_http_port=True), {})
            await other.open()
            await other.load()

            draining = asyncio.ensure_future(server.drain())
            await turns(100)
            answers = [await asyncio.to_thread(ask, server.http_port, "GET", "/v2") for _ in range(12)]
            assert not draining.done()
            gate.open.set()

            assert (await asking).startswith(b"HTTP/1.1 200 OK\r\n")
            assert await draining == 0
            await other.close()
            assert {json.loads(body)["name"] for _, body in answers} == {"other"}

    run(main)


def test_drain_returns_and_logs_the_requests_unfinished_after_the_exit_timeout(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate()
    caplog.set_level(logging.INFO, "penstock.serve")

    async def main() -> None:
        async with gated(gate, tmp_path, exit_timeout_secs=0.0) as server:
            asking = asyncio.ensure_future(asyncio.to_thread(ask_until_closed, server.http_port))
            await asyncio.to_thread(gate.entered.wait, 10)

            assert await server.drain() == 1
            assert "Model 'a' (version 1) has 1 in-flight inferences" in caplog.messages

            await server.close()
            assert await asking == b""

    run(main)


@pytest.mark.parametrize(
    ("name", "message"),
    [("absent", "absent: no such file or folder"), ("notes.txt", "neither a model repository nor an .onnx file")],
)
def test_a_path_that_cannot_be_served_is_a_start_error(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "notes.txt").touch()

    async def main() -> None:
        server = Server(settings_for(tmp_path / name))
        with pytest.raises(StartError, match=message):
            await server.open()
        await server.close()

    run(main)


def test_load_model_with_an_asterisk_cannot_be_combined_with_a_name(tmp_path: Path) -> None:
    async def main() -> None:
        server = Server(settings_for(tmp_path, model_control_mode="explicit", load_model=("*", "a")))
        with pytest.raises(StartError, match="loads every model and cannot be combined with another --load-model"):
            await server.open()
        await server.close()

    run(main)


def test_the_access_log_has_every_request_once_if_enabled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock.access")
    for enabled in (True, False):
        caplog.clear()
        with live_server(
            write_models(tmp_path / str(enabled), "a"), loaders=Gate().loaders, access_log=enabled
        ) as live:
            ask(live.http_port, "POST", "/v2/models/a/infer", BODY)
            ask(live.http_port, "POST", "/v2/models/a/infer", "{")
            ask(live.http_port, "GET", "/v2")

        lines = [record.getMessage().partition(" - ")[2] for record in caplog.records if "access" in record.name]
        expected = [
            '"POST /v2/models/a/infer HTTP/1.1" 200',
            '"POST /v2/models/a/infer HTTP/1.1" 400',
            '"GET /v2 HTTP/1.1" 200',
        ]
        assert lines == (expected if enabled else [])


@pytest.mark.parametrize("logged", [True, False], ids=["logged", "not logged"])
def test_the_access_log_has_the_metrics_port_unless_disabled(
    logged: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock.access")

    with live_server(tmp_path, access_log=True, metrics_access_log=logged) as live:
        ask(live.metrics_port, "GET", "/metrics")
        ask(live.http_port, "GET", "/v2")

    lines = [record.getMessage().partition(" - ")[2] for record in caplog.records if "access" in record.name]
    expected = ['"GET /metrics HTTP/1.1" 200', '"GET /v2 HTTP/1.1" 200']
    assert lines == (expected if logged else expected[1:])


# -- the process ---------------------------------------------------------------------------------------------------


class Process:
    """`penstock serve`, whose log lines are read as they arrive."""

    def __init__(self, *words: str, start: Callable[..., Any]) -> None:
        ports = ("--http-port=0", "--metrics-port=0", "--grpc-port=0", "--log-format=json")
        command = [sys.executable, "-m", "penstock.server.cli", "serve", *ports, *words]
        self._child = start(command, stderr=subprocess.PIPE, text=True)

    def line_with(self, word: str) -> str:
        """Read until a message has `word` in it."""
        assert self._child.stderr is not None
        messages = []
        for line in self._child.stderr:
            message: str = json.loads(line)["msg"]
            messages.append(message)
            if word in message:
                return message
        raise AssertionError(f"no {word!r} in {messages}")

    def signal(self, number: int) -> None:
        self._child.send_signal(number)

    def running(self) -> bool:
        """Return whether the process still runs, after giving it a moment to end."""
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(0.1)
        return self._child.poll() is None

    def status(self) -> int:
        status: int = self._child.wait(30)
        return status

    def end(self) -> None:
        with self._child:
            self._child.kill()


@contextmanager
def process(*words: str, start: Callable[..., Any] | None = None) -> Iterator[Process]:
    """Run `penstock serve`. `start`: like Popen; by default it is forked, since starting takes longer."""
    started = Process(*words, start=start or the_forker().start)
    try:
        yield started
    finally:
        started.end()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_process_with_status_0(number: int) -> None:
    with process(str(IRIS), start=subprocess.Popen) as server:
        assert server.line_with("serving") == "ready, serving iris/1"
        server.signal(number)

        assert server.line_with("stopped") == "stopped: all accepted requests are finished, exit status 0"
        assert server.status() == 0


@pytest.mark.slow
def test_the_started_lines_of_triton_are_logged_after_all_models_are_loaded() -> None:
    """FedML, Testcontainers and many scripts that start a server wait for these lines."""
    with process(str(IRIS), "--http-address=0.0.0.0", "--allow-metrics=false", start=subprocess.Popen) as server:
        server.line_with("ready, serving")

        assert re.fullmatch(r"Started GRPCInferenceService at 127\.0\.0\.1:\d+", server.line_with("Started"))
        assert re.fullmatch(r"Started HTTPService at 0\.0\.0\.0:\d+", server.line_with("Started"))


def test_as_triton_says_names_each_service_of_triton() -> None:
    urls = {"HTTP": "http://[::1]:1", "gRPC": "grpcs://h:2", "SageMaker": "http://h:4", "metrics": "http://h:3"}

    assert list(triton_log_lines(urls)) == [
        "Started GRPCInferenceService at h:2",
        "Started HTTPService at [::1]:1",
        "Started Metrics Service at h:3",
    ]
    assert list(triton_log_lines({})) == []


@pytest.mark.slow
def test_a_second_signal_forces_the_process_to_end_with_status_1() -> None:
    with process(str(IRIS), "--drain-delay-secs=1000") as server:
        server.line_with("ready, serving")
        server.signal(signal.SIGTERM)
        server.line_with("SIGTERM")

        while server.running():
            server.signal(signal.SIGTERM)

        assert server.status() == 1
        server.line_with("forced to stop")


@pytest.mark.slow
def test_a_signal_while_a_model_loads_ends_the_process_with_status_0(tmp_path: Path) -> None:
    model = tmp_path / "slow"
    shutil.copytree(IRIS / "iris", model)
    (model / "handler.py").write_text(
        "import logging, time\nlogging.getLogger('penstock').info('hooks begin')\ntime.sleep(1000)\n"
    )
    with process(str(tmp_path)) as server:
        server.line_with("hooks begin")
        server.signal(signal.SIGTERM)

        assert server.status() == 0


FORKS = """
import logging, multiprocessing, time
def wait(told):
    told.send(None)
    time.sleep(60)
fork = multiprocessing.get_context("fork")
heard, told = fork.Pipe()
child = fork.Process(target=wait, args=(told,))
child.start()
heard.recv()  # what comes while a process forks, Python drops
child.terminate()
child.join(10)
logging.getLogger("penstock").info("the fork ended by %s", child.exitcode)
child.kill()
def post_inference(prediction, signature, metadata): return 1
"""


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("--http-workers=1",)], ids=["one process", "a front end"])
def test_a_signal_ends_a_process_forked_by_a_hook(words: tuple[str, ...], tmp_path: Path) -> None:
    shutil.copytree(IRIS / "iris", tmp_path / "forks")
    (tmp_path / "forks" / "handler.py").write_text(FORKS)
    with process(str(tmp_path), *words, start=subprocess.Popen) as server:
        assert server.line_with("the fork ended") == "the fork ended by -15"


@pytest.mark.slow
def test_a_port_already_in_use_ends_the_process_with_status_1() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with process(str(IRIS), f"--http-port={port}") as server:
            expected = f"failed to start HTTP service: Unavailable - Socket '127.0.0.1:{port}' already in use"

            assert server.line_with("failed to start") == expected
            assert server.status() == 1


def test_servers_with_port_reuse_enabled_listen_on_the_same_ports() -> None:
    async def main() -> None:
        shared = {"reuse_http_port": True, "reuse_grpc_port": True}
        async with AsyncExitStack() as until:

            async def opened(**settings: Any) -> Server:
                server = Server(settings_for(**settings), {})
                until.push_async_callback(server.close)
                await server.open()
                await server.load()
                return server

            one = await opened(**shared)
            place = {"http_port": one.http_port, "grpc_port": one.grpc_port}
            with pytest.raises(StartError, match="already in use"):
                await opened(**place)
            await opened(id="two", **place, **shared)
            await one.close()
            _, body = await asyncio.to_thread(ask, one.http_port, "GET", "/v2")
            with grpc.insecure_channel(f"127.0.0.1:{one.grpc_port}") as channel:
                asking = service_pb2_grpc.GRPCInferenceServiceStub(channel).ServerMetadata
                answer = await asyncio.to_thread(asking, service_pb2.ServerMetadataRequest(), timeout=30)

        assert (json.loads(body)["name"], answer.name) == ("two", "two")

    run(main)


@pytest.mark.parametrize("name", ["http", "grpc"])
def test_a_shared_port_is_opened_after_all_models_are_loaded(name: str, tmp_path: Path) -> None:
    async def main() -> None:
        port = free_port()
        server = Server(
            settings_for(write_models(tmp_path, "a"), **{f"{name}_port": port, f"reuse_{name}_port": True}),
            Gate().loaders,
        )
        try:
            await server.open()
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", port)
            assert server.urls is None
            # the other port answers meanwhile
            place = server.grpc_port if name == "http" else server.http_port
            (await asyncio.open_connection("127.0.0.1", place))[1].close()
            await server.load()
            (await asyncio.open_connection("127.0.0.1", port))[1].close()
            assert server.urls is not None
        finally:
            await server.close()

    run(main)


def test_a_shared_port_in_exclusive_use_is_a_start_error_before_models_are_loaded() -> None:
    async def main() -> None:
        for name in ("http", "grpc"):
            with socket.create_server(("127.0.0.1", 0)) as holder:
                port = holder.getsockname()[1]
                server = Server(settings_for(**{f"{name}_port": port, f"reuse_{name}_port": True}), {})
                try:
                    with pytest.raises(StartError, match=f"Socket '127.0.0.1:{port}' already in use"):
                        await server.open()
                finally:
                    await server.close()

    run(main)


def test_a_shared_port_taken_exclusively_during_loading_is_a_start_error() -> None:
    async def main() -> None:
        port = free_port()
        server = Server(settings_for(http_port=port, reuse_http_port=True), {})
        try:
            await server.open()
            with socket.socket() as other:
                other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                other.bind(("127.0.0.1", port))
                other.listen()
                with pytest.raises(StartError, match=f"Socket '127.0.0.1:{port}' already in use"):
                    await server.load()
        finally:
            await server.close()

    run(main)


def test_a_server_that_exits_on_a_load_error_never_opens_its_shared_port(tmp_path: Path) -> None:
    async def main() -> None:
        port = free_port()
        shared = settings_for(write_models(tmp_path, "a"), http_port=port, reuse_http_port=True, exit_on_error=True)
        server = Server(shared, {})
        try:
            await server.open()
            assert await server.load() != []
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", port)
        finally:
            await server.close()

    run(main)


@pytest.mark.slow
def test_exit_on_error_makes_a_broken_model_fatal(tmp_path: Path) -> None:
    write_models(tmp_path, "broken")
    with process(str(tmp_path), "--exit-on-error") as server:
        assert "model 'broken' version 1" in server.line_with("--exit-on-error")
        assert server.status() == 1
