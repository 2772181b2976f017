"""CUDA regions: device memory that clients share through cudaIpcMemHandle, using the CUDA runtime if available.

`CudaRegions` registers regions in the same table as system regions (`regions.py`), so code that reads or writes a Lease
need not distinguish them. Models with Bindings on the same device access them in place (`regions.Lease.array`); for all
other models they are copied.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from penstock.backends.cuda import Runtime, find_runtime, unavailable_reason
from penstock.backends.cuda_calls import HANDLE_BYTES, CudaError
from penstock.backends.errors import Code, InferError

from .regions import CUDA, RegionKind, Regions

if TYPE_CHECKING:
    from penstock.backends.backend import Array

logger = logging.getLogger("penstock.server")


class _Mapping:
    """One allocation as mapped in this process; unmapped when no longer referenced."""

    def __init__(self, raw_handle: bytes, device: int, runtime: Runtime, pointer: int) -> None:
        self.raw_handle = raw_handle
        self.device = device
        self.runtime = runtime
        self.pointer = pointer

    def __del__(self) -> None:
        try:
            self.runtime.close_handle(self.pointer, self.device)
        except CudaError as error:
            logger.warning("unable to unmap CUDA shared memory: %s", error)


class _CudaRegion:
    """The first bytes of a mapped allocation. Implements `DeviceMemory`."""

    kind = CUDA

    def __init__(self, name: str, byte_size: int, mapping: _Mapping) -> None:
        self.name = name
        self.byte_size = byte_size
        self.device = mapping.device
        self.pointer = mapping.pointer
        self._mapping = mapping
        self._runtime = mapping.runtime

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "device_id": self.device, "byte_size": self.byte_size}

    def export(self) -> tuple[dict[str, Any], list[int]]:
        # a handle can be opened by any process; a mapping is valid only in the process that opened it
        return self.describe() | {"raw_handle": self._mapping.raw_handle.hex()}, []

    def check(self, end: int) -> None:
        """Accept any end: nobody can remove memory that is mapped here."""

    def read(self, offset: int, into: Array) -> None:
        try:
            self._runtime.read(self.pointer + offset, self.device, into.data.cast("B"))
        except CudaError as error:
            raise self.access_error("read", error) from None

    def write(self, offset: int, raw: bytes | memoryview) -> None:
        try:
            self._runtime.write(self.pointer + offset, self.device, raw)
        except CudaError as error:
            raise self.access_error("write to", error) from None

    def access_error(self, doing: str, error: Exception) -> InferError:
        logger.warning("unable to %s CUDA shared memory: %s", doing, error)
        return InferError(Code.INVALID, f"unable to {doing} shared memory region: '{self.name}'")


class CudaRegions(RegionKind):
    """CUDA shared memory. `runtime` is the CUDA runtime; None uses the one found on first use.

    An allocation registered under several names is mapped once: older drivers refuse to map it again, and newer ones
    count the mappings.
    """

    def __init__(self, regions: Regions, runtime: Runtime | None = None) -> None:
        super().__init__(CUDA, regions)
        self._runtime = runtime
        self._mappings: WeakValueDictionary[tuple[bytes, int], _Mapping] = WeakValueDictionary()

    def register(self, name: str, raw_handle: bytes, device_id: int, byte_size: int) -> None:
        """Register the first `byte_size` bytes of an allocation.

        Raises: InferError (UNSUPPORTED: disabled, or no CUDA here; ALREADY_EXISTS, INVALID, OVERLOADED).
        """
        self.regions.check_name(name)
        runtime = self._require_runtime(name)
        if len(raw_handle) != HANDLE_BYTES:
            raise InferError(Code.INVALID, "'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t")
        try:
            mapping = self._map(raw_handle, device_id, byte_size, runtime)
        except (CudaError, ValueError) as error:
            logger.warning("failed to register CUDA shared memory: %s", error)
            text = f"failed to register shared memory region '{name}': invalid args"
            raise InferError(Code.INVALID, text) from None
        self.regions.add(_CudaRegion(name, byte_size, mapping))

    def _map(self, raw_handle: bytes, device: int, byte_size: int, runtime: Runtime) -> _Mapping:
        """Map an allocation unless it is mapped already. Raises: CudaError, ValueError."""
        if byte_size <= 0 or not 0 <= device < runtime.device_count():
            raise ValueError(f"{byte_size} bytes on device {device}")
        key = (raw_handle, device)
        mapping = self._mappings.get(key)
        if mapping is None:
            mapping = _Mapping(raw_handle, device, runtime, runtime.open_handle(raw_handle, device))
        try:
            allocated = runtime.bytes_to_end(mapping.pointer, device)
            if allocated < byte_size:
                raise ValueError(f"the allocation has {allocated} bytes, not {byte_size}")
        except BaseException:
            # otherwise the exception's traceback would keep it mapped
            del mapping
            raise
        self._mappings[key] = mapping
        return mapping

    def _require_runtime(self, name: str) -> Runtime:
        runtime = self._runtime or find_runtime()
        if runtime is None:
            logger.warning("CUDA shared memory can not be registered: %s", unavailable_reason())
            text = (
                f"failed to register CUDA shared memory region: '{name}', GPUs not supported: no CUDA runtime was found"
            )
            raise InferError(Code.UNSUPPORTED, text)
        return runtime
