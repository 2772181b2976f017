"""Python models as steps of ensembles: what they receive over each transport and in any process; missing outputs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

from tests.live import Live, live_server
from tests.server.fronts.live_fronts import live_front
from tests.server.python_models.repositories import write_model

TELLS = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        said = [np.array([[each.parameters()]], object) for each in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", each)]) for each in said]
"""
TENSORS = """
max_batch_size: 4
input [ { name: "x" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "y" data_type: TYPE_STRING dims: [ 1 ] } ]
"""
ENSEMBLE = """
platform: "ensemble"
ensemble_scheduling {{ step [ {{
  model_name: "{step}" model_version: -1 input_map {{ key: "x" value: "x" }} output_map {{ key: "y" value: "y" }}
}} ] }}
"""
PARTIAL = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        found = [{each.name(): each.as_numpy() for each in request.inputs()} for request in requests]
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor(name + "_out", array) for name, array in each.items()])
            for each in found
        ]
"""
PARTIAL_TENSORS = """
max_batch_size: 4
input [
  { name: "a" data_type: TYPE_FP32 dims: [ 1 ] optional: true },
  { name: "b" data_type: TYPE_FP32 dims: [ 1 ] optional: true }
]
output [ { name: "a_out" data_type: TYPE_FP32 dims: [ 1 ] }, { name: "b_out" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""
TWICE = """
platform: "ensemble"
ensemble_scheduling { step [
  { model_name: "partial" model_version: -1
    input_map { key: "a" value: "a" } input_map { key: "b" value: "b" }
    output_map { key: "a_out" value: "a_once" } output_map { key: "b_out" value: "b_once" } },
  { model_name: "partial" model_version: -1
    input_map { key: "a" value: "a_once" } input_map { key: "b" value: "b_once" }
    output_map { key: "a_out" value: "a_out" } output_map { key: "b_out" value: "b_out" } }
] }
"""
SHAPED_TENSORS = PARTIAL_TENSORS.replace(
    '"b_out" data_type: TYPE_FP32 dims: [ 1 ]', '"b_out" data_type: TYPE_FP32 dims: [ 1, 1 ] reshape: { shape: [ 1 ] }'
)
HOOKS = """
def pre_inference(sample, signature, metadata, parameters):
    parameters["more"] = 2
    return sample
"""
POST = """
def post_inference(prediction, signature, metadata):
    return prediction
"""
HTTP, GRPC = "http", "grpc"


@pytest.fixture(scope="module", params=[live_server, live_front], ids=["alone", "behind a front end"])
def live(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    root = tmp_path_factory.mktemp("models")
    write_model(root, "tells", TELLS, 'backend: "python"' + TENSORS)
    for name, step in (("over", "tells"), ("over_over", "over"), ("hooked", "tells")):
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(ENSEMBLE.format(step=step) + TENSORS)
    write_model(root, "partial", PARTIAL, 'backend: "python"' + PARTIAL_TENSORS)
    (root / "twice" / "1").mkdir(parents=True)
    (root / "twice" / "config.pbtxt").write_text(TWICE + PARTIAL_TENSORS)
    (root / "shaped" / "1").mkdir(parents=True)
    (root / "shaped" / "config.pbtxt").write_text(TWICE + SHAPED_TENSORS)
    (root / "hooked" / "hooks.py").write_text(HOOKS)
    (root / "hooked" / "penstock.toml").write_text('[hooks]\nfile = "hooks.py"\n')
    (root / "posted" / "1").mkdir(parents=True)
    (root / "posted" / "config.pbtxt").write_text(
        (TWICE + PARTIAL_TENSORS).replace("FP32", "STRING").replace('"partial"', '"texts"')
    )
    (root / "posted" / "hooks.py").write_text(POST)
    (root / "posted" / "penstock.toml").write_text('[hooks]\nfile = "hooks.py"\n')
    write_model(root, "texts", PARTIAL, 'backend: "python"' + PARTIAL_TENSORS.replace("FP32", "STRING"))
    serve: Callable[..., AbstractContextManager[Live]] = request.param
    with serve(root, http_header_forward_pattern="x-mine", grpc_header_forward_pattern="x-mine") as served:
        yield served


def parameters_of(live: Live, transport: str, model: str) -> Any:
    """Return the parameters that the step reports."""
    library: Any = triton_http if transport == HTTP else triton_grpc
    tensor = library.InferInput("x", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.zeros((1, 1), np.float32))
    with library.InferenceServerClient(live.address if transport == HTTP else live.grpc_address) as client:
        answer = client.infer(model, [tensor], parameters={"mine": "a"}, headers={"x-mine": "b"})
    return json.loads(answer.as_numpy("y")[0, 0])


@pytest.mark.parametrize("transport", [HTTP, GRPC])
@pytest.mark.parametrize(("model", "more"), [("tells", {}), ("over", {}), ("over_over", {}), ("hooked", {"more": 2})])
def test_a_step_receives_the_parameters_and_the_forwarded_headers(
    live: Live, transport: str, model: str, more: dict[str, int]
) -> None:
    assert parameters_of(live, transport, model) == {"mine": "a", "x-mine": "b", **more}


def test_a_step_receives_the_parameters_of_a_generate_request(live: Live) -> None:
    answer = httpx.post(f"{live.url}/v2/models/over/generate", json={"x": 1, "mine": "a"}).json()

    assert json.loads(answer["y"]) == {"mine": "a"}


def sent(live: Live, inputs: Sequence[str], requested: Sequence[str], model: str = "twice") -> dict[str, float]:
    """Send ones through both steps. Returns: the outputs."""
    tensors = [triton_http.InferInput(name, [1, 1], "FP32") for name in inputs]
    for each in tensors:
        each.set_data_from_numpy(np.ones((1, 1), np.float32))
    outputs = [triton_http.InferRequestedOutput(name) for name in requested]
    with triton_http.InferenceServerClient(live.address) as client:
        answer = client.infer(model, tensors, outputs=outputs)
    found = [each["name"] for each in answer.get_response()["outputs"]]
    return {name: float(answer.as_numpy(name).item()) for name in found}


@pytest.mark.parametrize("names", ["a", "b", "ab"])
def test_an_output_missing_from_a_step_is_a_missing_optional_input_of_the_next(live: Live, names: str) -> None:
    requested = [f"{name}_out" for name in names]

    assert sent(live, list(names), requested) == dict.fromkeys(requested, 1)


def test_a_requested_output_missing_from_a_step_is_omitted(live: Live) -> None:
    """As in qa/L0_simple_ensemble."""
    assert sent(live, ["a"], ["a_out", "b_out"]) == {"a_out": 1}
    assert sent(live, ["a"], ["b_out"]) == {}
    assert sent(live, ["a"], ["a_out", "b_out"], "shaped") == {"a_out": 1}
    assert sent(live, ["b"], ["a_out", "b_out"], "shaped") == {"b_out": 1}


def test_a_post_inference_hook_of_an_ensemble_runs_only_with_every_output(live: Live) -> None:
    tensors = [{"name": name, "datatype": "BYTES", "shape": [1, 1], "data": ["t"]} for name in "ab"]
    url = f"{live.url}/v2/models/posted/infer"
    response = httpx.post(url, json={"inputs": tensors})
    lacking = httpx.post(url, json={"inputs": tensors[:1]})

    assert [each["data"] for each in response.json()["outputs"]] == [["t"], ["t"]]
    assert lacking.status_code == 500
    text = "in ensemble 'posted', model 'texts': the answer lacks the requested output 'b_out'"
    assert lacking.json() == {"error": text}


@pytest.mark.parametrize(("model", "identity"), [("over", 7), ("over_over", "seven"), ("hooked", 8)])
def test_the_answer_of_an_ensemble_has_the_sequence_parameters(live: Live, model: str, identity: int | str) -> None:
    """As in qa/L0_simple_ensemble."""
    terms: dict[str, Any] = {"sequence_id": identity, "sequence_start": True}
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1]}
    answer = httpx.post(f"{live.url}/v2/models/{model}/infer", json={"inputs": [tensor], "parameters": terms}).json()
    assert answer["parameters"] == {**terms, "sequence_end": False}
    generated = httpx.post(f"{live.url}/v2/models/{model}/generate", json={"x": 1, **terms}).json()
    assert {name: generated.get(name) for name in answer["parameters"]} == answer["parameters"]

    grpc_tensor = triton_grpc.InferInput("x", [1, 1], "FP32").set_data_from_numpy(np.ones((1, 1), np.float32))
    with triton_grpc.InferenceServerClient(live.grpc_address) as client:
        parameters = (
            client.infer(model, [grpc_tensor], sequence_id=identity, sequence_end=True).get_response().parameters
        )
        unset = client.infer(model, [grpc_tensor]).get_response().parameters
    assert [parameters[name].bool_param for name in ("sequence_start", "sequence_end")] == [False, True]
    assert (parameters["sequence_id"].int64_param or parameters["sequence_id"].string_param) == identity
    assert not unset
