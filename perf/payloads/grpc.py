"""Requests over gRPC: a ModelInferRequest with its five-byte prefix and raw tensors. The connection compresses.

Source: Triton's grpc_service.proto; gRPC over HTTP/2, "Length-Prefixed-Message".
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from penstock.server.grpc.framing import PREFIX
from penstock.server.protobuf import service_pb2

from .tensors import Place, Step
from .writing import FIRST, LAST, Call, Parameter, Template

_MAX_SIGNED = (1 << 63) - 1
_EMPTY_FINAL = "triton_enable_empty_final_response"


@dataclass(frozen=True, slots=True)
class GrpcWriter:
    """Writes requests. `empty_final`: request an empty final answer, by which a decoupled model can mark its end."""

    call: Call
    empty_final: bool = False

    def whole(self, step: Step) -> bytes:
        message = self._message(step)
        return PREFIX.pack(0, len(message)) + message

    def identity(self, number: int) -> bytes:
        # the field is signed, an id is not
        return _parameters({"sequence_id": number if number <= _MAX_SIGNED else number - (1 << 64)})

    def template(self, step: Step) -> Template:
        # concatenated messages are one message, whose maps have the entries of all
        message = self._message(step)
        size = len(message)
        marks = [
            _parameters({"sequence_start": bool(mark & FIRST), "sequence_end": bool(mark & LAST)}) for mark in range(4)
        ]

        def written(identity: bytes, mark: int) -> bytes:
            mark_parameters = marks[mark]
            return b"".join(
                (PREFIX.pack(0, size + len(identity) + len(mark_parameters)), identity, mark_parameters, message)
            )

        return written

    def _message(self, step: Step) -> bytes:
        message = service_pb2().ModelInferRequest(model_name=self.call.model, model_version=self.call.version)
        _set(message.parameters, *self.call.parameters)
        if self.empty_final:
            _set(message.parameters, (_EMPTY_FINAL, True))
        for sent in step:
            tensor = message.inputs.add(name=sent.name, datatype=sent.datatype, shape=sent.shape)
            if sent.place is None:
                message.raw_input_contents.append(sent.raw)
            else:
                _place(tensor.parameters, sent.place)
        for requested in self.call.outputs:
            output = message.outputs.add(name=requested.name)
            if requested.place is not None:
                _place(output.parameters, requested.place)
        return bytes(message.SerializeToString(deterministic=True))


def _parameters(parameters: dict[str, str | int | float | bool]) -> bytes:
    message = service_pb2().ModelInferRequest()
    _set(message.parameters, *parameters.items())
    return bytes(message.SerializeToString(deterministic=True))


def _place(parameters_map: MutableMapping[str, Any], place: Place) -> None:
    _set(parameters_map, ("shared_memory_region", place.region), ("shared_memory_byte_size", place.nbytes))
    if place.offset:
        _set(parameters_map, ("shared_memory_offset", place.offset))


def _set(parameters_map: MutableMapping[str, Any], *parameters: Parameter) -> None:
    for name, value in parameters:
        if isinstance(value, bool):
            parameters_map[name].bool_param = value
        elif isinstance(value, int) and value > _MAX_SIGNED:
            parameters_map[name].uint64_param = value
        elif isinstance(value, int):
            parameters_map[name].int64_param = value
        elif isinstance(value, float):
            parameters_map[name].double_param = value
        else:
            parameters_map[name].string_param = value
