"""ZeroCopy: tensors that are written directly where they are sent from, without a copy. For threads that block.

Used by code that fills tensors itself: the Bindings of models in workers (server/isolated).
"""

from __future__ import annotations

import socket
from typing import Any

import numpy as np

from penstock.backends.backend import Array

from .channel import Channel
from .layout import NO_SLOT, SLOT, Layout, tensor_bytes
from .wire import ARENA_BYTES, HEADER, INLINE_BYTES, Wire

Form = tuple[tuple[np.dtype[Any], tuple[int, ...]] | None, ...]
"""Datatype and shape of each tensor; None for an absent one."""
_MAX_LAYOUTS = 256


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
        self._form_layouts: dict[Form, Layout] = {}

    def allocate(self, form: Form) -> SharedTensors:
        """Return tensors of a form, to be filled and sent by `put_allocated`, or discarded.

        Small tensors are sent in their frame, and strings are packed when sent: these are plain memory, and so are all
        if the Arena has no room.
        """
        layout = self._form_layouts.get(form) or self._make_layout(form)
        lease = self.arena.lease(layout.nbytes) if layout.nbytes > INLINE_BYTES else None
        if lease is None:
            plain = [None if part is None else np.empty(part[1], part[0]) for part in layout.parts]
            return SharedTensors(form, plain, NO_SLOT)
        if self.arena.new_segments:
            self._announce_segments()
        slot, memory, start = lease
        arrays = [
            None if part is None else np.ndarray(part[1], part[0], memory, start + offset)
            for part, offset in zip(layout.parts, layout.offsets, strict=True)
        ]
        return SharedTensors(form, arrays, slot)

    def _make_layout(self, form: Form) -> Layout:
        """Compute the place of each tensor of a form. With strings it has 0 bytes, and all are plain memory."""
        if len(self._form_layouts) >= _MAX_LAYOUTS:
            self._form_layouts.clear()
        layout = Layout(0, [None if spec is None else (*spec, tensor_bytes(*spec)) for spec in form])
        self._form_layouts[form] = layout
        return layout

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
