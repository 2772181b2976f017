"""Lending: tensors that are written directly where they are sent from, without a copy. For threads that block.

Used by code that fills tensors itself: the Bindings of models in workers (server/isolated).
"""

from __future__ import annotations

import socket
from typing import Any

import numpy as np

from penstock.backends.backend import Array

from .channel import Channel
from .layout import NO_SLOT, SLOT, Part, place
from .wire import ARENA_BYTES, HEADER, INLINE_BYTES, Wire

Form = tuple[tuple[np.dtype[Any], tuple[int, ...]] | None, ...]
"""Datatype and shape of each tensor; None for an absent one."""
_MOST_PLANS = 256
_Plan = tuple[list[Part | None], list[int], int]


class Lent:
    """Tensors to be filled and then sent: views of one slot of the Arena, or plain memory for those sent in a frame.

    `slot` is the slot while the lender owns it: NO_SLOT for plain memory, and after it was sent or taken back.
    """

    __slots__ = ("arrays", "form", "slot")

    def __init__(self, form: Form, arrays: list[Array | None], slot: int) -> None:
        self.form = form
        self.arrays = arrays
        self.slot = slot


class LendingWire(Wire):
    """A Wire that lends the memory it sends."""

    def __init__(self, arena_bytes: int = ARENA_BYTES) -> None:
        super().__init__(lambda: None, arena_bytes)
        self._plans: dict[Form, _Plan] = {}

    def allocate(self, form: Form) -> Lent:
        """Return tensors of a form, to be filled and sent by `put_lent`, or taken back.

        Small tensors are sent in their frame, and strings are packed when sent: these are plain memory, and so are all
        if the Arena has no room.
        """
        parts, offsets, nbytes = self._plans.get(form) or self._plan(form)
        leased = self.arena.lease(nbytes) if nbytes > INLINE_BYTES else None
        if leased is None:
            return Lent(form, [None if part is None else np.empty(part[1], part[0]) for part in parts], NO_SLOT)
        if self.arena.fresh:
            self._announce()
        slot, memory, start = leased
        arrays = [
            None if part is None else np.ndarray(part[1], part[0], memory, start + offset)
            for part, offset in zip(parts, offsets, strict=True)
        ]
        return Lent(form, arrays, slot)

    def _plan(self, form: Form) -> _Plan:
        """Compute the place of each tensor of a form; 0 bytes for plain memory."""
        parts: list[Part | None] = [None if each is None else (*each, _size(*each)) for each in form]
        strings = any(part is not None and part[2] < 0 for part in parts)
        offsets, nbytes = ([0] * len(parts), 0) if strings else place([part[2] if part else 0 for part in parts])
        if len(self._plans) >= _MOST_PLANS:
            self._plans.clear()
        self._plans[form] = parts, offsets, nbytes
        return self._plans[form]

    def put_lent(self, kind: int, number: int, body: bytes, lent: Lent) -> None:
        """Put a message with lent tensors. If put again, they are copied, unchanged if nothing has written to them.

        Raises: as `put`.
        """
        if lent.slot == NO_SLOT:
            self.put(kind, number, body, lent.arrays)
            return
        layout = self._told.get(lent.form) or self._tell(lent.arrays)
        head = HEADER.pack(len(body) + SLOT.size, kind, 0, number, len(body), layout.number)
        self.out.append(head + body + SLOT.pack(lent.slot))
        lent.slot = NO_SLOT

    def take_back(self, lent: Lent) -> None:
        """Free lent tensors that were not sent."""
        if lent.slot != NO_SLOT:
            self.arena.release(lent.slot)
            lent.slot = NO_SLOT


class LendingChannel(Channel):
    """A Channel that lends the memory it sends. Threads: as a Channel; one at a time may lend."""

    _wire: LendingWire

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._wire = LendingWire()

    def allocate(self, form: Form) -> Lent:
        """Return tensors of a form, to be filled and sent by `send_lent`, or taken back."""
        with self._lock:
            return self._wire.allocate(form)

    def send_lent(self, kind: int, number: int, body: bytes, lent: Lent) -> None:
        """Send a message with lent tensors. Raises: as `send`."""
        with self._lock:
            self._wire.put_lent(kind, number, body, lent)
            self._flush()

    def take_back(self, lent: Lent) -> None:
        """Free lent tensors that were not sent."""
        with self._lock:
            self._wire.take_back(lent)


def _size(dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    """Return the size of a tensor in bytes; -1 for strings."""
    if dtype.hasobject:
        return -1
    size = dtype.itemsize
    for dim in shape:
        size *= dim
    return size
