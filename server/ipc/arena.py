"""Arena and Mirror: unnamed shared memory in which one process writes tensors and another reads them.

The writer has an Arena, the reader its Mirror, over the same memfds, which are sent over their Unix socket. Only
`wire.py` uses them. Threads: the holder of the wire; `Slot` buffers may be freed on any thread.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any

MIN_SLOT_BYTES = 16 << 10
SEGMENT_BYTES = 4 << 20
"""Each mapping needs a descriptor on both sides, so segments are large; untouched memory costs nothing."""
MAX_IDLE_BYTES = 64 << 20
"""Idle segments are returned to the system while an Arena has more unleased memory than this."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_MAX_SEGMENTS = 1 << 16
_MAX_MAPPED = 4096
"""The limit per writer: the kernel allows a process 65,530 mappings, and a process that runs out dies."""

Lease = tuple[int, mmap.mmap, int]
"""A slot's number, its memory, and its offset there."""


class WireError(Exception):
    """The other process has sent something invalid; the connection must end."""


def slot_size(nbytes: int) -> int:
    """Return the slot size for `nbytes`: a power of two, or above SEGMENT_BYTES a multiple of an eighth of one."""
    power: int = 1 << (nbytes - 1).bit_length()
    if power <= SEGMENT_BYTES:
        return max(MIN_SLOT_BYTES, power)
    step = power >> 4
    return (nbytes + step - 1) // step * step


def seal(fd: int) -> None:
    """Fix the size of a memfd: if it shrank, its readers would crash."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)


class _Segment:
    """One memfd, divided into slots of one size. `free` holds the indices of unleased slots.

    The Arena owns `fd` until the wire takes it to send it.
    """

    __slots__ = ("count", "fd", "free", "leased", "memory", "number", "slot_bytes")

    def __init__(self, number: int, slot_bytes: int) -> None:
        self.number = number
        self.slot_bytes = slot_bytes
        self.count = max(1, SEGMENT_BYTES // slot_bytes)
        size = self.count * slot_bytes
        self.fd = os.memfd_create("penstock", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size)
            seal(self.fd)
            self.memory = mmap.mmap(self.fd, size)
        except BaseException:
            os.close(self.fd)
            raise
        self.free = list(range(self.count))[::-1]
        self.leased = bytearray(self.count)

    @property
    def idle(self) -> bool:
        """Whether none of its slots is leased."""
        return len(self.free) == self.count


class Arena:
    """The writer's side: leases slots, and gets them back when the reader has released them.

    Invariants: a slot has one lease at a time. `leased_bytes` and `total_bytes` count whole slots and segments, and
    `total_bytes` never exceeds `limit_bytes`. `new_segments` holds new segments, and `removed_segments` removed ones,
    until the wire has announced them; a number may be in both, if a new segment reuses it.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.total_bytes = 0
        self.leased_bytes = 0
        self.new_segments: list[_Segment] = []
        self.removed_segments: list[int] = []
        self._segments: dict[int, _Segment] = {}
        self._available: dict[int, list[_Segment]] = {}

    @property
    def leases(self) -> int:
        """The number of leased slots."""
        return sum(segment.count - len(segment.free) for segment in self._segments.values())

    def lease(self, nbytes: int) -> Lease | None:
        """Lease a slot for `nbytes`, at least 1; None if there is no room."""
        slot_bytes = slot_size(nbytes)
        segments = self._available.setdefault(slot_bytes, [])
        if not segments and not self._grow(slot_bytes, segments):
            return None
        segment = segments[-1]
        index = segment.free.pop()
        segment.leased[index] = 1
        if not segment.free:
            segments.pop()
        self.leased_bytes += slot_bytes
        return segment.number << 16 | index, segment.memory, index * slot_bytes

    def _grow(self, slot_bytes: int, segments: list[_Segment]) -> bool:
        size = max(SEGMENT_BYTES, slot_bytes)
        if self.total_bytes + size > self.limit_bytes:
            self._shrink(self.limit_bytes - size)
        if self.total_bytes + size > self.limit_bytes or len(self._segments) >= _MAX_SEGMENTS:
            return False
        number = next(number for number in range(_MAX_SEGMENTS) if number not in self._segments)
        try:
            segment = _Segment(number, slot_bytes)
        except OSError:
            return False
        self._segments[number] = segment
        self.new_segments.append(segment)
        self.total_bytes += size
        segments.append(segment)
        return True

    def release(self, slot: int) -> None:
        """Free a slot. Raises: WireError if it was not leased."""
        segment = self._segments.get(slot >> 16)
        index = slot & 0xFFFF
        if segment is None or index >= segment.count or not segment.leased[index]:
            raise WireError(f"slot {slot:#x} was not leased")
        segment.leased[index] = 0
        segment.free.append(index)
        self.leased_bytes -= segment.slot_bytes
        if len(segment.free) == 1:
            self._available[segment.slot_bytes].append(segment)
        if segment.idle and self.total_bytes - self.leased_bytes > MAX_IDLE_BYTES:
            self._drop(segment)

    def _shrink(self, max_bytes: int) -> None:
        for segment in list(self._segments.values()):
            if self.total_bytes <= max_bytes:
                return
            if segment.idle:
                self._drop(segment)

    def _drop(self, segment: _Segment) -> None:
        del self._segments[segment.number]
        self._available[segment.slot_bytes].remove(segment)
        self.total_bytes -= segment.count * segment.slot_bytes
        self.removed_segments.append(segment.number)

    def close(self) -> None:
        """Release all memory."""
        for segment in self.new_segments:
            os.close(segment.fd)
        self.new_segments.clear()
        self.removed_segments.clear()
        self._segments.clear()
        self._available.clear()
        self.total_bytes = self.leased_bytes = 0


def _ignore_freed() -> None:
    """Ignore a freed slot: the Mirror is closed."""


class Mirror:
    """The reader's side: buffers over leased slots, each released when its last view is freed.

    `freed` holds the slots to report to the writer; `on_free` is called, on any thread, when one is added.
    """

    def __init__(self, on_free: Callable[[], None]) -> None:
        self.freed: deque[int] = deque()
        self.on_free = on_free
        self._segments: dict[int, tuple[mmap.mmap, int]] = {}

    def map(self, number: int, slot_bytes: int, fd: int) -> None:
        """Map an announced segment; `fd` is closed. Raises: WireError."""
        try:
            unknown = number < _MAX_SEGMENTS and number not in self._segments and len(self._segments) < _MAX_MAPPED
            if not unknown or slot_bytes < MIN_SLOT_BYTES or slot_bytes != slot_size(slot_bytes):
                raise WireError(f"segment {number} with slots of {slot_bytes} bytes")
            size = max(SEGMENT_BYTES, slot_bytes)
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS or os.fstat(fd).st_size != size:
                raise WireError("a segment that is not sealed, or not of its size")
            self._segments[number] = mmap.mmap(fd, size), slot_bytes
        except OSError as error:
            raise WireError(f"a segment that cannot be mapped: {error.strerror}") from error
        finally:
            os.close(fd)

    def drop(self, number: int) -> None:
        """Forget a segment; existing views stay valid. Raises: WireError."""
        if self._segments.pop(number, None) is None:
            raise WireError(f"segment {number} was not announced")

    def view(self, slot: int, nbytes: int) -> Any:
        """Return a buffer over a slot, which is freed with the last view of the buffer. Raises: WireError."""
        memory, slot_bytes = self._segments.get(slot >> 16, (None, 0))
        offset = (slot & 0xFFFF) * slot_bytes
        if memory is None or nbytes > slot_bytes or offset + slot_bytes > len(memory):
            raise WireError(f"slot {slot:#x} of {nbytes} bytes is nowhere")
        buffer = _slot_type(slot_bytes).from_buffer(memory, offset)
        buffer.slot, buffer.mirror = slot, self
        return buffer

    def close(self) -> None:
        """Forget all segments, and stop calling `on_free`.

        The callback's owner may hold tensors that refer back to it, a cycle that the collector cannot see in numpy
        arrays.
        """
        self._segments.clear()
        self.on_free = _ignore_freed


@cache
def _slot_type(slot_bytes: int) -> type[Any]:
    """Return the buffer type for a size. All Mirrors share it: a type is a cycle, which only the collector frees."""

    def end(buffer: Any) -> None:
        buffer.mirror.freed.append(buffer.slot)
        buffer.mirror.on_free()

    return type("Slot", (ctypes.c_char * slot_bytes,), {"__del__": end})
