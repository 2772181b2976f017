"""Classification over HTTP, and JSON answers encoded on a thread, against a live server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.http as triton

from penstock.backends.backend import Array
from tests.clients import models
from tests.live import Live, live_server
from tests.server.v2.rpc.calls import pb

LABELS = ["zero", "one", "", "three"]
LABELLED = """
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: -1 }
output { name: "y" data_type: TYPE_FP32 dims: -1 label_filename: "labels.txt" }
"""
HOOKS = """
def post_inference(prediction, metadata):
    return {"y": prediction[0], "own": -prediction[0]}
"""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    root: Path = tmp_path_factory.mktemp("repository")
    models.write_identity(root, "labelled", LABELLED)
    (root / "labelled" / "labels.txt").write_text("\n".join(LABELS) + "\n")
    models.write_identity(root, "plain", "")
    models.write_identity(root, "words", "", "BYTES")
    models.write_identity(root, "half", "", "FP16")
    models.write_identity(root, "hooked", "")
    (root / "hooked" / "penstock.toml").write_text('[hooks]\nfile = "hooks.py"\n')
    (root / "hooked" / "hooks.py").write_text(HOOKS)
    with live_server(root, http_header_forward_pattern="^x-mine") as server:
        yield server


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[Any]:
    with triton.InferenceServerClient(live.address) as new_client:
        yield new_client


def classify(client: Any, model: str, values: Array, count: int, *, binary: bool) -> Any:
    tensor = triton.InferInput("x", list(values.shape), "FP32").set_data_from_numpy(values)
    requested = triton.InferRequestedOutput("y", binary_data=binary, class_count=count)
    return client.infer(model, [tensor], outputs=[requested]).as_numpy("y")


def expected(values: Array, count: int, labels: list[str]) -> list[list[str]]:
    rows = []
    for row in values:
        best = np.argsort(-row, kind="stable")[:count]
        texts = [f"{row[index]:f}:{index}" for index in best]
        rows.append(
            [t + f":{labels[i]}" if i < len(labels) and labels[i] else t for t, i in zip(texts, best, strict=True)]
        )
    return rows


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize(("model", "labels"), [("labelled", LABELS), ("plain", []), ("hooked", [])])
@pytest.mark.parametrize(("rows", "width", "count"), [(2, 4, 3), (1, 1000, 5), (3, 2, 10), (4, 6000, 2000)])
def test_classes_match_those_that_numpy_computes(
    client: Any, model: str, labels: list[str], rows: int, width: int, count: int, binary: bool
) -> None:
    values = np.random.default_rng(1).normal(size=(rows, width)).astype(np.float32)
    found = classify(client, model, values, count, binary=binary)
    texts = [[each.decode() if isinstance(each, bytes) else each for each in row] for row in found]

    assert found.shape == (rows, min(count, width))
    assert texts == expected(values, count, labels)


def test_a_classification_answer_in_json_has_the_shape_of_the_classes_and_no_parameters(live: Live) -> None:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [0.25, 0.5, 0.125]}
    output = {"name": "y", "parameters": {"classification": 2}}
    answer = httpx.post(
        f"{live.url}/v2/models/labelled/infer", json={"id": "9", "inputs": [tensor], "outputs": [output]}
    )

    assert answer.text == (
        '{"id":"9","model_name":"labelled","model_version":"1","outputs":[{"name":"y","datatype":"BYTES","shape":[1,2],'
        '"data":["0.500000:1:one","0.250000:0:zero"]}]}'
    )


def test_classification_of_a_string_output_is_rejected(live: Live) -> None:
    tensor = {"name": "x", "datatype": "BYTES", "shape": [1, 1], "data": ["a"]}
    output = {"name": "y", "parameters": {"classification": 2}}
    answer = httpx.post(f"{live.url}/v2/models/words/infer", json={"inputs": [tensor], "outputs": [output]})

    assert answer.status_code == 400
    assert answer.json() == {"error": "class result not available for output due to unsupported type 'BYTES'"}


@pytest.mark.parametrize("headers", [{}, {"accept-encoding": "gzip"}])
@pytest.mark.parametrize("count", [16_383, 16_384, 60_000])
def test_a_large_json_answer_is_the_same_from_the_event_loop_and_from_a_thread(
    live: Live, headers: dict[str, str], count: int
) -> None:
    values = np.random.default_rng(0).random((1, count), dtype=np.float32)
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, count], "parameters": {"binary_data_size": 4 * count}}
    text = json.dumps({"inputs": [tensor]}).encode()
    headers = {"inference-header-content-length": str(len(text)), "accept-encoding": "identity"} | headers
    with httpx.Client(base_url=live.url, headers=headers) as client:
        for _ in range(2):
            answer = client.post("/v2/models/plain/infer", content=text + values.tobytes())
            [output] = answer.json()["outputs"]
            np.testing.assert_array_equal(np.array(output["data"], np.float32), values[0])


def test_a_large_json_answer_that_cannot_be_encoded_is_an_error_and_the_connection_stays_open(live: Live) -> None:
    count = 20_000
    tensor = {"name": "x", "datatype": "FP16", "shape": [1, count], "parameters": {"binary_data_size": 2 * count}}
    text = json.dumps({"inputs": [tensor]}).encode()
    headers = {"inference-header-content-length": str(len(text))}
    with httpx.Client(base_url=live.url) as client:
        answer = client.post("/v2/models/half/infer", content=text + bytes(2 * count), headers=headers)

        assert answer.status_code == 400
        assert "sending FP16 data via JSON is not supported" in answer.json()["error"]
        assert client.get("/v2/health/live").status_code == 200


def test_a_forwarded_header_changes_no_answer_and_an_unmatched_reserved_header_is_ignored(live: Live) -> None:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [0.5]}
    with httpx.Client(base_url=live.url, headers={"X-Mine": "a", "priority": "u=1"}) as client:
        for _ in range(2):
            answer = client.post("/v2/models/plain/infer", json={"inputs": [tensor], "parameters": {"own": 1}})
            assert answer.json()["outputs"][0]["data"] == [0.5]


def test_reserved_headers_and_metadata_that_match_the_forward_pattern_are_rejected(tmp_path: Path) -> None:
    models.write_identity(tmp_path, "plain", "")
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [0.5]}
    wrong = "parameter 'timeout' is reserved for Triton usage and should not be specified."
    with live_server(tmp_path, http_header_forward_pattern=".*", grpc_header_forward_pattern=".*") as live:
        answer = httpx.post(f"{live.url}/v2/models/plain/infer", json={"inputs": [tensor]}, headers={"Timeout": "5"})
        message = pb.ModelInferRequest(model_name="plain")
        with grpc.insecure_channel(live.grpc_address) as channel:
            infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            with pytest.raises(grpc.RpcError) as caught:
                infer(message.SerializeToString(), timeout=20, metadata=[("timeout", "5")])

        assert (answer.status_code, answer.json()) == (400, {"error": wrong})
        assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.INVALID_ARGUMENT, wrong)
