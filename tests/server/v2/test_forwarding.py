"""Header fields that become parameters, and how both reach hooks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from penstock.backends.errors import Code, InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.server.settings import SettingError, resolve
from penstock.server.v2.forwarding import Forwarding
from tests.fakes import FakeBackend, fake_loader
from tests.live import Live, live_server
from tests.server.repository.folders import make, native
from tests.server.v2.rpc.calls import pb
from tests.server.v2.rpc.calls import request as rpc_request


def test_header_names_that_match_the_pattern_are_forwarded_in_any_case() -> None:
    found = Forwarding("^(X-Tenant|trace)")

    assert found.from_header({b"x-tenant": b"a", b"tracestate": b"b", b"host": b"c"}) == {
        "x-tenant": "a",
        "tracestate": "b",
    }
    assert found.from_metadata({"X-TENANT": "ä"}) == {"X-TENANT": "ä"}


def test_a_pattern_can_turn_case_sensitivity_on() -> None:
    found = Forwarding("(?-i)X-.*")

    assert found.from_metadata({"x-tenant": "a", "X-TENANT": "b"}) == {"X-TENANT": "b"}


def test_fields_reserved_by_grpc_are_not_forwarded() -> None:
    """A model that forwards all fields to another server would otherwise send it a field `:authority`."""
    found = Forwarding(".*")
    metadata = {"te": "trailers", "content-type": "application/grpc", "user-agent": "a", "grpc-timeout": "1S", "x": "b"}

    assert found.from_metadata({**metadata, ":authority": "h:1", "grpc-accept-encoding": "gzip"}) == {
        "user-agent": "a",
        "x": "b",
    }
    assert found.from_header({b"content-type": b"application/json"}) == {"content-type": "application/json"}


def test_an_empty_pattern_forwards_nothing() -> None:
    assert Forwarding.of("") is None
    assert Forwarding.of("x") is not None


@pytest.mark.parametrize("name", ["priority", "timeout", "headers", "sequence_id", "triton_x"])
def test_reserved_names_that_match_the_pattern_are_rejected(name: str) -> None:
    everything, other = Forwarding(".*"), Forwarding("^x-")
    calls: list[Callable[[], object]] = [
        lambda: everything.from_header({name.encode(): b"1"}),
        lambda: everything.from_metadata({name: "1"}),
    ]
    for call in calls:
        with pytest.raises(InferError, match="reserved for Triton usage and should not be specified") as caught:
            call()
        assert caught.value.code is Code.INVALID
    assert other.from_header({name.encode(): b"1"}) == other.from_metadata({name: "1"}) == {}


@pytest.mark.parametrize("name", ["http_header_forward_pattern", "grpc_header_forward_pattern"])
def test_an_invalid_pattern_is_rejected_at_startup(name: str) -> None:
    with pytest.raises(SettingError, match="is not a valid regular expression"):
        resolve({name: "("}, {})


HOOKS = """
import json

def pre_inference(sample, signature, metadata, parameters):
    parameters["pre"] = len(parameters)
    return {"x": [1, 2, 3, 4]}

def post_inference(prediction, signature, metadata, parameters):
    return {"said": json.dumps(parameters, sort_keys=True)}
"""
TENSOR = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}


class TestForwardingToHooks:
    @pytest.fixture
    def live(self, tmp_path: Path) -> Iterator[Live]:
        make(tmp_path, "m/1/model.onnx")
        (tmp_path / "m" / "hooks.py").write_text(HOOKS)
        native(tmp_path, "m", '[hooks]\nfile = "hooks.py"\n')
        graph = Signature((TensorSpec("x", "FP32", (-1, 4)),), (TensorSpec("y", "FP32", (-1, 4)),))
        with live_server(
            tmp_path,
            loaders={"onnxruntime": fake_loader(FakeBackend(graph, list))},
            http_header_forward_pattern="^x-mine",
            grpc_header_forward_pattern="^x-mine",
        ) as started:
            yield started

    def test_hooks_receive_each_http_requests_own_parameters_and_forwarded_headers(self, live: Live) -> None:
        body = {"inputs": [TENSOR], "parameters": {"p": 0.5, "timeout": 10_000_000}}
        answers = [
            httpx.post(f"{live.url}/v2/models/m/infer", json=body, headers={"X-Mine": value}).json()
            for value in ("a", "b")
        ]

        assert [parameters_of(answer) for answer in answers] == [
            {"p": 0.5, "x-mine": "a", "pre": 2},
            {"p": 0.5, "x-mine": "b", "pre": 2},
        ]

    def test_hooks_receive_forwarded_headers_on_predict_and_parameters_on_generate(self, live: Live) -> None:
        headers = {"X-Mine": "a"}
        predicted = httpx.post(f"{live.url}/v2/models/m/predict", json={}, headers=headers).json()
        generated = httpx.post(f"{live.url}/v2/models/m/generate", json={"x": [1, 2, 3, 4], "p": "q"}).json()

        assert json.loads(predicted["said"]) == {"x-mine": "a", "pre": 1}
        assert json.loads(generated["said"]) == {"p": "q", "pre": 1}

    def test_hooks_receive_the_same_grpc_parameters_and_metadata_on_a_repeated_request(self, live: Live) -> None:
        message = rpc_request()
        message.parameters["p"].bool_param = True
        found = []
        with grpc.insecure_channel(live.grpc_address) as channel:
            ask = channel.unary_unary(
                "/inference.GRPCInferenceService/ModelInfer", response_deserializer=pb.ModelInferResponse.FromString
            )
            for _ in range(2):
                answer = ask(message.SerializeToString(), timeout=20, metadata=[("x-mine", "a")])
                found.append(json.loads(answer.raw_output_contents[0][4:]))

        assert found == [{"p": True, "x-mine": "a", "pre": 2}] * 2


def parameters_of(answer: Any) -> Any:
    [output] = answer["outputs"]
    return json.loads(output["data"][0])
