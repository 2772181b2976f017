"""Pins: clients' memory on the host from which a device copies by itself. One for each Runtime; asked by its Bindings.

A copy from pages that may go is the host's to make, into memory that is pinned. Pinning a client's own spares that: its
pages are the device's until they are let go, whatever becomes of the file that they were of.
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

MOST_BYTES = 1 << 32
"""So much is pinned at once: pages stay though their client has let go of them, and holes in a file are filled."""
PAGE_BYTES = mmap.PAGESIZE

logger = logging.getLogger("penstock.backends")


class Pinning(Protocol):
    """The part of the CUDA runtime that is used here."""

    def pin(self, pointer: int, size: int, device: int) -> None: ...
    def unpin(self, pointer: int, device: int) -> None: ...


class Pins:
    """Memory is pinned as a whole when it is first asked for, and let go just before it is unmapped.

    What cannot be pinned is not tried again. Threads: any; the first to ask for some memory waits while it is pinned,
    so that must not be an event loop.
    """

    def __init__(self, runtime: Pinning, most_bytes: int = MOST_BYTES) -> None:
        self._runtime = runtime
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._sizes: dict[int, int] = {}
        """The bytes that were pinned of what is at an address; 0: it cannot be."""

    def has(self, memory: DeviceMemory, device: int) -> bool:
        """Tell whether devices copy from a memory on the host by themselves; `device` is the one that asks."""
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
        if sum(tuple(self._sizes.values())) + size > self._most_bytes:
            size = 0
        else:
            try:
                self._runtime.pin(start, size, device)
            except CudaError as error:
                # in words: the error itself would hold the memory for as long as somebody has the record
                why = str(error)
                logger.warning("shared memory of %d bytes cannot be pinned, so the host copies it: %s", size, why)
                size = 0
        # weak references are told before the memory's own members go, and with them what unmaps it
        weakref.finalize(memory, self._forget, pointer, start, device).atexit = False
        self._sizes[pointer] = size
        return size

    def _forget(self, pointer: int, start: int, device: int) -> None:
        """Let go of memory that nobody holds any more. Takes no lock: it may come at any moment, on any thread."""
        if self._sizes.get(pointer):
            with suppress(CudaError):
                self._runtime.unpin(start, device)
        self._sizes.pop(pointer, None)
