"""What is asked of a server beside the load, over both protocols."""

from __future__ import annotations

import json
import socket
import ssl
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from penstock.backends.signature import Signature, TensorSpec
from penstock.perf.generator.orders import GrpcCall, Target, Tls
from penstock.perf.profiling import control as controls
from penstock.perf.profiling.control import Control, ControlError, RefusedError, control_for
from tests.fakes import FakeBackend, fake_loader
from tests.keys import certificate
from tests.live import live_server

GRAPH = Signature((TensorSpec("x", "FP32", (-1, 4)),), (TensorSpec("y", "FP32", (-1, 4)),))
NAME = "m #1"
GRPC = GrpcCall("")


@dataclass
class Both:
    """The same server over either protocol."""

    http: Control
    grpc: Control

    def __iter__(self) -> Iterator[Control]:
        return iter((self.http, self.grpc))


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    root = tmp_path_factory.mktemp("models")
    for version in ("1", "2"):
        (root / NAME / version).mkdir(parents=True)
        (root / NAME / version / "model.onnx").touch()
    loaders = {"onnxruntime": fake_loader(FakeBackend(GRAPH, list))}
    explicit: dict[str, Any] = {"model_control_mode": "explicit", "load_model": ("*",), "allow_client_shm": True}
    with live_server(root, loaders=loaders, **explicit) as live:
        yield Both(
            control_for(Target("127.0.0.1", live.http_port)),
            control_for(Target("127.0.0.1", live.grpc_port, grpc=GRPC)),
        )


def test_both_protocols_describe_the_server_and_its_models_alike(both: Both) -> None:
    http, grpc = both

    assert http.server() == grpc.server()
    assert "statistics" in http.server()["extensions"]
    assert http.metadata(NAME) == grpc.metadata(NAME)
    assert grpc.metadata(NAME, "2")["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]
    assert http.config(NAME) == grpc.config(NAME)
    assert type(grpc.config(NAME)["max_batch_size"]) is int
    assert [control.ready() for control in both] == [True, True]
    assert [control.ready(NAME, "2") for control in both] == [True, True]


def test_statistics_are_integers_by_version(both: Both) -> None:
    http, grpc = (control.statistics(NAME) for control in both)

    assert [each["version"] for each in grpc] == [each["version"] for each in http] == ["2"]
    assert grpc[0]["inference_stats"] == http[0]["inference_stats"]
    assert all(type(duration["ns"]) is int for duration in grpc[0]["inference_stats"].values())
    assert [len(control.statistics(NAME, "2")) for control in both] == [1, 1]


def test_an_unsupported_extension_is_empty_and_a_rejection_is_an_error(both: Both) -> None:
    for control in both:
        assert control.config("none") == {}
        assert control.statistics("none") == []
        assert not control.ready("none")
        with pytest.raises(RefusedError, match="'none' is not found"):
            control.metadata("none")


def test_regions_of_shared_memory_are_registered_and_unregistered(both: Both) -> None:
    for control in both:
        key = f"/penstock-control-{uuid.uuid4().hex}"
        Path("/dev/shm", key[1:]).write_bytes(bytes(64))
        try:
            control.register("a region", key, 64)
            with pytest.raises(RefusedError, match="already"):
                control.register("a region", key, 64)
            control.unregister("a region")
            control.register("a region", key, 64)
            control.register("another", key, 64)
            control.unregister()
            control.register("another", key, 64)
            control.unregister()
        finally:
            Path("/dev/shm", key[1:]).unlink()


def test_models_are_loaded_with_a_configuration_and_unloaded(both: Both) -> None:
    for control in both:
        control.unload(NAME)
        assert not control.ready(NAME)
        control.load(NAME, {"max_batch_size": 6})
        assert control.config(NAME)["max_batch_size"] == 6
        control.load(NAME)
        with pytest.raises(RefusedError, match="none"):
            control.load("none")


def test_trace_settings_are_read_and_changed(both: Both) -> None:
    http, grpc = both
    before = http.trace()

    assert grpc.trace() == before
    assert before["trace_level"] == ["OFF"]
    for control in both:
        changed = control.trace({"trace_level": ["OFF"], "trace_rate": "500"})
        assert changed == {**before, "trace_rate": "500"}
        assert control.trace({"trace_level": None, "trace_rate": None}) == before
        assert control.trace({"trace_rate": "7"}, NAME)["trace_rate"] == "7"
        assert control.trace({"trace_rate": None}, NAME) == before


def test_a_restricted_protocol_is_unavailable_without_its_header(tmp_path: Path) -> None:
    (tmp_path / NAME / "1").mkdir(parents=True)
    (tmp_path / NAME / "1" / "model.onnx").touch()
    loaders = {"onnxruntime": fake_loader(FakeBackend(GRAPH, list))}
    with live_server(tmp_path, loaders=loaders, grpc_restricted_protocol=("model-config,statistics:k=v",)) as live:
        header = ("triton-grpc-protocol-k", "v")
        anybody = control_for(Target("127.0.0.1", live.grpc_port, grpc=GRPC))
        target = Target("127.0.0.1", live.grpc_port, grpc=GrpcCall("", (header,)))

        assert (anybody.config(NAME), anybody.statistics(NAME)) == ({}, [])
        assert control_for(target, dict([header])).config(NAME)["name"] == NAME


def test_an_unreachable_server_is_an_error_and_not_ready() -> None:
    for control in (control_for(Target("127.0.0.1", 1)), control_for(Target("127.0.0.1", 1, grpc=GRPC))):
        assert not control.ready()
        for call in (control.server, lambda: control.config("m"), lambda: control.statistics("m")):  # noqa: B023
            with pytest.raises(ControlError) as raised:
                call()
            assert not isinstance(raised.value, RefusedError)


@pytest.mark.parametrize(
    ("host", "header", "message"),
    [
        ("a..b", ("X", "y"), "label"),
        ("127.0.0.1", ("X", "\N{EURO SIGN}"), "latin-1"),
        ("127.0.0.1", ("X", "one\nline more"), "header"),
    ],
)
def test_a_call_that_fails_over_http_is_an_error(host: str, header: tuple[str, str], message: str) -> None:
    asking = control_for(Target(host, 1), dict([header]))

    with pytest.raises(ControlError, match=message):
        asking.server()


@pytest.mark.parametrize(
    ("host", "header", "message"),
    [("a..b", ("x", "y"), "no connection to a..b:1: .*label"), ("127.0.0.1", ("x", "y" * 20_000), "header fields of")],
)
def test_a_call_that_fails_over_grpc_is_an_error(host: str, header: tuple[str, str], message: str) -> None:
    asking = control_for(Target(host, 1, grpc=GRPC), dict([header]))

    with pytest.raises(ControlError, match=message):
        asking.server()


@dataclass
class Scripted:
    """A server of HTTP with the answers it is given, by path; all else is 404."""

    port: int
    answers: dict[str, tuple[int, str]]
    requests: list[tuple[str, str, dict[str, str], str]] = field(default_factory=list)


@contextmanager
def scripted(answers: dict[str, tuple[int, str]], tls: ssl.SSLContext | None = None) -> Iterator[Scripted]:
    class Answering(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
            stand_in.requests.append((self.command, self.path, dict(self.headers), body))
            status, text = stand_in.answers.get(self.path, (404, "Not Found"))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_POST = _answer  # noqa: N815 - http.server's names

        def log_message(self, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Answering)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    stand_in = Scripted(server.server_port, answers)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield stand_in
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


def test_a_server_without_the_extensions_of_triton_returns_empty_results() -> None:
    metadata = {"name": "m", "platform": "", "inputs": [], "outputs": []}
    with scripted({"/v2/models/m": (200, json.dumps(metadata)), "/v2/models/m/stats": (200, "[1]")}) as server:
        control = control_for(Target("127.0.0.1", server.port), {"Authorization": "Bearer x"})

        assert control.metadata("m") == metadata
        assert control.config("m") == {}
        assert control.statistics("m") == []
        assert not control.ready("m")
        server.answers["/v2/models/m/ready"] = (200, "")
        assert control.ready("m")
        server.answers["/v2/models/a%2Fb%3F/versions/1%20"] = (200, "{}")
        assert control.metadata("a/b?", "1 ") == {}
        assert {headers["Authorization"] for _, _, headers, _ in server.requests} == {"Bearer x"}


@pytest.mark.parametrize("text", ["", "<html>", "null", '"text"', "[[]]"])
def test_an_answer_that_is_not_a_json_object_is_rejected(text: str) -> None:
    with scripted({"/v2": (200, text)}) as server:
        control = control_for(Target("127.0.0.1", server.port))
        with pytest.raises(RefusedError):
            control.server()


def test_https_works_with_a_trusted_server(tmp_path: Path) -> None:
    certificate_file, key = certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate_file, key)
    with scripted({"/v2": (200, "{}")}, context) as server:
        assert control_for(Target("127.0.0.1", server.port, Tls(roots=certificate_file))).server() == {}
        assert control_for(Target("127.0.0.1", server.port, Tls(verify_peer=False))).server() == {}
        with pytest.raises(ControlError, match="certificate verify failed"):
            control_for(Target("127.0.0.1", server.port, Tls())).server()


@pytest.mark.parametrize("grpc", [None, GRPC])
def test_a_server_that_hangs_is_an_error_after_the_timeout(
    grpc: GrpcCall | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controls, "READY_TIMEOUT_S", 0.02)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        asking = control_for(Target("127.0.0.1", silent.getsockname()[1], grpc=grpc))
        with pytest.raises(ControlError, match=r"timed out|no answer within"):
            asking.statistics("m")
        assert not asking.ready()
