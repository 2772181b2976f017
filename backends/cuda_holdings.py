"""The CUDA resources of one Binding: streams, events, device memory and pinned host memory."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Hashable
from contextlib import suppress

import numpy as np

from .backend import Array
from .cuda import OUT_OF_MEMORY, CudaError, Runtime, refusal
from .errors import RETRY_AFTER_NS, Code, OutOfMemory

_GRAIN_BYTES = 256


class Holdings:
    """Created one by one, freed together. Every method that creates something raises InferError."""

    def __init__(self, runtime: Runtime, device: int) -> None:
        self.bytes = 0
        """The bytes allocated on the device."""
        self._runtime = runtime
        self._device = device
        self._slabs: dict[Hashable, tuple[int, int]] = {}
        self._streams: list[int] = []
        self._events: list[int] = []

    def stream(self) -> int:
        """Create a stream."""
        self._streams.append(self._made(self._runtime.stream))
        return self._streams[-1]

    def event(self) -> int:
        """Create an event."""
        self._events.append(self._made(self._runtime.event))
        return self._events[-1]

    def slab(self, name: Hashable, size: int) -> int:
        """Return the slab of a name, with at least `size` bytes; a smaller one is replaced.

        Nothing on the device may be using it then.
        """
        pointer, has = self._slabs.get(name, (0, 0))
        if pointer and size <= has:
            return pointer
        if pointer:
            del self._slabs[name]
            self.bytes -= has
            self._try(lambda: self._runtime.free(pointer, self._device))
        size = max(size, _GRAIN_BYTES)
        pointer = self._made(lambda device: self._runtime.allocate(size, device), size)
        self._slabs[name] = pointer, size
        self.bytes += size
        return pointer

    def pinned(self, size: int) -> Array:
        """Return zeroed pinned host memory; it is freed with its last view."""
        size = max(size, _GRAIN_BYTES)
        pointer = self._made(lambda device: self._runtime.allocate_pinned(size, device), size, pinned=True)
        raw = (ctypes.c_uint8 * size).from_address(pointer)
        ctypes.memset(pointer, 0, size)
        # an array still in use must not point to freed memory
        weakref.finalize(raw, _free_pinned, self._runtime, pointer, self._device).atexit = False
        return np.frombuffer(memoryview(raw), np.uint8)

    def drain(self, *streams: int) -> CudaError | None:
        """Wait until nothing is under way, on these streams too; return the last error."""
        met = None
        for stream in (*streams, *self._streams):
            try:
                if stream:
                    self._runtime.drain(stream)
            except CudaError as error:
                met = error
        return met

    def free(self) -> None:
        """Free everything, once, as far as a lost device permits. Pinned memory is freed with its views."""
        self.drain()
        slabs, events, streams = self._slabs, self._events, self._streams
        self._slabs, self._events, self._streams, self.bytes = {}, [], [], 0
        for pointer, _ in slabs.values():
            self._try(lambda pointer=pointer: self._runtime.free(pointer, self._device))  # type: ignore[misc]
        for event in events:
            self._try(lambda event=event: self._runtime.end_event(event, self._device))  # type: ignore[misc]
        for stream in streams:
            self._try(lambda stream=stream: self._runtime.end_stream(stream, self._device))  # type: ignore[misc]

    def _made(self, make: Callable[[int], int], size: int = 0, *, pinned: bool = False) -> int:
        try:
            return make(self._device)
        except CudaError as error:
            if error.status == OUT_OF_MEMORY and size:
                raise OutOfMemory(Code.OVERLOADED, self._too_big(size, pinned), RETRY_AFTER_NS) from error
            raise refusal(error) from error

    def _too_big(self, size: int, pinned: bool) -> str:
        if pinned:
            return f"{size} bytes of pinned host memory cannot be allocated"
        try:
            free, total = self._runtime.memory(self._device)
        except CudaError:
            return f"{size} bytes do not fit in the memory of cuda:{self._device}"
        return f"{size} bytes do not fit in the memory of cuda:{self._device}: {free} of its {total} bytes are free"

    def _try(self, free: Callable[[], None]) -> None:
        with suppress(CudaError):
            free()


def _free_pinned(runtime: Runtime, pointer: int, device: int) -> None:
    with suppress(CudaError):
        runtime.free_pinned(pointer, device)
