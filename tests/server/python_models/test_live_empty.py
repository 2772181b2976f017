"""Answers of a decoupled Python model that have no outputs, or other outputs than were requested."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton

from tests.live import Live, live_server

from .repositories import write_model

pytestmark = pytest.mark.slow

SENDS = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender, asked = request.get_response_sender(), sorted(request.requested_output_names())
            sender.send(pb_utils.InferenceResponse([], parameters={"asked": json.dumps(asked)}))
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([5], np.int32))]))
            sender.send(pb_utils.InferenceResponse([]), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
CONFIG = """
backend: "python"
input [ { name: "x" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "y" data_type: TYPE_INT32 dims: [ 1 ] }, { name: "z" data_type: TYPE_INT32 dims: [ 1 ] } ]
model_transaction_policy { decoupled: true }
"""
ENSEMBLE = """
platform: "ensemble"
input [ { name: "x" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "y" data_type: TYPE_INT32 dims: [ 1 ] } ]
ensemble_scheduling { step [
  { model_name: "sends" model_version: -1 input_map { key: "x" value: "x" } output_map { key: "y" value: "y" } }
] }
"""
BARE = {"model_name": "sends", "model_version": "1"}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    root: Path = tmp_path_factory.mktemp("repository")
    write_model(root, "sends", SENDS, CONFIG)
    (root / "whole" / "1").mkdir(parents=True)
    (root / "whole" / "config.pbtxt").write_text(ENSEMBLE)
    with live_server(root) as server:
        yield server


def streamed(live: Live, model: str, *requested: str) -> list[tuple[list[str], str, bool]]:
    """Return the answers: the output names, which outputs the model saw as requested, and whether it is the last."""
    came: queue.Queue[Any] = queue.Queue()
    found: list[tuple[list[str], str, bool]] = []
    x = triton.InferInput("x", [1], "INT32").set_data_from_numpy(np.ones(1, np.int32))
    with triton.InferenceServerClient(live.grpc_address) as client:
        client.start_stream(lambda result, error: came.put(error or result))
        outputs = [triton.InferRequestedOutput(name) for name in requested]
        client.async_stream_infer(model, [x], outputs=outputs, enable_empty_final_response=True)
        while not found or not found[-1][2]:
            answer = came.get(timeout=20).get_response()
            requested_names, final = (answer.parameters[name] for name in ("asked", "triton_final_response"))
            found.append(([output.name for output in answer.outputs], requested_names.string_param, final.bool_param))
    return found


def test_an_answer_without_outputs_is_streamed(live: Live) -> None:
    assert streamed(live, "sends") == [([], '["y", "z"]', False), (["y"], "", False), ([], "", True)]


def test_unrequested_outputs_are_omitted_and_the_model_sees_the_requested_ones(live: Live) -> None:
    assert streamed(live, "sends", "z") == [([], '["z"]', False), ([], "", False), ([], "", True)]
    assert streamed(live, "sends", "y") == [([], '["y"]', False), (["y"], "", False), ([], "", True)]


def test_an_answer_without_outputs_is_sent_as_an_event(live: Live) -> None:
    answer = httpx.post(f"{live.url}/v2/models/sends/generate_stream", json={"x": 1})

    parameters = {"asked": '["y", "z"]'} | BARE
    assert [json.loads(line[6:]) for line in answer.text.split("\n\n")[:-1]] == [parameters, {"y": 5} | BARE, BARE]


def test_an_answer_without_outputs_ends_at_its_ensemble_step(live: Live) -> None:
    assert streamed(live, "whole") == [(["y"], "", False), ([], "", True)]
