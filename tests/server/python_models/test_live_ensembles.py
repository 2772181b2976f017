"""Python models as steps: whatever a request says comes to them through every ensemble, transport and process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

from tests.live import Live, live_server
from tests.server.fronts.living import live_front
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
HOOKS = """
def pre_inference(sample, signature, metadata, parameters):
    parameters["more"] = 2
    return sample
"""
HTTP, GRPC = "http", "grpc"


@pytest.fixture(scope="module", params=[live_server, live_front], ids=["alone", "behind a front end"])
def live(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    root = tmp_path_factory.mktemp("models")
    write_model(root, "tells", TELLS, 'backend: "python"' + TENSORS)
    for name, step in (("over", "tells"), ("over_over", "over"), ("hooked", "tells")):
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(ENSEMBLE.format(step=step) + TENSORS)
    (root / "hooked" / "hooks.py").write_text(HOOKS)
    (root / "hooked" / "penstock.toml").write_text('[hooks]\nfile = "hooks.py"\n')
    serve: Callable[..., AbstractContextManager[Live]] = request.param
    with serve(root, http_header_forward_pattern="x-mine", grpc_header_forward_pattern="x-mine") as served:
        yield served


def told(live: Live, transport: str, model: str) -> Any:
    """Give the parameters that the step says it was given."""
    library: Any = triton_http if transport == HTTP else triton_grpc
    given = library.InferInput("x", [1, 1], "FP32")
    given.set_data_from_numpy(np.zeros((1, 1), np.float32))
    with library.InferenceServerClient(live.address if transport == HTTP else live.grpc_address) as client:
        answer = client.infer(model, [given], parameters={"mine": "a"}, headers={"x-mine": "b"})
    return json.loads(answer.as_numpy("y")[0, 0])


@pytest.mark.parametrize("transport", [HTTP, GRPC])
@pytest.mark.parametrize(("model", "more"), [("tells", {}), ("over", {}), ("over_over", {}), ("hooked", {"more": 2})])
def test_a_step_is_told_the_parameters_and_the_forwarded_headers(
    live: Live, transport: str, model: str, more: dict[str, int]
) -> None:
    assert told(live, transport, model) == {"mine": "a", "x-mine": "b", **more}


def test_a_step_is_told_what_generate_does_not_take_for_inputs(live: Live) -> None:
    answer = httpx.post(f"{live.url}/v2/models/over/generate", json={"x": 1, "mine": "a"}).json()

    assert json.loads(answer["y"]) == {"mine": "a"}
