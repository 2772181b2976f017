"""The HTTP behavior that Triton's own tests (qa/L0_http, L0_input_validation, L0_nan_inf) expect."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest

from tests.clients import models
from tests.clients.tensors import VALUES, document
from tests.live import Live, live_server

pytestmark = pytest.mark.slow

ONE_TO_16 = list(range(1, 17))
INPUTS = [{"name": f"INPUT{i}", "datatype": "INT32", "shape": [1, 16], "data": ONE_TO_16} for i in (0, 1)]
SUM, DIFFERENCE = [2 * i for i in ONE_TO_16], [0] * 16
NOT_THE_SHAPE = """{"error":"Unable to parse 'data': Shape does not match true shape of 'data' field"}"""
MISSING = """
expected 2 inputs but got {got} inputs for model 'simple'. Got input(s) [{named}], but missing required input(s)
[{missing}]. Please provide all required input(s).
""".strip().replace("\n", " ")


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live.url, timeout=20, headers={"accept-encoding": "identity"}) as new_client:
        yield new_client


def infer(client: httpx.Client, model: str, body: Any, **fields: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return client.post(f"/v2/models/{model}/infer", content=content, headers=fields)


def error(response: httpx.Response) -> str:
    assert response.headers["content-type"] == "application/json"
    assert response.json().keys() == {"error"}
    text: str = response.json()["error"]
    return text


def outputs(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the entries of the outputs, from the JSON before any binary tensors."""
    length = response.headers.get("inference-header-content-length")
    entries: list[dict[str, Any]] = json.loads(response.content[: int(length) if length else None])["outputs"]
    return entries


class TestBinaryOutputs:
    """Which outputs are binary: `binary_data_output` is the default for outputs without `binary_data`."""

    @pytest.mark.parametrize("default", [None, False, True])
    @pytest.mark.parametrize("named", [None, [], *itertools.product([None, False, True], repeat=2)])
    def test_an_output_is_binary_if_requested_by_name_or_by_default(
        self, client: httpx.Client, default: bool | None, named: Any
    ) -> None:
        body: dict[str, Any] = {"inputs": INPUTS}
        if default is not None:
            body["parameters"] = {"binary_data_output": default}
        if named is not None:
            body["outputs"] = [
                {"name": f"OUTPUT{i}"} | ({} if way is None else {"parameters": {"binary_data": way}})
                for i, way in enumerate(named)
            ]
        binary = [bool(way) for way in named] if named else [bool(default)] * 2
        response = infer(client, "simple", body)
        found = outputs(response)

        assert [entry["name"] for entry in found] == ["OUTPUT0", "OUTPUT1"]
        assert ["data" not in entry for entry in found] == binary
        # the C++ client takes any output with parameters for a binary one
        assert ["parameters" in entry for entry in found] == binary
        assert ("inference-header-content-length" in response.headers) == any(binary)
        kind = "application/octet-stream" if any(binary) else "application/json"
        assert response.headers["content-type"] == kind
        raw = response.content[int(response.headers.get("inference-header-content-length", len(response.content))) :]
        expected = [values for values, way in zip((SUM, DIFFERENCE), binary, strict=True) if way]
        assert np.frombuffer(raw, "<i4").tolist() == list(itertools.chain(*expected))
        assert [entry["data"] for entry in found if "data" in entry] == [
            values for values, way in zip((SUM, DIFFERENCE), binary, strict=True) if not way
        ]

    def test_binary_outputs_without_bytes_have_no_length_header_and_are_json(self, client: httpx.Client) -> None:
        body = document(np.empty((0, 3), np.float32), parameters={"binary_data_output": True})
        response = infer(client, "identity_FP32", body)

        assert "inference-header-content-length" not in response.headers
        assert response.headers["content-type"] == "application/json"
        assert response.json()["outputs"] == [
            {"name": "y", "datatype": "FP32", "shape": [0, 3], "parameters": {"binary_data_size": 0}}
        ]

    def test_the_members_of_an_answer_are_in_tritons_order(self, client: httpx.Client) -> None:
        response = infer(client, "simple", {"id": "7", "inputs": INPUTS})

        assert list(response.json()) == ["id", "model_name", "model_version", "outputs"]
        assert list(response.json()["outputs"][0]) == ["name", "datatype", "shape", "data"]


class TestJsonData:
    @pytest.mark.parametrize("count", [15, 18])
    def test_a_number_of_values_that_does_not_match_the_shape_is_rejected(
        self, client: httpx.Client, count: int
    ) -> None:
        entry = {**INPUTS[0], "data": list(range(count))}
        response = infer(client, "simple", {"inputs": [entry]})

        assert (response.status_code, response.text) == (400, NOT_THE_SHAPE)
        assert infer(client, "simple", {"inputs": INPUTS}).json()["outputs"][0]["data"] == SUM

    def test_data_may_be_nested(self, client: httpx.Client) -> None:
        entries = [{**entry, "data": [ONE_TO_16]} for entry in INPUTS]

        assert infer(client, "simple", {"inputs": entries}).json()["outputs"][0]["data"] == SUM

    @pytest.mark.parametrize(("datatype", "value"), [("BYTES", "hello"), ("INT64", 123), ("FP32", 0.5)])
    @pytest.mark.parametrize(("depth", "status"), [(50, 200), (120, 400)])
    def test_the_nesting_depth_of_data_is_limited(
        self, client: httpx.Client, datatype: str, value: object, depth: int, status: int
    ) -> None:
        nested = json.loads("[" * depth + json.dumps(value) + "]" * depth)
        entry = {"name": "x", "datatype": datatype, "shape": [1, 1], "data": nested}
        response = infer(client, f"identity_{datatype}", {"inputs": [entry]})

        assert response.status_code == status
        if status == 200:
            assert response.json()["outputs"][0]["data"] == [value]
        else:
            assert "JSON nesting depth exceeds maximum allowed limit (100)" in error(response)

    @pytest.mark.parametrize(
        ("shape", "text"),
        [
            ([2**4, 2**60 + 2], "causes total element count to exceed maximum size of"),
            ([2**2, 2**60 + 2], "byte size overflow for input"),
            ([2, -5], "Unable to parse 'shape': attempt to access JSON non-unsigned-integer as unsigned-integer"),
            ([1.0, 1], "Unable to parse 'shape': attempt to access JSON non-unsigned-integer as unsigned-integer"),
            (["1", 1], "Unable to parse 'shape': attempt to access JSON non-unsigned-integer as unsigned-integer"),
            (1, "Unable to parse 'shape': attempt to access JSON non-array as array"),
            (None, "Unable to parse 'shape': attempt to access non-existing object member 'shape'"),
        ],
    )
    def test_an_invalid_shape_is_rejected(self, client: httpx.Client, shape: object, text: str) -> None:
        entry = {"name": "x", "datatype": "FP32", "shape": shape, "data": [1.0]}
        if shape is None:
            del entry["shape"]
        response = infer(client, "identity_FP32", {"inputs": [entry]})

        assert response.status_code == 400
        assert text in error(response)

    @pytest.mark.parametrize("datatype", [name for name in VALUES if name not in {"FP16", "BF16"}])
    @pytest.mark.parametrize("times", [1, 400])
    def test_json_values_are_returned_exactly(self, client: httpx.Client, datatype: str, times: int) -> None:
        sent = np.tile(VALUES[datatype], (1, times))
        entry = document(sent)["inputs"][0]
        entry = entry | {"datatype": datatype, "data": [[*row] for row in sent.tolist()]}
        found = infer(client, f"identity_{datatype}", {"inputs": [entry]}).json()["outputs"][0]

        assert found["shape"] == list(sent.shape)
        assert found["data"] == sent.ravel().tolist()

    @pytest.mark.parametrize("times", [1, 400])
    def test_values_beyond_the_range_of_fp32_become_infinite(self, client: httpx.Client, times: int) -> None:
        body = '{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, %d], "data": [%s]}]}'
        values = ", ".join(["1e300, -1e300, 1e-300"] * times)
        response = infer(client, "identity_FP32", (body % (3 * times, values)).encode())

        assert response.json()["outputs"][0]["data"] == [float("inf"), float("-inf"), 0.0] * times


class TestFloatFormatting:
    """L0_nan_inf, and how FP32 is printed."""

    @pytest.mark.parametrize("times", [1, 100])
    def test_nan_and_infinity_are_written_as_python_reads_them(self, client: httpx.Client, times: int) -> None:
        above, below = np.array([[1, -1, 0, 0.5] * times], np.float32), np.array([[0, 0, 0, 1] * times], np.float32)
        entries = [document(above, "a")["inputs"][0], document(below, "b")["inputs"][0]]
        response = infer(client, "quotient", {"inputs": entries})

        assert response.text.count("NaN") == times
        assert b'"data":[Infinity,-Infinity,NaN,0.5' in response.content
        np.testing.assert_array_equal(response.json()["outputs"][0]["data"], [np.inf, -np.inf, np.nan, 0.5] * times)

    @pytest.mark.parametrize("times", [1, 100])
    def test_fp32_is_written_with_the_digits_of_its_double(self, client: httpx.Client, times: int) -> None:
        sent = np.array([[0.1, 1e10, 1 / 3] * times], np.float32)
        response = infer(client, "identity_FP32", document(sent))

        assert b"0.10000000149011612," in response.content
        assert response.json()["outputs"][0]["data"] == sent.astype(np.float64).ravel().tolist()


class TestErrors:
    @pytest.mark.parametrize(
        ("body", "text"),
        [
            (b"", "failed to parse the request JSON buffer"),
            (b"{", "failed to parse the request JSON buffer"),
            (b"[]", "failed to parse the request JSON buffer"),
            ({}, "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'"),
            ({"inputs": {}}, "Unable to parse 'inputs': attempt to access JSON non-array as array"),
            ({"inputs": [{}]}, "Unable to parse 'name': attempt to access non-existing object member 'name'"),
            ({"inputs": [], "id": 7}, "Unable to parse 'id'"),
            (
                {"inputs": []},
                MISSING.format(got=0, named="", missing="'INPUT0','INPUT1'"),
            ),
            (
                {"inputs": INPUTS[1:]},
                MISSING.format(got=1, named="'INPUT1'", missing="'INPUT0'"),
            ),
            ({"inputs": [*INPUTS, INPUTS[0]]}, "input 'INPUT0' already exists in request"),
            (
                {"inputs": INPUTS, "outputs": [{"name": "OUTPUT0"}] * 2},
                "Duplicate output name 'OUTPUT0' is not allowed in a request",
            ),
            ({"inputs": INPUTS, "outputs": [{"name": "x"}]}, "unexpected inference output 'x' for model 'simple'"),
            ({"inputs": INPUTS, "parameters": {"triton_x": 1}}, "parameter keys starting with 'triton_' are reserved"),
            ({"inputs": INPUTS, "parameters": {"x": None}}, "parameter 'x' has invalid type"),
            ({"inputs": INPUTS, "parameters": {"timeout": -1}}, "Unable to parse 'timeout'"),
            ({"inputs": INPUTS, "parameters": {"priority": "1"}}, "Unable to parse 'priority'"),
            ({"inputs": INPUTS, "parameters": {"binary_data_output": 1}}, "Unable to parse 'binary_data_output'"),
            ({"inputs": [{**INPUTS[0], "data": ["a"] * 16}]}, "Unable to parse 'data'"),
            ({"inputs": [{**INPUTS[0], "data": [2**40] * 16}]}, "Unable to parse 'data'"),
            ({"inputs": [{**INPUTS[0], "data": [0.5] * 16}]}, "Unable to parse 'data'"),
            ({"inputs": [{**INPUTS[0], "datatype": "INT3"}]}, "data-type is 'INT3'"),
        ],
    )
    def test_a_malformed_body_is_a_bad_request(self, client: httpx.Client, body: Any, text: str) -> None:
        response = infer(client, "simple", body)

        assert response.status_code == 400
        assert text in error(response)

    @pytest.mark.parametrize(
        ("size", "sent", "text"),
        [
            (8, 8, None),
            (8, 9, "unexpected additional input data for model 'identity_FP32'"),
            (8, 5, "unexpected size for input 'x', expecting 3 additional bytes for model 'identity_FP32'"),
            (4, 4, "input byte size mismatch for input 'x' for model 'identity_FP32'. Expected 8, got 4"),
            (0, 0, "input byte size mismatch for input 'x' for model 'identity_FP32'. Expected 8, got 0"),
        ],
    )
    def test_a_size_mismatch_of_binary_data_is_rejected(
        self, client: httpx.Client, size: int, sent: int, text: str | None
    ) -> None:
        entry = {"name": "x", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": size}}
        head = json.dumps({"inputs": [entry]}).encode()
        fields = {"inference-header-content-length": str(len(head))}
        response = infer(client, "identity_FP32", head + bytes(range(sent)), **fields)

        assert response.status_code == (400 if text else 200)
        assert text is None or text in error(response)

    @pytest.mark.parametrize(
        ("value", "status", "text"),
        [
            ("x", 400, "Unable to parse Inference-Header-Content-Length, got: x"),
            ("-1", 400, "got: -1"),
            ("9999", 400, "inference header size should be in range (0, "),
            ("99999999999999999999999", 400, "got: 99999999999999999999999"),
        ],
    )
    def test_an_invalid_inference_header_content_length_is_rejected(
        self, client: httpx.Client, value: str, status: int, text: str
    ) -> None:
        fields = {"inference-header-content-length": value}
        response = infer(client, "simple", {"inputs": INPUTS}, **fields)

        assert response.status_code == status
        assert text in error(response)

    def test_the_rejection_of_an_unknown_content_coding_lists_the_supported_ones(self, client: httpx.Client) -> None:
        response = infer(client, "simple", {"inputs": INPUTS}, **{"content-encoding": "br"})

        assert response.status_code == 501
        assert response.headers["accept-encoding"] == "gzip, deflate"

    @pytest.mark.parametrize("path", [f"/v2/models/x{end}" for end in ("", "/config", "/ready", "/infer")])
    @pytest.mark.parametrize(("version", "text"), [("", ""), ("/versions/9", " version 9")])
    def test_an_unknown_model_is_not_found(self, client: httpx.Client, path: str, version: str, text: str) -> None:
        path = path.replace("/x", f"/x{version}")
        response = client.post(path, content=b"{}") if path.endswith("infer") else client.get(path)

        assert response.status_code == 404
        # if the model is unknown, Triton's message includes the requested version, too
        assert error(response).startswith("Request for unknown model: 'x'")
        assert error(response) in {
            "Request for unknown model: 'x' is not found", f"Request for unknown model: 'x'{text} is not found"
        }  # fmt: skip

    def test_statistics_of_an_unknown_model_are_a_bad_request(self, client: httpx.Client) -> None:
        response = client.get("/v2/models/x/stats")

        assert (response.status_code, error(response)) == (400, "requested model 'x' is not available")

    def test_a_named_repository_is_not_supported(self, client: httpx.Client) -> None:
        response = client.post("/v2/repository/r/models/simple/load")

        assert response.status_code == 501
        assert "'repository_name' specification is not supported" in error(response)


QUEUE_CONFIG = """
dynamic_batching {
  max_queue_delay_microseconds: 1000000
  preferred_batch_size: [ 8 ]
  default_queue_policy { max_queue_size: 1 }
}
"""
TIMEOUT_CONFIG = """
dynamic_batching {
  max_queue_delay_microseconds: 10000000
  default_queue_policy { default_timeout_microseconds: 100000 }
}
"""


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    root = tmp_path_factory.mktemp("held")
    for name, config in (("small", QUEUE_CONFIG), ("late", TIMEOUT_CONFIG)):
        models.write_identity(root, name, config)
    with live_server(root) as server:
        yield server


async def waiting(live: Live, model: str) -> int:
    return live.server.engine.model(model).waiting_requests


def test_a_full_queue_is_unavailable_and_the_queued_request_is_served(held: Live) -> None:
    url, body = f"{held.url}/v2/models/small/infer", document(np.ones((1, 2), np.float32))
    with httpx.Client(timeout=20) as client, ThreadPoolExecutor(1) as pool:
        first = pool.submit(httpx.post, url, json=body, timeout=20)
        while not held.call(waiting(held, "small")):
            pass
        second = client.post(url, json=body)

    assert (second.status_code, error(second)) == (503, "Exceeds maximum queue size")
    assert first.result().status_code == 200


def test_a_request_that_times_out_in_the_queue_is_unavailable(held: Live) -> None:
    body = document(np.ones((1, 2), np.float32))
    response = httpx.post(f"{held.url}/v2/models/late/infer", json=body, timeout=20)

    assert (response.status_code, error(response)) == (503, "Request timeout expired")
