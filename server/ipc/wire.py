"""Wire: one end of a connection between two processes, without the socket: encodes and decodes messages.

`link.py` runs it on an event loop, `channel.py` on a thread that blocks. A message is a kind, a number, a body and
tensors; small tensors are sent in the frame, larger ones in the writer's Arena.

A frame: a header (length of the rest, kind, number of descriptors, number, length of the body, layout of the tensors or
0), the body, and for tensors their slot (or NO_SLOT), the size of each string tensor, and the payload unless it is in
the slot.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.backends.backend import Array

from .arena import Arena, Mirror, WireError
from .layout import (
    NO_SLOT,
    SLOT,
    Layout,
    compute_offsets,
    describe_tensors,
    join_tensors,
    layout_key,
    pack_strings,
    read_parts,
    read_strings,
)  # fmt: skip
from .sockets import close_descriptors, duplicate_descriptors

Message = tuple[int, int, bytes, list[Array | None], list[int]]
"""Kind, number, body, tensors, and descriptors, which the receiver must close."""

INLINE_BYTES = 8 << 10
"""Tensors of at most this total size are sent in the frame: a slot costs 4 us a call, and copying these less. Round
trip with 64 in flight: 17 us in the frame, 19 in a slot; 16 KiB: the same (`python -m penstock.perf.ipc`)."""
ARENA_BYTES = 1 << 30
FIRST_KIND = 16
"""Kinds below are the wire's own."""
LAST_KIND = 0xFFF
_SEGMENT, _DROP, _RELEASE, _LAYOUT = 1, 2, 3, 4
HEADER = struct.Struct("<IHHQII")
_MAX_LAYOUTS = 1024
_MAX_BYTES = (1 << 32) - 1
_MAX_UNCLAIMED = 1024
"""Descriptors that have arrived and that no frame has claimed yet."""
_MAX_JOINED_BYTES = 64 << 10
"""A frame larger than this is not copied again to make it contiguous."""


class Wire:
    """One end. `put` fills `out` and `descriptors`, which the owner sends in order; `feed` takes the bytes it receives.

    Invariant: bytes fed in any pieces yield the messages that were put, in order.
    Ownership: the receiver owns received tensors and may write to them; those in the other side's Arena are views,
    which keep their slot until the last one is freed. Bodies are copies.
    `on_free` is called, on any thread, when a slot is to be reported, which `put_freed` does.
    Threads: one at a time.
    """

    def __init__(self, on_free: Callable[[], None], arena_bytes: int = ARENA_BYTES) -> None:
        self.out: list[bytes] = []
        self.descriptors: list[int] = []
        self.arena = Arena(arena_bytes)
        self.mirror = Mirror(on_free)
        self._sent_layouts: dict[tuple[Any, ...], Layout] = {}
        self._dtype: Any = None
        self._shape: Any = None
        self._last_layout = Layout(0, ())
        self._received_layouts: dict[int, Layout] = {}
        self._partial = bytearray()
        self._unclaimed: deque[int] = deque()
        self.claimed: list[list[int]] = []

    # -- sending -----------------------------------------------------------------------------------------------

    def put(
        self, kind: int, number: int, body: bytes = b"", arrays: Sequence[Array | None] | None = None,
        descriptors: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """Put a message. Raises: TypeError or ValueError for values that cannot be sent, or OSError, with nothing put.

        Ownership: the tensors are copied, and `descriptors` duplicated, before it returns.
        """
        if len(body) > _MAX_BYTES:
            raise ValueError(f"a message of {len(body)} bytes is too long")
        if arrays is None and not descriptors:
            self.out.append(HEADER.pack(len(body), kind, 0, number, len(body), 0) + body)  # 0.25 us instead of 0.37
            return
        duplicates = duplicate_descriptors(descriptors) if descriptors else ()
        try:
            if arrays is None:
                tensors, layout_number = b"", 0
            else:
                single = arrays[0] if len(arrays) == 1 else None
                if single is not None and single.dtype is self._dtype and single.shape == self._shape:
                    layout = self._last_layout  # as in the last message: saves 0.2 us for the lookup
                else:
                    layout = self._layout_of(arrays, single)
                if layout.padding is not None:
                    tensors = _NO_SLOT + single.tobytes() + layout.padding  # type: ignore[union-attr]
                else:
                    tensors = self._tensors(layout, arrays, len(body))
                layout_number = layout.number
        except BaseException:
            close_descriptors(duplicates)
            raise
        if duplicates:
            self.descriptors += duplicates
        head = HEADER.pack(len(body) + len(tensors), kind, len(duplicates), number, len(body), layout_number)
        if len(tensors) > _MAX_JOINED_BYTES:
            self.out += (head + body, tensors)
        else:
            self.out.append(head + body + tensors)

    def _layout_of(self, arrays: Sequence[Array | None], single: Array | None) -> Layout:
        """Return the layout of tensors, sending it if it is new; `single` is the tensor if there is just one."""
        layout = self._sent_layouts.get(layout_key(arrays)) or self._send_layout(arrays)
        if single is not None:
            self._dtype, self._shape, self._last_layout = single.dtype, single.shape, layout
        return layout

    def _send_layout(self, arrays: Sequence[Array | None]) -> Layout:
        parts = describe_tensors(arrays)
        if len(self._sent_layouts) >= _MAX_LAYOUTS:
            self._sent_layouts.clear()  # numbers start over, and replace those that the other side knows
            self._dtype = None
        layout = Layout(len(self._sent_layouts) + 1, parts)
        if len(parts) == 1 and not layout.strings and 0 < layout.nbytes <= INLINE_BYTES:
            part, array = parts[0], arrays[0]
            if part is not None and array is not None and array.dtype == part[0]:
                layout.padding = bytes(layout.nbytes - part[2])
        self._sent_layouts[layout_key(arrays)] = layout
        self._put_internal(_LAYOUT, layout.number, layout.encode())
        return layout

    def _put_internal(self, kind: int, number: int, body: bytes = b"", descriptors: int = 0) -> None:
        self.out.append(HEADER.pack(len(body), kind, descriptors, number, len(body), 0) + body)

    def _tensors(self, layout: Layout, arrays: Sequence[Array | None], body_bytes: int) -> bytes:
        if layout.strings:
            return self._string_tensors(layout, arrays, body_bytes)
        if layout.nbytes > INLINE_BYTES:
            slot = self._write_slot(layout.parts, arrays, layout.offsets, layout.nbytes)
            if slot is not None:
                return slot
            _check_size(body_bytes + 4 + layout.nbytes)
        return _NO_SLOT + join_tensors(layout.parts, arrays)

    def _string_tensors(self, layout: Layout, arrays: Sequence[Array | None], body_bytes: int) -> bytes:
        flat: list[Array | None] = []
        sizes = b""
        for part, array in zip(layout.parts, arrays, strict=True):
            if part is not None and part[2] < 0 and array is not None:
                packed = pack_strings(array)
                _check_size(len(packed))
                sizes += SLOT.pack(len(packed))
                if len(packed) <= INLINE_BYTES and len(layout.parts) == 1:  # as below, in a third of the time
                    return _NO_SLOT + sizes + packed + bytes(-len(packed) % 64)
                array = np.frombuffer(packed, np.uint8)
            flat.append(array)
        parts = describe_tensors(flat)
        offsets, nbytes = compute_offsets([part[2] if part else 0 for part in parts])
        if nbytes > INLINE_BYTES:
            slot = self._write_slot(parts, flat, offsets, nbytes)
            if slot is not None:
                return slot + sizes
            _check_size(body_bytes + 4 + len(sizes) + nbytes)
        return _NO_SLOT + sizes + join_tensors(parts, flat)

    def _write_slot(
        self, parts: Sequence[Any], arrays: Sequence[Array | None], offsets: Sequence[int], nbytes: int
    ) -> bytes | None:
        """Write tensors to the Arena; None if it has no room, and they must be sent in the frame."""
        lease = self.arena.lease(nbytes)
        if lease is None:
            return None
        if self.arena.new_segments:
            self._announce_segments()
        slot, memory, start = lease
        for part, array, offset in zip(parts, arrays, offsets, strict=True):
            if array is not None and array.size:
                np.copyto(np.ndarray(array.shape, part[0], memory, start + offset), array)
        return SLOT.pack(slot)

    def _announce_segments(self) -> None:
        """Announce removed segments, then new ones, which may reuse their numbers."""
        self._put_removed()
        for segment in self.arena.new_segments:
            self.descriptors.append(segment.fd)
            self._put_internal(_SEGMENT, segment.number, SLOT.pack(segment.slot_bytes), 1)
        self.arena.new_segments.clear()

    def _put_removed(self) -> None:
        removed_segments = self.arena.removed_segments
        while removed_segments:
            self._put_internal(_DROP, removed_segments.pop())

    def put_freed(self) -> None:
        """Report freed slots and removed segments to the other side."""
        freed = self.mirror.freed
        if freed:
            slots = [freed.popleft() for _ in range(len(freed))]
            self._put_internal(_RELEASE, len(slots), struct.pack(f"<{len(slots)}I", *slots))
        if self.arena.removed_segments:
            self._put_removed()

    # -- receiving ---------------------------------------------------------------------------------------------

    def feed(self, data: memoryview, descriptors: Sequence[int] = ()) -> list[Message]:
        """Add received bytes, and return the messages that are now complete. Raises: WireError."""
        if self.claimed:
            self.claimed = []  # the receiver of the last messages has taken them
        if descriptors:
            self._unclaimed.extend(descriptors)
            if len(self._unclaimed) > _MAX_UNCLAIMED:
                raise WireError("descriptors that belong to no message")
        if self._partial:
            self._partial += data
            view = memoryview(self._partial)
            messages, read = self._read(view)
            view.release()
            del self._partial[:read]
        else:
            # slicing bytes takes half the time of slicing a view
            messages, read = self._read(bytes(data) if len(data) <= _MAX_JOINED_BYTES else data)
            if read < len(data):
                self._partial += data[read:]
        return messages

    def _read(self, data: memoryview | bytes) -> tuple[list[Message], int]:
        messages: list[Message] = []
        try:
            return messages, self._read_into(messages, data)
        except WireError:
            for message in messages:
                close_descriptors(message[4])
            raise

    def _read_into(self, messages: list[Message], data: memoryview | bytes) -> int:
        position, end = 0, len(data)
        header_bytes, layouts = HEADER.size, self._received_layouts
        while end - position >= header_bytes:
            size, kind, count, number, body_bytes, layout = HEADER.unpack_from(data, position)
            start = position + header_bytes
            if start + size > end:
                if body_bytes > size or kind > LAST_KIND or (layout and layout not in layouts):
                    raise WireError("an impossible frame")  # do not wait for its end
                break
            position = start + size
            if body_bytes > size or count > len(self._unclaimed):
                raise WireError("a frame that does not fit itself")
            body = bytes(data[start : start + body_bytes]) if body_bytes else b""
            if kind < FIRST_KIND:
                self._handle_internal(kind, number, body, count)
                continue
            arrays: list[Array | None] = []
            if layout:
                start += body_bytes
                known = layouts.get(layout)
                # as `_arrays`, for the usual single small tensor: saves 0.4 us
                if known is not None and position - start == known.single_bytes and data[start : start + 4] == _NO_SLOT:
                    dtype, shape, _ = known.parts[0]  # type: ignore[misc]
                    arrays = [np.ndarray(shape, dtype, bytearray(data[start + 4 : position]))]
                else:
                    arrays = self._arrays(known, layout, data, start, position)
            descriptors = [self._unclaimed.popleft() for _ in range(count)] if count else []
            if count:
                self.claimed.append(descriptors)
            messages.append((kind, number, body, arrays, descriptors))
        return position

    def _handle_internal(self, kind: int, number: int, body: bytes, count: int) -> None:
        if kind == _RELEASE and len(body) % 4 == 0:
            for (slot,) in SLOT.iter_unpack(body):
                self.arena.release(slot)
        elif kind == _LAYOUT and 0 < number <= _MAX_LAYOUTS:
            self._received_layouts[number] = Layout(number, read_parts(body))
        elif kind == _SEGMENT and count == 1 and len(body) == 4:
            self.mirror.map(number, SLOT.unpack(body)[0], self._unclaimed.popleft())
        elif kind == _DROP:
            self.mirror.drop(number)
        else:
            raise WireError(f"a frame of kind {kind} that cannot be read")

    def _arrays(
        self, layout: Layout | None, number: int, data: memoryview | bytes, start: int, end: int
    ) -> list[Array | None]:
        if layout is None:
            raise WireError(f"layout {number} was not announced")
        try:
            if layout.strings:
                return read_strings(layout, memoryview(data)[start:end], self.mirror)
            (slot,) = SLOT.unpack_from(data, start)
            start += 4
            buffer: Any
            if slot != NO_SLOT:
                buffer = self.mirror.view(slot, layout.nbytes)
            elif end - start == layout.nbytes:
                buffer = bytearray(data[start:end])
            else:
                raise WireError(f"{end - start} bytes of tensors where {layout.nbytes} should be")
            parts = layout.parts
            if len(parts) == 1 and (single := parts[0]) is not None:
                arrays: list[Array | None] = [np.ndarray(single[1], single[0], buffer)]
                layout.single_bytes = 4 + layout.nbytes  # numpy accepts it
                return arrays
            return [
                None if part is None else np.ndarray(part[1], part[0], buffer, offset)
                for part, offset in zip(parts, layout.offsets, strict=True)
            ]
        except (struct.error, ValueError, TypeError, OverflowError) as error:
            raise WireError(f"tensors that do not fit their layout: {error}") from error

    def close_claimed(self) -> None:
        """Close the descriptors of the last messages that were not taken."""
        for descriptors in self.claimed:
            close_descriptors(descriptors)
        self.claimed.clear()

    def close(self) -> None:
        """Release everything: pending data is not sent, and descriptors are closed."""
        close_descriptors((*self.descriptors, *self._unclaimed))
        self.descriptors.clear()
        self._unclaimed.clear()
        self.out.clear()
        self.arena.close()
        self.mirror.close()


_NO_SLOT = SLOT.pack(NO_SLOT)


def _check_size(size: int) -> None:
    """Reject a message that no frame can hold. Raises: ValueError."""
    if size > _MAX_BYTES:
        raise ValueError(f"a message of {size} bytes is too long, and there is no room for it in shared memory")
