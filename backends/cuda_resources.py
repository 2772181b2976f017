"""The CUDA resources of one Binding: streams, events, device memory and pinned host memory."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Hashable
from contextlib import suppress

import numpy as np

from .backend import Array
from .cuda import OUT_OF_MEMORY, CudaError, Runtime, to_infer_error
from .errors import RETRY_AFTER_NS, Code, OutOfMemory

_MIN_BYTES = 256


class CudaResources:
    """Created one by one, freed together. Every method that creates something raises InferError."""

    def __init__(self, runtime: Runtime, device: int) -> None:
        self.bytes = 0
        """The bytes allocated on the device."""
        self._runtime = runtime
        self._device = device
        self._slabs: dict[Hashable, tuple[int, int]] = {}
        self._streams: list[int] = []
        self._events: list[int] = []

    def create_stream(self) -> int:
        """Create a stream."""
        self._streams.append(self._create(self._runtime.create_stream))
        return self._streams[-1]

    def create_event(self) -> int:
        """Create an event."""
        self._events.append(self._create(self._runtime.create_event))
        return self._events[-1]

    def device_slab(self, name: Hashable, size: int) -> int:
        """Return the slab of a name, with at least `size` bytes; a smaller one is replaced.

        Nothing on the device may be using it then.
        """
        pointer, allocated = self._slabs.get(name, (0, 0))
        if pointer and size <= allocated:
            return pointer
        if pointer:
            del self._slabs[name]
            self.bytes -= allocated
            self._free_quietly(lambda: self._runtime.free(pointer, self._device))
        size = max(size, _MIN_BYTES)
        pointer = self._create(lambda device: self._runtime.allocate(size, device), size)
        self._slabs[name] = pointer, size
        self.bytes += size
        return pointer

    def pinned_buffer(self, size: int) -> Array:
        """Return zeroed pinned host memory; it is freed with its last view."""
        size = max(size, _MIN_BYTES)
        pointer = self._create(lambda device: self._runtime.allocate_pinned(size, device), size, pinned=True)
        raw = (ctypes.c_uint8 * size).from_address(pointer)
        ctypes.memset(pointer, 0, size)
        # an array still in use must not point to freed memory
        weakref.finalize(raw, _free_pinned, self._runtime, pointer, self._device).atexit = False
        return np.frombuffer(memoryview(raw), np.uint8)

    def synchronize(self, *streams: int) -> CudaError | None:
        """Wait until nothing is under way, on these streams too; return the last error."""
        last_error = None
        for stream in (*streams, *self._streams):
            try:
                if stream:
                    self._runtime.synchronize_stream(stream)
            except CudaError as error:
                last_error = error
        return last_error

    def free_all(self) -> None:
        """Free everything, once, as far as a lost device permits. Pinned memory is freed with its views."""
        self.synchronize()
        slabs, events, streams = self._slabs, self._events, self._streams
        self._slabs, self._events, self._streams, self.bytes = {}, [], [], 0
        for pointer, _ in slabs.values():
            self._free_quietly(lambda pointer=pointer: self._runtime.free(pointer, self._device))  # type: ignore[misc]
        for event in events:
            self._free_quietly(lambda event=event: self._runtime.destroy_event(event, self._device))  # type: ignore[misc]
        for stream in streams:
            self._free_quietly(lambda stream=stream: self._runtime.destroy_stream(stream, self._device))  # type: ignore[misc]

    def _create(self, make: Callable[[int], int], size: int = 0, *, pinned: bool = False) -> int:
        try:
            return make(self._device)
        except CudaError as error:
            if error.status == OUT_OF_MEMORY and size:
                raise OutOfMemory(Code.OVERLOADED, self._out_of_memory_text(size, pinned), RETRY_AFTER_NS) from error
            raise to_infer_error(error) from error

    def _out_of_memory_text(self, size: int, pinned: bool) -> str:
        if pinned:
            return f"{size} bytes of pinned host memory cannot be allocated"
        try:
            free, total = self._runtime.memory_info(self._device)
        except CudaError:
            return f"{size} bytes do not fit in the memory of cuda:{self._device}"
        return f"{size} bytes do not fit in the memory of cuda:{self._device}: {free} of its {total} bytes are free"

    def _free_quietly(self, free: Callable[[], None]) -> None:
        with suppress(CudaError):
            free()


def _free_pinned(runtime: Runtime, pointer: int, device: int) -> None:
    with suppress(CudaError):
        runtime.free_pinned(pointer, device)
