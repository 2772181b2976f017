"""grpc.health.v1 and server reflection over fake calls."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool

from penstock.server.grpc.method import Status
from penstock.server.v2.rpc import ticker
from penstock.server.v2.rpc.descriptors import message_class
from tests.server.v2.rpc.calls import FakeCall, Services, turns

SERVICES = ["", "inference.GRPCInferenceService"]
REFLECTIONS = ["grpc.reflection.v1", "grpc.reflection.v1alpha"]
SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3


def check_request(service: str) -> bytes:
    return bytes(message_class("grpc.health.v1.HealthCheckRequest")(service=service).SerializeToString())


def statuses_of(call: FakeCall) -> list[int]:
    kind = message_class("grpc.health.v1.HealthCheckResponse")
    return [kind.FromString(message).status for message in call.sent]


@pytest.mark.parametrize("service", SERVICES)
def test_check_reports_whether_the_server_is_ready(service: str) -> None:
    services = Services()
    assert statuses_of(services.call("/grpc.health.v1.Health/Check", check_request(service))) == [SERVING]
    services.repository.is_ready = False
    assert statuses_of(services.call("/grpc.health.v1.Health/Check", check_request(service))) == [NOT_SERVING]


def test_check_of_an_unknown_service_is_not_found() -> None:
    assert Services().call("/grpc.health.v1.Health/Check", check_request("other")).status is Status.NOT_FOUND


def test_watch_reports_changes_and_ends_when_the_server_exits(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(ticker, "INTERVAL_S", 0)
        services = Services()
        watch = services.call("/grpc.health.v1.Health/Watch", check_request(""))
        lost = services.call("/grpc.health.v1.Health/Watch", check_request(""))
        unknown = services.call("/grpc.health.v1.Health/Watch", check_request("other"))
        assert statuses_of(watch) == [SERVING]
        lost.lose()
        for ready in (True, False, False, True):
            services.repository.is_ready = ready
            await turns()
        services.health.draining = True
        await turns()
        assert statuses_of(watch) == [SERVING, NOT_SERVING, SERVING, NOT_SERVING]
        assert (statuses_of(lost), statuses_of(unknown)) == ([SERVING], [SERVICE_UNKNOWN])
        assert (watch.status, unknown.status) == (Status.UNAVAILABLE, Status.UNAVAILABLE)

    asyncio.run(main())


def test_readiness_is_evaluated_once_per_tick_for_any_number_of_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(ticker, "INTERVAL_S", 0)
        services = Services()
        for _ in range(20):
            services.call("/grpc.health.v1.Health/Watch", check_request(""))
        calls: list[int] = []

        def ready() -> bool:
            calls.append(1)
            return True

        monkeypatch.setattr(services.health, "ready", ready)
        await turns()
        beats = len(calls)
        monkeypatch.setattr(services.health, "ready", lambda: False)
        late = services.call("/grpc.health.v1.Health/Watch", check_request(""))

        assert 0 < beats <= 20
        assert statuses_of(late) == [NOT_SERVING]
        services.health.draining = True
        await turns()

    asyncio.run(main())


def test_notifying_many_listeners_yields_to_the_event_loop() -> None:
    async def main() -> None:
        beats, notified = ticker.Ticker(), list[int]()
        listeners: list[Any] = [partial(notified.append, number) for number in range(5000)]
        for listener in listeners:
            beats.add(listener)
        beats.tick()
        at_once = len(notified)
        beats.remove(listeners[-1])
        await turns()
        for listener in listeners:
            beats.remove(listener)

        assert 0 < at_once < 1000
        assert notified == list(range(4999))

    asyncio.run(main())


def test_a_ticker_without_listeners_has_no_timer() -> None:
    async def main() -> None:
        beats = ticker.Ticker()
        notified: list[int] = []

        def listener() -> None:
            notified.append(1)

        beats.add(listener)
        beats.tick()
        beats.remove(listener)
        beats.remove(listener)
        beats.tick()
        assert (notified, len(beats), beats._timer) == ([1], 0, None)

    asyncio.run(main())


class Conversation:
    """One reflection stream."""

    def __init__(self, package: str) -> None:
        self._request = message_class(f"{package}.ServerReflectionRequest")
        self._answer = message_class(f"{package}.ServerReflectionResponse")
        self.call, self.reader = Services().open(f"/{package}.ServerReflection/ServerReflectionInfo")

    def ask(self, **question: Any) -> Any:
        self.reader.on_message(self._request(host="h", **question).SerializeToString())
        answer = self._answer.FromString(self.call.sent[-1])
        assert answer.valid_host == "h"
        assert answer.original_request == self._request(host="h", **question)
        return answer


@pytest.mark.parametrize("package", REFLECTIONS)
def test_reflection_describes_every_service_and_message(package: str) -> None:
    async def main() -> None:
        conversation = Conversation(package)
        listed = [each.name for each in conversation.ask(list_services="*").list_services_response.service]
        assert listed == [
            "grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection",
            "inference.GRPCInferenceService",
        ]  # fmt: skip
        pool, known = descriptor_pool.DescriptorPool(), set()
        for name in (*listed, "inference.ModelInferRequest.InferInputTensor", "inference.ModelConfig"):
            answer = conversation.ask(file_containing_symbol=name).file_descriptor_response
            for raw in reversed(answer.file_descriptor_proto):
                file = descriptor_pb2.FileDescriptorProto.FromString(raw)
                if file.name not in known:
                    known.add(file.name)
                    pool.Add(file)
        service = pool.FindServiceByName("inference.GRPCInferenceService")
        assert len(service.methods) == 20
        assert pool.FindMessageTypeByName("inference.ModelInferRequest").fields_by_name["inputs"].number == 5
        again = conversation.ask(file_by_filename="grpc_service.proto").file_descriptor_response
        assert len(again.file_descriptor_proto) == 2
        conversation.reader.on_half_close()
        assert conversation.call.status is Status.OK

    asyncio.run(main())


@pytest.mark.parametrize(
    "question",
    [
        {"file_by_filename": "no.proto"},
        {"file_containing_symbol": "google.protobuf.FileDescriptorProto"},
        {"file_containing_extension": {"containing_type": "inference.ModelConfig", "extension_number": 1}},
        {"all_extension_numbers_of_type": "no.Type"},
        {},
    ],
)
def test_an_unknown_file_or_symbol_is_not_found(question: dict[str, Any]) -> None:
    async def main() -> None:
        assert Conversation(REFLECTIONS[0]).ask(**question).error_response.error_code == Status.NOT_FOUND

    asyncio.run(main())


def test_reflection_reports_no_extensions_for_a_message() -> None:
    async def main() -> None:
        answer = Conversation(REFLECTIONS[0]).ask(all_extension_numbers_of_type="inference.ModelConfig")
        assert answer.all_extension_numbers_response.base_type_name == "inference.ModelConfig"
        assert not answer.all_extension_numbers_response.extension_number

    asyncio.run(main())


def test_a_reflection_stream_whose_client_does_not_read_is_ended() -> None:
    async def main() -> None:
        conversation = Conversation(REFLECTIONS[0])
        conversation.call.writable = False
        for _ in range(65):
            conversation.reader.on_message(b"")
        assert conversation.call.status is Status.RESOURCE_EXHAUSTED

    asyncio.run(main())
