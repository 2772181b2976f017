"""The access log: one line with the same fields for each answer over HTTP and gRPC, and none for unsent answers."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from penstock.server.grpc.access import LoggedCall, LoggedCompressingCall
from penstock.server.grpc.method import Status
from penstock.server.http.access import LoggedFastLane
from penstock.server.http2 import frames
from penstock.server.settings import Settings
from penstock.server.telemetry.logs import Logs
from tests.fakes import PATIENCE_S
from tests.live import live_server
from tests.server.http.lane import Lane, Own, request, run, turns
from tests.server.http2.wire import BIDI, ECHO, HOLD, Wire, message_of, payload
from tests.server.test_tally import GOOD, INFER, LOADERS, WRONG, models

__all__ = ["models"]


@pytest.fixture
def access_lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "penstock.access")
    return caplog


def logged_fields(access_lines: pytest.LogCaptureFixture) -> list[tuple[Any, ...]]:
    """Return status, bytes, model and ID of each line."""
    names = ("status", "bytes", "model", "request_id")
    return [
        tuple(vars(each).get(name) for name in names) for each in access_lines.records if each.name == "penstock.access"
    ]


def infer(request_id: str) -> Any:
    message = service_pb2.ModelInferRequest(model_name="a", id=request_id, raw_input_contents=[bytes(8)])
    message.inputs.add(name="x", datatype="FP32", shape=[1, 2])
    return message


@pytest.mark.parametrize("form", ["json", "text"])
def test_http_and_grpc_answers_are_logged_with_the_same_fields_in_json_and_text(form: str, models: Path) -> None:
    text = io.StringIO()
    logs = Logs(Settings(log_format=form), text)
    logs.start()
    with live_server(models, loaders=LOADERS, access_log=True) as live:
        body = httpx.post(live.url + INFER, json={**GOOD, "id": "seven"}).content
        with grpc.insecure_channel(live.grpc_address) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            answers = [stub.ModelInfer(infer("eight"), timeout=PATIENCE_S).ByteSize() for _ in range(2)]
    logs.stop()

    lines = [line for line in text.getvalue().splitlines() if "penstock.access" in line or " access: " in line]
    if form == "text":
        fields = [dict(word.split("=") for word in line.split() if "=" in word) for line in lines]
    else:
        fields = [{name: str(value) for name, value in json.loads(line).items()} for line in lines]
    logged = [[each[name] for name in ("status", "bytes", "model", "request_id")] for each in fields]
    assert all(float(each["duration_ms"]) > 0 for each in fields)
    assert logged == [
        ["200", str(len(body)), "a", "seven"],
        *(["OK", str(size), "a", "eight"] for size in answers),
    ]


def test_failed_requests_and_requests_other_than_inference_are_logged(
    models: Path, access_lines: pytest.LogCaptureFixture
) -> None:
    with live_server(models, loaders=LOADERS, access_log=True) as live:
        wrong = httpx.post(live.url + INFER, json=WRONG, headers={"x-request-id": "mine"}).content
        config = httpx.get(f"{live.url}/v2/models/a/config?x=1").content
        lost = httpx.get(f"{live.url}/nowhere").content
        with grpc.insecure_channel(live.grpc_address) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            for ask, message in (
                (stub.ModelMetadata, service_pb2.ModelMetadataRequest(name="none")),
                (channel.unary_unary("/not/There"), b""),
            ):
                with pytest.raises(grpc.RpcError):
                    ask(message, timeout=PATIENCE_S)

    assert logged_fields(access_lines) == [
        (400, len(wrong), "a", "mine"),
        (200, len(config), "a", None),
        (404, len(lost), None, None),
        ("NOT_FOUND", 0, "none", None),
        ("UNIMPLEMENTED", 0, None, None),
    ]
    requests = [each.getMessage().split('"')[1] for each in access_lines.records if each.name == "penstock.access"]
    assert requests == [
        f"POST {INFER} HTTP/1.1", "GET /v2/models/a/config?x=1 HTTP/1.1", "GET /nowhere HTTP/1.1",
        "POST /inference.GRPCInferenceService/ModelMetadata HTTP/2", "POST /not/There HTTP/2",
    ]  # fmt: skip


def test_an_invalid_request_is_logged_and_an_undelivered_answer_is_not(access_lines: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        lane = Lane(kind=LoggedFastLane, own=Own(hold=True))
        await lane.fed(b"nonsense\r\n\r\n")
        leaving = Lane(kind=LoggedFastLane, own=Own(hold=True))
        await leaving.fed(request("/own"))
        leaving.transport.lose(None)
        await turns()

    run(main)
    assert [(status, name) for status, _, name, _ in logged_fields(access_lines)] == [(400, None)]
    assert access_lines.messages[0].endswith(' - "-" 400')


def test_a_stream_is_logged_in_one_line_with_the_bytes_of_all_its_messages(
    access_lines: pytest.LogCaptureFixture,
) -> None:
    wire = Wire()
    wire.shared.call_classes = LoggedCall, LoggedCompressingCall
    wire.connect()
    wire.feed(frames.PREFACE + frames.settings({}))
    wire.feed(wire.headers(__path=BIDI) + payload(message_of(b"one") + message_of(b"three"), end=True))
    wire.feed(wire.call(ECHO, b"hello", stream=3))

    assert logged_fields(access_lines) == [("OK", 8, None, None), ("OK", 5, None, None)]


def test_a_call_is_logged_only_when_it_is_answered(access_lines: pytest.LogCaptureFixture) -> None:
    wire = Wire()
    wire.shared.call_classes = LoggedCall, LoggedCompressingCall
    wire.connect()
    wire.feed(frames.PREFACE + frames.settings({}))
    for stream in (1, 3):
        wire.feed(wire.call(HOLD, stream=stream))
    wire.feed(frames.reset(1, frames.ErrorCode.CANCEL))
    assert logged_fields(access_lines) == []
    for call in wire.held:
        call.abort(Status.INTERNAL, "late")
        call.abort(Status.UNAVAILABLE, "later")

    assert logged_fields(access_lines) == [("INTERNAL", 0, None, None)]


def test_a_cancelled_stream_is_logged_with_the_bytes_that_were_sent(access_lines: pytest.LogCaptureFixture) -> None:
    wire = Wire()
    wire.shared.call_classes = LoggedCall, LoggedCompressingCall
    wire.connect()
    wire.feed(frames.PREFACE + frames.settings({}))
    wire.feed(wire.headers(__path=BIDI) + payload(message_of(b"one")))
    wire.feed(frames.reset(1, frames.ErrorCode.CANCEL))

    assert logged_fields(access_lines) == [("CANCELLED", 3, None, None)]


def test_a_long_request_id_is_truncated_in_the_access_log(models: Path, access_lines: pytest.LogCaptureFixture) -> None:
    with live_server(models, loaders=LOADERS, access_log=True) as live:
        httpx.post(live.url + INFER, json={**GOOD, "id": "i" * 10_000})
        with grpc.insecure_channel(live.grpc_address) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            stub.ModelInfer(infer("j" * 10_000), timeout=PATIENCE_S)

    assert [request_id for *_, request_id in logged_fields(access_lines)] == ["i" * 128, "j" * 128]


def test_the_address_of_a_disconnected_client_is_logged(access_lines: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        lane = Lane(kind=LoggedFastLane)
        lane.protocol.client = "10.0.0.1", 4321
        await lane.fed(b"nonsense\r\n\r\n")

    run(main)
    assert access_lines.messages == ['10.0.0.1:4321 - "-" 400']
