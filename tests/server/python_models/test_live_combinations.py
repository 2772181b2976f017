"""Python models together with the rest of the server: ensembles, the cache, samples, BLS, control, cancellation."""

from __future__ import annotations

import json
import logging
import queue
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from tests.live import Live, live_server
from tests.server.python_models.repositories import ONE, infer_value, left_behind, wait_until, write_model

pytestmark = pytest.mark.slow
GUARD_S = 10.0
COUNTS = """
import os
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.count = 0

    def execute(self, requests):
        self.count += 1
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("y", np.full_like(each.inputs()[0].as_numpy(), self.count))])
            for each in requests
        ]
"""
ADD_ONE = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.one(request.inputs()[0].as_numpy()) for request in requests]

    def one(self, x):
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", x + 1)])
"""
TICKS = """
import threading, time
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.send, args=(request, request.get_response_sender())).start()

    def send(self, request, sender):
        number = 0
        while not request.is_cancelled() and number < 2000:
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([number], np.float32))]))
            number += 1
            time.sleep(0.005)
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
TICKS_CONFIG = """
backend: "python"
input [ { name: "x" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 1 ] } ]
model_transaction_policy { decoupled: true }
"""
THREE = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for number in range(3):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([number], np.float32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
DRIVER = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.one(request) for request in requests]

    def one(self, request):
        said = json.loads(request.parameters())
        x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
        if said["do"] == "sum":
            asked = pb_utils.InferenceRequest(
                model_name=said["model"], requested_output_names=["y"], inputs=[pb_utils.Tensor("x", x[0])]
            )
            found = sum(float(pb_utils.get_output_tensor_by_name(each, "y").as_numpy()[0])
                        for each in asked.exec(decoupled=True) if each.output_tensors())
        else:
            if said["do"] == "load":
                pb_utils.load_model(said["model"])
            elif said["do"] == "unload":
                pb_utils.unload_model(said["model"])
            found = float(pb_utils.is_model_ready(said["model"]))
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([[found]], np.float32))])
"""
ENSEMBLE = """
platform: "ensemble"
max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ -1 ] } ]
ensemble_scheduling { step [
  { model_name: "add_one" model_version: -1 input_map { key: "x" value: "x" } output_map { key: "y" value: "once" } },
  { model_name: "add_one" model_version: -1 input_map { key: "x" value: "once" } output_map { key: "y" value: "y" } }
] }
"""
SAMPLE = """
model_warmup [ {
  name: "s" batch_size: 2 count: 3
  inputs { key: "x" value { data_type: TYPE_FP32 dims: [ 1 ] zero_data: true } }
} ]
"""
PRIORITIES = """
dynamic_batching { priority_levels: 2 default_priority_level: 2 preserve_ordering: false }
"""
RATED = """
instance_group [ { count: 2 kind: KIND_CPU rate_limiter { resources [ { name: "r" count: 1 } ] } } ]
"""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    root = tmp_path_factory.mktemp("models")
    write_model(root, "add_one", ADD_ONE, ONE)
    write_model(root, "cached", COUNTS, ONE + "response_cache { enable: true }")
    write_model(root, "warmed", COUNTS, ONE + SAMPLE)
    write_model(root, "priorities", ADD_ONE, ONE + PRIORITIES)
    write_model(root, "rated", ADD_ONE, ONE + RATED)
    write_model(root, "ticks", TICKS, TICKS_CONFIG)
    write_model(root, "three", THREE, TICKS_CONFIG)
    write_model(root, "driver", DRIVER, ONE)
    (root / "twice" / "1").mkdir(parents=True)
    (root / "twice" / "config.pbtxt").write_text(ENSEMBLE)
    before = left_behind()
    settings: dict[str, Any] = {
        "cache_config": ("local,size=1000000",), "rate_limit": "execution_count",
        "model_control_mode": "explicit", "load_model": ("*",),
    }  # fmt: skip
    with live_server(root, **settings) as server:
        yield server
    assert left_behind() == before


def test_python_models_can_be_steps_of_an_ensemble(http: Any) -> None:
    assert infer_value(http, "twice", 3) == 5


def test_an_answer_is_cached(http: Any) -> None:
    assert infer_value(http, "cached", 7) == infer_value(http, "cached", 7)
    assert infer_value(http, "cached", 8) != infer_value(http, "cached", 7)


def test_warmup_samples_run_before_readiness_and_are_not_counted(http: Any) -> None:
    assert infer_value(http, "warmed", 1) > 3
    (counted,) = http.get_inference_statistics("warmed")["model_stats"]
    assert counted["inference_count"] == 1


def test_priorities_and_rate_limits_apply_to_python_models(http: Any) -> None:
    assert infer_value(http, "priorities", 1, priority=1) == 2
    assert [infer_value(http, "rated", value) for value in range(5)] == [1, 2, 3, 4, 5]


def test_a_model_receives_several_answers_from_another_model(http: Any) -> None:
    assert infer_value(http, "driver", 1, parameters={"do": "sum", "model": "three"}) == 3


def test_a_model_loads_and_unloads_another_model(http: Any) -> None:
    assert infer_value(http, "driver", 1, parameters={"do": "unload", "model": "priorities"}) == 0
    assert not http.is_model_ready("priorities")
    assert infer_value(http, "driver", 1, parameters={"do": "load", "model": "priorities"}) == 1
    assert http.is_model_ready("priorities")


def test_a_failed_load_is_an_error_of_the_calling_model(http: Any) -> None:
    with pytest.raises(InferenceServerException, match="failed to load 'nobody'"):
        infer_value(http, "driver", 1, parameters={"do": "load", "model": "nobody"})


def test_a_failed_initialize_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    code = "class TritonPythonModel:\n    def initialize(self, args):\n        raise ValueError('no table')\n"
    write_model(tmp_path, "broken", code, ONE)
    with live_server(tmp_path):
        pass

    records = [record for record in caplog.records if "no table" in record.getMessage()]
    assert [record.levelname for record in records] == ["INFO", "ERROR"]
    assert "in initialize" in (records[0].exc_text or "")
    assert (vars(records[1])["model"], vars(records[1])["version"]) == ("broken", "1")


def test_a_disconnected_client_cancels_its_stream(live: Live) -> None:
    came: queue.Queue[Any] = queue.Queue()
    tensor = triton_grpc.InferInput("x", [1], "FP32")
    tensor.set_data_from_numpy(np.array([1], np.float32))
    client = triton_grpc.InferenceServerClient(live.grpc_address)
    client.start_stream(lambda result, error: came.put(error or result))
    client.async_stream_infer("ticks", [tensor])
    came.get(timeout=GUARD_S)
    client.stop_stream(cancel_requests=True)
    client.close()

    wait_until(lambda: live.server.engine.model("ticks").inflight == 0)


def test_a_closed_connection_cancels_generate_stream(live: Live) -> None:
    with httpx.stream("POST", f"{live.url}/v2/models/ticks/generate_stream", json={"x": 1}) as answer:
        first = next(line for line in answer.iter_lines() if line)

    assert json.loads(first.removeprefix("data: "))["y"] == 0
    wait_until(lambda: live.server.engine.model("ticks").inflight == 0)


def test_predict_accepts_any_json(live: Live) -> None:
    answer = httpx.post(f"{live.url}/v2/models/add_one/predict", json=[[1.0, 2.0]])

    assert answer.json() == [[[2.0, 3.0]]]


def test_a_model_runs_on_the_configured_python_interpreter(tmp_path: Path) -> None:
    write_model(tmp_path, "add_one", ADD_ONE, ONE, f'[worker]\ninterpreter = "{sys.executable}"\n')
    write_model(tmp_path, "none", ADD_ONE, ONE, '[worker]\ninterpreter = "/no/such/python"\n')
    with live_server(tmp_path) as live, triton_http.InferenceServerClient(live.address) as client:
        assert infer_value(client, "add_one", 1) == 2
        rows = live.call(live.server.control.index())

    assert "/no/such/python" in next(row["reason"] for row in rows if row["name"] == "none")


def test_reloading_a_model_uses_its_changed_code(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "add_one", ADD_ONE, ONE)
    explicit = live_server(tmp_path, model_control_mode="explicit")
    with explicit as live, triton_http.InferenceServerClient(live.address) as client:
        client.load_model("add_one")
        assert infer_value(client, "add_one", 1) == 2
        (folder / "1" / "model.py").write_text(ADD_ONE.replace("+ 1", "+ 2000"))
        client.load_model("add_one")
        assert infer_value(client, "add_one", 1) == 2001


def test_a_load_request_can_contain_the_model_file(tmp_path: Path) -> None:
    config = {
        "backend": "python", "max_batch_size": 8,
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [-1]}],
        "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [-1]}],
    }  # fmt: skip
    explicit = live_server(tmp_path, model_control_mode="explicit")
    with explicit as live, triton_http.InferenceServerClient(live.address) as client:
        client.load_model("brought", config=json.dumps(config), files={"file:1/model.py": ADD_ONE.encode()})
        assert infer_value(client, "brought", 1) == 2
