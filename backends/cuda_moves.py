"""Moves: the copies of tensors into and out of a run's slabs on a device. Used by the CUDA Binding.

Rows are contiguous, so part of a tensor is a range of bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from .backend import Array
from .device_array import DeviceArray
from .errors import PartUnreadable
from .gathering import gather


class Move(NamedTuple):
    """One copy of `size` bytes between two addresses. `part` is the client's tensor in it, if any."""

    to: int
    source: int
    size: int
    part: DeviceArray | None = None


@dataclass(slots=True)
class Slab:
    """Memory for one tensor: on the device, and its pinned counterpart on the host.

    Units: `row_bytes` of one row. `host` is the run's host buffer, and `pinned` its address, which takes numpy 3 us to
    return.
    """

    device: int
    host: Array
    row_bytes: int
    pinned: int = field(init=False)

    def __post_init__(self) -> None:
        self.pinned = int(self.host.ctypes.data)


def onto_host(buffer: Array, parts: Sequence[Array | DeviceArray]) -> None:
    """Fill a run's host buffer with parts; rows beyond them are copies of the last one. Raises: InferError."""
    flat = _bytes(buffer)
    filled = 0
    for part in parts:
        _fill(flat[filled : filled + part.nbytes], part)
        filled += part.nbytes
    row_bytes = len(flat) // len(buffer) if buffer.ndim and len(buffer) else len(flat)
    while row_bytes and row_bytes <= filled < len(flat):
        flat[filled : filled + row_bytes] = flat[filled - row_bytes : filled]
        filled += row_bytes


def onto_pinned(
    buffer: Array, parts: Sequence[Array | DeviceArray], reaches: Callable[[Any], bool]
) -> list[Array | DeviceArray]:
    """Gather parts that the device cannot copy into a run's pinned buffer, each at its rows.

    Returns: the other parts, with views of the buffer for those gathered. Raises: PartUnreadable.
    """
    flat: Array = buffer.reshape(-1)
    placed: list[Array | DeviceArray] = []
    start = number = 0
    for reached, some in groupby(parts, lambda part: isinstance(part, DeviceArray) and reaches(part)):
        run = list(some)
        size = sum([part.size for part in run])
        if reached:
            placed += run
        else:
            view = flat[start : start + size]
            try:
                gather([part.reshape(part.size) for part in run], view)  # type: ignore[misc]  # DeviceArrays, too
            except PartUnreadable as error:
                error.part += number
                raise
            placed.append(view)
        start += size
        number += len(run)
    return placed


def onto_device(slab: Slab, parts: Sequence[Array | DeviceArray]) -> list[Move]:
    """Return the moves of parts, as returned by `onto_pinned`, into a run's slab; then the last row's copies."""
    moves: list[Move] = []
    filled = 0
    for part in parts:
        nbytes = part.nbytes
        if isinstance(part, DeviceArray):
            moves.append(Move(slab.device + filled, part.pointer, nbytes, part))
        else:
            moves.append(Move(slab.device + filled, slab.pinned + filled, nbytes))
        filled += nbytes
    last = slab.device + filled - slab.row_bytes
    missing = range(filled, slab.host.nbytes, slab.row_bytes) if filled and slab.row_bytes else ()
    moves += [Move(slab.device + start, last, slab.row_bytes) for start in missing]
    return [move for move in moves if move.size]


def off_device(slab: Slab, targets: Iterable[tuple[int, DeviceArray]]) -> list[Move]:
    """Return the moves of an output's rows to their targets on the device, and of those in between to the host."""
    moves: list[Move] = []
    reached = 0
    for first, target in sorted(targets, key=lambda each: each[0]):
        start, nbytes = first * slab.row_bytes, target.nbytes
        if start > reached:
            moves.append(Move(slab.pinned + reached, slab.device + reached, start - reached))
        moves.append(Move(target.pointer, slab.device + start, nbytes, target))
        reached = start + nbytes
    moves.append(Move(slab.pinned + reached, slab.device + reached, slab.host.nbytes - reached))
    return [move for move in moves if move.size > 0]


def _fill(into: Array, part: Array | DeviceArray) -> None:
    """Copy a part's bytes. Raises: InferError."""
    if isinstance(part, DeviceArray):
        part.read(into)
    else:
        into[...] = _bytes(np.ascontiguousarray(part))


def _bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)
