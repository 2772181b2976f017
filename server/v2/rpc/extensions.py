"""The RPCs of shared memory, trace settings and logging settings.

Made by `services.py`. Source: Triton server, grpc_server.cc (messages, texts).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.backends.errors import Code, InferError
from penstock.server.grpc.method import Method
from penstock.server.protobuf import service_pb2
from penstock.server.restricted import TRITON_SERVICE

from .calls import unary_method

if TYPE_CHECKING:
    from penstock.server.v2.cuda_regions import CudaRegions
    from penstock.server.v2.logging_settings import LogSettings
    from penstock.server.v2.system_regions import SystemRegions
    from penstock.server.v2.trace_settings import TraceSettings


class MemoryRpcs:
    """System and CUDA shared memory."""

    def __init__(self, system: SystemRegions, cuda: CudaRegions) -> None:
        self._system = system
        self._cuda = cuda
        self._pb = service_pb2()

    def methods(self) -> tuple[Method, ...]:
        pb, system, cuda = self._pb, TRITON_SERVICE + "SystemSharedMemory", TRITON_SERVICE + "CudaSharedMemory"
        return (
            unary_method(system + "Status", pb.SystemSharedMemoryStatusRequest, self.system_status),
            unary_method(system + "Register", pb.SystemSharedMemoryRegisterRequest, self.system_register),
            unary_method(system + "Unregister", pb.SystemSharedMemoryUnregisterRequest, self.system_unregister),
            unary_method(cuda + "Status", pb.CudaSharedMemoryStatusRequest, self.cuda_status),
            unary_method(cuda + "Register", pb.CudaSharedMemoryRegisterRequest, self.cuda_register),
            unary_method(cuda + "Unregister", pb.CudaSharedMemoryUnregisterRequest, self.cuda_unregister),
        )

    def system_status(self, request: Any) -> Any:
        regions = self._system.status(request.name)
        return self._pb.SystemSharedMemoryStatusResponse(regions={region["name"]: region for region in regions})

    def system_register(self, request: Any) -> Any:
        self._system.register(request.name, request.key, request.offset, request.byte_size)
        return self._pb.SystemSharedMemoryRegisterResponse()

    def system_unregister(self, request: Any) -> Any:
        self._system.unregister(request.name)
        return self._pb.SystemSharedMemoryUnregisterResponse()

    def cuda_status(self, request: Any) -> Any:
        regions = self._cuda.status(request.name)
        return self._pb.CudaSharedMemoryStatusResponse(regions={region["name"]: region for region in regions})

    def cuda_register(self, request: Any) -> Any:
        self._cuda.register(request.name, request.raw_handle, request.device_id, request.byte_size)
        return self._pb.CudaSharedMemoryRegisterResponse()

    def cuda_unregister(self, request: Any) -> Any:
        self._cuda.unregister(request.name)
        return self._pb.CudaSharedMemoryUnregisterResponse()


class SettingsRpcs:
    """Trace settings and logging settings."""

    def __init__(self, traces: TraceSettings, logs: LogSettings) -> None:
        self._traces = traces
        self._logs = logs
        self._pb = service_pb2()

    def methods(self) -> tuple[Method, ...]:
        pb = self._pb
        return (
            unary_method(TRITON_SERVICE + "TraceSetting", pb.TraceSettingRequest, self.trace),
            unary_method(TRITON_SERVICE + "LogSettings", pb.LogSettingsRequest, self.log),
        )

    def trace(self, request: Any) -> Any:
        traces = self._traces
        changes = {name: list(setting.value) or None for name, setting in request.settings.items()}
        if changes:
            traces.update(request.model_name, changes)
        settings = traces.read(request.model_name)
        return self._pb.TraceSettingResponse(settings={name: {"value": value} for name, value in settings.items()})

    def log(self, request: Any) -> Any:
        logs = self._logs
        changes: dict[str, Any] = {}
        for name, setting in request.settings.items():
            choice = setting.WhichOneof("parameter_choice")
            if choice is None:
                raise InferError(Code.INVALID, f"expect a value for '{name}'")
            changes[name] = getattr(setting, choice)
        if changes:
            logs.update(changes)
        return self._pb.LogSettingsResponse(
            settings={name: {_param(value): value} for name, value in logs.read().items()}
        )


def _param(value: bool | int | str) -> str:
    if isinstance(value, bool):
        return "bool_param"
    return "uint32_param" if isinstance(value, int) else "string_param"
