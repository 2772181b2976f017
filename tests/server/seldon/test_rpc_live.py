"""The RPCs of seldon.protos over a socket, called by grpcio with the stubs of users' clients."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf import empty_pb2
from seldon_core.proto import prediction_pb2 as pb
from seldon_core.proto import prediction_pb2_grpc as stubs

from penstock.server.protobuf import service_pb2
from penstock.server.v2.rpc.descriptors import message_class
from tests.live import Live, live_server

PATIENCE_S = 30.0
WITHOUT_LIMIT = [("grpc.max_receive_message_length", -1)]
COMPONENT = """
import os
from seldon_core.flask_utils import SeldonMicroserviceException


class Gated:
    "Waits, if requested, until the pipe has a writer."

    def predict(self, x, names):
        if isinstance(x, str) and x == "wait":
            with open("gate") as gate:
                return gate.read()
        if isinstance(x, str) and x == "refuse":
            raise SeldonMicroserviceException("not you", status_code=403)
        return x

    def init_metadata(self):
        return {"name": "gated", "versions": ["1"]}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    component_folder = tmp_path_factory.mktemp("component")
    (component_folder / "Gated.py").write_text(COMPONENT)
    os.mkfifo(component_folder / "gate")
    return component_folder


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[Live]:
    with live_server(folder, dialect="seldon", seldon_component="Gated") as server:
        yield server


@pytest.fixture(scope="module")
def mapping(folder: Path) -> Iterator[Live]:
    """A server that is not strict, and takes small messages only."""
    settings: dict[str, Any] = {"seldon_strict": False, "grpc_max_message_bytes": 1000}
    with live_server(folder, dialect="seldon", seldon_component="Gated", **settings) as server:
        yield server


def channel(server: Live) -> Any:
    return grpc.insecure_channel(server.grpc_address, options=WITHOUT_LIMIT)


def tensor(values: Any) -> Any:
    return pb.SeldonMessage(data=pb.DefaultData(tensor=pb.Tensor(shape=values.shape, values=values.ravel().tolist())))


def error_of(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as raised:
        call()
    return raised.value.code(), raised.value.details()


@pytest.mark.parametrize("service", ["Model", "Seldon"])
def test_a_tensor_is_answered_by_predict(live: Live, service: str) -> None:
    with channel(live) as line:
        answer = getattr(stubs, f"{service}Stub")(line).Predict(tensor(np.array([[1.0, 2.0]])), timeout=PATIENCE_S)
    assert (list(answer.data.names), list(answer.data.tensor.values)) == (["t:0", "t:1"], [1.0, 2.0])


@pytest.mark.parametrize(("service", "method"), [
    ("Generic", "TransformInput"), ("Generic", "TransformOutput"), ("Transformer", "TransformInput"),
    ("OutputTransformer", "TransformOutput"),
])  # fmt: skip
def test_messages_for_missing_transform_methods_are_returned_unchanged(live: Live, service: str, method: str) -> None:
    with channel(live) as line:
        answer = getattr(getattr(stubs, f"{service}Stub")(line), method)(pb.SeldonMessage(strData="x"))
    assert answer == pb.SeldonMessage(strData="x", meta=pb.Meta())


def test_errors_have_status_unknown_when_strict_is_on(live: Live) -> None:
    with channel(live) as line:
        generic, model = stubs.GenericStub(line), stubs.ModelStub(line)
        calling = "Exception calling application: "
        assert error_of(lambda: generic.Route(pb.SeldonMessage(strData="x"))) == (grpc.StatusCode.UNKNOWN, calling)
        assert error_of(lambda: generic.Aggregate(pb.SeldonMessageList())) == (grpc.StatusCode.UNKNOWN, calling)
        assert error_of(lambda: model.Predict(pb.SeldonMessage(strData="refuse"))) == (grpc.StatusCode.UNKNOWN, calling)
        refused = error_of(lambda: stubs.SeldonStub(line).GraphMetadata(empty_pb2.Empty()))
        assert refused == (grpc.StatusCode.UNKNOWN, f"{calling}GraphMetadata not available on the Model level.")


def test_errors_are_mapped_to_status_codes_when_strict_is_off(mapping: Live) -> None:
    with channel(mapping) as line:
        model = stubs.ModelStub(line)
        refused = error_of(lambda: model.Predict(pb.SeldonMessage(strData="refuse")))
        assert refused == (grpc.StatusCode.PERMISSION_DENIED, "not you")
        assert error_of(lambda: model.Predict(pb.SeldonMessage()))[0] is grpc.StatusCode.INVALID_ARGUMENT


def test_a_large_message_is_accepted_unless_a_limit_is_set(live: Live, mapping: Live) -> None:
    large = tensor(np.ones((700, 1000)))
    assert large.ByteSize() > 4 << 20
    with channel(live) as line:
        assert stubs.ModelStub(line).Predict(large, timeout=PATIENCE_S).data.tensor == large.data.tensor
    with channel(mapping) as line:
        code, text = error_of(lambda: stubs.ModelStub(line).Predict(large))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert text == f"Received message larger than max ({large.ByteSize()} vs. 1000)"


def test_metadata_is_answered_and_deadlines_expire_while_a_call_runs(live: Live, folder: Path) -> None:
    with channel(live) as line, ThreadPoolExecutor(1) as threads:
        model = stubs.ModelStub(line)
        waiting = model.Predict.future(pb.SeldonMessage(strData="wait"))
        # when this returns, the call has opened the pipe, so it is running
        gate = threads.submit(open, folder / "gate", "w").result(PATIENCE_S)
        try:
            assert model.Metadata(empty_pb2.Empty(), timeout=PATIENCE_S).name == "gated"
            request = pb.SeldonModelMetadataRequest(name="whatever")
            assert list(stubs.SeldonStub(line).ModelMetadata(request, timeout=PATIENCE_S).versions) == ["1"]
            late = error_of(lambda: model.Predict(pb.SeldonMessage(strData="x"), timeout=0.05))
            assert late[0] is grpc.StatusCode.DEADLINE_EXCEEDED
            behind = model.Predict.future(pb.SeldonMessage(strData="y"))
            assert behind.cancel()
            gate.write("opened")
        finally:
            gate.close()
        assert waiting.result(PATIENCE_S).strData == "opened"
        assert model.Predict(pb.SeldonMessage(strData="z"), timeout=PATIENCE_S).strData == "z"


def test_health_reflection_and_v2_services_share_the_port(live: Live) -> None:
    request_class = message_class("grpc.health.v1.HealthCheckRequest")
    v2 = service_pb2()
    question = message_class("grpc.reflection.v1alpha.ServerReflectionRequest")(list_services="")
    with channel(live) as line:
        checked = line.unary_unary("/grpc.health.v1.Health/Check")(
            request_class().SerializeToString(), timeout=PATIENCE_S
        )
        ready = line.unary_unary("/inference.GRPCInferenceService/ModelReady")
        response = ready(v2.ModelReadyRequest(name="Gated").SerializeToString(), timeout=PATIENCE_S)
        reflect = line.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        (listed,) = reflect(iter([question.SerializeToString()]), timeout=PATIENCE_S)
    assert message_class("grpc.health.v1.HealthCheckResponse").FromString(checked).status == 1
    assert v2.ModelReadyResponse.FromString(response).ready
    services = message_class("grpc.reflection.v1alpha.ServerReflectionResponse").FromString(listed)
    names = {each.name for each in services.list_services_response.service}
    assert {"seldon.protos.Model", "inference.GRPCInferenceService"} <= names
