"""The messages of gRPC's own services, health and reflection, described by hand, so their packages are not needed.

They have a separate descriptor pool, so that a hook that imports those packages finds the default pool unchanged.
Source: grpc-proto, grpc/health/v1/health.proto and grpc/reflection/v1/reflection.proto (v1alpha is the same).
"""

from __future__ import annotations

from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

HEALTH = "grpc.health.v1.Health"
REFLECTIONS = ("grpc.reflection.v1", "grpc.reflection.v1alpha")
_TYPES = {"string": 9, "int32": 5, "bytes": 12}
_MESSAGE, _ENUM = 11, 14
_OPTIONAL, _REPEATED = 1, 3

# A field is (name, number, type); a "*" before the type marks a repeated field, "?" a member of the message's oneof.
_Field = tuple[str, int, str]
_REFLECTION: dict[str, tuple[str, tuple[_Field, ...]]] = {
    "ServerReflectionRequest": (
        "message_request",
        (
            ("host", 1, "string"),
            ("file_by_filename", 3, "?string"),
            ("file_containing_symbol", 4, "?string"),
            ("file_containing_extension", 5, "?ExtensionRequest"),
            ("all_extension_numbers_of_type", 6, "?string"),
            ("list_services", 7, "?string"),
        ),
    ),
    "ExtensionRequest": ("", (("containing_type", 1, "string"), ("extension_number", 2, "int32"))),
    "ServerReflectionResponse": (
        "message_response",
        (
            ("valid_host", 1, "string"),
            ("original_request", 2, "ServerReflectionRequest"),
            ("file_descriptor_response", 4, "?FileDescriptorResponse"),
            ("all_extension_numbers_response", 5, "?ExtensionNumberResponse"),
            ("list_services_response", 6, "?ListServiceResponse"),
            ("error_response", 7, "?ErrorResponse"),
        ),
    ),
    "FileDescriptorResponse": ("", (("file_descriptor_proto", 1, "*bytes"),)),
    "ExtensionNumberResponse": ("", (("base_type_name", 1, "string"), ("extension_number", 2, "*int32"))),
    "ListServiceResponse": ("", (("service", 1, "*ServiceResponse"),)),
    "ServiceResponse": ("", (("name", 1, "string"),)),
    "ErrorResponse": ("", (("error_code", 1, "int32"), ("error_message", 2, "string"))),
}


@cache
def builtin_files() -> tuple[Any, ...]:
    """Return the FileDescriptorProtos of health and reflection."""
    return _health(), *(_reflection(package) for package in REFLECTIONS)


def message_class(full_name: str) -> Any:
    """Return a message's class."""
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(full_name))


@cache
def _pool() -> Any:
    pool = descriptor_pool.DescriptorPool()
    for file in builtin_files():
        pool.Add(file)
    return pool


def _health() -> Any:
    file = descriptor_pb2.FileDescriptorProto(
        name="grpc/health/v1/health.proto", package="grpc.health.v1", syntax="proto3"
    )
    _add(file, "HealthCheckRequest", "", (("service", 1, "string"),))
    answer = file.message_type.add(name="HealthCheckResponse")
    statuses = answer.enum_type.add(name="ServingStatus")
    for number, name in enumerate(("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")):
        statuses.value.add(name=name, number=number)
    answer.field.add(
        name="status", number=1, label=_OPTIONAL, type=_ENUM,
        type_name=".grpc.health.v1.HealthCheckResponse.ServingStatus",
    )  # fmt: skip
    request_type, answer_type = ".grpc.health.v1.HealthCheckRequest", ".grpc.health.v1.HealthCheckResponse"
    service = file.service.add(name="Health")
    service.method.add(name="Check", input_type=request_type, output_type=answer_type)
    service.method.add(name="Watch", input_type=request_type, output_type=answer_type, server_streaming=True)
    return file


def _reflection(package: str) -> Any:
    file = descriptor_pb2.FileDescriptorProto(
        name=package.replace(".", "/") + "/reflection.proto", package=package, syntax="proto3"
    )
    for name, (oneof, fields) in _REFLECTION.items():
        _add(file, name, oneof, fields)
    file.service.add(name="ServerReflection").method.add(
        name="ServerReflectionInfo", client_streaming=True, server_streaming=True,
        input_type=f".{package}.ServerReflectionRequest", output_type=f".{package}.ServerReflectionResponse",
    )  # fmt: skip
    return file


def _add(file: Any, name: str, oneof: str, fields: tuple[_Field, ...]) -> None:
    message = file.message_type.add(name=name)
    if oneof:
        message.oneof_decl.add(name=oneof)
    for title, number, kind in fields:
        bare = kind.lstrip("*?")
        field = message.field.add(
            name=title, number=number, label=_REPEATED if kind[0] == "*" else _OPTIONAL, type=_TYPES.get(bare, _MESSAGE)
        )
        if bare not in _TYPES:
            field.type_name = f".{file.package}.{bare}"
        if kind[0] == "?":
            field.oneof_index = 0
