"""Hooks in worker processes, used by clients over a socket."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton

from tests.clients import models
from tests.live import Live, live_server
from tests.processes import children

pytestmark = pytest.mark.slow

SOURCE = """
import os
import time

def pre_inference(sample, signature, metadata, parameters):
    if isinstance(sample, dict) and "wait" in sample:
        with open(sample["wait"]) as pipe:
            pipe.read()
    parameters["pid"] = os.getpid()
    return sample["x"]

def post_inference(prediction, signature, metadata, parameters):
    assert parameters["pid"] == os.getpid()
    return {"y": prediction[0] * metadata["times"], "pid": os.getpid()}
"""
YIELDS = """
import os

def post_inference(prediction, metadata):
    for number in range(12):
        yield {"y": [number], "pid": os.getpid()}
"""
TOML = '[hooks]\nfile = "handler.py"\nworkers = 2\n[hooks.metadata]\ntimes = 3\n'
WITHIN_S = 2.0


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    models.write_identity(tmp_path, "hooked", "")
    (tmp_path / "hooked" / "handler.py").write_text(SOURCE)
    (tmp_path / "hooked" / "penstock.toml").write_text(TOML)
    models.write_identity(tmp_path, "yields", "model_transaction_policy { decoupled: true }\n")
    (tmp_path / "yields" / "handler.py").write_text(YIELDS)
    (tmp_path / "yields" / "penstock.toml").write_text('[hooks]\nfile = "handler.py"\nworkers = 1\n')
    models.write_identity(tmp_path, "plain", "")
    return tmp_path


@pytest.fixture
def before() -> set[int]:
    return children()


@pytest.fixture
def live(before: set[int], repository: Path) -> Iterator[Live]:
    with live_server(repository, model_control_mode="explicit", load_model=("*",)) as server:
        yield server
    assert children() <= before


@pytest.fixture
def client(live: Live) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live.url, timeout=20) as new_client:
        yield new_client


def predict(client: httpx.Client, sample: Any) -> dict[str, Any]:
    answer = client.post("/v2/models/hooked/predict", json=sample)
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


def test_predict_http_and_grpc_requests_are_answered_by_a_worker(live: Live, client: httpx.Client) -> None:
    answer = predict(client, {"x": [[1.0, 2.0]]})
    assert answer["y"] == [[3, 6]]
    assert answer["pid"] in children()

    x = np.ones((50, 3000), np.float32)
    for asking, kind in (
        (triton.InferenceServerClient(live.address), triton),
        (triton_grpc.InferenceServerClient(live.grpc_address), triton_grpc),
    ):
        tensor = kind.InferInput("x", x.shape, "FP32")
        tensor.set_data_from_numpy(x)
        assert (asking.infer("hooked", [tensor]).as_numpy("y") == 3 * x).all()
        asking.close()


def test_a_generator_in_a_worker_is_streamed(live: Live) -> None:
    tensor = triton_grpc.InferInput("x", [1, 2], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 2), np.float32))
    results: list[Any] = []
    with triton_grpc.InferenceServerClient(live.grpc_address) as client:
        client.start_stream(lambda result, error: results.append(error or result.as_numpy("y").tolist()))
        client.async_stream_infer("yields", [tensor])
        client.stop_stream()

    assert results == [[number] for number in range(12)]


def test_unloading_ends_the_workers_and_loading_starts_new_ones(
    live: Live, client: httpx.Client, repository: Path
) -> None:
    before = predict(client, {"x": [[1]]})["pid"]
    with triton.InferenceServerClient(live.address) as control:
        control.unload_model("hooked")
        assert not control.is_model_ready("hooked")
        until = time.monotonic() + 10
        while Path(f"/proc/{before}").exists() and time.monotonic() < until:
            time.sleep(0.01)
        (repository / "hooked" / "penstock.toml").write_text(TOML.replace("times = 3", "times = 5"))
        control.load_model("hooked")

    assert not Path(f"/proc/{before}").exists()
    assert predict(client, {"x": [[1]]})["y"] == [[5]]


def test_killed_workers_do_not_affect_other_models_under_load(before: set[int], live: Live) -> None:
    ledger: dict[str, list[tuple[int, Any]]] = {}
    victims = children() - before

    async def ask(session: aiohttp.ClientSession, name: str, number: int) -> None:
        if name == "hooked":
            path, body = f"/v2/models/{name}/predict", json.dumps({"x": [[number]]})
        else:
            tensor = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [number]}
            path, body = f"/v2/models/{name}/infer", json.dumps({"inputs": [tensor]})
        async with session.post(live.url + path, data=body) as answer:
            text = await answer.read()
            ledger.setdefault(f"{name} {number}", []).append((answer.status, json.loads(text)))

    async def everything() -> None:
        async with aiohttp.ClientSession() as session:

            async def client(name: str, first: int) -> None:
                for number in range(first, 1200, 8):
                    if number == 408 and name == "hooked":
                        for victim in victims:
                            os.kill(victim, signal.SIGKILL)
                    await ask(session, name, number)

            await asyncio.gather(*(client(name, first) for name in ("hooked", "plain") for first in range(8)))

    asyncio.run(everything())
    failed = {}
    for key, ends in ledger.items():
        assert len(ends) == 1
        name, number = key.split()
        status, value = ends[0]
        if status == 200:
            values = value["y"][0] if name == "hooked" else value["outputs"][0]["data"]
            assert values == [float(number) * (3 if name == "hooked" else 1)]
        else:
            failed[key] = ends[0]

    fronts = int(os.environ.get("PENSTOCK_TEST_FRONTS") or 1)
    assert len(victims) == 3 * fronts  # a worker of the other model is among them
    assert len(ledger) == 2400
    assert len(failed) <= 8  # one for each connection: what pre_inference leaves in the parameters goes with its worker
    assert all(key.startswith("hooked") and status == 503 for key, (status, _) in failed.items())


def test_a_client_that_disconnects_during_its_hook_does_not_affect_other_requests(
    live: Live, client: httpx.Client, tmp_path: Path
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    body = json.dumps({"wait": str(pipe), "x": [[1]]}).encode()
    head = f"POST /v2/models/hooked/predict HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", live.http_port)) as leaving:
        leaving.sendall(head + body)
        gate = os.open(pipe, os.O_WRONLY)  # blocks until the hook has opened the pipe for reading
    for number in range(20):
        assert predict(client, {"x": [[number]]})["y"] == [[3 * number]]
    os.close(gate)
    for number in range(20):
        assert predict(client, {"x": [[number]]})["y"] == [[3 * number]]
