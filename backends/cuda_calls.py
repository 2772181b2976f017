"""The functions of libcudart and libcuda by name, with their parameters, and their errors. Used by cuda.py only."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from .cuda_gate import GATE

HANDLE_BYTES = 64
"""The size of a cudaIpcMemHandle_t."""
DRIVER = "libcuda.so.1"


class CudaError(Exception):
    """A CUDA call's error. For the log: clients are only told that it failed.

    `status` is the cudaError_t (for driver calls the CUresult).
    """

    def __init__(self, status: int, call: str, text: str) -> None:
        super().__init__(f"{call}: CUDA error {status}: {text}")
        self.status = status
        self.call = call
        self.text = text


class Handle(ctypes.Structure):
    """cudaIpcMemHandle_t, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


Pointer, Size, Int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_flags = ctypes.c_uint
_new_pointer = ctypes.POINTER(Pointer)
_RUNTIME_CALLS: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "cudaGetDeviceCount": (ctypes.POINTER(Int),),
        "cudaDeviceGetPCIBusId": (ctypes.c_char_p, Int, Int),
        "cudaDeviceGetAttribute": (ctypes.POINTER(Int), Int, Int),
        "cudaMemGetInfo": (ctypes.POINTER(Size), ctypes.POINTER(Size)),
        "cudaSetDevice": (Int,),
        "cudaMalloc": (_new_pointer, Size),
        "cudaFree": (Pointer,),
        "cudaHostAlloc": (_new_pointer, Size, _flags),
        "cudaFreeHost": (Pointer,),
        "cudaHostRegister": (Pointer, Size, _flags),
        "cudaHostUnregister": (Pointer,),
        "cudaStreamCreateWithFlags": (_new_pointer, _flags),
        "cudaStreamDestroy": (Pointer,),
        "cudaStreamWaitEvent": (Pointer, Pointer, _flags),
        "cudaStreamSynchronize": (Pointer,),
        "cudaEventCreateWithFlags": (_new_pointer, _flags),
        "cudaEventDestroy": (Pointer,),
        "cudaEventRecord": (Pointer, Pointer),
        "cudaEventQuery": (Pointer,),
        "cudaEventSynchronize": (Pointer,),
        "cudaEventElapsedTime": (ctypes.POINTER(ctypes.c_float), Pointer, Pointer),
        "cudaMemcpy": (Pointer, Pointer, Size, Int),
        "cudaMemcpyAsync": (Pointer, Pointer, Size, Int, Pointer),
        "cudaIpcGetMemHandle": (ctypes.POINTER(Handle), Pointer),
        "cudaIpcOpenMemHandle": (_new_pointer, Handle, _flags),
        "cudaIpcCloseMemHandle": (Pointer,),
        "cudaGetLastError": (),
    }
)
_DRIVER_CALLS: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "cuInit": (_flags,),
        "cuDeviceGet": (ctypes.POINTER(Int), Int),
        "cuDeviceGetName": (ctypes.c_char_p, Int, Int),
        "cuMemGetAddressRange_v2": (ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(Size), ctypes.c_uint64),
    }
)
"""The parameters of the libraries' functions; all of them return a status. Source: cuda_runtime_api.h and cuda.h of
CUDA 13, unchanged since CUDA 11."""


_NONBLOCKING_CALLS = (
    "cudaSetDevice", "cudaStreamWaitEvent", "cudaEventRecord", "cudaEventQuery", "cudaEventElapsedTime",
    "cudaMemcpyAsync", "cudaGetLastError",
)  # fmt: skip
"""Calls that queue work, or query, and return within a few microseconds."""


class CudaLibraries:
    """Both libraries, loaded. Threads: any; only calls made by `invoke_holding_gil` hold the GIL."""

    def __init__(self, runtime: str, driver: str = DRIVER) -> None:
        """Raise OSError or AttributeError if a library or one of its functions is missing."""
        libraries = ((ctypes.CDLL(runtime), _RUNTIME_CALLS), (ctypes.CDLL(driver), _DRIVER_CALLS))
        self._calls: dict[str, Any] = {}
        self._gil_calls: dict[str, Any] = {}
        for library, calls in libraries:
            for name, parameters in calls.items():
                self._calls[name] = function = getattr(library, name)
                function.argtypes = parameters
        gil_library = ctypes.PyDLL(runtime)
        for name in _NONBLOCKING_CALLS:
            self._gil_calls[name] = function = getattr(gil_library, name)
            function.argtypes = _RUNTIME_CALLS[name]
        self._error_string: Any = libraries[0][0].cudaGetErrorString
        self._error_string.argtypes = (Int,)
        self._error_string.restype = ctypes.c_char_p

    def create(self, name: str, *arguments: Any) -> int:
        """Call a function that writes an address to its first argument; return the address."""
        pointer = Pointer()
        self.invoke(name, pointer, *arguments)
        return pointer.value or 0

    def invoke(self, name: str, *arguments: Any) -> None:
        """Call a function without the GIL, since it may wait for the device. Raises: CudaError."""
        self._checked_call(name, self._calls[name], arguments)

    def invoke_holding_gil(self, name: str, *arguments: Any) -> None:
        """Call a function that does not wait, holding the GIL. Raises: CudaError.

        A thread that releases the GIL for two microseconds gets it back only when another thread releases it: a run
        makes a dozen such calls, and beside a busy event loop each had to wait, up to half a millisecond.
        """
        self._checked_call(name, self._gil_calls[name], arguments)

    def _checked_call(self, name: str, function: Any, arguments: tuple[Any, ...]) -> None:
        if GATE.enabled and not GATE.is_held:
            with GATE.shared():
                status = function(*arguments)
        else:
            status = function(*arguments)
        if status:
            # the last error is per thread: ONNX Runtime, which queries it after a kernel, would take it as its own
            self._gil_calls["cudaGetLastError"]()
            raise CudaError(status, name, (self._error_string(status) or b"").decode("latin-1"))
