"""GrpcControl: the calls to a server other than the load, over gRPC. Made by `control.control_for`.

Its results are those of HTTP: the content of the protobuf messages, converted to JSON as Triton does.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from google.protobuf.message import DecodeError

from penstock.perf.generator.grpc import ask
from penstock.perf.generator.grpc_calls import CallError
from penstock.perf.generator.orders import GrpcCall, Target
from penstock.server.protobuf import service_pb2
from penstock.server.repository.completed_config import to_json

from . import control
from .control import ControlError, RefusedError, Settings

_SERVICE = "/inference.GRPCInferenceService/"
_UNREACHED = {"DEADLINE_EXCEEDED", "CANCELLED"}
"""Without UNAVAILABLE, which Triton uses to say that part of its protocol is restricted."""


class GrpcControl:
    """Calls over gRPC, with a connection for each call. Threads: any that runs no event loop."""

    def __init__(self, target: Target, headers: Mapping[str, str]) -> None:
        metadata = (target.grpc or GrpcCall("")).metadata
        self._target = target
        self._call = GrpcCall("", metadata=tuple(dict.fromkeys((*metadata, *headers.items()))))  # without duplicates
        self._pb = service_pb2()

    def server(self) -> dict[str, Any]:
        return to_json(self._ask("ServerMetadata"))

    def metadata(self, model: str, version: str = "") -> dict[str, Any]:
        return to_json(self._ask("ModelMetadata", name=model, version=version))

    def config(self, model: str, version: str = "") -> dict[str, Any]:
        try:
            return to_json(self._ask("ModelConfig", name=model, version=version).config)
        except RefusedError:
            return {}

    def statistics(self, model: str, version: str = "") -> list[dict[str, Any]]:
        try:
            reply = self._ask("ModelStatistics", name=model, version=version)
        except RefusedError:
            return []
        return [to_json(each) for each in reply.model_stats]

    def ready(self, model: str = "", version: str = "") -> bool:
        try:
            reply = self._ask("ModelReady", name=model, version=version) if model else self._ask("ServerReady")
        except ControlError:
            return False
        return bool(reply.ready)

    def register(self, region: str, key: str, size: int) -> None:
        self._ask("SystemSharedMemoryRegister", name=region, key=key, offset=0, byte_size=size)

    def unregister(self, region: str = "") -> None:
        self._ask("SystemSharedMemoryUnregister", name=region)

    def register_cuda(self, region: str, handle: bytes, device: int, size: int) -> None:
        self._ask("CudaSharedMemoryRegister", name=region, raw_handle=handle, device_id=device, byte_size=size)

    def unregister_cuda(self, region: str = "") -> None:
        self._ask("CudaSharedMemoryUnregister", name=region)

    def load(self, model: str, config: Mapping[str, Any] | None = None) -> None:
        request = self._pb.RepositoryModelLoadRequest(model_name=model)
        if config is not None:
            request.parameters["config"].string_param = json.dumps(config)
        self._send("RepositoryModelLoad", request, control.LOAD_TIMEOUT_S)

    def unload(self, model: str) -> None:
        self._send("RepositoryModelUnload", self._pb.RepositoryModelUnloadRequest(model_name=model), control.TIMEOUT_S)

    def trace(self, settings: Settings | None = None, model: str = "") -> dict[str, Any]:
        request = self._pb.TraceSettingRequest(model_name=model)
        for name, value in (settings or {}).items():
            request.settings[name].value[:] = [] if value is None else [value] if isinstance(value, str) else value
        settings_map = self._send("TraceSetting", request).settings
        # over HTTP only the level is an array
        return {
            name: list(settings_map[name].value) if name == "trace_level" else ",".join(settings_map[name].value)
            for name in settings_map
        }

    def _ask(self, method: str, **fields: Any) -> Any:
        return self._send(method, getattr(self._pb, f"{method}Request")(**fields))

    def _send(self, method: str, request: Any, wait_s: float = 0.0) -> Any:
        wait_s = wait_s or control.READY_TIMEOUT_S
        call = replace(self._call, method=_SERVICE + method)
        try:
            message = asyncio.run(self._answer(call, request.SerializeToString(), wait_s))
            return getattr(self._pb, f"{method}Response").FromString(message)
        except CallError as error:
            kind = ControlError if error.status in _UNREACHED else RefusedError
            raise kind(f"{method}: {error}") from error
        except TimeoutError as error:
            raise ControlError(f"{method}: no answer within {wait_s:g} s") from error
        except (OSError, ValueError, DecodeError) as error:  # ValueError: headers that are too large
            raise ControlError(f"{method}: {str(error) or type(error).__name__}") from error

    async def _answer(self, call: GrpcCall, message: bytes, wait_s: float) -> bytes:
        async with asyncio.timeout(wait_s):
            return await ask(self._target, call, message)
