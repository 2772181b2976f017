"""The services of seldon.protos for grpcio, like a generated module: a Stub, a Servicer and an adder for each."""

from __future__ import annotations

from typing import Any

import grpc

from penstock.server.seldon.protos import message_class, registered_file

_EMPTY = "google.protobuf.Empty"


def _class_of(descriptor: Any) -> Any:
    if descriptor.full_name == _EMPTY:
        from google.protobuf.empty_pb2 import Empty

        return Empty
    return message_class(descriptor.name)


def _stub(service: Any) -> type:
    def __init__(self: Any, channel: Any) -> None:  # noqa: N807 - of the class that is made below
        for method in service.methods:
            call = channel.unary_unary(
                f"/{service.full_name}/{method.name}",
                request_serializer=_class_of(method.input_type).SerializeToString,
                response_deserializer=_class_of(method.output_type).FromString,
            )
            setattr(self, method.name, call)

    return type(f"{service.name}Stub", (), {"__init__": __init__, "__module__": __name__})


def _unimplemented(self: Any, request: Any, context: Any) -> None:
    context.set_code(grpc.StatusCode.UNIMPLEMENTED)
    context.set_details("Method not implemented!")
    raise NotImplementedError("Method not implemented!")


def _servicer(service: Any) -> type:
    methods = {method.name: _unimplemented for method in service.methods}
    return type(f"{service.name}Servicer", (), {**methods, "__module__": __name__})


def _adder(service: Any) -> Any:
    def add(servicer: Any, server: Any) -> None:
        handlers = {
            method.name: grpc.unary_unary_rpc_method_handler(
                getattr(servicer, method.name),
                request_deserializer=_class_of(method.input_type).FromString,
                response_serializer=_class_of(method.output_type).SerializeToString,
            )
            for method in service.methods
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))

    return add


for _service in registered_file().services_by_name.values():
    globals()[f"{_service.name}Stub"] = _stub(_service)
    globals()[f"{_service.name}Servicer"] = _servicer(_service)
    globals()[f"add_{_service.name}Servicer_to_server"] = _adder(_service)
