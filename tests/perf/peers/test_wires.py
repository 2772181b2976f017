"""Every wire writes what its server reads, and reads what it answers."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.perf.peers import wires
from penstock.server.protobuf import service_pb2

ROW = np.array([[0.5, 1.0, -2.25, 3.0]], np.float32)


def test_v2_json_has_shape_and_numbers() -> None:
    request = wires.V2_JSON.ask("iris", ROW)

    assert request.path == "/v2/models/iris/infer"
    assert json.loads(request.body) == {
        "inputs": [{"name": "input", "shape": [1, 4], "datatype": "FP32", "data": [0.5, 1.0, -2.25, 3.0]}]
    }


def test_v2_binary_puts_the_bytes_after_a_head_of_declared_length() -> None:
    request = wires.V2_BINARY.ask("iris", ROW)
    head = int(request.headers["Inference-Header-Content-Length"])

    assert json.loads(request.body[:head])["inputs"][0]["parameters"] == {"binary_data_size": 16}
    assert request.body[head:] == ROW.tobytes()


def test_v2_grpc_writes_a_message() -> None:
    message = service_pb2().ModelInferRequest.FromString(wires.V2_GRPC.ask("iris", ROW).body)

    assert (message.model_name, message.inputs[0].shape) == ("iris", [1, 4])
    assert message.raw_input_contents[0] == ROW.tobytes()


@pytest.mark.parametrize(("batched", "sent"), [(False, [0.5, 1.0, -2.25, 3.0]), (True, [[0.5, 1.0, -2.25, 3.0]])])
def test_own_json_has_the_row_with_or_without_a_batch_dimension(batched: bool, sent: object) -> None:
    request = wires.own_json("/predict", "x", batched=batched).ask("iris", ROW)

    assert (request.path, json.loads(request.body)) == ("/predict", {"x": sent})


@pytest.mark.parametrize("body", [b'{"output": [0.5, 2]}', b"[[0.5, 2]]"])
def test_own_json_reads_an_object_or_a_list(body: bytes) -> None:
    assert wires.own_json("/", "x").read({}, body).tolist() == [0.5, 2]


def test_answers_are_parsed() -> None:
    expected = np.array([0.25, 0.75], np.float32)
    message = service_pb2().ModelInferResponse()
    message.raw_output_contents.append(expected.tobytes())
    spelled = service_pb2().ModelInferResponse()
    spelled.outputs.add(name="output").contents.fp32_contents.extend([0.25, 0.75])

    for wire, headers, body in (
        (wires.V2_JSON, {}, b'{"outputs":[{"data":[0.25,0.75]}]}'),
        (wires.V2_BINARY, {"inference-header-content-length": "2"}, b"{}" + expected.tobytes()),
        (wires.V2_GRPC, {}, message.SerializeToString()),
        (wires.V2_GRPC, {}, spelled.SerializeToString()),
        (wires.raw_bytes("/"), {}, expected.tobytes()),
    ):
        assert wire.read(headers, body).tolist() == [0.25, 0.75]


def test_a_payload_over_http_is_a_whole_request() -> None:
    head, _, body = wires.raw_bytes("/inference").payload("iris", ROW).partition(b"\r\n\r\n")

    assert head.startswith(b"POST /inference HTTP/1.1\r\n")
    assert b"\r\nContent-Length: 16" in head
    assert body == ROW.tobytes()


def test_a_payload_over_grpc_is_a_message_with_its_length() -> None:
    payload = wires.V2_GRPC.payload("iris", ROW)

    assert payload[:5] == b"\0" + (len(payload) - 5).to_bytes(4, "big")
    assert wires.V2_GRPC.call is not None
    assert wires.V2_JSON.call is None


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=9))
def test_json_carries_every_float_unchanged(values: list[float]) -> None:
    row = np.array([values], np.float32)
    sent = json.loads(wires.V2_JSON.ask("m", row).body)["inputs"][0]["data"]

    assert np.array_equal(np.array(sent, np.float32), row[0])
