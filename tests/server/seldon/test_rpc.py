"""The RPCs of seldon.protos over fake calls: requests, answers, metadata and reflection."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, cast

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool

from penstock.backends.errors import Code, InferError
from penstock.server.answering import LARGE_BYTES
from penstock.server.grpc.method import Status
from penstock.server.restricted import RestrictedApis, restricted_methods
from penstock.server.seldon import protos
from penstock.server.seldon.calls import SeldonCall
from penstock.server.seldon.current_component import CurrentComponent
from penstock.server.seldon.exposition import Exposition
from penstock.server.seldon.messages import ANSWER, ComponentDescription, Endpoint, PayloadKind
from penstock.server.seldon.rpc import CATEGORIES, METADATA, PACKAGE, RPCS, SeldonRpcs
from penstock.server.v2.rpc.descriptors import message_class
from tests.server.v2.held_engine import HeldEngine
from tests.server.v2.rpc.calls import FakeCall, Services, settled

PREDICT = PACKAGE + "Model/Predict"
ALL = [*RPCS, *METADATA, "Seldon/GraphMetadata"]


class FakeModels:
    """Stands in for the components that loading.py keeps."""

    def __init__(self, metadata: dict[str, Any] | None) -> None:
        self.descriptions = {"m": ComponentDescription(metadata=metadata)}
        self.sharing: dict[str, Any] = {}


class FakeExposition:
    """Keeps the metrics it is passed."""

    def __init__(self) -> None:
        self.added: list[tuple[Endpoint, bytes]] = []

    def add(self, endpoint: Endpoint, metrics: bytes) -> None:
        self.added.append((endpoint, metrics))


class Served:
    """The RPCs over an Engine that answers when told to."""

    def __init__(self, metadata: dict[str, Any] | None = None) -> None:
        self.engine = HeldEngine()
        self.models = FakeModels(metadata)
        self.exposition = FakeExposition()
        current = CurrentComponent(cast(Any, self.engine), lambda: "m", cast(Any, self.models))
        self.rpcs = SeldonRpcs(cast(Any, self.engine), current, cast(Exposition, self.exposition))
        self.methods = self.rpcs.methods()

    def call(self, path: str = PREDICT, message: bytes = b"", deadline_ns: int = 0) -> FakeCall:
        call = FakeCall(deadline_ns=deadline_ns)
        method = self.methods[path]
        assert method.unary is not None
        method.unary(call, message)
        return call

    def reply(self, body: bytes, status: int = 0, metrics: bytes = b"") -> None:
        """Answer all that was submitted, in one delivery."""
        held, self.engine.held = self.engine.held, []
        for each in held:
            cast(SeldonCall, each).reply = ANSWER.pack(status, 0, len(metrics)) + metrics + body
        self.rpcs.deliver(held)


class FakeSharing:
    """Makes calls, and counts them."""

    def __init__(self) -> None:
        self.call_count = 0

    def make_call(self, *arguments: Any) -> SeldonCall:
        self.call_count += 1
        return SeldonCall(*arguments)


def service(files: Iterable[Any], name: str) -> Any:
    """Find a service in the files of reflection, which may be in any order."""
    waiting = {file.name: file for file in files}
    pool = descriptor_pool.DescriptorPool()
    while waiting:
        ready = next(file for file in waiting.values() if not waiting.keys() & set(file.dependency))
        pool.AddSerializedFile(waiting.pop(ready.name).SerializeToString())
    return pool.FindServiceByName(f"seldon.protos.{name}")


@pytest.mark.parametrize("path", list(RPCS))
def test_a_call_is_submitted_with_the_clients_bytes_unchanged(path: str) -> None:
    served = Served()
    call = served.call(PACKAGE + path, b"whatever it is")
    (request,) = served.engine.held
    assert cast(SeldonCall, request).body == bytes((RPCS[path], PayloadKind.PROTO)) + b"whatever it is"
    served.reply(b"answer")
    assert (call.status, call.sent) == (Status.OK, [b"answer"])


def test_a_components_error_is_answered_with_its_status_and_text() -> None:
    served = Served()
    call = served.call()
    served.reply("Exception calling application: é".encode(), Status.UNKNOWN)
    assert (call.status, call.text, call.sent) == (Status.UNKNOWN, "Exception calling application: é", [])


def test_metrics_of_a_call_are_counted_and_are_not_in_the_answer() -> None:
    served = Served()
    good, bad = served.call(), served.call()
    served.reply(b"x", metrics=b'[["k","COUNTER",1,null]]')
    assert served.exposition.added == [(Endpoint.PREDICT, b'[["k","COUNTER",1,null]]')] * 2
    assert good.sent == bad.sent == [b"x"]


def test_a_server_error_is_answered_with_its_own_status_and_pushback() -> None:
    served = Served()
    call = served.call()
    served.engine.held[0].error = InferError(Code.OVERLOADED, "too much", 5_000_000)
    served.rpcs.deliver(served.engine.held)
    assert (call.status, call.text, call.pushback_ms) == (Status.UNAVAILABLE, "too much", 5)


def test_a_call_rejected_by_the_engine_is_answered_unavailable() -> None:
    served = Served()
    served.engine.failure = InferError(Code.NOT_READY, "the server is stopping")
    call = served.call()
    assert (call.status, call.on_cancel) == (Status.UNAVAILABLE, None)


def test_a_component_that_is_not_loaded_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> Any:
        raise InferError(Code.NOT_FOUND, f"no {name}")

    served = Served()
    found = served.engine.model
    monkeypatch.setattr(served.engine, "model", none)
    with pytest.raises(InferError, match="the component is not ready") as refused:
        served.call()
    assert refused.value.code is Code.NOT_READY
    monkeypatch.setattr(served.engine, "model", found)
    served.call()
    assert len(served.engine.held) == 1


def test_a_client_that_disconnects_cancels_its_call() -> None:
    served = Served()
    call = served.call()
    call.lose()
    assert served.engine.cancelled == served.engine.held
    served.reply(b"late")
    assert call.sent == []


def test_a_calls_deadline_is_the_deadline_of_its_request() -> None:
    served = Served()
    call = served.call(deadline_ns=12345)
    (request,) = served.engine.held
    assert request.deadline_ns == 12345
    request.error = InferError(Code.EXPIRED, "Request timeout expired")
    served.rpcs.deliver([request])
    assert call.status is Status.DEADLINE_EXCEEDED


def test_a_malformed_reply_fails_only_its_own_call() -> None:
    served = Served()
    broken, valid = served.call(), served.call()
    requests, served.engine.held = served.engine.held, []
    cast(SeldonCall, requests[0]).reply = b"\0"
    cast(SeldonCall, requests[1]).reply = ANSWER.pack(0, 0, 0) + b"x"
    served.rpcs.deliver(requests)
    assert (broken.status, valid.sent) == (Status.INTERNAL, [b"x"])


def test_only_predict_calls_are_read_for_batching() -> None:
    served = Served()
    sharing = served.models.sharing["m"] = FakeSharing()
    served.call(PREDICT)
    served.call(PACKAGE + "Router/Route")
    assert (sharing.call_count, len(served.engine.held)) == (1, 2)
    served.engine.refusal = InferError(Code.OVERLOADED, "the queue is full")
    assert served.call(PREDICT).status is Status.UNAVAILABLE
    assert sharing.call_count == 1


def test_large_calls_are_read_on_a_thread() -> None:
    async def main() -> None:
        served = Served()
        sharing = served.models.sharing["m"] = FakeSharing()
        call = served.call(PREDICT, bytes(LARGE_BYTES))
        assert served.engine.held == []
        assert served.engine.loaded[0].hold_count == 1
        await settled()
        assert (sharing.call_count, len(served.engine.held)) == (1, 1)
        served.reply(b"x")
        assert call.sent == [b"x"]
        served.call(PREDICT, bytes(LARGE_BYTES)).lose()
        await settled()
        assert served.engine.held == []
        assert served.engine.loaded[0].hold_count == 0

    asyncio.run(main())


@pytest.mark.parametrize("path", METADATA)
def test_metadata_is_answered_without_a_worker(path: str) -> None:
    metadata = {
        "name": "n", "versions": ["v"], "platform": "p", "custom": {"a": "b"},
        "inputs": [{"name": "i", "datatype": "BYTES", "shape": [1]}],
        "outputs": [{"messagetype": "jsonData", "schema": {"type": "string"}}],
    }  # fmt: skip
    call = Served(metadata).call(PACKAGE + path)
    answer = protos.message_class("SeldonModelMetadata").FromString(call.sent[0])
    assert (answer.name, list(answer.versions), answer.platform, dict(answer.custom)) == ("n", ["v"], "p", {"a": "b"})
    assert (answer.inputs[0].datatype, list(answer.inputs[0].shape)) == ("BYTES", [1])
    assert answer.outputs[0].schema.struct_value.fields["type"].string_value == "string"


@pytest.mark.parametrize("metadata", [None, {}], ids=["not valid", "empty"])
def test_invalid_or_empty_metadata_is_answered_with_an_empty_message(metadata: dict[str, Any] | None) -> None:
    assert Served(metadata).call(PACKAGE + "Model/Metadata").sent == [b""]


def test_metadata_that_does_not_fit_the_message_is_an_error() -> None:
    call = Served({"inputs": [{"shape": [2**70]}]}).call(PACKAGE + "Model/Metadata")
    assert (call.status, call.text) == (Status.UNKNOWN, "Exception calling application: ")


def test_graph_metadata_of_a_component_is_an_error() -> None:
    call = Served().call(PACKAGE + "Seldon/GraphMetadata")
    assert call.status is Status.UNKNOWN
    assert call.text == "Exception calling application: GraphMetadata not available on the Model level."


def test_every_rpc_of_the_proto_file_is_served() -> None:
    services = ("Generic", "Model", "Router", "Transformer", "OutputTransformer", "Combiner", "Seldon")
    rpcs = [f"{name}/{method.name}" for name in services for method in service(protos.files(), name).methods]
    assert sorted(rpcs) == sorted(ALL)
    assert sorted(Served().methods) == sorted(PACKAGE + path for path in ALL)


def test_reflection_lists_seldons_services_beside_the_v2_service() -> None:
    request_class = message_class("grpc.reflection.v1alpha.ServerReflectionRequest")
    answered = message_class("grpc.reflection.v1alpha.ServerReflectionResponse")

    async def main() -> list[Any]:
        services = Services(files=protos.files())
        call, reader = services.open("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        for question in (
            request_class(list_services=""),
            request_class(file_containing_symbol="seldon.protos.Model.Predict"),
        ):
            reader.on_message(question.SerializeToString())
        reader.on_half_close()
        return [answered.FromString(each) for each in call.sent]

    listed, file = asyncio.run(main())
    names = {each.name for each in listed.list_services_response.service}
    assert {"seldon.protos.Model", "seldon.protos.Seldon", "inference.GRPCInferenceService"} <= names
    files = file.file_descriptor_response.file_descriptor_proto
    predict = service(map(descriptor_pb2.FileDescriptorProto.FromString, files), "Model").methods_by_name["Predict"]
    assert predict.input_type.name == "SeldonMessage"


def test_restricted_rpcs_are_rejected_without_their_header() -> None:
    restricted = RestrictedApis.parse(["inference:key=secret"], "triton-grpc-protocol-")
    methods = restricted_methods(Served(metadata={}).methods, restricted, CATEGORIES)
    closed, open_to_all = FakeCall(), FakeCall()
    for path, call in ((PREDICT, closed), (PACKAGE + "Model/Metadata", open_to_all)):
        unary = methods[path].unary
        assert unary is not None
        unary(call, b"")
    assert (closed.status, open_to_all.status) == (Status.UNAVAILABLE, Status.OK)
