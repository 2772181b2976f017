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
from typing import Any

SMALLEST_BYTES = 16 << 10
SEGMENT_BYTES = 1 << 20
KEPT_BYTES = 64 << 20
"""Segments without a lease are given back to the system while an Arena has more than this."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_MOST_SEGMENTS = 1 << 16


class WireError(Exception):
    """What the other process has sent cannot be: it is not to be spoken with any more."""


class _Segment:
    """One memfd, divided into slots of one size. `free` are the indices of those that nobody has leased."""

    __slots__ = ("count", "fd", "free", "memory", "number", "slot_bytes")

    def __init__(self, number: int, slot_bytes: int) -> None:
        self.number = number
        self.slot_bytes = slot_bytes
        self.count = max(1, SEGMENT_BYTES // slot_bytes)
        size = self.count * slot_bytes
        self.fd = os.memfd_create("penstock", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size)
            # the reader could not be made to fault by a file that shrinks under it
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
            self.memory = mmap.mmap(self.fd, size)
        except BaseException:
            os.close(self.fd)
            raise
        self.free = list(range(self.count))


class Arena:
    """The writer's side: slots are leased here, and come back when the reader has let go of them.

    Invariants: a slot has one lease at a time. `leased_bytes` and `total_bytes` count whole slots and segments, and
    `total_bytes` never passes `limit_bytes`. Segments that came are in `fresh` until the wire has announced them, and
    those that went in `dropped`.
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

    def lease(self, nbytes: int) -> tuple[int, mmap.mmap, int] | None:
        """Lease a slot. Returns: its number, the memory it is in, and its offset there; None when there is no room."""
        slot_bytes = max(SMALLEST_BYTES, 1 << (nbytes - 1).bit_length())
        segments = self._open.setdefault(slot_bytes, [])
        if not segments and not self._grow(slot_bytes, segments):
            return None
        segment = segments[-1]
        index = segment.free.pop()
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
        if segment is None or index >= segment.count or index in segment.free:
            raise WireError(f"slot {slot:#x} was not leased")
        segment.free.append(index)
        self.leased_bytes -= segment.slot_bytes
        if len(segment.free) == 1:
            self._open[segment.slot_bytes].append(segment)
        if len(segment.free) == segment.count and self.total_bytes > KEPT_BYTES:
            self._drop(segment)

    def _shrink(self, most_bytes: int) -> None:
        for segment in list(self._segments.values()):
            if self.total_bytes <= most_bytes:
                return
            if len(segment.free) == segment.count and segment not in self.fresh:
                self._drop(segment)

    def _drop(self, segment: _Segment) -> None:
        if segment in self.fresh:
            return
        del self._segments[segment.number]
        self._open[segment.slot_bytes].remove(segment)
        self.total_bytes -= segment.count * segment.slot_bytes
        self.dropped.append(segment.number)

    def announced(self) -> None:
        """Close the descriptors of the segments that have been sent: the mapping keeps the memory."""
        for segment in self.fresh:
            os.close(segment.fd)
        self.fresh.clear()

    def close(self) -> None:
        """Let go of everything."""
        self.announced()
        self._segments.clear()
        self._open.clear()
        self.total_bytes = self.leased_bytes = 0


class Mirror:
    """The reader's side: buffers over the slots that the writer has leased, let go of as the last view of them dies.

    `freed` are the slots to tell the writer of; `on_free` is called, on whichever thread, when there is one more.
    """

    def __init__(self, on_free: Callable[[], None]) -> None:
        self.freed: deque[int] = deque()
        self._on_free = on_free
        self._segments: dict[int, tuple[mmap.mmap, int]] = {}
        self._kinds: dict[int, type[Any]] = {}

    def map(self, number: int, slot_bytes: int, fd: int) -> None:
        """Map a segment that has been announced; `fd` is closed. Raises: WireError."""
        try:
            if slot_bytes < SMALLEST_BYTES or slot_bytes & (slot_bytes - 1):
                raise WireError(f"slots of {slot_bytes} bytes")
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
        kind = self._kinds.get(slot_bytes) or self._kind(slot_bytes)
        buffer = kind.from_buffer(memory, offset)
        buffer.slot = slot
        return buffer

    def _kind(self, slot_bytes: int) -> type[Any]:
        freed, on_free = self.freed, self._on_free

        def end(buffer: Any) -> None:
            freed.append(buffer.slot)
            on_free()

        kind = self._kinds[slot_bytes] = type("Slot", (ctypes.c_char * slot_bytes,), {"__del__": end})
        return kind

    def close(self) -> None:
        """Forget every segment."""
        self._segments.clear()
