"""A GPU that is lost for the whole process, as clients and the supervisor see it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tritonclient.grpc as over_grpc

from penstock.server.repository import mirrors
from penstock.server.repository.gpus import Gpus
from penstock.server.supervisor.roles import EngineProcess
from tests.backends.fake_cuda import FakeRuntime
from tests.backends.fake_session import fake_cuda_loader
from tests.backends.onnx_models import node
from tests.clients import models
from tests.live import Live, live_server, settings_for

STICKY = 700
KINDS = {"gpu": "KIND_GPU gpus: [ 0 ]", "other": "KIND_GPU gpus: [ 1 ]", "cpu": "KIND_CPU"}
BODY = b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}'
PATIENCE_S = 20.0


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime()


@pytest.fixture
def live(tmp_path: Path, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    monkeypatch.setattr(mirrors, "Gpus", lambda *_: Gpus.from_numbers((0, 1)))
    tensors: tuple[models.Tensors, models.Tensors] = ({"x": (1, ["N", 4])}, {"y": (1, ["N", 4])})
    for name, kind in KINDS.items():
        config = f"max_batch_size: 4 instance_group {{ kind: {kind} }}"
        models.write(tmp_path, name, [node("Add", ["x", "x"], ["y"])], tensors, config=config)
    with live_server(tmp_path, loaders={"onnxruntime": fake_cuda_loader(runtime)}) as server:
        yield server


def ask(live: Live, method: str, path: str, body: bytes | None = None) -> tuple[int, dict[str, str]]:
    connection = HTTPConnection("127.0.0.1", live.http_port, timeout=PATIENCE_S)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        answer.read()
        return answer.status, {name.casefold(): value for name, value in answer.getheaders()}
    finally:
        connection.close()


@pytest.mark.slow
def test_a_server_with_a_lost_gpu_is_not_live_and_still_serves_cpu_models(live: Live, runtime: FakeRuntime) -> None:
    spent = threading.Event()
    live.server.on_device_lost = spent.set
    before = ask(live, "GET", "/v2/health/live")[0]
    runtime.fail("cudaEventSynchronize", STICKY)
    first = ask(live, "POST", "/v2/models/gpu/infer", BODY)
    notified = spent.wait(PATIENCE_S)
    status, headers = ask(live, "POST", "/v2/models/gpu/infer", BODY)
    grpc = over_grpc.InferenceServerClient(live.grpc_address)

    assert (before, first[0], notified) == (200, 503, True)
    assert (status, headers["retry-after"]) == (503, "1")
    assert ask(live, "GET", "/v2/health/live")[0] == 503
    assert ask(live, "GET", "/v2/health/ready")[0] == 400
    assert ask(live, "GET", "/v2/models/gpu/ready")[0] == 400
    assert not grpc.is_server_live()
    assert ask(live, "POST", "/v2/models/cpu/infer", BODY)[0] == 200
    assert ask(live, "GET", "/v2/models/cpu/ready")[0] == 200


def test_a_supervised_engine_that_loses_its_gpu_ends_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        ended = asyncio.Event()
        supervisor: Any = SimpleNamespace(
            saved={}, save=lambda *_: None, request_end=ended.set, logs=SimpleNamespace(apply=lambda *_: None)
        )
        engine = EngineProcess(settings_for(tmp_path, allow_metrics=False), supervisor, {})
        engine._no_fronts.clear()  # as if a front end were connected
        await engine.load()
        devices: Any = engine._server.engine.devices
        await asyncio.to_thread(devices.mark_lost, "model 'm' lost its device: CUDA failure 700")
        async with asyncio.timeout(PATIENCE_S):
            await ended.wait()
            assert await engine.drain(last=False) == 0
        await engine.close()

    asyncio.run(main())
