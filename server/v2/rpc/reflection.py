"""Server reflection, v1 and v1alpha, through which tools such as grpcurl discover services and messages.

Made by `services.py`. Source: grpc/doc/server-reflection.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from google.protobuf import descriptor_pb2

from penstock.server.grpc.method import Call, Method, Reader, Status
from penstock.server.grpc.request import SHUTTING_DOWN
from penstock.server.health import Health
from penstock.server.protobuf import model_config_pb2, service_pb2

from .calls import parse_small
from .descriptors import REFLECTIONS, builtin_files, message_class
from .ticker import Ticker

_MAX_UNSENT = 64
"""The most answers queued for a client that does not read them."""


class Reflection:
    """The served files by name and symbol: Penstock's and a dialect's, whatever else the process has loaded."""

    def __init__(self, health: Health, ticker: Ticker, files: Iterable[Any] = ()) -> None:
        self.health = health
        self.ticker = ticker
        self._files: dict[str, Any] = {}
        self._symbols: dict[str, str] = {}
        self._services: list[str] = []
        generated = [_file_proto(module.DESCRIPTOR) for module in (model_config_pb2(), service_pb2())]
        for file in (*generated, *builtin_files(), *files):
            self._files[file.name] = file
            self._services += [f"{file.package}.{service.name}" for service in file.service]
            self._symbols |= dict.fromkeys(_symbols(file), file.name)

    def methods(self) -> tuple[Method, ...]:
        return tuple(self._method(package) for package in REFLECTIONS)

    def _method(self, package: str) -> Method:
        request = message_class(f"{package}.ServerReflectionRequest")
        answer = message_class(f"{package}.ServerReflectionResponse")

        def open_stream(call: Call) -> Reader:
            return _ReflectionStream(self, call, request, answer)

        return Method(f"/{package}.ServerReflection/ServerReflectionInfo", streaming=open_stream)

    def answer(self, request: Any, answer: Any) -> None:
        """Fill in the answer to one request."""
        request_kind = request.WhichOneof("message_request")
        if request_kind == "list_services":
            for name in sorted(self._services):
                answer.list_services_response.service.add(name=name)
        elif request_kind == "file_by_filename":
            self._describe(request.file_by_filename, answer)
        elif request_kind == "file_containing_symbol":
            self._describe(self._symbols.get(request.file_containing_symbol, ""), answer)
        elif request_kind == "all_extension_numbers_of_type" and request.all_extension_numbers_of_type in self._symbols:
            answer.all_extension_numbers_response.base_type_name = request.all_extension_numbers_of_type
        else:
            self._describe("", answer)

    def _describe(self, name: str, answer: Any) -> None:
        if name not in self._files:
            answer.error_response.error_code = Status.NOT_FOUND
            answer.error_response.error_message = "not found"
            return
        for file in self._with_dependencies(name, set()):
            answer.file_descriptor_response.file_descriptor_proto.append(file.SerializeToString())

    def _with_dependencies(self, name: str, seen: set[str]) -> Iterator[Any]:
        seen.add(name)
        yield self._files[name]
        for dependency in self._files[name].dependency:
            if dependency not in seen:
                yield from self._with_dependencies(dependency, seen)


class _ReflectionStream:
    """One reflection stream: an answer to each message, in order."""

    def __init__(self, reflection: Reflection, call: Call, request: Any, answer: Any) -> None:
        self._reflection = reflection
        self._call = call
        self._request = request
        self._answer = answer
        self._unsent = 0
        call.on_cancel = self._end
        reflection.ticker.add(self._check_health)

    def on_message(self, message: bytes) -> None:
        request = parse_small(self._request, message)
        self._unsent = 0 if self._call.writable else self._unsent + 1
        if self._unsent > _MAX_UNSENT:
            self._end()
            self._call.abort(Status.RESOURCE_EXHAUSTED, "the client does not read its answers")
            return
        answer = self._answer(valid_host=request.host, original_request=request)
        self._reflection.answer(request, answer)
        self._call.send(answer.SerializeToString())

    def on_half_close(self) -> None:
        self._end()
        self._call.finish()

    def _check_health(self) -> None:
        if not self._reflection.health.live():
            self._end()
            self._call.abort(Status.UNAVAILABLE, SHUTTING_DOWN)

    def _end(self) -> None:
        self._call.on_cancel = None
        self._reflection.ticker.remove(self._check_health)


def _file_proto(descriptor: Any) -> Any:
    file = descriptor_pb2.FileDescriptorProto()
    descriptor.CopyToProto(file)
    return file


def _symbols(file: Any) -> Iterator[str]:
    yield from _in_messages(file.package, file.message_type)
    for enum in file.enum_type:
        yield f"{file.package}.{enum.name}"
    for service in file.service:
        name = f"{file.package}.{service.name}"
        yield name
        yield from (f"{name}.{method.name}" for method in service.method)


def _in_messages(scope: str, messages: Iterable[Any]) -> Iterator[str]:
    for message in messages:
        name = f"{scope}.{message.name}"
        yield name
        yield from (f"{name}.{field.name}" for field in message.field)
        yield from (f"{name}.{enum.name}" for enum in message.enum_type)
        yield from _in_messages(name, message.nested_type)
