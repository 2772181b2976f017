"""DeviceCopies: the copies of tensors into and out of a run's slabs on a device. Used by the CUDA Binding.

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


class DeviceCopy(NamedTuple):
    """One copy of `size` bytes between two addresses. `part` is the client's tensor in it, if any."""

    destination: int
    source: int
    size: int
    part: DeviceArray | None = None


@dataclass(slots=True)
class Slab:
    """Memory for one tensor: on the device, and its pinned counterpart on the host.

    Units: `row_bytes` of one row. `host` is the run's host buffer, and `host_pointer` its address, which takes numpy 3
    us to return.
    """

    device_pointer: int
    host: Array
    row_bytes: int
    host_pointer: int = field(init=False)

    def __post_init__(self) -> None:
        self.host_pointer = int(self.host.ctypes.data)


def fill_host_buffer(buffer: Array, parts: Sequence[Array | DeviceArray]) -> None:
    """Fill a run's host buffer with parts; rows beyond them are copies of the last one. Raises: InferError."""
    flat = _as_bytes(buffer)
    filled = 0
    for part in parts:
        _copy_part(flat[filled : filled + part.nbytes], part)
        filled += part.nbytes
    row_bytes = len(flat) // len(buffer) if buffer.ndim and len(buffer) else len(flat)
    while row_bytes and row_bytes <= filled < len(flat):
        flat[filled : filled + row_bytes] = flat[filled - row_bytes : filled]
        filled += row_bytes


def gather_into_pinned(
    buffer: Array, parts: Sequence[Array | DeviceArray], can_copy: Callable[[Any], bool]
) -> list[Array | DeviceArray]:
    """Gather parts that the device cannot copy into a run's pinned buffer, each at its rows.

    Returns: the other parts, with views of the buffer for those gathered. Raises: PartUnreadable.
    """
    flat: Array = buffer.reshape(-1)
    gathered: list[Array | DeviceArray] = []
    start = part_count = 0
    for is_copyable, group in groupby(parts, lambda part: isinstance(part, DeviceArray) and can_copy(part)):
        group_parts = list(group)
        size = sum([part.size for part in group_parts])
        if is_copyable:
            gathered += group_parts
        else:
            view = flat[start : start + size]
            try:
                gather([part.reshape(part.size) for part in group_parts], view)  # type: ignore[misc]  # DeviceArrays, too
            except PartUnreadable as error:
                error.part_index += part_count
                raise
            gathered.append(view)
        start += size
        part_count += len(group_parts)
    return gathered


def plan_input_copies(slab: Slab, parts: Sequence[Array | DeviceArray]) -> list[DeviceCopy]:
    """Return the copies of parts from `gather_into_pinned` into a slab, then those of the last row."""
    copies: list[DeviceCopy] = []
    filled = 0
    for part in parts:
        nbytes = part.nbytes
        if isinstance(part, DeviceArray):
            copies.append(DeviceCopy(slab.device_pointer + filled, part.pointer, nbytes, part))
        else:
            copies.append(DeviceCopy(slab.device_pointer + filled, slab.host_pointer + filled, nbytes))
        filled += nbytes
    last_row = slab.device_pointer + filled - slab.row_bytes
    missing_rows = range(filled, slab.host.nbytes, slab.row_bytes) if filled and slab.row_bytes else ()
    copies += [DeviceCopy(slab.device_pointer + start, last_row, slab.row_bytes) for start in missing_rows]
    return [copy for copy in copies if copy.size]


def plan_output_copies(slab: Slab, targets: Iterable[tuple[int, DeviceArray]]) -> list[DeviceCopy]:
    """Return the copies of an output's rows to their targets on the device, and of those in between to the host."""
    copies: list[DeviceCopy] = []
    copied_bytes = 0
    for first, target in sorted(targets, key=lambda each: each[0]):
        start, nbytes = first * slab.row_bytes, target.nbytes
        if start > copied_bytes:
            copies.append(
                DeviceCopy(slab.host_pointer + copied_bytes, slab.device_pointer + copied_bytes, start - copied_bytes)
            )
        copies.append(DeviceCopy(target.pointer, slab.device_pointer + start, nbytes, target))
        copied_bytes = start + nbytes
    copies.append(
        DeviceCopy(
            slab.host_pointer + copied_bytes, slab.device_pointer + copied_bytes, slab.host.nbytes - copied_bytes
        )
    )
    return [copy for copy in copies if copy.size > 0]


def _copy_part(into: Array, part: Array | DeviceArray) -> None:
    """Copy a part's bytes. Raises: InferError."""
    if isinstance(part, DeviceArray):
        part.read(into)
    else:
        into[...] = _as_bytes(np.ascontiguousarray(part))


def _as_bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)
