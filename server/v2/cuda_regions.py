"""CUDA regions: device memory that clients share by cudaIpcMemHandle, through the CUDA runtime where there is one.

`CudaRuntime` is the runtime by ctypes, found when the first region is registered; `CudaRegions` registers regions in
the table that system regions are in too (`regions.py`), so that whoever reads or writes a Lease need not know.
"""

from __future__ import annotations

import ctypes
import logging
from typing import Any, Protocol

from penstock.backends.errors import Code, InferError

from .regions import CUDA, Lease, Regions

HANDLE_BYTES = 64
_LIBRARIES = ("libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0", "libcudart.so")
_DRIVER = "libcuda.so.1"
_LAZY_PEER_ACCESS = 1
_TO_DEVICE, _TO_HOST = 1, 2
_MAX_DEVICE = 2**31 - 1

logger = logging.getLogger("penstock.server")


class CudaError(Exception):
    """What the runtime answered. For the log: clients are told no more than that it failed."""


class Runtime(Protocol):
    """The part of the CUDA runtime that is used. Pointers are device addresses. All raise CudaError."""

    def open_handle(self, handle: bytes, device: int) -> int: ...
    def close_handle(self, pointer: int, device: int) -> None: ...
    def size(self, pointer: int, device: int) -> int: ...
    def read(self, pointer: int, device: int, into: memoryview) -> None: ...
    def write(self, pointer: int, device: int, raw: bytes | memoryview) -> None: ...


class _Handle(ctypes.Structure):
    """cudaIpcMemHandle_t, which goes by value."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class CudaRuntime:
    """libcudart, and libcuda for the one thing that it does not tell: how large an allocation is."""

    def __init__(self, runtime: str, driver: str = _DRIVER) -> None:
        """Raise OSError or AttributeError when the libraries are not there, or not what their names say."""
        self._runtime = ctypes.CDLL(runtime)
        self._driver = ctypes.CDLL(driver)
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._runtime.cudaSetDevice.argtypes = (ctypes.c_int,)
        self._runtime.cudaIpcOpenMemHandle.argtypes = (ctypes.POINTER(pointer), _Handle, ctypes.c_uint)
        self._runtime.cudaIpcCloseMemHandle.argtypes = (pointer,)
        self._runtime.cudaMemcpy.argtypes = (pointer, pointer, size, ctypes.c_int)
        self._runtime.cudaGetErrorString.argtypes = (ctypes.c_int,)
        self._runtime.cudaGetErrorString.restype = ctypes.c_char_p
        self._driver.cuMemGetAddressRange_v2.argtypes = (
            ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(size), ctypes.c_uint64,
        )  # fmt: skip

    def open_handle(self, handle: bytes, device: int) -> int:
        """Map another process's allocation."""
        self._use(device)
        pointer, by_value = ctypes.c_void_p(), _Handle.from_buffer_copy(handle)
        self._check(
            self._runtime.cudaIpcOpenMemHandle(ctypes.byref(pointer), by_value, _LAZY_PEER_ACCESS),
            "cudaIpcOpenMemHandle",
        )
        return pointer.value or 0

    def close_handle(self, pointer: int, device: int) -> None:
        """Unmap it."""
        self._use(device)
        self._check(self._runtime.cudaIpcCloseMemHandle(pointer), "cudaIpcCloseMemHandle")

    def size(self, pointer: int, device: int) -> int:
        """Give the bytes from `pointer` to the end of its allocation."""
        self._use(device)
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        status = self._driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), pointer)
        if status:
            raise CudaError(f"cuMemGetAddressRange: {status}")
        return base.value + size.value - pointer

    def read(self, pointer: int, device: int, into: memoryview) -> None:
        """Copy from the device."""
        self._use(device)
        place = (ctypes.c_char * len(into)).from_buffer(into)
        self._check(self._runtime.cudaMemcpy(ctypes.addressof(place), pointer, len(into), _TO_HOST), "cudaMemcpy")

    def write(self, pointer: int, device: int, raw: bytes | memoryview) -> None:
        """Copy to the device."""
        self._use(device)
        # ctypes takes no address of what is read only
        kept = raw if isinstance(raw, bytes) else raw.tobytes()
        self._check(self._runtime.cudaMemcpy(pointer, kept, len(kept), _TO_DEVICE), "cudaMemcpy")

    def _use(self, device: int) -> None:
        # a thread has a current device of its own
        self._check(self._runtime.cudaSetDevice(device), "cudaSetDevice")

    def _check(self, status: int, call: str) -> None:
        if status:
            said = self._runtime.cudaGetErrorString(status) or b""
            raise CudaError(f"{call}: {status} {said.decode('latin-1')}")


def find_runtime() -> Runtime | None:
    """Load the CUDA runtime, where the loader finds one or the process has it already."""
    for name in _LIBRARIES:
        try:
            return CudaRuntime(name)
        except (OSError, AttributeError):
            continue
    return None


class _CudaRegion:
    """One mapped allocation, unmapped when nobody holds it any more."""

    kind = CUDA

    def __init__(
        self, name: str, device: int, byte_size: int, runtime: Runtime, pointer: int, raw_handle: bytes
    ) -> None:  # fmt: skip
        self.name = name
        self.byte_size = byte_size
        self._raw_handle = raw_handle
        self._device = device
        self._runtime = runtime
        self._pointer = pointer

    def described(self) -> dict[str, Any]:
        return {"name": self.name, "device_id": self._device, "byte_size": self.byte_size}

    def shared(self) -> tuple[dict[str, Any], list[int]]:
        # a handle is for any process; what it maps is for the one that has opened it
        return self.described() | {"raw_handle": self._raw_handle.hex()}, []

    def read(self, offset: int, into: memoryview) -> None:
        try:
            self._runtime.read(self._pointer + offset, self._device, into)
        except CudaError as error:
            raise self._failed("read", error) from None

    def write(self, offset: int, raw: bytes | memoryview) -> None:
        try:
            self._runtime.write(self._pointer + offset, self._device, raw)
        except CudaError as error:
            raise self._failed("write to", error) from None

    def _failed(self, doing: str, error: CudaError) -> InferError:
        logger.warning("unable to %s CUDA shared memory: %s", doing, error)
        return InferError(Code.INVALID, f"unable to {doing} shared memory region: '{self.name}'")

    def __del__(self) -> None:
        try:
            self._runtime.close_handle(self._pointer, self._device)
        except CudaError as error:
            logger.warning("unable to unmap CUDA shared memory: %s", error)


class CudaRegions:
    """CUDA shared memory. `runtime` is what answers for CUDA; None: to be found when it is first asked for."""

    def __init__(self, regions: Regions, runtime: Runtime | None = None) -> None:
        self._regions = regions
        self._runtime = runtime
        self._looked = runtime is not None

    def register(self, name: str, raw_handle: bytes, device_id: int, byte_size: int) -> None:
        """Register the first `byte_size` bytes of an allocation.

        Raises: InferError (UNSUPPORTED: off, or no CUDA here; ALREADY_EXISTS, INVALID, OVERLOADED).
        """
        self._regions.check_new(name)
        runtime = self._found(name)
        if len(raw_handle) != HANDLE_BYTES:
            raise InferError(Code.INVALID, "'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t")
        try:
            if byte_size <= 0 or not 0 <= device_id <= _MAX_DEVICE:
                raise CudaError(f"{byte_size} bytes on device {device_id}")
            pointer = runtime.open_handle(raw_handle, device_id)
            try:
                if runtime.size(pointer, device_id) < byte_size:
                    raise CudaError(f"the allocation has less than {byte_size} bytes")
            except CudaError:
                runtime.close_handle(pointer, device_id)
                raise
        except CudaError as error:
            logger.warning("failed to register CUDA shared memory: %s", error)
            text = f"failed to register shared memory region '{name}': invalid args"
            raise InferError(Code.INVALID, text) from None
        region = _CudaRegion(name, device_id, byte_size, runtime, pointer, raw_handle)
        self._regions.add(region)

    def unregister(self, name: str = "") -> None:
        """Forget a region, or all CUDA regions. Raises: InferError (UNSUPPORTED)."""
        self._regions.drop(CUDA, name)

    def status(self, name: str = "") -> list[dict[str, Any]]:
        """Describe a region, or all CUDA regions. Raises: InferError (UNSUPPORTED, NOT_FOUND)."""
        return self._regions.listed(CUDA, name)

    def lease(self, name: str, offset: int, byte_size: int) -> Lease:
        """Lease a part of a region, of either kind. Raises: InferError."""
        return self._regions.lease(name, offset, byte_size)

    def _found(self, name: str) -> Runtime:
        if not self._looked:
            self._looked = True
            self._runtime = find_runtime()
        if self._runtime is None:
            text = (
                f"failed to register CUDA shared memory region: '{name}', GPUs not supported: no CUDA runtime was found"
            )
            raise InferError(Code.UNSUPPORTED, text)
        return self._runtime
