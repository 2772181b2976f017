"""Counters of error answers and of rejected connections."""

from __future__ import annotations

import asyncio
import errno
import socket
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from penstock.backends.signature import Signature, TensorSpec
from penstock.server.grpc.method import Status
from penstock.server.http.limits import Limits
from penstock.server.listening.acceptor import Acceptor
from penstock.server.listening.tally import Tally
from tests.fakes import PATIENCE_S, FakeBackend, fake_loader
from tests.live import Live, live_server
from tests.server.fronts.live_fronts import live_front
from tests.server.http.lane import App, Lane, Own, request, run, turns
from tests.server.http2.wire import HOLD, Wire, message_of, payload

GRAPH = Signature((TensorSpec("x", "FP32", (-1, 2)),), (TensorSpec("y", "FP32", (-1, 2)),))
LOADERS = {"onnxruntime": fake_loader(FakeBackend(GRAPH, list))}
GOOD = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}
WRONG = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}]}
INFER = "/v2/models/a/infer"


@pytest.fixture
def models(tmp_path: Path) -> Path:
    (tmp_path / "a" / "1").mkdir(parents=True)
    (tmp_path / "a" / "1" / "model.onnx").touch()
    return tmp_path


def errors(url: str) -> dict[str, int]:
    lines = [line.removeprefix("penstock_errors_total") for line in httpx.get(f"{url}/metrics").text.splitlines()]
    return {line.split()[0]: int(line.split()[1]) for line in lines if line.startswith("{protocol")}


def err(live: Live) -> None:
    """Cause errors over HTTP and gRPC."""
    assert httpx.post(live.url + INFER, json=GOOD).status_code == 200
    for _ in range(3):
        assert httpx.post(live.url + INFER, json=WRONG).status_code == 400
    assert httpx.get(f"{live.url}/v2/models/none").status_code == 404
    assert httpx.get(f"{live.url}/nowhere").status_code == 404
    with grpc.insecure_channel(live.grpc_address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        assert stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=PATIENCE_S).live
        for ask, message in (
            (stub.ModelInfer, service_pb2.ModelInferRequest(model_name="a")),
            (stub.ModelMetadata, service_pb2.ModelMetadataRequest(name="none")),
            (channel.unary_unary("/not/There"), b""),
        ):
            with pytest.raises(grpc.RpcError):
                ask(message, timeout=PATIENCE_S)


ERRED = {
    '{protocol="http",code="400"}': 3,
    '{protocol="http",code="404"}': 2,
    '{protocol="grpc",code="INVALID_ARGUMENT"}': 1,
    '{protocol="grpc",code="NOT_FOUND"}': 1,
    '{protocol="grpc",code="UNIMPLEMENTED"}': 1,
}


def test_error_answers_are_counted_by_protocol_and_code(models: Path) -> None:
    with live_server(models, loaders=LOADERS) as live:
        assert errors(live.url) == {}
        err(live)

        assert errors(live.url) == ERRED


def test_error_answers_of_all_front_ends_are_counted_together(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.server.fronts.front.REPORT_INTERVAL_S", 0.01)
    with live_front(models, loaders=LOADERS, count=2) as live:
        err(live)
        assert httpx.post(live.url_of(1) + INFER, json=WRONG).status_code == 400
        expected = ERRED | {'{protocol="http",code="400"}': 4}
        request_count = 0
        while errors(live.url) != expected and request_count < 500:
            request_count += 1

        assert errors(live.url) == expected


def test_invalid_http_requests_and_connections_over_the_limit_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        lane = Lane(Limits(max_connections=1))
        Lane(shared=lane.shared)
        await lane.fed(b"nonsense\r\n\r\n")
        await turns()

        assert lane.shared.tally.totals == {
            'penstock_connections_refused_total{protocol="http",reason="limit"}': 1,
            'penstock_errors_total{protocol="http",code="400"}': 1,
            'penstock_errors_total{protocol="http",code="503"}': 1,
        }

    run(main)
    assert caplog.messages == ["a connection is rejected: 1 are open, the limit of --http-max-connections"]


def test_a_grpc_connection_over_the_limit_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    wire = Wire(max_connections=1)
    wire.connect()

    assert wire.shared.tally.totals == {'penstock_connections_refused_total{protocol="grpc",reason="limit"}': 1}
    assert caplog.messages[0].endswith("the limit of --grpc-max-connections")


def test_an_ended_call_is_not_counted_as_an_error_again() -> None:
    wire = Wire()
    wire.feed(wire.headers(__path=HOLD, grpc_timeout="1S") + payload(message_of(b""), end=True))
    wire.loop.pass_time(2.0)
    wire.held[0].abort(Status.INTERNAL, "too late")

    assert wire.shared.tally.totals == {'penstock_errors_total{protocol="grpc",code="DEADLINE_EXCEEDED"}': 1}


class Failing(App):
    """Fails before it answers, or sends a late answer and fails when it is notified of a disconnect."""

    def __init__(self, *, at_once: bool) -> None:
        super().__init__()
        self._at_once = at_once

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while not self._at_once and (await receive())["type"] != "http.disconnect":
            pass
        if not self._at_once:
            await send({"type": "http.response.start", "status": 500, "headers": []})
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("at_once", "raw", "code"), [(True, request("/app"), 500), (False, request("/app", b"body")[:-1], 408)]
)
def test_a_failing_application_is_counted_by_the_status_sent_to_the_client(
    at_once: bool, raw: bytes, code: int
) -> None:
    async def main() -> None:
        lane = Lane(app=Failing(at_once=at_once))
        await lane.fed(raw)
        lane.tick(lane.shared.limits.receive_timeout_s + 2)
        await turns()

        assert lane.statuses == [code]
        assert lane.shared.tally.totals == {f'penstock_errors_total{{protocol="http",code="{code}"}}': 1}

    run(main)


def test_error_answers_to_disconnected_clients_are_not_counted() -> None:
    async def main() -> None:
        lane = Lane(app=Failing(at_once=False))
        await lane.fed(request("/app", b"body"))
        lane.transport.lose(None)
        await turns()
        own = Lane(own=Own(hold=True), shared=None)
        await own.fed(request("/own"))
        own.transport.lose(None)
        own.own.waiting[0].answer(503, b"", b"")

        assert (lane.shared.tally.totals, own.shared.tally.totals) == ({}, {})

    run(main)


class Listening:
    """A listening socket on which connections wait, and whose `accept` then fails if there is an error."""

    def __init__(self, waiting: int, error: OSError | None) -> None:
        self.waiting = waiting
        self.error = error

    def accept(self) -> tuple[socket.socket, None]:
        if not self.waiting:
            raise BlockingIOError if self.error is None else self.error
        self.waiting -= 1
        return socket.socket(), None

    def fileno(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("error", "reason"), [(None, "limit"), (OSError(errno.EMFILE, "Too many open files"), "descriptors")]
)
def test_connections_that_are_not_accepted_are_counted_by_reason(error: OSError | None, reason: str) -> None:
    async def main() -> None:
        tally = Tally("grpc")
        accepting = Acceptor(asyncio.Protocol, lambda _sock: False, lambda _count: None, tally)
        accepting.max_connections = 0
        accepting._accept(Listening(int(error is None), error))  # type: ignore[arg-type]

        line = f'penstock_connections_refused_total{{protocol="grpc",reason="{reason}"}}'
        assert tally.totals == {line: 1}

    run(main)


def test_running_out_of_file_descriptors_is_logged_once_until_nobody_waits(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        tally, full = Tally("http"), OSError(errno.EMFILE, "Too many open files")
        accepting = Acceptor(asyncio.Protocol, lambda _sock: True, lambda _count: None, tally)
        for error in (full, full, None, full):
            accepting._accept(Listening(1, error))  # type: ignore[arg-type]
        assert sum(tally.totals.values()) == 3

    run(main)
    assert caplog.messages == ["connections cannot be accepted: Too many open files"] * 2
