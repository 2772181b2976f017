"""Readiness agrees with inference, also when a process that requests need has ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import httpx
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from penstock.batching.registry import LOADING_MESSAGE
from penstock.server.faults import own_workers
from penstock.server.fronts.engine_server import EngineServer
from penstock.server.fronts.front import FrontServer
from tests.live import Live, live_server, settings_for
from tests.server.fronts.live_fronts import attach, live_front

pytestmark = pytest.mark.slow
IRIS = Path(__file__).parents[3] / "examples" / "iris"
HOOKS = "def pre_inference(sample, metadata): return sample\n"
GUARD_S = 20.0


def _until(met: Callable[[], bool]) -> None:
    end_s = time.monotonic() + GUARD_S
    while not met():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def _statuses(live: Live) -> tuple[int, int, int]:
    """Return the statuses of inference, of the model's readiness and of the server's."""
    sample = [5.1, 3.5, 1.4, 0.2]
    return (
        httpx.post(f"{live.url}/v2/models/iris/predict", json=sample, timeout=GUARD_S).status_code,
        httpx.get(f"{live.url}/v2/models/iris/ready").status_code,
        httpx.get(f"{live.url}/v2/health/ready").status_code,
    )


@pytest.mark.parametrize("serving", [live_server, live_front])
def test_a_model_whose_hooks_cannot_be_loaded_again_is_not_ready(
    tmp_path: Path, serving: Callable[..., contextlib.AbstractContextManager[Live]]
) -> None:
    (model,) = [path.parent.parent for path in IRIS.rglob("model.onnx")]
    shutil.copytree(model, tmp_path / "iris")
    (tmp_path / "iris" / "penstock.toml").write_text('[hooks]\nfile = "hooks.py"\nworkers = 1\n', "utf-8")
    hooks = tmp_path / "iris" / "hooks.py"
    hooks.write_text(HOOKS, "utf-8")
    with serving(tmp_path) as live:
        assert _statuses(live) == (200, 200, 200)
        hooks.write_text("import nothing_of_that_name\n", "utf-8")
        for pid in own_workers():
            os.kill(pid, signal.SIGKILL)

        _until(lambda: _statuses(live) == (503, 400, 400))
        hooks.write_text(HOOKS, "utf-8")
        _until(lambda: _statuses(live) == (200, 200, 200))


async def _readiness(front: FrontServer, name: str) -> tuple[tuple[int, str | None], grpc.StatusCode]:
    """Return how requests for a model's metadata are rejected over HTTP, with Retry-After, and over gRPC.

    Requests for its statistics are rejected with the same text while the engine loads; ModelReady returns false.
    """
    url = f"http://127.0.0.1:{front.http_port}/v2/models/{name}"
    async with httpx.AsyncClient() as client, grpc.aio.insecure_channel(f"127.0.0.1:{front.grpc_port}") as channel:
        page, counted = await client.get(url), await client.get(url + "/stats")
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        assert not (await stub.ModelReady(service_pb2.ModelReadyRequest(name=name))).ready
        with pytest.raises(grpc.aio.AioRpcError) as uncounted:
            await stub.ModelStatistics(service_pb2.ModelStatisticsRequest(name=name))
        assert counted.json()["error"] == uncounted.value.details()
        assert (counted.text == page.text) == (page.status_code == counted.status_code == 503)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.ModelMetadata(service_pb2.ModelMetadataRequest(name=name))
        texts = page.json()["error"], refused.value.details()
        assert all((text == LOADING_MESSAGE) == (page.status_code == 503) for text in texts)
        return (page.status_code, page.headers.get("retry-after")), refused.value.code()


def test_an_unknown_model_is_503_while_the_engine_loads_and_404_afterwards(tmp_path: Path) -> None:
    async def main() -> None:
        settings = settings_for(tmp_path)
        engine, front = EngineServer(settings), FrontServer(settings)
        try:
            await engine.open()
            attach(engine, front)
            await front.open()
            assert await _readiness(front, "iris") == ((503, "1"), grpc.StatusCode.UNAVAILABLE)
            await engine.load()
            assert await front.wait_ready(GUARD_S)
            assert await _readiness(front, "iris") == ((404, None), grpc.StatusCode.NOT_FOUND)
        finally:
            await front.close()
            await engine.close()

    asyncio.run(main())


def test_a_front_end_being_replaced_drains_without_the_drain_delay(tmp_path: Path) -> None:
    async def main() -> None:
        front = FrontServer(settings_for(tmp_path, drain_delay_secs=3600))
        try:
            await front.open()
            async with asyncio.timeout(GUARD_S):
                assert await front.drain(server_stopping=False) == 0
        finally:
            await front.close()

    asyncio.run(main())
