"""ZeroCopy: tensors that are written directly where they are sent from, without a copy. For threads that block.

Used by code that fills tensors itself: the Bindings of models in workers (server/isolated).
"""

from __future__ import annotations

import socket
from typing import Any

import numpy as np

from penstock.backends.backend import Array

from .channel import Channel
from .layout import NO_SLOT, SLOT, Part, compute_offsets
from .wire import ARENA_BYTES, HEADER, INLINE_BYTES, Wire

Form = tuple[tuple[np.dtype[Any], tuple[int, ...]] | None, ...]
"""Datatype and shape of each tensor; None for an absent one."""
_MAX_PLANS = 256
_Plan = tuple[list[Part | None], list[int], int]


class SharedTensors:
    """Tensors to be filled and then sent: views of one slot of the Arena, or plain memory for those sent in a frame.

    `slot` is the slot while this side owns it: NO_SLOT for plain memory, and after it was sent or discarded.
    """

    __slots__ = ("arrays", "form", "slot")

    def __init__(self, form: Form, arrays: list[Array | None], slot: int) -> None:
        self.form = form
        self.arrays = arrays
        self.slot = slot


class ZeroCopyWire(Wire):
    """A Wire that allocates the tensors it sends in shared memory."""

    def __init__(self, arena_bytes: int = ARENA_BYTES) -> None:
        super().__init__(lambda: None, arena_bytes)
        self._plans: dict[Form, _Plan] = {}

    def allocate(self, form: Form) -> SharedTensors:
        """Return tensors of a form, to be filled and sent by `put_allocated`, or discarded.

        Small tensors are sent in their frame, and strings are packed when sent: these are plain memory, and so are all
        if the Arena has no room.
        """
        parts, offsets, nbytes = self._plans.get(form) or self._make_plan(form)
        lease = self.arena.lease(nbytes) if nbytes > INLINE_BYTES else None
        if lease is None:
            return SharedTensors(
                form, [None if part is None else np.empty(part[1], part[0]) for part in parts], NO_SLOT
            )
        if self.arena.new_segments:
            self._announce_segments()
        slot, memory, start = lease
        arrays = [
            None if part is None else np.ndarray(part[1], part[0], memory, start + offset)
            for part, offset in zip(parts, offsets, strict=True)
        ]
        return SharedTensors(form, arrays, slot)

    def _make_plan(self, form: Form) -> _Plan:
        """Compute the place of each tensor of a form; 0 bytes for plain memory."""
        parts: list[Part | None] = [None if spec is None else (*spec, _tensor_bytes(*spec)) for spec in form]
        strings = any(part is not None and part[2] < 0 for part in parts)
        offsets, nbytes = (
            ([0] * len(parts), 0) if strings else compute_offsets([part[2] if part else 0 for part in parts])
        )
        if len(self._plans) >= _MAX_PLANS:
            self._plans.clear()
        self._plans[form] = parts, offsets, nbytes
        return self._plans[form]

    def put_allocated(self, kind: int, number: int, body: bytes, tensors: SharedTensors) -> None:
        """Put a message with allocated tensors. If put again, they are copied as they then are.

        Raises: as `put`.
        """
        if tensors.slot == NO_SLOT:
            self.put(kind, number, body, tensors.arrays)
            return
        layout = self._sent_layouts.get(tensors.form) or self._send_layout(tensors.arrays)
        head = HEADER.pack(len(body) + SLOT.size, kind, 0, number, len(body), layout.number)
        self.out.append(head + body + SLOT.pack(tensors.slot))
        tensors.slot = NO_SLOT

    def discard(self, tensors: SharedTensors) -> None:
        """Free allocated tensors that were not sent."""
        if tensors.slot != NO_SLOT:
            self.arena.release(tensors.slot)
            tensors.slot = NO_SLOT


class ZeroCopyChannel(Channel):
    """A Channel that allocates the tensors it sends in shared memory. Threads: as a Channel; one may allocate."""

    _wire: ZeroCopyWire

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._wire = ZeroCopyWire()

    def allocate(self, form: Form) -> SharedTensors:
        """Return tensors of a form, to be filled and sent by `send_allocated`, or discarded."""
        with self._lock:
            return self._wire.allocate(form)

    def send_allocated(self, kind: int, number: int, body: bytes, tensors: SharedTensors) -> None:
        """Send a message with allocated tensors. Raises: as `send`."""
        with self._lock:
            self._wire.put_allocated(kind, number, body, tensors)
            self._flush()

    def discard(self, tensors: SharedTensors) -> None:
        """Free allocated tensors that were not sent."""
        with self._lock:
            self._wire.discard(tensors)


def _tensor_bytes(dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    """Return the size of a tensor in bytes; -1 for strings."""
    if dtype.hasobject:
        return -1
    size = dtype.itemsize
    for dim in shape:
        size *= dim
    return size
