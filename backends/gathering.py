"""Gathering: concatenates rows of several arrays, and copies arrays, beside a busy event loop.

NumPy releases the GIL for each array of more than 500 elements, and the thread of an Instance gets it back when the
event loop next releases it, up to half a millisecond later: beside a thread that computes, 64 rows of 512 floats took
2.5 ms instead of 17 us, and 64 images of 600 kB 46 ms instead of 3.3. So small data is copied holding the GIL, and
large data without it, in a single call: 0.06 and 8.9 ms (perf/gathering.py). Used by the Bindings and
batching/running/execution.py.
Parts may be in memory that their clients can unmap while it is copied: only the kernel may read that, whose copies
return short counts where a load would end the process (docs/adr/0008-shared-memory.md).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from functools import cache
from struct import pack
from typing import Any

import numpy as np

from .backend import Array
from .device_array import HOST, DeviceArray
from .errors import InferError, PartUnreadable

GIL_HELD_BYTES = 1 << 18
"""Up to this size, data is copied holding the GIL: in some 20 us, less than releasing it costs."""
NUMPY_GIL_ELEMENTS = 500
"""NumPy itself holds the GIL up to this many elements: NPY_BEGIN_THREADS_THRESHOLDED."""
VECTORED_PARTS, VECTORED_MAX_BYTES = 8, 1 << 20
"""From this many parts on, if they average less than that size, all are copied by one system call, which takes up to
twice the CPU of plain copies (it looks up each page): less than waiting for the GIL after each."""
_MAX_PARTS = 1024
"""The limit of one vectored copy: IOV_MAX."""
_BYTE = np.dtype(np.uint8)


def gather(parts: Sequence[Array], buffer: Array) -> None:
    """Concatenate parts, which may be DeviceArrays, into a buffer of rows.

    Shapes: each part's first axis is rows, the others are the buffer's.
    Raises: ValueError if they do not fill it; PartUnreadable if one no longer exists.
    """
    if buffer.size > NUMPY_GIL_ELEMENTS * len(parts):
        if _are_plain_arrays(parts, buffer.dtype):
            if buffer.nbytes <= GIL_HELD_BYTES:
                buffer.reshape(-1).view(_BYTE).data[:] = b"".join(parts)  # type: ignore[arg-type]
                return
            if (
                len(parts) >= VECTORED_PARTS
                and buffer.nbytes < VECTORED_MAX_BYTES * len(parts)
                and _copy_vectored(parts, buffer, _readv_without_gil())
            ):
                return
        elif _are_host_memory(parts, buffer):
            _copy_host_memory(parts, buffer)
            return
    if len(parts) == 1:
        np.copyto(buffer, parts[0])
    else:
        np.concatenate(parts, out=buffer)


def repeat_last_row(buffer: Array, rows: int) -> None:
    """Fill a buffer's rows from `rows` on with copies of the one before, which must exist. Shapes: C-contiguous."""
    missing = buffer[rows:]
    if missing.size <= NUMPY_GIL_ELEMENTS or missing.nbytes > GIL_HELD_BYTES or buffer.dtype.hasobject:
        missing[...] = buffer[rows - 1]
    else:
        row_bytes = buffer.reshape(len(buffer), -1).view(_BYTE)
        row_bytes[rows:].reshape(-1).data[:] = row_bytes[rows - 1].tobytes() * len(missing)


def copy_array(array: Array) -> Array:
    """Copy a C-contiguous array."""
    if array.size <= NUMPY_GIL_ELEMENTS or array.nbytes > GIL_HELD_BYTES or array.dtype.hasobject:
        return array.copy()
    return np.ndarray(array.shape, array.dtype, bytearray(array.reshape(-1).view(_BYTE).data))


def _are_plain_arrays(parts: Sequence[Array], dtype: np.dtype[Any]) -> bool:
    """Whether all parts are plain contiguous host arrays of this type."""
    ndarray = np.ndarray
    for part in parts:  # a generator takes half as long again
        if part.dtype is not dtype or type(part) is not ndarray or not part.flags.c_contiguous:
            return False
    return not dtype.hasobject


def _are_host_memory(parts: Sequence[Array | DeviceArray], buffer: Array) -> bool:
    """Whether all parts are contiguous host memory of the buffer's type, including clients', and fill it."""
    dtype, nbytes = buffer.dtype, 0
    for part in parts:
        if part.dtype is not dtype or dtype.hasobject:
            return False
        if type(part) is DeviceArray:
            if part.memory.device != HOST:
                return False
        elif not part.flags.c_contiguous:  # type: ignore[union-attr]
            return False
        nbytes += part.nbytes
    return nbytes == buffer.nbytes


def _copy_host_memory(parts: Sequence[Array | DeviceArray], buffer: Array) -> None:
    """Copy parts of which some are in clients' memory. Raises: PartUnreadable."""
    readv = _readv_without_gil() if buffer.nbytes > GIL_HELD_BYTES else _readv_holding_gil()
    if all(type(part) is not DeviceArray or part.memory.pointer for part in parts) and _copy_vectored(
        parts, buffer, readv
    ):
        return
    # by each memory's own method, which also reports what is wrong with it
    flat, start = buffer.reshape(-1).view(_BYTE), 0
    for number, part in enumerate(parts):
        into = flat[start : start + part.nbytes]
        start += part.nbytes
        if type(part) is not DeviceArray:
            into[...] = part.reshape(-1).view(_BYTE)  # type: ignore[union-attr]
            continue
        try:
            part.read(into)
        except InferError as error:
            unreadable = PartUnreadable(error.code, error.message)
            unreadable.part_index = number
            raise unreadable from None


def _copy_vectored(parts: Sequence[Array | DeviceArray], buffer: Array, readv: Any) -> bool:
    """Copy with one system call, by addresses; False if it is not available, or did not copy everything."""
    if readv is None or sum([part.nbytes for part in parts]) != buffer.nbytes:
        return False
    # for writable buffers, this takes a third of the time of numpy's way to the address
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))  # type: ignore[arg-type]  # a Buffer from 3.12 on
    for first in range(0, len(parts), _MAX_PARTS):
        chunk = parts[first : first + _MAX_PARTS]
        spans: list[int] = []
        for part in chunk:
            spans += _address(part), part.nbytes
        size = sum(spans[1::2])
        if readv(os.getpid(), _pack_iovec(address, size), 1, _pack_iovec(*spans), len(chunk), 0) != size:
            return False
        address += size
    return True


def _pack_iovec(*numbers: int) -> bytes:
    """Pack addresses and sizes as an array of struct iovec."""
    return pack(f"{len(numbers)}N", *numbers)


def _address(part: Array | DeviceArray) -> int:
    if type(part) is DeviceArray:
        return part.memory.pointer + part.offset
    address: int = part.__array_interface__["data"][0]  # type: ignore[union-attr]
    return address


@cache
def _readv_without_gil() -> Any:
    """Return process_vm_readv(2), if it may be called: some containers forbid it."""
    return _find_readv(ctypes.CDLL(None))


@cache
def _readv_holding_gil() -> Any:
    """Return the same function, called holding the GIL."""
    return _find_readv(ctypes.PyDLL(None))


def _find_readv(library: ctypes.CDLL) -> Any:
    readv = getattr(library, "process_vm_readv", None)
    if readv is None:
        return None
    readv.restype = ctypes.c_ssize_t
    readv.argtypes = (
        ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong
    )  # fmt: skip
    source, target = (np.full(1, value, _BYTE) for value in (1, 0))
    copied_bytes = readv(os.getpid(), _pack_iovec(_address(target), 1), 1, _pack_iovec(_address(source), 1), 1, 0)
    return readv if copied_bytes == 1 and target[0] == 1 else None
