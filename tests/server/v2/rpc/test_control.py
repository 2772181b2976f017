"""The RPCs about the server, its models, its repository, shared memory and settings, over fakes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from penstock.backends.errors import Code, InferError
from penstock.server.grpc.method import Status
from penstock.server.protobuf import service_pb2
from penstock.server.restricted import GRPC_PREFIX, RestrictedApis
from tests.fakes import fake_model
from tests.server.v2.rpc.calls import PREFIX, FakeCall, Services, pb, request, settled


class FakeControl:
    """A ModelControl that records its calls."""

    def __init__(self) -> None:
        self.requests: list[Any] = []

    async def load(self, name: str, config: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        if name == "broken":
            raise InferError(Code.INTERNAL, "failed to load 'broken', failed to poll from model repository")
        self.requests.append((name, config, files))

    async def unload(self, name: str, *, dependents: bool = False) -> None:
        self.requests.append((name, dependents))

    async def index(self, ready: bool = False) -> list[dict[str, str]]:
        return [{"name": "only"}] if ready else [{"name": "m", "version": "1", "state": "READY"}, {"name": "n"}]


class FakeRegions:
    """Regions of either kind."""

    def __init__(self) -> None:
        self.requests: list[Any] = []

    def register(self, *arguments: Any) -> None:
        self.requests.append(arguments)

    def unregister(self, name: str = "") -> None:
        self.requests.append(name)

    def status(self, name: str = "") -> list[dict[str, Any]]:
        if name == "no":
            raise InferError(Code.NOT_FOUND, "Unable to find system shared memory region: 'no'")
        return [{"name": "r", "key": "/k", "offset": 1, "byte_size": 2**40}]


class FakeCudaRegions(FakeRegions):
    def status(self, name: str = "") -> list[dict[str, Any]]:
        return [{"name": "g", "device_id": 1, "byte_size": 64}]


class FakeSettings:
    """Trace settings and logging settings at once."""

    def __init__(self) -> None:
        self.requests: list[Any] = []

    def read(self, model: str = "") -> Any:
        return {"trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": [model or "all"]}

    def update(self, model: str, changes: Mapping[str, Any]) -> None:
        self.requests.append((model, dict(changes)))


class FakeLogs:
    def __init__(self) -> None:
        self.requests: list[Any] = []

    def read(self) -> dict[str, bool | int | str]:
        return {"log_info": True, "log_verbose_level": 3, "log_format": "default"}

    def update(self, changes: Mapping[str, Any]) -> None:
        self.requests.append(dict(changes))


async def ask(services: Services, name: str, message: Any) -> FakeCall:
    call = services.call(name, message)
    await settled()
    return call


def refused(name: str, message: Any, **parts: Any) -> tuple[Status | None, str]:
    call = asyncio.run(_called(name, message, **parts))
    return call.status, call.text


async def _called(name: str, message: Any, **parts: Any) -> FakeCall:
    return await ask(Services(**parts), name, message)


def test_every_method_of_the_service_is_served() -> None:
    service = service_pb2().DESCRIPTOR.services_by_name["GRPCInferenceService"]

    assert {PREFIX + method.name for method in service.methods} <= Services().methods.keys()
    assert len(Services().methods) == 20 + 2 + 2


def test_health_and_metadata_are_answered() -> None:
    services = Services(fake_model(version=1), fake_model(version=10), name="mine", extensions=("statistics",))

    assert services.ask("ServerLive", pb.ServerLiveRequest()).live
    assert services.ask("ServerReady", pb.ServerReadyRequest()).ready
    server = services.ask("ServerMetadata", pb.ServerMetadataRequest())
    assert (server.name, list(server.extensions)) == ("mine", ["statistics"])
    model = services.ask("ModelMetadata", pb.ModelMetadataRequest(name="m"))
    assert (model.name, list(model.versions), list(model.inputs[0].shape)) == ("m", ["1", "10"], [-1, 4])
    model = services.ask("ModelMetadata", pb.ModelMetadataRequest(name="m", version="10"))
    assert list(model.versions) == ["10"]
    assert services.ask("ModelConfig", pb.ModelConfigRequest(name="m")).config.max_batch_size == 8


def test_a_server_that_has_lost_a_device_permanently_is_not_live() -> None:
    services = Services()
    services.health.device_lost = True

    assert not services.ask("ServerLive", pb.ServerLiveRequest()).live
    assert services.ask("ServerReady", pb.ServerReadyRequest()).ready


def test_a_server_that_is_exiting_is_neither_live_nor_ready() -> None:
    services = Services()
    services.health.draining = True

    assert not services.ask("ServerLive", pb.ServerLiveRequest()).live
    assert not services.ask("ServerReady", pb.ServerReadyRequest()).ready


@pytest.mark.parametrize(
    ("name", "version", "ready"), [("m", "", True), ("m", "1", True), ("m", "2", False), ("x", "", False)]
)
def test_an_unknown_model_is_reported_as_not_ready_without_an_error(name: str, version: str, ready: bool) -> None:
    call = asyncio.run(_called("ModelReady", pb.ModelReadyRequest(name=name, version=version)))

    assert call.status is Status.OK
    assert pb.ModelReadyResponse.FromString(call.sent[0]).ready is ready


@pytest.mark.parametrize("name", ["ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics"])
@pytest.mark.parametrize("version", ["x", "1.0", "9" * 20, "²"])
def test_a_version_that_is_not_a_number_is_rejected(name: str, version: str) -> None:
    status, text = refused(name, getattr(pb, name + "Request")(name="m", version=version))

    assert status is Status.INVALID_ARGUMENT
    assert text.startswith("failed to get model version from specified version string")


@pytest.mark.parametrize("name", ["ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics"])
def test_a_negative_version_is_rejected(name: str) -> None:
    status, text = refused(name, getattr(pb, name + "Request")(name="m", version="-1"))

    assert status is Status.INVALID_ARGUMENT
    assert text == "invalid model version specified '-1' , version should be an integral value > 0"


@pytest.mark.parametrize("name", ["ModelMetadata", "ModelConfig"])
def test_an_unknown_model_is_not_found(name: str) -> None:
    message = getattr(pb, name + "Request")(name="x")

    assert refused(name, message) == (Status.NOT_FOUND, "Request for unknown model: 'x' is not found")


def test_model_statistics_have_every_member() -> None:
    services = Services(fake_model(version=1), fake_model(version=2))

    def statistics_of(**members: str) -> Any:
        call = asyncio.run(ask(services, "ModelStatistics", pb.ModelStatisticsRequest(**members)))
        return pb.ModelStatisticsResponse.FromString(call.sent[0]).model_stats

    assert len(statistics_of()) == 2
    (one,) = statistics_of(name="m", version="2")
    assert (one.name, one.version) == ("m", "2")
    assert one.inference_stats.HasField("cache_hit")
    unknown = refused("ModelStatistics", pb.ModelStatisticsRequest(name="x"))
    assert unknown == (Status.INVALID_ARGUMENT, "requested model 'x' is not available")
    unknown = refused("ModelStatistics", pb.ModelStatisticsRequest(name="m", version="9"))
    assert unknown == (Status.INVALID_ARGUMENT, "requested model version is not available for model 'm'")


def test_statistics_yield_to_the_event_loop_after_each_model() -> None:
    async def main() -> int:
        services, looks = Services(*(fake_model(f"m{number}") for number in range(50))), 0
        call = services.call("ModelStatistics", pb.ModelStatisticsRequest())
        while not call.ended:
            looks += 1
            await asyncio.sleep(0)
        return looks

    assert asyncio.run(main()) >= 50


def test_the_repository_index_is_answered_and_can_be_restricted_to_ready_models() -> None:
    async def main() -> None:
        call = await ask(Services(control=FakeControl()), "RepositoryIndex", pb.RepositoryIndexRequest())
        first, second = pb.RepositoryIndexResponse.FromString(call.sent[0]).models
        assert (first.name, first.version, first.state) == ("m", "1", "READY")
        assert (second.name, second.version) == ("n", "")
        call = await ask(Services(control=FakeControl()), "RepositoryIndex", pb.RepositoryIndexRequest(ready=True))
        (only,) = pb.RepositoryIndexResponse.FromString(call.sent[0]).models
        assert only.name == "only"

    asyncio.run(main())


@pytest.mark.parametrize("name", ["RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"])
def test_a_named_repository_is_not_supported(name: str) -> None:
    text = "'repository_name' specification is not supported"

    assert refused(name, getattr(pb, name + "Request")(repository_name="r")) == (Status.UNIMPLEMENTED, text)


def test_load_and_unload_pass_their_parameters_to_model_control() -> None:
    async def main() -> None:
        control = FakeControl()
        services = Services(control=control)
        parameters = {"config": {"string_param": "{}"}, "file:1/model.onnx": {"bytes_param": b"\0"}}
        loaded = await ask(
            services, "RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name="m", parameters=parameters)
        )
        unloading = pb.RepositoryModelUnloadRequest(
            model_name="m", parameters={"unload_dependents": {"bool_param": True}}
        )
        unloaded = await ask(services, "RepositoryModelUnload", unloading)
        assert (loaded.status, unloaded.status) == (Status.OK, Status.OK)
        assert control.requests == [("m", "{}", {"1/model.onnx": b"\0"}), ("m", True)]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("name", "key", "value", "text"),
    [
        ("Load", "config", {"bytes_param": b"{}"}, "load parameter 'config', expected string_param."),
        ("Load", "file:1/m", {"string_param": "x"}, "load parameter 'file:1/m', expected bytes_param."),
        ("Load", "other", {"string_param": "x"}, "unrecognized load parameter 'other'"),
        ("Unload", "unload_dependents", {"string_param": "x"}, "'unload_dependents', expected bool_param."),
        ("Unload", "other", {"bool_param": True}, "unrecognized unload parameter 'other'"),
    ],
)
def test_invalid_parameters_of_load_and_unload_are_rejected(name: str, key: str, value: Any, text: str) -> None:
    kind = getattr(pb, f"RepositoryModel{name}Request")
    status, message = refused(
        f"RepositoryModel{name}", kind(model_name="m", parameters={key: value}), control=FakeControl()
    )

    assert status is Status.INVALID_ARGUMENT
    assert text in message


def test_the_reason_of_a_failed_load_is_returned() -> None:
    status, text = refused(
        "RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name="broken"), control=FakeControl()
    )

    assert (status, text) == (Status.INTERNAL, "failed to load 'broken', failed to poll from model repository")


def test_shared_memory_calls_are_passed_to_the_regions() -> None:
    system, cuda = FakeRegions(), FakeCudaRegions()
    services = Services(system=system, cuda=cuda)
    services.ask("SystemSharedMemoryRegister", pb.SystemSharedMemoryRegisterRequest(name="r", key="/k", byte_size=5))
    services.ask("SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest(name="r"))
    services.ask("CudaSharedMemoryRegister", pb.CudaSharedMemoryRegisterRequest(name="g", raw_handle=b"h", byte_size=5))
    services.ask("CudaSharedMemoryUnregister", pb.CudaSharedMemoryUnregisterRequest())

    assert system.requests == [("r", "/k", 0, 5), "r"]
    assert cuda.requests == [("g", b"h", 0, 5), ""]
    regions = services.ask("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest()).regions
    assert (regions["r"].key, regions["r"].byte_size) == ("/k", 2**40)
    regions = services.ask("CudaSharedMemoryStatus", pb.CudaSharedMemoryStatusRequest()).regions
    assert (regions["g"].device_id, regions["g"].byte_size) == (1, 64)
    status, text = refused("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest(name="no"), system=system)
    assert (status, text) == (Status.NOT_FOUND, "Unable to find system shared memory region: 'no'")


def test_trace_and_log_settings_are_returned_and_changed() -> None:
    traces, logs = FakeSettings(), FakeLogs()
    services = Services(traces=traces, logs=logs)
    changes = pb.TraceSettingRequest(
        model_name="m", settings={"trace_rate": {"value": ["5"]}, "trace_level": {"value": []}}
    )
    settings = services.ask("TraceSetting", changes).settings
    assert traces.requests == [("m", {"trace_rate": ["5"], "trace_level": None})]
    assert list(settings["trace_level"].value) == ["TIMESTAMPS", "TENSORS"]
    assert list(services.ask("TraceSetting", pb.TraceSettingRequest()).settings["trace_rate"].value) == ["all"]

    log_settings = {"log_info": {"bool_param": False}, "log_verbose_level": {"uint32_param": 1}}
    found = services.ask("LogSettings", pb.LogSettingsRequest(settings=log_settings)).settings
    assert logs.requests == [{"log_info": False, "log_verbose_level": 1}]
    assert (found["log_info"].bool_param, found["log_verbose_level"].uint32_param) == (True, 3)
    assert found["log_format"].string_param == "default"
    status, text = refused("LogSettings", pb.LogSettingsRequest(settings={"log_info": {}}), logs=logs)
    assert (status, text) == (Status.INVALID_ARGUMENT, "expect a value for 'log_info'")


def test_a_message_that_cannot_be_parsed_is_rejected() -> None:
    status, text = refused("ModelReady", b"\x0a\xff")

    assert (status, text) == (Status.INVALID_ARGUMENT, "failed to parse the request as inference.ModelReadyRequest")


def test_restricted_methods_require_their_header() -> None:
    services = Services(restricted=RestrictedApis.parse(["inference:key=secret"], GRPC_PREFIX))
    closed = services.call("ModelInfer", request())
    call, reader = services.open()
    reader.on_message(request().SerializeToString())
    opened = services.call("ModelInfer", request(), {"triton-grpc-protocol-key": "secret"})

    text = "This protocol is restricted, expecting header 'triton-grpc-protocol-key'"
    assert (closed.status, closed.text) == (call.status, call.text) == (Status.UNAVAILABLE, text)
    assert (opened.ended, len(services.engine.held)) == (False, 1)


def test_a_load_continues_after_its_client_has_disconnected() -> None:
    async def main() -> None:
        control = FakeControl()
        call = Services(control=control).call("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name="m"))
        call.lose()
        await settled()
        assert control.requests == [("m", None, {})]

    asyncio.run(main())


@pytest.mark.parametrize("name", ["ServerLive", "ModelConfig", "RepositoryIndex", "TraceSetting", "LogSettings"])
def test_an_oversized_control_message_is_rejected_without_being_parsed(name: str) -> None:
    async def main() -> None:
        services = Services(control=FakeControl(), traces=FakeSettings(), logs=FakeLogs())
        call = services.call(name, b"\x7a\x00" * 32769)
        await settled()

        text = f"request message of 65538 bytes exceeds the maximum of 65536 for {name}Request"
        assert (call.status, call.text) == (Status.INVALID_ARGUMENT, text)
        assert services.call(name, b"\x7a\x00" * 32768).status is not Status.INVALID_ARGUMENT

    asyncio.run(main())


def test_a_load_message_may_be_large_but_may_not_have_too_many_fields() -> None:
    async def main() -> None:
        control = FakeControl()
        message = pb.RepositoryModelLoadRequest(model_name="m")
        message.parameters["file:1/model.onnx"].bytes_param = bytes(1 << 20)
        assert (await ask(Services(control=control), "RepositoryModelLoad", message)).status is Status.OK
        call = Services(control=control).call("RepositoryModelLoad", b"\x1a\x00" * 65537)
        await settled()

        assert (call.status, call.text) == (
            Status.INVALID_ARGUMENT, "RepositoryModelLoadRequest has more than 65536 fields"
        )  # fmt: skip
        assert len(control.requests) == 1

    asyncio.run(main())
