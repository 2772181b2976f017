"""The CUDA runtime by ctypes: memory, copies, streams, events and memory shared between processes.

Used by the CUDA Binding and by CUDA shared memory. Importing this loads no library: `find_runtime` does.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Protocol

from .cuda_calls import DRIVER, HANDLE_BYTES, CudaError, CudaLibraries, Handle, Int, Size
from .cuda_pins import Pins
from .errors import RETRY_AFTER_NS, Code, DeviceLost, InferError, OutOfMemory

__all__ = [
    "HANDLE_BYTES",
    "CudaError",
    "CudaRuntime",
    "Runtime",
    "find_runtime",
    "to_infer_error",
    "unavailable_reason",
]

OUT_OF_MEMORY = 2
NOT_READY = 600
LOST_STATUSES = frozenset(
    {46, 100, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911, 999}
)
"""CUDA's errors after which every call of the process's context fails: devices unavailable, none, ECC, NVLink, illegal
address, time limit, context gone, assert, broken code, launch. Source: cudaError_t in CUDA's runtime API: the errors
for which it says "the process must be terminated and relaunched", and those of an absent device."""
UNAVAILABLE_STATUSES = frozenset({3, 34, 35, 36, 46, 100, 101, 103, 209, *range(802, 810)})
"""CUDA's errors at load which mean that the device cannot be used at all: no driver or one that is too old, no device,
exclusive use by another process, refusal by a multi-process service (MPS), no kernels for so old a GPU."""

_LIBRARY_NAMES = ("libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0", "libcudart.so")
_MAPS = Path("/proc/self/maps")
_LOADED_LIBRARY = re.compile(r"/.*/libcudart(?:-[0-9a-f]+)?\.so[.\d]*$")
_LAZY_PEER_ACCESS = 1
_TO_DEVICE, _TO_HOST, _INFER_DIRECTION = 1, 2, 4
_PORTABLE = 1
_DEFAULT_STREAM = 0
_NON_BLOCKING = 1
_BLOCKING_SYNC = 1
_CAPABILITY_ATTRIBUTES = 75, 76
_NAME_BYTES = 256
_BUS_ID_BYTES = 32


def to_infer_error(error: CudaError) -> InferError:
    """Make the InferError of a run or a load that met an error: OutOfMemory, DeviceLost, else INTERNAL."""
    if error.status == OUT_OF_MEMORY:
        return OutOfMemory(Code.OVERLOADED, str(error), RETRY_AFTER_NS)
    if error.status in LOST_STATUSES:
        return DeviceLost(Code.NOT_READY, str(error))
    return InferError(Code.INTERNAL, str(error))


class Runtime(Protocol):
    """The part of the CUDA runtime that is used.

    Pointers, streams and events are addresses; sizes are bytes. All raise CudaError. Threads: any; no call that may
    wait holds the GIL. A thread has a current device: calls that take a device set it. `pins` is the memory that has
    been pinned.
    """

    pins: Pins

    def device_count(self) -> int: ...
    def pci_bus_id(self, device: int) -> str: ...
    def device_name(self, device: int) -> str: ...
    def capability(self, device: int) -> str: ...
    def memory_info(self, device: int) -> tuple[int, int]: ...
    def set_device(self, device: int) -> None: ...

    def allocate(self, size: int, device: int) -> int: ...
    def free(self, pointer: int, device: int) -> None: ...
    def allocate_pinned(self, size: int, device: int) -> int: ...
    def free_pinned(self, pointer: int, device: int) -> None: ...
    def pin(self, pointer: int, size: int, device: int) -> None: ...
    def unpin(self, pointer: int, device: int) -> None: ...

    def create_stream(self, device: int) -> int: ...
    def destroy_stream(self, stream: int, device: int) -> None: ...
    def create_event(self, device: int) -> int: ...
    def destroy_event(self, event: int, device: int) -> None: ...
    def copy(self, to: int, source: int, size: int, stream: int, *, pageable: bool = False) -> None: ...
    def record_event(self, event: int, stream: int) -> None: ...
    def wait_event(self, stream: int, event: int) -> None: ...
    def is_event_done(self, event: int) -> bool: ...
    def synchronize_event(self, event: int) -> None: ...
    def synchronize_stream(self, stream: int) -> None: ...
    def elapsed_ns(self, first: int, last: int) -> int: ...

    def export_handle(self, pointer: int, device: int) -> bytes: ...
    def open_handle(self, handle: bytes, device: int) -> int: ...
    def close_handle(self, pointer: int, device: int) -> None: ...
    def bytes_to_end(self, pointer: int, device: int) -> int: ...
    def read(self, pointer: int, device: int, into: memoryview) -> None: ...
    def write(self, pointer: int, device: int, raw: bytes | memoryview) -> None: ...


class CudaRuntime(CudaLibraries):
    """libcudart, plus libcuda for what that lacks: the name of a device, and the size of an allocation."""

    def __init__(self, runtime: str, driver: str = DRIVER) -> None:
        super().__init__(runtime, driver)
        self.pins = Pins(self)
        self._contexts: set[int] = set()

    def device_count(self) -> int:
        """Count the devices that this process may use (CUDA_VISIBLE_DEVICES)."""
        found = Int()
        self.invoke("cudaGetDeviceCount", found)
        return found.value

    def pci_bus_id(self, device: int) -> str:
        """Return a device's PCI bus id, such as "0000:65:00.0". Creates no context on it."""
        text = ctypes.create_string_buffer(_BUS_ID_BYTES)
        self.invoke("cudaDeviceGetPCIBusId", text, _BUS_ID_BYTES, device)
        return text.value.decode("latin-1")

    def device_name(self, device: int) -> str:
        """Return a device's name, such as "NVIDIA H200". Creates no context on it."""
        number, text = Int(), ctypes.create_string_buffer(_NAME_BYTES)
        self.invoke("cuInit", 0)
        self.invoke("cuDeviceGet", number, device)
        self.invoke("cuDeviceGetName", text, _NAME_BYTES, number)
        return text.value.decode("latin-1")

    def capability(self, device: int) -> str:
        """Return a device's compute capability, such as "9.0". Creates no context on it."""
        major, minor = Int(), Int()
        for component, attribute in zip((major, minor), _CAPABILITY_ATTRIBUTES, strict=True):
            self.invoke("cudaDeviceGetAttribute", component, attribute, device)
        return f"{major.value}.{minor.value}"

    def memory_info(self, device: int) -> tuple[int, int]:
        """Return the free and the total bytes, whoever uses the rest."""
        self.set_device(device)
        free, total = Size(), Size()
        self.invoke("cudaMemGetInfo", free, total)
        return free.value, total.value

    def set_device(self, device: int) -> None:
        """Make a device this thread's current one. Calls that take no device use it, or device 0 if none was set."""
        if device in self._contexts:
            self.invoke_holding_gil("cudaSetDevice", device)
        else:
            self.invoke("cudaSetDevice", device)  # the first call creates a context, which takes a while
            self._contexts.add(device)

    def allocate(self, size: int, device: int) -> int:
        """Allocate device memory, aligned to at least 256 bytes."""
        self.set_device(device)
        return self.create("cudaMalloc", size)

    def free(self, pointer: int, device: int) -> None:
        """Free memory from `allocate`. Waits for all current work on the device."""
        self.set_device(device)
        self.invoke("cudaFree", pointer)

    def allocate_pinned(self, size: int, device: int) -> int:
        """Allocate page-locked host memory, from which a device copies without the CPU."""
        self.set_device(device)
        return self.create("cudaHostAlloc", size, _PORTABLE)

    def free_pinned(self, pointer: int, device: int) -> None:
        """Free memory from `allocate_pinned`. No copy of it may be under way."""
        self.set_device(device)
        self.invoke("cudaFreeHost", pointer)

    def pin(self, pointer: int, size: int, device: int) -> None:
        """Page-lock mapped memory, so that devices copy from it without the CPU. Fails if pages are missing."""
        self.set_device(device)
        self.invoke("cudaHostRegister", pointer, size, _PORTABLE)

    def unpin(self, pointer: int, device: int) -> None:
        """Unpin memory by its start address. No copy of it may be under way."""
        self.set_device(device)
        self.invoke("cudaHostUnregister", pointer)

    def create_stream(self, device: int) -> int:
        """Create a stream that does not wait for the default one."""
        self.set_device(device)
        return self.create("cudaStreamCreateWithFlags", _NON_BLOCKING)

    def destroy_stream(self, stream: int, device: int) -> None:
        """Destroy a stream. Work that it still holds is completed first."""
        self.set_device(device)
        self.invoke("cudaStreamDestroy", stream)

    def create_event(self, device: int) -> int:
        """Create an event that records the time, and that is waited for without a spinning CPU."""
        self.set_device(device)
        return self.create("cudaEventCreateWithFlags", _BLOCKING_SYNC)

    def destroy_event(self, event: int, device: int) -> None:
        """Destroy an event."""
        self.set_device(device)
        self.invoke("cudaEventDestroy", event)

    def copy(self, to: int, source: int, size: int, stream: int, *, pageable: bool = False) -> None:
        """Queue a copy between any memory of devices or the host. `pageable`: some of it is unpinned host memory.

        In that case the host takes part, and waits for the work in the stream.
        """
        (self.invoke if pageable else self.invoke_holding_gil)(
            "cudaMemcpyAsync", to, source, size, _INFER_DIRECTION, stream
        )

    def record_event(self, event: int, stream: int) -> None:
        """Record an event, which completes when the stream has done everything queued so far."""
        self.invoke_holding_gil("cudaEventRecord", event, stream)

    def wait_event(self, stream: int, event: int) -> None:
        """Have a stream continue only once an event has completed."""
        self.invoke_holding_gil("cudaStreamWaitEvent", stream, event, 0)

    def is_event_done(self, event: int) -> bool:
        """Whether an event has completed. Raises: also errors of the work before it."""
        try:
            self.invoke_holding_gil("cudaEventQuery", event)
        except CudaError as error:
            if error.status == NOT_READY:
                return False
            raise
        return True

    def synchronize_event(self, event: int) -> None:
        """Wait until an event has completed. Raises: also errors of the work before it."""
        self.invoke("cudaEventSynchronize", event)

    def synchronize_stream(self, stream: int) -> None:
        """Wait until a stream has done everything. Raises: also errors of its work."""
        self.invoke("cudaStreamSynchronize", stream)

    def elapsed_ns(self, first: int, last: int) -> int:
        """Return the time between two completed events, to about half a microsecond."""
        found = ctypes.c_float()
        self.invoke_holding_gil("cudaEventElapsedTime", found, first, last)
        return round(found.value * 1e6)

    def export_handle(self, pointer: int, device: int) -> bytes:
        """Return the handle by which another process maps memory from `allocate`."""
        self.set_device(device)
        handle = Handle()
        self.invoke("cudaIpcGetMemHandle", handle, pointer)
        return bytes(handle)

    def open_handle(self, handle: bytes, device: int) -> int:
        """Map another process's allocation."""
        self.set_device(device)
        return self.create("cudaIpcOpenMemHandle", Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)

    def close_handle(self, pointer: int, device: int) -> None:
        """Unmap it."""
        self.set_device(device)
        self.invoke("cudaIpcCloseMemHandle", pointer)

    def bytes_to_end(self, pointer: int, device: int) -> int:
        """Return the bytes from `pointer` to the end of its allocation."""
        self.set_device(device)
        base, size = ctypes.c_uint64(), Size()
        self.invoke("cuMemGetAddressRange_v2", base, size, pointer)
        return base.value + size.value - pointer

    def read(self, pointer: int, device: int, into: memoryview) -> None:
        """Copy from the device, and wait."""
        self.set_device(device)
        destination = (ctypes.c_char * len(into)).from_buffer(into)
        self.invoke("cudaMemcpy", ctypes.addressof(destination), pointer, len(into), _TO_HOST)

    def write(self, pointer: int, device: int, raw: bytes | memoryview) -> None:
        """Copy to the device, and wait."""
        self.set_device(device)
        # ctypes cannot take the address of a read-only buffer
        content = raw if isinstance(raw, bytes) else raw.tobytes()
        self.invoke("cudaMemcpy", pointer, content, len(content), _TO_DEVICE)
        # it returns when the bytes have been read, which is before they are on the device
        self.synchronize_stream(_DEFAULT_STREAM)


def find_runtime() -> Runtime | None:
    """Load the CUDA runtime: the one already in this process, the loader's, or pip's (nvidia-cuda-runtime).

    Once per process. Touches no device.
    """
    found = _load_runtime()
    return None if isinstance(found, str) else found


def unavailable_reason() -> str:
    """Say why `find_runtime` returns None; "" if it does not."""
    found = _load_runtime()
    return found if isinstance(found, str) else ""


@cache
def _load_runtime() -> CudaRuntime | str:
    try:
        ctypes.CDLL(DRIVER)
    except OSError as error:
        return f"no NVIDIA driver was found ({error})"
    first_error = ""
    for name in _candidates():
        try:
            return CudaRuntime(name, DRIVER)
        except (OSError, AttributeError) as error:
            first_error = first_error or str(error)
    return f"no CUDA runtime library could be loaded ({first_error})"


def _candidates() -> Iterator[str]:
    with suppress(OSError):
        for line in _MAPS.read_text("utf-8", "replace").splitlines():
            if (match := _LOADED_LIBRARY.search(line)) is not None:
                yield match[0]
    yield from _LIBRARY_NAMES
    for folder in sys.path:
        yield from sorted(map(str, Path(folder, "nvidia").glob("*/lib/libcudart.so*")), reverse=True)
