"""Pins: clients' host memory pinned so that a device copies from it. One per Runtime, queried by its Bindings.

The host must copy from pageable memory, into pinned memory. Pinning the client's own memory avoids that: its pages then
stay until they are unpinned, whatever becomes of their file.
"""

from __future__ import annotations

import logging
import mmap
import threading
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from .cuda_calls import CudaError

if TYPE_CHECKING:
    from .device_array import DeviceMemory

MAX_BYTES = 1 << 32
"""The most that is pinned at once: pages stay even if their client has released them, and holes in a file are
filled."""
PAGE_BYTES = mmap.PAGESIZE

logger = logging.getLogger("penstock.backends")


class Pinning(Protocol):
    """The part of the CUDA runtime that is used here."""

    def pin(self, pointer: int, size: int, device: int) -> None: ...
    def unpin(self, pointer: int, device: int) -> None: ...


class Pins:
    """Memory is pinned as a whole when it is first queried, and unpinned just before it is unmapped.

    A failed attempt is not repeated. Threads: any; the first query for some memory waits while it is pinned, so it must
    not be made on an event loop.
    """

    def __init__(self, runtime: Pinning, max_bytes: int = MAX_BYTES) -> None:
        self._runtime = runtime
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._sizes: dict[int, int] = {}
        """The bytes pinned at an address; 0 if they cannot be."""

    def ensure_pinned(self, memory: DeviceMemory, device: int) -> bool:
        """Whether devices can copy from a host memory themselves; `device` is the one that asks."""
        if not memory.pointer:
            return False
        size = self._sizes.get(memory.pointer)
        if size is None:
            with self._lock:
                size = self._sizes.get(memory.pointer)
                if size is None:
                    size = self._pin(memory, device)
        return size > 0

    def _pin(self, memory: DeviceMemory, device: int) -> int:
        pointer = memory.pointer
        start = pointer - pointer % PAGE_BYTES
        pages = -(-(pointer + memory.byte_size - start) // PAGE_BYTES)
        size = pages * PAGE_BYTES
        if sum(tuple(self._sizes.values())) + size > self._max_bytes:
            size = 0
        else:
            try:
                self._runtime.pin(start, size, device)
            except CudaError as error:
                # as text: a logged exception would hold the memory for as long as the record exists
                reason = str(error)
                logger.warning(
                    "%d bytes of shared memory cannot be pinned and are copied by the host instead: %s", size, reason
                )
                size = 0
        # weak references run before the memory's own members, including the one that unmaps it, are released
        weakref.finalize(memory, self._unpin, pointer, start, device).atexit = False
        self._sizes[pointer] = size
        return size

    def _unpin(self, pointer: int, start: int, device: int) -> None:
        """Unpin memory that is no longer referenced. Takes no lock: it may run at any moment, on any thread."""
        if self._sizes.get(pointer):
            with suppress(CudaError):
                self._runtime.unpin(start, device)
        self._sizes.pop(pointer, None)
