"""A client that disconnects cancels its request."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import pytest

from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.statistics import CANCELED
from tests.fakes import FakeBackend, Gate, fake_loader
from tests.live import Live, live_server

GRAPH = Signature((TensorSpec("x", "FP32", (-1, 2)),), (TensorSpec("y", "FP32", (-1, 2)),))
BODY = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}).encode()
BODIES = {"infer": BODY, "generate": b'{"x":[1,2]}', "generate_stream": b'{"x":[1,2]}'}


def connected(live: Live, verb: str = "infer") -> socket.socket:
    body = BODIES[verb]
    client = socket.create_connection(("127.0.0.1", live.http_port), timeout=20)
    client.sendall(
        b"POST /v2/models/m/%b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (verb.encode(), len(body), body)
    )
    return client


async def until_waiting(live: Live, count: int) -> None:
    model = live.server.engine.model("m")
    async with asyncio.timeout(10):
        while model.waiting_requests != count:  # noqa: ASYNC110 - the queue tells nobody
            await asyncio.sleep(0)


async def cancelled(live: Live) -> int:
    return live.server.engine.model("m").statistics.snapshot().failures[CANCELED]


@pytest.mark.parametrize("verb", BODIES)
def test_the_queued_request_of_a_disconnected_client_is_removed_and_never_runs(tmp_path: Path, verb: str) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.onnx").touch()
    (tmp_path / "m" / "penstock.toml").write_text('[batching]\nexecutor = "thread"\n')
    gate = Gate(list)
    backend = FakeBackend(GRAPH, gate)
    with live_server(tmp_path, loaders={"onnxruntime": fake_loader(backend)}) as live:
        warm_up = len(backend.runs)
        gate.close()
        with connected(live) as first:
            live.call(gate.entered())
            with connected(live, verb):
                live.call(until_waiting(live, 1))
            live.call(until_waiting(live, 0))

            assert live.call(cancelled(live)) == 1

            gate.open()

            assert first.recv(4096).startswith(b"HTTP/1.1 200")
            assert [run.rows for run in backend.runs[warm_up:]] == [1]


def test_a_stream_cut_off_by_the_exit_timeout_logs_no_server_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.onnx").touch()
    (tmp_path / "m" / "config.pbtxt").write_text("model_transaction_policy { decoupled: true }")
    (tmp_path / "m" / "penstock.toml").write_text('[hooks]\nfile = "endless.py"\n')
    (tmp_path / "m" / "endless.py").write_text(
        "import time\n\ndef post_inference(prediction, metadata):\n    while True:\n        yield prediction\n"
        "        time.sleep(0.02)\n"
    )
    loaders = {"onnxruntime": fake_loader(FakeBackend(GRAPH, list))}
    with live_server(tmp_path, loaders=loaders, exit_timeout_secs=0.1) as live:
        client = connected(live, "generate_stream")
        assert client.recv(4096).startswith(b"HTTP/1.1 200")
    client.close()

    assert [record.getMessage() for record in caplog.records if record.name.startswith("uvicorn")] == []
