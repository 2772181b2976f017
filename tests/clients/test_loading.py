"""Loads of a live server: how many in parallel, how often one is retried, and what a new configuration changes."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from penstock.backends.backend import Backend
from penstock.backends.errors import Code, InferError
from penstock.backends.loading import load_onnx
from tests.backends.onnx_models import FLOAT, node
from tests.clients import models
from tests.fakes import PATIENCE_S
from tests.live import Live, live_server
from tests.server.python_models.repositories import ONE, write_model

pytestmark = pytest.mark.slow

EXPLICIT: dict[str, Any] = {"model_control_mode": "explicit"}


@pytest.fixture(params=[tritonclient.http, tritonclient.grpc], ids=["http", "grpc"])
def triton(request: pytest.FixtureRequest) -> Any:
    return request.param


def client_of(live: Live, triton: Any) -> Any:
    return triton.InferenceServerClient(live.grpc_address if triton is tritonclient.grpc else live.address)


def index(live: Live) -> dict[str, str]:
    """Return the state of each model that was ever loaded."""
    found = httpx.post(f"{live.url}/v2/repository/index").json()
    return {entry["name"]: entry["state"] for entry in found if "state" in entry}


class Slow:
    """Loads ONNX models after `failures` failed attempts; each load waits until `together` of them are in progress."""

    def __init__(self, together: int = 1, failures: int = 0) -> None:
        self.loads = 0
        self.most = 0
        self._failures = failures
        self._under_way = 0
        self._lock = threading.Lock()
        self._meet = threading.Barrier(together)

    def __call__(self, path: Path, device: str, options: Mapping[str, str]) -> Backend:
        with self._lock:
            self.loads += 1
            self._under_way += 1
            self.most = max(self.most, self._under_way)
            fails = self.loads <= self._failures
        self._meet.wait(PATIENCE_S)
        try:
            if fails:
                raise InferError(Code.INTERNAL, "not yet")
            return load_onnx(path, device, options)
        finally:
            with self._lock:
                self._under_way -= 1


class TestLoadThreads:
    def test_as_many_models_load_in_parallel_as_there_are_load_threads(self, tmp_path: Path) -> None:
        for number in range(6):
            models.write_identity(tmp_path, f"m{number}", "max_batch_size: 4")
        slow = Slow(together=3)
        with live_server(tmp_path, loaders={"onnxruntime": slow}, model_load_thread_count=3) as live:
            assert index(live) == {f"m{number}": "READY" for number in range(6)}

        assert (slow.loads, slow.most) == (6, 3)

    def test_more_models_than_cpus_load_in_parallel_and_large_requests_do_not_wait_for_them(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "cpu_count", lambda: 1)
        entered, finish = threading.Semaphore(0), threading.Event()

        def load(path: Path, device: str, options: Mapping[str, str]) -> Backend:
            if path.parts[-3] != "served":
                entered.release()
                finish.wait(PATIENCE_S)
            return load_onnx(path, device, options)

        names = [f"m{number}" for number in range(8)]
        for name in (*names, "served"):
            models.write_identity(tmp_path, name, "max_batch_size: 4")
        settings: dict[str, Any] = {"model_load_thread_count": len(names), "load_model": ("served",), **EXPLICIT}
        with (
            live_server(tmp_path, loaders={"onnxruntime": load}, **settings) as live,
            ThreadPoolExecutor(len(names)) as threads,
        ):
            urls = [f"{live.url}/v2/repository/models/{name}/load" for name in names]
            loads = [threads.submit(httpx.post, url, timeout=2 * PATIENCE_S) for url in urls]
            assert all(entered.acquire(timeout=PATIENCE_S / 2) for _ in names)
            x = {"name": "x", "datatype": "FP32", "shape": [1, 1 << 17], "data": [1.5] * (1 << 17)}
            answer = httpx.post(f"{live.url}/v2/models/served/infer", json={"inputs": [x]}, timeout=PATIENCE_S / 2)
            finish.set()

            assert [answer.status_code, *(each.result().status_code for each in loads)] == [200] * 9

    @pytest.mark.parametrize(("retries", "loads"), [(0, 1), (1, 2), (2, 3), (5, 3)])
    def test_a_failed_load_is_retried_the_configured_number_of_times(
        self, tmp_path: Path, triton: Any, retries: int, loads: int
    ) -> None:
        models.write_identity(tmp_path, "m", "max_batch_size: 4")
        slow = Slow(failures=2)
        with (
            live_server(tmp_path, loaders={"onnxruntime": slow}, model_load_retry_count=retries, **EXPLICIT) as live,
            client_of(live, triton) as client,
        ):
            if retries < 2:
                with pytest.raises(InferenceServerException, match=r"load failed for model 'm': .* not yet"):
                    client.load_model("m")
            else:
                client.load_model("m")
            assert client.is_model_ready("m") == (retries >= 2)

        assert slow.loads == loads

    @pytest.mark.parametrize("mode", ["none", "poll"])
    def test_load_and_unload_are_rejected_unless_the_control_mode_is_explicit(
        self, tmp_path: Path, triton: Any, mode: str
    ) -> None:
        models.write_identity(tmp_path, "m", "max_batch_size: 4")
        status = "StatusCode.UNAVAILABLE" if triton is tritonclient.grpc else "503"
        with live_server(tmp_path, model_control_mode=mode) as live, client_of(live, triton) as client:
            for call in (client.load_model, client.unload_model):
                with pytest.raises(InferenceServerException, match="explicit model load / unload is not") as failed:
                    call("m")
                assert failed.value.status() == status
            assert client.is_model_ready("m")


KINDS: dict[str, dict[str, Any]] = {
    "dynamic": {"dynamic_batching": {"preferred_batch_size": [2], "max_queue_delay_microseconds": 100}},
    "levels": {"dynamic_batching": {"priority_levels": 2, "default_priority_level": 1}},
    "sequences": {"sequence_batching": {"oldest": {"max_candidate_sequences": 8}}},
    "ordered": {"dynamic_batching": {"preserve_ordering": True}},
    "cached": {"response_cache": {"enable": True}},
    "limited": {"instance_group": [{"count": 2, "rate_limiter": {"resources": [{"name": "R", "count": 1}]}}]},
    "direct": {"sequence_batching": {"direct": {}}},
    "unbatched": {
        "max_batch_size": 0,
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [-1, 4]}],
        "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [-1, 4]}],
    },
}
UNSAID = "must specify a non-zero or non-empty correlation ID"
"""What a sequence model says to those that are of none."""


class Load:
    """Clients of `m` over both protocols, with and without sequences, and the errors in their answers."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self.over = threading.Event()
        self.wrong: list[Any] = []

    def ask(self, number: int) -> int:
        """Send requests until stopped. Returns: how many."""
        triton, request_count = (tritonclient.grpc, tritonclient.http)[number % 2], 0
        options: dict[str, Any] = {"priority": number % 3}
        if number >= 2:
            options = {"sequence_id": number, "sequence_start": True, "sequence_end": True}
        with client_of(self._live, triton) as client:
            while not self.over.is_set():
                request_count += 1
                array = np.full((1, 4), number * 1000 + request_count % 7, np.float32)
                tensor = triton.InferInput("x", [1, 4], "FP32").set_data_from_numpy(array)
                try:
                    if not np.array_equal(client.infer("m", [tensor], **options).as_numpy("y"), array):
                        self.wrong.append(array)
                except InferenceServerException as error:
                    if number >= 2 or UNSAID not in str(error):
                        self.wrong.append(error)
        return request_count


class TestReconfiguration:
    @pytest.fixture
    def live(self, tmp_path: Path) -> Iterator[Live]:
        described: models.Tensors = {"x": (FLOAT, ["N", 4])}
        identity = [node("Identity", ["x"], ["y"])]
        models.write(tmp_path, "m", identity, (described, {"y": (FLOAT, ["N", 4])}), config="max_batch_size: 4")
        settings: dict[str, Any] = {"cache_config": ("local,size=100000",), "rate_limit": "execution_count"}
        with live_server(tmp_path, load_model=("m",), **EXPLICIT, **settings) as server:
            yield server

    def test_a_load_can_change_the_scheduler_while_requests_arrive(self, live: Live) -> None:
        load = Load(live)
        with ThreadPoolExecutor(4) as pool, tritonclient.http.InferenceServerClient(live.address) as client:
            futures = [pool.submit(load.ask, number) for number in range(4)]
            try:
                for kind in KINDS.values():
                    client.load_model("m", config=json.dumps({"max_batch_size": 4, **kind}))
                    (reported,) = {*kind} & {"dynamic_batching", "sequence_batching", "response_cache"} or {"name"}
                    assert reported in client.get_model_config("m")
            finally:
                load.over.set()
            counts = [each.result(PATIENCE_S) for each in futures]

        assert load.wrong == []
        assert min(counts) > 0
        assert live.call(inflight(live)) == 0

    def test_a_load_can_make_a_python_model_decoupled(self, tmp_path: Path) -> None:
        write_model(tmp_path, "m", SENDER, ONE)
        array = np.ones((1, 1), np.float32)
        with (
            live_server(tmp_path, load_model=("m",), **EXPLICIT) as live,
            tritonclient.http.InferenceServerClient(live.address, network_timeout=PATIENCE_S) as client,
        ):
            tensor = tritonclient.http.InferInput("x", [1, 1], "FP32").set_data_from_numpy(array)
            assert client.infer("m", [tensor]).as_numpy("y").item() == 1
            declared = client.get_model_config("m")
            client.load_model("m", config=json.dumps({**declared, "model_transaction_policy": {"decoupled": True}}))
            with pytest.raises(InferenceServerException, match="doesn't support models with decoupled") as failed:
                client.infer("m", [tensor])
            assert failed.value.status() == "501"
            events = httpx.post(f"{live.url}/v2/models/m/generate_stream", json={"x": [1.0]}).text
            client.load_model("m")
            assert client.infer("m", [tensor]).as_numpy("y").item() == 1

        assert events.count("data: ") == 1


SENDER = """
import triton_python_backend_utils as pb

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            answer = pb.InferenceResponse([pb.Tensor("y", request.inputs()[0].as_numpy())])
            request.get_response_sender().send(answer, flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


async def inflight(live: Live) -> int:
    return live.server.engine.inflight
