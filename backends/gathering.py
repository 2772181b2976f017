"""Gathering: rows of several arrays copied one behind the other, and arrays copied, beside a busy event loop.

NumPy lets go of the GIL for each array of more than 500 elements, and the thread of an Instance has it back when the
event loop next lets go of it, up to half a millisecond later: beside a thread that computes, 64 rows of 512 floats took
2.5 ms instead of 17 us, and 64 images of 600 kB 46 ms instead of 3.3. So what is little is copied with the GIL held,
and what is much without it, once for all: 0.06 and 8.9 ms (perf/gathering.py). Called by batching/execution.py and the
Bindings.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from .backend import Array

HELD_BYTES = 1 << 18
"""So much is copied with the GIL held: in some 20 us, less than giving it up costs."""
FEW = 500
"""NumPy holds the GIL by itself for so few elements: NPY_BEGIN_THREADS_THRESHOLDED."""
MANY, LARGE_BYTES = 8, 1 << 20
"""From so many parts on, and for parts below that size, all are copied by one call, which takes up to twice the CPU of
plain copies (it looks up each page): less than to wait for the GIL after each."""
_MOST_PARTS = 1024
"""Of one vectored copy: IOV_MAX."""
_BYTE = np.dtype(np.uint8)


class _Span(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


def gather(parts: Sequence[Array], buffer: Array) -> None:
    """Copy parts one behind the other into a buffer, whose rows they are.

    Shapes: each part's first axis is rows, the others are the buffer's. Raises: ValueError where they do not fill it.
    """
    if buffer.size > FEW * len(parts) and _alike(parts, buffer.dtype):
        if buffer.nbytes <= HELD_BYTES:
            buffer.reshape(-1).view(_BYTE).data[:] = b"".join(parts)  # type: ignore[arg-type]
            return
        if len(parts) >= MANY and buffer.nbytes < LARGE_BYTES * len(parts) and _vectored(parts, buffer):
            return
    if len(parts) == 1:
        np.copyto(buffer, parts[0])
    else:
        np.concatenate(parts, out=buffer)


def fill_up(buffer: Array, rows: int) -> None:
    """Fill a buffer's rows from `rows` on with copies of the one before, which there is. Shapes: C-contiguous."""
    missing = buffer[rows:]
    if missing.size <= FEW or missing.nbytes > HELD_BYTES or buffer.dtype.hasobject:
        missing[...] = buffer[rows - 1]
    else:
        bytes_of = buffer.reshape(len(buffer), -1).view(_BYTE)
        bytes_of[rows:].reshape(-1).data[:] = bytes_of[rows - 1].tobytes() * len(missing)


def copied(array: Array) -> Array:
    """Copy an array that is C-contiguous."""
    if array.size <= FEW or array.nbytes > HELD_BYTES or array.dtype.hasobject:
        return array.copy()
    return np.ndarray(array.shape, array.dtype, bytearray(array.reshape(-1).view(_BYTE).data))


def _alike(parts: Sequence[Array], dtype: np.dtype[Any]) -> bool:
    """Tell whether all are bytes of one kind on the host, one behind the other."""
    return not dtype.hasobject and all(
        part.dtype is dtype and type(part) is np.ndarray and part.flags.c_contiguous for part in parts
    )


def _vectored(parts: Sequence[Array], buffer: Array) -> bool:
    """Copy with one call of the system, which takes addresses; False where it is not there, or did not do it all."""
    call, at, done = _call(), _address(buffer), 0
    if call is None or sum([part.nbytes for part in parts]) != buffer.nbytes:
        return False
    for first in range(0, len(parts), _MOST_PARTS):
        some = parts[first : first + _MOST_PARTS]
        size = sum([part.nbytes for part in some])
        into, of = _Span(at + done, size), (_Span * len(some))(*[_Span(_address(part), part.nbytes) for part in some])
        if call(os.getpid(), ctypes.byref(into), 1, of, len(some), 0) != size:
            return False
        done += size
    return True


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


@cache
def _call() -> Any:
    """Find process_vm_readv(2), if it may be called: some containers forbid it."""
    call = getattr(ctypes.CDLL(None), "process_vm_readv", None)
    if call is None:
        return None
    call.restype = ctypes.c_ssize_t
    call.argtypes = (
        ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong
    )  # fmt: skip
    source, target = (np.full(1, value, _BYTE) for value in (1, 0))
    spans = [_Span(_address(each), 1) for each in (target, source)]
    did = call(os.getpid(), ctypes.byref(spans[0]), 1, ctypes.byref(spans[1]), 1, 0)
    return call if did == 1 and target[0] == 1 else None
