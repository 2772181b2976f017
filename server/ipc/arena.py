"""Arena and Mirror: shared memory that one process writes tensors to and another reads, without a name to be found by.

An Arena is the writer's, its Mirror the reader's, over the same memfds, which travel over their Unix socket. Both are
used by `wire.py` only. Threads: whoever holds the wire; `Slot` buffers may die on any thread.
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

SMALLEST_BYTES = 16 << 10
SEGMENT_BYTES = 4 << 20
"""A mapping holds a descriptor on each side, so there should be few; memory that was never written to costs nothing."""
KEPT_BYTES = 64 << 20
"""Segments without a lease are given back to the system while an Arena has more than this that is not leased."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_MOST_SEGMENTS = 1 << 16
_MOST_MAPPED = 4096
"""Of one writer; the system gives a process 65,530 mappings, and one that has none left dies."""

Lease = tuple[int, mmap.mmap, int]
"""A slot's number, the memory that it is in, and its offset there."""


class WireError(Exception):
    """What the other process has sent cannot be: it is not to be spoken with any more."""


def slot_size(nbytes: int) -> int:
    """Give how large a slot for so many bytes is: a power of two, and beyond a segment an eighth of one at a time."""
    power: int = 1 << (nbytes - 1).bit_length()
    if power <= SEGMENT_BYTES:
        return max(SMALLEST_BYTES, power)
    step = power >> 4
    return (nbytes + step - 1) // step * step


def seal(fd: int) -> None:
    """Let a memfd keep its size: whoever reads it would die of one that shrinks under them."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)


class _Segment:
    """One memfd, divided into slots of one size. `free` are the indices of those that nobody has leased.

    `fd` is the Arena's until the wire has taken it to send it.
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
        """Whether nobody has leased anything of it."""
        return len(self.free) == self.count


class Arena:
    """The writer's side: slots are leased here, and come back when the reader has let go of them.

    Invariants: a slot has one lease at a time. `leased_bytes` and `total_bytes` count whole slots and segments, and
    `total_bytes` never passes `limit_bytes`. Segments that came are in `fresh` until the wire has announced them, and
    those that went in `dropped`; a number may be in both, of a segment that went and then of another that came.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.total_bytes = 0
        self.leased_bytes = 0
        self.fresh: list[_Segment] = []
        self.dropped: list[int] = []
        self._segments: dict[int, _Segment] = {}
        self._open: dict[int, list[_Segment]] = {}

    @property
    def leases(self) -> int:
        """How many slots are leased."""
        return sum(segment.count - len(segment.free) for segment in self._segments.values())

    def lease(self, nbytes: int) -> Lease | None:
        """Lease a slot of so many bytes, at least 1; None when there is no room."""
        slot_bytes = slot_size(nbytes)
        segments = self._open.setdefault(slot_bytes, [])
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
        if self.total_bytes + size > self.limit_bytes or len(self._segments) >= _MOST_SEGMENTS:
            return False
        number = next(number for number in range(_MOST_SEGMENTS) if number not in self._segments)
        try:
            segment = _Segment(number, slot_bytes)
        except OSError:
            return False
        self._segments[number] = segment
        self.fresh.append(segment)
        self.total_bytes += size
        segments.append(segment)
        return True

    def release(self, slot: int) -> None:
        """Take a slot back. Raises: WireError for one that was not leased."""
        segment = self._segments.get(slot >> 16)
        index = slot & 0xFFFF
        if segment is None or index >= segment.count or not segment.leased[index]:
            raise WireError(f"slot {slot:#x} was not leased")
        segment.leased[index] = 0
        segment.free.append(index)
        self.leased_bytes -= segment.slot_bytes
        if len(segment.free) == 1:
            self._open[segment.slot_bytes].append(segment)
        if segment.idle and self.total_bytes - self.leased_bytes > KEPT_BYTES:
            self._drop(segment)

    def _shrink(self, most_bytes: int) -> None:
        for segment in list(self._segments.values()):
            if self.total_bytes <= most_bytes:
                return
            if segment.idle:
                self._drop(segment)

    def _drop(self, segment: _Segment) -> None:
        del self._segments[segment.number]
        self._open[segment.slot_bytes].remove(segment)
        self.total_bytes -= segment.count * segment.slot_bytes
        self.dropped.append(segment.number)

    def close(self) -> None:
        """Let go of everything."""
        for segment in self.fresh:
            os.close(segment.fd)
        self.fresh.clear()
        self.dropped.clear()
        self._segments.clear()
        self._open.clear()
        self.total_bytes = self.leased_bytes = 0


def _nobody() -> None:
    """Be called for a slot of which nobody is told."""


class Mirror:
    """The reader's side: buffers over the slots that the writer has leased, let go of as the last view of them dies.

    `freed` are the slots to tell the writer of; `on_free` is called, on whichever thread, when there is one more.
    """

    def __init__(self, on_free: Callable[[], None]) -> None:
        self.freed: deque[int] = deque()
        self.on_free = on_free
        self._segments: dict[int, tuple[mmap.mmap, int]] = {}

    def map(self, number: int, slot_bytes: int, fd: int) -> None:
        """Map a segment that has been announced; `fd` is closed. Raises: WireError."""
        try:
            unknown = number < _MOST_SEGMENTS and number not in self._segments and len(self._segments) < _MOST_MAPPED
            if not unknown or slot_bytes < SMALLEST_BYTES or slot_bytes != slot_size(slot_bytes):
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
        """Forget a segment; views of it stay valid for as long as they live. Raises: WireError."""
        if self._segments.pop(number, None) is None:
            raise WireError(f"segment {number} was not announced")

    def view(self, slot: int, nbytes: int) -> Any:
        """Give a buffer over a slot; the slot is free again when the last view of it has died. Raises: WireError."""
        memory, slot_bytes = self._segments.get(slot >> 16, (None, 0))
        offset = (slot & 0xFFFF) * slot_bytes
        if memory is None or nbytes > slot_bytes or offset + slot_bytes > len(memory):
            raise WireError(f"slot {slot:#x} of {nbytes} bytes is nowhere")
        buffer = _kind(slot_bytes).from_buffer(memory, offset)
        buffer.slot, buffer.mirror = slot, self
        return buffer

    def close(self) -> None:
        """Forget every segment, and call nobody any more.

        Whoever is called may hold the tensors, and numpy's are not seen by the collector: they would live for ever.
        """
        self._segments.clear()
        self.on_free = _nobody


@cache
def _kind(slot_bytes: int) -> type[Any]:
    """Give the type of buffers of one size. All Mirrors share it: a type is a cycle, which only the collector ends."""

    def end(buffer: Any) -> None:
        buffer.mirror.freed.append(buffer.slot)
        buffer.mirror.on_free()

    return type("Slot", (ctypes.c_char * slot_bytes,), {"__del__": end})
