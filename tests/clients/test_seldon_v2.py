"""A Seldon component as a model of the v2 protocol, over HTTP and gRPC with tritonclient."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
import tritonclient.utils.shared_memory as system_memory
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from tests.live import Live, live_server

pytestmark = pytest.mark.slow
needs_both_protocols = pytest.mark.skipif(
    bool(os.environ.get("PENSTOCK_TEST_FRONTS")), reason="front ends do not serve Seldon's own protocol"
)

CODE = '''
import threading
import numpy as np

HELD = threading.Event()


class Plain:
    def predict(self, X, names):
        return X * 2


class Said:
    """Says its tensors."""

    def init_metadata(self):
        return {
            "name": "said", "versions": ["v1"], "platform": "numpy",
            "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3]}],
            "outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 3]}],
        }

    def predict(self, X, names):
        if (X == 13).any():
            raise ValueError("thirteen is not taken")
        return X.astype(np.float64) + 1

    def tags(self):
        return {"tagged": "yes"}

    def metrics(self):
        return [{"type": "COUNTER", "key": "said_calls", "value": 1}]


class Words:
    def init_metadata(self):
        return {"inputs": [{"name": "word", "datatype": "BYTES", "shape": [1]}], "outputs": []}

    def predict(self, X, names):
        return np.array([word.upper() for word in X])


class Two:
    def init_metadata(self):
        tensors = [{"name": name, "datatype": "FP64", "shape": [1]} for name in "ab"]
        return {"inputs": tensors, "outputs": [{**each, "name": "of_" + each["name"]} for each in tensors]}

    def predict(self, X, names):
        return {"of_" + name: array * 10 for name, array in zip(names, X)}


class Wide:
    """Takes long for a call, however many rows it has."""

    def __init__(self):
        matrix = np.random.default_rng(0).random((600, 600))
        self.matrix = matrix / matrix.sum(axis=0)

    def predict(self, X, names):
        power = self.matrix
        for _ in range(8):
            power = power @ self.matrix
        return X * power.sum(axis=0)[0].round(6)
'''
Ask = Callable[..., Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("components")
    (folder / "tensors.py").write_text(CODE)
    return folder


def serving(folder: Path, component: str, **settings: Any) -> Any:
    """Serve one of the classes above."""
    return live_server(folder, dialect="seldon", seldon_component=f"tensors.{component}", **settings)


@pytest.fixture(scope="module")
def described(folder: Path) -> Iterator[Live]:
    with serving(folder, "Said", allow_client_shm=True) as live:
        yield live


@pytest.fixture(params=["http", "grpc"])
def module(request: pytest.FixtureRequest) -> Any:
    return triton_http if request.param == "http" else triton_grpc


def client_of(live: Live, module: Any) -> Any:
    return module.InferenceServerClient(live.address if module is triton_http else live.grpc_address)


def inputs_of(module: Any, tensors: dict[str, Any]) -> list[Any]:
    inputs = []
    for name, array in tensors.items():
        tensor = module.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs


def infer(live: Live, module: Any, model: str, tensors: dict[str, Any], **terms: Any) -> Any:
    with client_of(live, module) as client:
        return client.infer(model, inputs_of(module, tensors), **terms)


def test_a_component_without_metadata_takes_and_returns_fp64(folder: Path, module: Any) -> None:
    with serving(folder, "Plain") as live:
        answer = infer(live, module, "Plain", {"input": np.array([[1.0, 2.0]])})
        assert answer.as_numpy("output").tolist() == [[2.0, 4.0]]
        found = httpx.get(f"{live.url}/v2/models/Plain").json()
        assert [(each["name"], each["datatype"], each["shape"]) for each in found["inputs"] + found["outputs"]] == [
            ("input", "FP64", [-1, -1]), ("output", "FP64", [-1, -1]),
        ]  # fmt: skip
        config = httpx.get(f"{live.url}/v2/models/Plain/config").json()
        assert (config["max_batch_size"], config["input"][0]["dims"]) == (0, [-1, -1])
        assert "dynamic_batching" not in config
        assert [group["count"] for group in config["instance_group"]] == [1]


def test_the_metadata_of_a_component_becomes_the_metadata_of_its_model(described: Live, module: Any) -> None:
    answer = infer(described, module, "Said", {"x": np.zeros((200, 3), np.float32)})

    assert answer.as_numpy("y").dtype == np.float32
    assert answer.as_numpy("y").tolist() == [[1.0] * 3] * 200
    found = httpx.get(f"{described.url}/v2/models/Said").json()
    assert found["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}]


def test_errors_of_user_code_and_wrong_inputs_are_reported_and_tags_are_returned(described: Live, module: Any) -> None:
    with pytest.raises(InferenceServerException, match="thirteen is not taken"):
        infer(described, module, "Said", {"x": np.full((1, 3), 13, np.float32)})
    with pytest.raises(InferenceServerException, match="expects 'FP32'"):
        infer(described, module, "Said", {"x": np.zeros((1, 3))})
    with pytest.raises(InferenceServerException, match="unexpected shape"):
        infer(described, module, "Said", {"x": np.zeros((1, 4), np.float32)})
    answer = infer(described, module, "Said", {"x": np.zeros((1, 3), np.float32)}, request_id="an id")
    response = answer.get_response()
    tagged = response["parameters"]["tagged"] if module is triton_http else response.parameters["tagged"].string_param
    assert tagged == "yes"


def test_an_error_of_user_code_has_status_500_and_its_metrics_are_exposed(described: Live) -> None:
    entry = {"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [13, 1, 1]}
    answer = httpx.post(f"{described.url}/v2/models/Said/infer", json={"inputs": [entry]})

    assert (answer.status_code, answer.json()) == (500, {"error": "thirteen is not taken"})
    httpx.post(f"{described.url}/v2/models/Said/infer", json={"inputs": [{**entry, "data": [1, 1, 1]}]})
    assert "said_calls_total{" in httpx.get(f"http://127.0.0.1:{described.metrics_port}/metrics").text


@needs_both_protocols
def test_the_same_instance_also_answers_seldons_own_protocol(described: Live) -> None:
    answer = httpx.post(f"{described.url}/predict", json={"data": {"ndarray": [[1.0, 2.0, 3.0]]}})

    assert answer.json()["data"]["ndarray"] == [[2.0, 3.0, 4.0]]


@needs_both_protocols
def test_calls_of_both_protocols_are_counted_once(folder: Path) -> None:
    with serving(folder, "Said") as live:
        for _ in range(3):
            infer(live, triton_http, "Said", {"x": np.zeros((2, 3), np.float32)})
        httpx.post(f"{live.url}/predict", json={"data": {"ndarray": [[1.0, 2.0, 3.0]]}})
        (found,) = httpx.get(f"{live.url}/v2/models/Said/stats").json()["model_stats"]
        assert found["inference_stats"]["success"]["count"] == 4
        assert found["execution_count"] == 4


def test_tensors_in_shared_memory_are_read_and_written(described: Live, module: Any) -> None:
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    name = f"seldon_{module.__name__.rpartition('.')[2]}"
    region = system_memory.create_shared_memory_region(name, f"/{name}", 2 * rows.nbytes)
    try:
        with client_of(described, module) as client:
            system_memory.set_shared_memory_region(region, [rows])
            client.register_system_shared_memory(name, f"/{name}", 2 * rows.nbytes)
            tensor = module.InferInput("x", rows.shape, "FP32")
            tensor.set_shared_memory(name, rows.nbytes)
            requested = module.InferRequestedOutput("y")
            requested.set_shared_memory(name, rows.nbytes, offset=rows.nbytes)
            client.infer("Said", [tensor], outputs=[requested])
            client.unregister_system_shared_memory(name)
        found = system_memory.get_contents_as_numpy(region, np.float32, [2, 3], offset=rows.nbytes)
        assert found.tolist() == (rows + 1).tolist()
    finally:
        system_memory.destroy_shared_memory_region(region)


def test_strings_and_several_tensors_are_passed_to_the_component(folder: Path, module: Any) -> None:
    with serving(folder, "Words") as live:
        answer = infer(live, module, "Words", {"word": np.array([b"one", "zwölf".encode()], object)})
        assert answer.as_numpy("output").tolist() == [b"ONE", "ZWÖLF".encode()]
    with serving(folder, "Two") as live:
        answer = infer(live, module, "Two", {"b": np.array([2.0]), "a": np.array([1.0])})
        assert (answer.as_numpy("of_a").tolist(), answer.as_numpy("of_b").tolist()) == ([10.0], [20.0])
        requested = [module.InferRequestedOutput("of_b")]
        answer = infer(live, module, "Two", {"b": np.array([2.0]), "a": np.array([1.0])}, outputs=requested)
        assert answer.as_numpy("of_a") is None


@needs_both_protocols
def test_calls_of_both_protocols_share_batches_with_seldon_batching(folder: Path) -> None:
    """A component whose run time is independent of the rows gains from batching: it runs less often than called."""
    with serving(folder, "Wide", seldon_batching=True) as live:
        config = httpx.get(f"{live.url}/v2/models/Wide/config").json()
        assert (config["max_batch_size"], config["input"][0]["dims"]) == (64, [-1])
        start = threading.Barrier(16)

        def ask(number: int) -> None:
            with httpx.Client(timeout=60) as rest, client_of(live, triton_http) as v2:
                start.wait(30)
                for turn in range(3):
                    value = float(number + turn)
                    found = rest.post(f"{live.url}/predict", json={"data": {"ndarray": [[value]]}}).json()
                    assert found["data"]["ndarray"] == [[value]]
                    answer = v2.infer("Wide", inputs_of(triton_http, {"input": np.array([[value]])}))
                    assert answer.as_numpy("output").tolist() == [[value]]

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(ask, range(16)))
        (found,) = httpx.get(f"{live.url}/v2/models/Wide/stats").json()["model_stats"]
        assert found["inference_count"] == 96
        assert found["execution_count"] < 96
