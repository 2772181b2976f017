"""Raw messages over grpcio's C core: mutated requests, health and reflection without their packages."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.server.protobuf import service_pb2
from penstock.server.v2.rpc.descriptors import message_class
from tests.clients import models
from tests.live import Live, live_server

pytestmark = pytest.mark.slow

pb = service_pb2()
INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
NOT_OURS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED}
PATIENCE_S = 10.0


@pytest.fixture(scope="module")
def channel(live: Live) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(live.grpc_address) as new_channel:
        yield new_channel


def good() -> list[bytes]:
    ones = np.ones((1, 16), np.int32).tobytes()
    raw = pb.ModelInferRequest(
        model_name="simple", model_version="1", id="id",
        inputs=[{"name": f"INPUT{at}", "datatype": "INT32", "shape": [1, 16]} for at in (0, 1)],
        outputs=[{"name": "OUTPUT0"}], raw_input_contents=[ones, ones],
    )  # fmt: skip
    typed = pb.ModelInferRequest(
        model_name="mixed", parameters={"timeout": {"int64_param": 9_000_000}, "mine": {"string_param": "x"}},
        inputs=[
            {"name": "a", "datatype": "FP32", "shape": [1, 3], "contents": {"fp32_contents": [1, 2, 3]}},
            {"name": "words", "datatype": "BYTES", "shape": [1, 2], "contents": {"bytes_contents": [b"a", b"b"]}},
            {"name": "n", "datatype": "INT64", "shape": [1, 2], "contents": {"int64_contents": [1, 2]}},
        ],
    )  # fmt: skip
    words = pb.ModelInferRequest(
        model_name="identity_BYTES", inputs=[{"name": "x", "datatype": "BYTES", "shape": [1, 1]}],
        outputs=[{"name": "y", "parameters": {"classification": {"int64_param": 1}}}],
        raw_input_contents=[b"\3\0\0\0abc"],
    )  # fmt: skip
    return [each.SerializeToString() for each in (raw, typed, words)]


GOOD = good()
CHANGES = st.lists(
    st.tuples(
        st.integers(0, 10_000), st.sampled_from(["set", "cut", "add", "copy"]), st.binary(min_size=1, max_size=4)
    ),
    max_size=4,
)


@st.composite
def mutated(draw: Any) -> bytes:
    message = bytearray(draw(st.sampled_from(GOOD)))
    for where, change, content in draw(CHANGES):
        at = where % (len(message) + 1)
        if change == "set":
            message[at : at + len(content)] = content
        elif change == "cut":
            del message[at : at + len(content)]
        elif change == "add":
            message[at:at] = content
        else:
            message[at:at] = message[at // 2 : at]
    return bytes(message)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(message=mutated())
def test_no_mutated_message_causes_an_internal_error(channel: grpc.Channel, message: bytes) -> None:
    call = channel.unary_unary(INFER).future(message, timeout=PATIENCE_S)

    assert call.code() not in NOT_OURS, call.details()
    if call.code() is grpc.StatusCode.OK:
        pb.ModelInferResponse.FromString(call.result())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=st.lists(mutated(), max_size=5))
def test_a_stream_answers_every_mutated_message(channel: grpc.Channel, messages: list[bytes]) -> None:
    answers = list(channel.stream_stream(STREAM)(iter([*messages, GOOD[0]]), timeout=PATIENCE_S))

    assert len(answers) == len(messages) + 1
    for raw in answers:
        answer = pb.ModelStreamInferResponse.FromString(raw)
        assert "internal error" not in answer.error_message
    assert not answer.error_message


def test_the_original_messages_are_answered(channel: grpc.Channel) -> None:
    infer = channel.unary_unary(INFER)
    for message in GOOD[:2] * 2:
        assert pb.ModelInferResponse.FromString(infer(message)).raw_output_contents


def test_health_check_and_watch_report_the_server_as_serving(live: Live) -> None:
    request, answer = (message_class(f"grpc.health.v1.HealthCheck{kind}") for kind in ("Request", "Response"))
    with grpc.insecure_channel(live.grpc_address) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check", request.SerializeToString, answer.FromString)
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch", request.SerializeToString, answer.FromString)
        assert check(request(), timeout=PATIENCE_S).status == 1
        assert check(request(service="inference.GRPCInferenceService"), timeout=PATIENCE_S).status == 1
        with pytest.raises(grpc.RpcError) as caught:
            check(request(service="other"), timeout=PATIENCE_S)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        watched = watch(request(), timeout=PATIENCE_S)
        assert next(watched).status == 1
        watched.cancel()


def test_a_watcher_is_notified_when_the_server_exits(tmp_path_factory: pytest.TempPathFactory) -> None:
    request, answer = (message_class(f"grpc.health.v1.HealthCheck{kind}") for kind in ("Request", "Response"))
    root = models.write_examples(tmp_path_factory.mktemp("repository"))
    statuses: list[Any] = []
    first = threading.Event()

    def listen(watched: Any) -> None:
        try:
            for each in watched:
                statuses.append(each.status)
                first.set()
        except grpc.RpcError as error:
            statuses.append(error.code())

    with live_server(root) as live:
        channel = grpc.insecure_channel(live.grpc_address)
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch", request.SerializeToString, answer.FromString)
        listener = threading.Thread(target=listen, args=(watch(request(), timeout=60),))
        listener.start()
        assert first.wait(PATIENCE_S)
    listener.join(PATIENCE_S)
    channel.close()
    assert statuses == [1, 2, grpc.StatusCode.UNAVAILABLE]


def test_an_idle_stream_does_not_delay_the_exit_of_the_server(tmp_path_factory: pytest.TempPathFactory) -> None:
    root = models.write_examples(tmp_path_factory.mktemp("repository"))
    forever = threading.Event()

    def one() -> Iterator[bytes]:
        yield GOOD[0]
        forever.wait(60)

    with live_server(root, exit_timeout_secs=30.0) as live:
        channel = grpc.insecure_channel(live.grpc_address)
        answers = channel.stream_stream(STREAM)(one(), timeout=60)
        assert pb.ModelStreamInferResponse.FromString(next(answers)).infer_response.id == "id"
    with pytest.raises(grpc.RpcError) as caught:
        next(answers)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "shutting down" in caught.value.details()
    forever.set()
    channel.close()


@pytest.mark.parametrize("package", ["grpc.reflection.v1", "grpc.reflection.v1alpha"])
def test_reflection_lists_the_services(channel: grpc.Channel, package: str) -> None:
    request = message_class(f"{package}.ServerReflectionRequest")
    answer = message_class(f"{package}.ServerReflectionResponse")
    talk = channel.stream_stream(
        f"/{package}.ServerReflection/ServerReflectionInfo", request.SerializeToString, answer.FromString
    )
    questions = [request(list_services=""), request(file_containing_symbol="inference.GRPCInferenceService")]
    listed, described = talk(iter(questions), timeout=PATIENCE_S)
    assert "inference.GRPCInferenceService" in [each.name for each in listed.list_services_response.service]
    assert len(described.file_descriptor_response.file_descriptor_proto) == 2
