"""Requests as they are written, read back by the server's own readers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.perf.generator.orders import Target
from penstock.perf.payloads.grpc import GrpcWriter
from penstock.perf.payloads.http import HttpWriter
from penstock.perf.payloads.tensors import InputError, InputTensor, Place, Step
from penstock.perf.payloads.writing import FIRST, LAST, Call, Parameter, RequestedOutput, check_parameters
from penstock.perf.profiling.model import ModelDescription
from penstock.server.v2.call_parameters import BINARY, Options
from tests.perf.payloads.readers import http, message, over_grpc, over_http, sent_again
from tests.perf.payloads.strategies import IDS, PARAMETERS, requested

TARGET = Target("host", 80)
CALL = Call("m", "", (RequestedOutput("y"),))
ONE: Step = (InputTensor("x", "FP32", (1, 2), b"\0" * 8),)
PLACED: Step = (
    InputTensor("x", "FP32", (1, 2), place=Place("r", 64, 8)),
    InputTensor("z", "BYTES", (1,), place=Place("s", 0, 4)),
)


def parse_written(writer: HttpWriter, step: Step = ONE) -> Any:
    parsed = http(writer.whole(step))
    return json.loads(parsed.body[: parsed.json_bytes] if parsed.json_bytes >= 0 else parsed.body)


def same_parameters(options: Options, parameters: tuple[Parameter, ...]) -> bool:
    # true and 1 are equal, and not the same
    return repr(sorted((options.parameters or {}).items())) == repr(sorted(parameters))


@settings(max_examples=50)
@given(requested(), PARAMETERS)
def test_a_binary_request_contains_what_was_specified(
    drawn: tuple[ModelDescription, Step], parameters: tuple[Parameter, ...]
) -> None:
    model, step = drawn
    request, options = over_http(
        model, HttpWriter(Call("m", "", (RequestedOutput("y"),), parameters), TARGET).whole(step)
    )

    assert sent_again(model, request) == step
    assert options.plan == (BINARY,)
    assert same_parameters(options, parameters)


@settings(max_examples=50)
@given(requested(json=True), PARAMETERS)
def test_a_json_request_contains_what_was_specified(
    drawn: tuple[ModelDescription, Step], parameters: tuple[Parameter, ...]
) -> None:
    model, step = drawn
    call = Call("m", "", (RequestedOutput("y"),), parameters)
    writer = HttpWriter(call, TARGET, binary_input=False, binary_output=False)
    request, options = over_http(model, writer.whole(step))

    assert sent_again(model, request) == step
    assert options.plan is None or options.plan == (False,)
    assert same_parameters(options, parameters)


@settings(max_examples=50)
@given(requested(), PARAMETERS)
def test_a_grpc_request_contains_what_was_specified(
    drawn: tuple[ModelDescription, Step], parameters: tuple[Parameter, ...]
) -> None:
    model, step = drawn
    request, options = over_grpc(model, GrpcWriter(Call("m", "7", (RequestedOutput("y"),), parameters)).whole(step))

    assert sent_again(model, request) == step
    assert same_parameters(options, parameters)


@settings(max_examples=50)
@given(requested(), IDS, st.integers(0, 3), PARAMETERS, st.booleans())
def test_a_request_of_a_sequence_has_its_id_and_position(
    drawn: tuple[ModelDescription, Step], number: int, mark: int, parameters: tuple[Parameter, ...], grpc: bool
) -> None:
    model, step = drawn
    call = Call("m", "", (RequestedOutput("y"),), parameters)
    writer = GrpcWriter(call) if grpc else HttpWriter(call, TARGET)
    request_bytes = writer.template(step)(writer.identity(number), mark)
    request, options = over_grpc(model, request_bytes) if grpc else over_http(model, request_bytes)

    assert options.sequence == (number, bool(mark & FIRST), bool(mark & LAST))
    assert sent_again(model, request) == step
    assert same_parameters(options, parameters)


def test_a_head_has_only_the_headers_that_the_request_needs() -> None:
    parsed = http(HttpWriter(CALL, TARGET).whole(ONE))

    assert parsed.path == "/v2/models/m/infer"
    assert list(parsed.headers) == ["host", "content-type", "inference-header-content-length", "content-length"]
    assert parsed.headers["host"] == "host:80"


def test_a_request_of_json_alone_has_no_json_length_header() -> None:
    parsed = http(HttpWriter(CALL, TARGET, binary_input=False).whole(ONE))

    assert list(parsed.headers) == ["host", "content-type", "content-length"]
    assert parsed.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("binary", "outputs"), [(True, [{"name": "y", "parameters": {"binary_data": True}}]), (False, [{"name": "y"}])]
)
def test_outputs_are_requested_by_name(binary: bool, outputs: list[Any]) -> None:
    document = parse_written(HttpWriter(CALL, TARGET, binary_output=binary))

    assert document["outputs"] == outputs
    assert document.keys() == {"inputs", "outputs"}


def test_all_outputs_are_requested_if_none_are_known() -> None:
    assert parse_written(HttpWriter(Call("m", "", ()), TARGET)).keys() == {"inputs"}


def test_names_and_versions_are_quoted_in_the_path() -> None:
    writer = HttpWriter(Call("a/b c", "3", ()), Target("::1", 80))

    assert http(writer.whole(ONE)).path == "/v2/models/a%2Fb%20c/versions/3/infer"
    assert http(writer.whole(ONE)).headers["host"] == "[::1]:80"


def test_over_a_unix_socket_the_host_header_is_localhost() -> None:
    assert http(HttpWriter(CALL, Target("/run/server.sock", 0)).whole(ONE)).headers["host"] == "localhost"


def test_user_headers_are_sent_and_their_host_replaces_ours() -> None:
    headers = (("Authorization", "Bearer x"), ("host", "other"))

    parsed = http(HttpWriter(CALL, TARGET, headers).whole(ONE))

    assert parsed.headers["authorization"] == "Bearer x"
    assert parsed.headers["host"] == "other"


@pytest.mark.parametrize(
    "header", [("Content-Length", "1"), ("content-type", "x"), ("a b", "1"), ("", "1"), ("a", "1\r\nb: 2"), ("a", "☺")]
)
def test_headers_that_would_break_a_request_are_rejected(header: tuple[str, str]) -> None:
    with pytest.raises(InputError, match=r"^-H"):
        HttpWriter(CALL, TARGET, (header,)).whole(ONE)


def test_shared_memory_is_referred_to_and_no_tensor_is_carried() -> None:
    call = Call("m", "", (RequestedOutput("y", Place("o", 0, 12)),))
    there = {"shared_memory_region": "r", "shared_memory_byte_size": 8, "shared_memory_offset": 64}

    parsed = http(HttpWriter(call, TARGET).whole(PLACED))

    document = json.loads(parsed.body)
    assert [each["parameters"] for each in document["inputs"]] == [
        there, {"shared_memory_region": "s", "shared_memory_byte_size": 4}
    ]  # fmt: skip
    assert document["outputs"][0]["parameters"] == {"shared_memory_region": "o", "shared_memory_byte_size": 12}


def test_shared_memory_is_referred_to_over_grpc_too() -> None:
    parsed = message(GrpcWriter(Call("m", "", (RequestedOutput("y", Place("o", 0, 12)),))).whole(PLACED))

    assert not parsed.raw_input_contents
    assert parsed.inputs[0].parameters["shared_memory_region"].string_param == "r"
    assert parsed.inputs[0].parameters["shared_memory_offset"].int64_param == 64
    assert "shared_memory_offset" not in parsed.inputs[1].parameters
    assert parsed.outputs[0].parameters["shared_memory_byte_size"].int64_param == 12


def test_a_decoupled_model_is_asked_for_an_empty_final_response() -> None:
    assert not message(GrpcWriter(CALL).whole(ONE)).parameters
    assert (
        message(GrpcWriter(CALL, empty_final=True).whole(ONE))
        .parameters["triton_enable_empty_final_response"]
        .bool_param
    )


def test_a_whole_number_beyond_63_bits_is_unsigned_over_grpc() -> None:
    parsed = message(GrpcWriter(Call("m", "", (), (("big", 2**64 - 1), ("small", -1)))).whole(ONE))

    assert parsed.parameters["big"].uint64_param == 2**64 - 1
    assert parsed.parameters["small"].int64_param == -1


@pytest.mark.parametrize("grpc", [False, True])
def test_the_same_request_has_the_same_bytes(grpc: bool) -> None:
    call = Call("m", "", (RequestedOutput("y"),), (("b", 1), ("a", "x"), ("c", 0.5)))

    def once() -> bytes:
        return (GrpcWriter(call) if grpc else HttpWriter(call, TARGET)).whole(ONE)

    assert once() == once()


@pytest.mark.parametrize(
    ("step", "text"),
    [
        ((InputTensor("h", "FP16", (1,), b"\0\0"),), "FP16"),
        ((InputTensor("f", "FP32", (1,), b"\0\0\x80\x7f"),), "not finite"),
        ((InputTensor("s", "BYTES", (1,), b"\1\0\0\0\xff"),), "BYTES"),
    ],
)
def test_values_that_json_cannot_represent_are_rejected_naming_the_flag(step: Step, text: str) -> None:
    with pytest.raises(InputError, match=f"^--input-tensor-format json.*{text}"):
        HttpWriter(CALL, TARGET, binary_input=False).whole(step)


@pytest.mark.parametrize("names", [["sequence_id"], ["binary_data_output"], [""], ["a", "a"]])
def test_reserved_and_duplicate_parameters_are_rejected(names: list[str]) -> None:
    with pytest.raises(InputError, match=r"^--request-parameter"):
        check_parameters([(name, 1) for name in names])
