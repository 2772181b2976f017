"""What is written, answered by a live server over both protocols: strings, sequences and shared memory."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from http.client import HTTPResponse
from pathlib import Path
from socket import create_connection
from typing import Any

import grpc
import numpy as np
import pytest

from penstock.perf.generator.orders import GrpcCall, Target
from penstock.perf.payloads.preparing import prepare_payloads
from penstock.perf.profiling.control import HttpControl
from penstock.perf.profiling.model import ModelDescription, describe_model
from penstock.perf.profiling.options import Input
from penstock.server.protobuf import service_pb2
from tests.clients import models
from tests.clients.sequence_models import CONTROLS, STATE, config, write_accumulator
from tests.live import Live, live_server
from tests.perf.payloads.readers import http, message

METHOD = "/inference.GRPCInferenceService/ModelInfer"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    root = tmp_path_factory.mktemp("repository")
    models.write_identity(root, "words", "", "BYTES")
    write_accumulator(root, "sums", config(4, "direct {}" + CONTROLS + STATE % ""))
    with live_server(root, allow_client_shm=True) as server:
        yield server


@pytest.fixture(params=["http", "grpc"])
def target(live: Live, request: pytest.FixtureRequest) -> Target:
    if request.param == "grpc":
        return Target("127.0.0.1", live.grpc_port, grpc=GrpcCall(METHOD))
    return Target("127.0.0.1", live.http_port)


def control(live: Live) -> HttpControl:
    return HttpControl(Target("127.0.0.1", live.http_port), {})


def answers_to(target: Target, requests: list[bytes]) -> list[dict[str, bytes]]:
    """Send requests one after another, and give the raw outputs of each answer."""
    if target.grpc is not None:
        with grpc.insecure_channel(f"{target.host}:{target.port}") as channel:
            call = channel.unary_unary(METHOD)
            answers = [service_pb2().ModelInferResponse.FromString(call(each[5:])) for each in requests]
        return [
            {output.name: raw for output, raw in zip(each.outputs, each.raw_output_contents, strict=False)}
            for each in answers
        ]
    with create_connection((target.host, target.port)) as connection:
        return [_http(connection, each) for each in requests]


def _http(connection: Any, request: bytes) -> dict[str, bytes]:
    connection.sendall(request)
    answer = HTTPResponse(connection)
    answer.begin()
    body = answer.read()
    assert answer.status == 200, body
    at = int(answer.headers.get("Inference-Header-Content-Length", len(body)))
    outputs = {}
    for output in json.loads(body[:at])["outputs"]:
        size = output.get("parameters", {}).get("binary_data_size", 0)
        outputs[output["name"]] = body[at : at + size]
        at += size
    return outputs


def named(target: Target, request: bytes) -> str:
    """Give the region that a request has its output written to, whose key is its name."""
    if target.grpc is not None:
        return str(message(request).outputs[0].parameters["shared_memory_region"].string_param)
    return str(json.loads(http(request).body)["outputs"][0]["parameters"]["shared_memory_region"])


def model(live: Live, name: str) -> ModelDescription:
    return describe_model(control(live), name)


def test_strings_return_as_they_were_sent(live: Live, target: Target) -> None:
    words = Input(shapes={"x": (2,)}, string="hé", batch=2)
    with prepare_payloads(model(live, "words"), words, target, control(live)) as prepared:
        (answer,) = answers_to(target, [next(prepared.payloads.stream(0))])

    assert answer["y"] == b"\3\0\0\0h\xc3\xa9" * 4


def test_sequences_keep_separate_state_and_end(live: Live, target: Target, tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_text(json.dumps({"data": [[{"x": [1]}, {"x": [2]}], [{"x": [10]}, {"x": [20]}, {"x": [30]}]]}))
    sums = model(live, "sums")
    assert sums.sequences
    with prepare_payloads(sums, Input(source=(str(path),)), target, control(live), slots=2) as prepared:
        one, two = prepared.payloads.stream(0), prepared.payloads.stream(1)
        turns = [next(stream) for stream in itertools.islice(itertools.cycle((one, two)), 8)]
        endings = [each for each in (prepared.payloads.ending(0), prepared.payloads.ending(1)) if each is not None]
        answers = answers_to(target, turns + endings)

    results = [float(np.frombuffer(each["y"], np.float32)[0]) for each in answers]
    assert results == [1, 10, 3, 30, 10, 60, 30, 1, 60, 3]


def test_tensors_are_placed_in_shared_memory(live: Live, target: Target) -> None:
    words = Input(shapes={"x": (1,)}, string="abc", shared_memory="system", output_shared_memory_bytes=16)
    with prepare_payloads(model(live, "words"), words, target, control(live)) as prepared:
        request = next(prepared.payloads.stream(0))
        answers_to(target, [request])
        region = Path("/dev/shm", named(target, request))
        assert region.read_bytes()[:7] == b"\3\0\0\0abc"

    assert not region.exists()
