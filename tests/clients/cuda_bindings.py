"""What tritonclient uses of NVIDIA's cuda-python, on a Runtime of ours: its own utilities run where there is no GPU.

`tritonclient.utils.cuda_shared_memory` imports `cuda.bindings`, whose functions return a status and what they found.
"""

from __future__ import annotations

import ctypes
import enum
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

from penstock.backends.cuda import HANDLE_BYTES, CudaError, Runtime


class Status(enum.IntEnum):
    """The parts of cudaError_t and CUresult that tritonclient reads."""

    cudaSuccess = CUDA_SUCCESS = 0  # noqa: N815 - NVIDIA's words
    failed = 1


class Pointed:
    """An object whose address cuda-python returns."""

    def __init__(self, raw: bytes = b"") -> None:
        self._buffer = ctypes.create_string_buffer(raw, max(len(raw), 1))

    def getPtr(self) -> int:  # noqa: N802 - NVIDIA's word
        return ctypes.addressof(self._buffer)


class Bindings:
    """The functions of `cuda.bindings.runtime`; only one thread may call them, so there is one current device."""

    CUDA_IPC_HANDLE_SIZE = HANDLE_BYTES
    cudaError_t = Status  # noqa: N815
    cudaIpcMemHandle_t = Pointed  # noqa: N815
    cudaMemcpyKind = SimpleNamespace(cudaMemcpyDefault=4)  # noqa: N815
    cudaDeviceAttr = SimpleNamespace(cudaDevAttrUnifiedAddressing=41)  # noqa: N815

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._device = 0

    def cudaGetDevice(self) -> tuple[Any, ...]:  # noqa: N802
        return Status.cudaSuccess, self._device

    def cudaSetDevice(self, device: int) -> tuple[Any, ...]:  # noqa: N802
        self._device = device
        return self._done(self._runtime.set_device, device)

    def cudaMalloc(self, size: int) -> tuple[Any, ...]:  # noqa: N802
        if size < 0:
            return (Status.failed,)
        return self._done(self._runtime.allocate, size, self._device)

    def cudaFree(self, pointer: int) -> tuple[Any, ...]:  # noqa: N802
        return self._done(self._runtime.free, pointer, self._device)

    def cudaIpcGetMemHandle(self, pointer: int) -> tuple[Any, ...]:  # noqa: N802
        return self._done(lambda: Pointed(self._runtime.export_handle(pointer, self._device)))

    def cudaMemcpyAsync(self, to: Any, source: Any, size: int, kind: int, stream: Any) -> tuple[Any, ...]:  # noqa: N802
        if isinstance(to, ctypes.Array):
            return self._done(self._runtime.read, source, self._device, memoryview(to).cast("B")[:size])
        raw = source if isinstance(source, bytes) else ctypes.string_at(source, size)
        return self._done(self._runtime.write, to, self._device, raw)

    def cudaDeviceGetAttribute(self, attribute: int, device: int) -> tuple[Any, ...]:  # noqa: N802
        return Status.cudaSuccess, 1

    def cudaStreamCreate(self) -> tuple[Any, ...]:  # noqa: N802
        return Status.cudaSuccess, Pointed()

    def cudaStreamSynchronize(self, stream: Any) -> tuple[Any, ...]:  # noqa: N802
        return (Status.cudaSuccess,)

    cudaStreamDestroy = cudaStreamSynchronize  # noqa: N815

    def cudaGetErrorString(self, status: Status) -> tuple[Any, ...]:  # noqa: N802
        return Status.cudaSuccess, b"refused"

    @staticmethod
    def _done(call: Any, *args: Any) -> tuple[Any, ...]:
        try:
            found = call(*args)
        except CudaError:
            return (Status.failed,)
        return (Status.cudaSuccess,) if found is None else (Status.cudaSuccess, found)


class Driver:
    """The functions of `cuda.bindings.driver`."""

    CUresult = Status

    def cuDeviceGet(self, device: int) -> tuple[Any, ...]:  # noqa: N802
        return Status.CUDA_SUCCESS, device

    def cuDevicePrimaryCtxGetState(self, device: int) -> tuple[Any, ...]:  # noqa: N802
        return Status.CUDA_SUCCESS, 0, 1


@contextmanager
def cuda_shared_memory(runtime: Runtime) -> Iterator[Any]:
    """Import tritonclient's utilities for CUDA shared memory on top of a Runtime; forget them afterwards."""
    name = "tritonclient.utils.cuda_shared_memory"
    modules: dict[str, Any] = {"cuda": ModuleType("cuda"), "cuda.bindings": ModuleType("cuda.bindings")}
    modules["cuda.bindings.runtime"], modules["cuda.bindings.driver"] = Bindings(runtime), Driver()
    modules["cuda"].bindings = modules["cuda.bindings"]
    modules["cuda.bindings"].runtime, modules["cuda.bindings"].driver = list(modules.values())[2:]
    before = {each: sys.modules.get(each) for each in (*modules, name, name + "._utils")}
    sys.modules.update(modules)
    try:
        yield importlib.import_module(name)
    finally:
        for each, module in before.items():
            sys.modules.pop(each, None)
            if module is not None:
                sys.modules[each] = module
