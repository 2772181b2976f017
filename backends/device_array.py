"""DeviceArray: a tensor in memory that Penstock does not own, with the needed part of numpy's array interface.

A request's input may be one if the client shares memory: a device's, which the model's Binding reads there, or the
host's, which is gathered from there and may be unmapped by the client at any moment. An output on a device may be one
too. Reading its values copies them, so code that does not know the type works, only more slowly.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

if TYPE_CHECKING:
    from penstock.backends.errors import InferError

    from .backend import Array

HOST = -1
"""The device number that means host memory."""
ALIGNED_BYTES = 256
"""The alignment of every allocation by a runtime. Kernels rely on it: tensors with other addresses are copied."""


class DeviceMemory(Protocol):
    """Memory of one device, which stays valid for as long as anything refers to this object.

    `device` may be HOST: then only the address stays valid, if it has one (`pointer` is not 0), and its contents may
    vanish: the kernel may copy from it, but this process must never touch it.
    """

    device: int
    pointer: int
    byte_size: int

    def read(self, offset: int, into: Array) -> None:
        """Fill the C-contiguous `into`, and wait. Threads: any. Raises: InferError (INVALID)."""

    def access_error(self, action: str, error: Exception) -> InferError:
        """Return the client's error for when the device refused `action` something with this memory; log the reason."""


class DeviceArray:
    """A C-contiguous tensor in the memory of device `device`, or of the HOST, from `pointer` on. It keeps `memory`.

    Slices of rows and other shapes are views. `numpy.asarray` copies to the host, anew each time.
    Units: `offset` and `nbytes` in bytes.
    Threads: any.
    """

    __slots__ = ("dtype", "memory", "nbytes", "ndim", "offset", "shape", "size")

    def __init__(self, memory: DeviceMemory, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        """`offset` is in bytes; the caller has checked that the memory is large enough from there on."""
        self.memory = memory
        self.offset = offset
        self.shape = shape
        self.dtype = dtype
        self.ndim = len(shape)
        self.size = math.prod(shape)
        self.nbytes = self.size * dtype.itemsize

    @property
    def device(self) -> int:
        """The device's number in this process, or HOST."""
        return self.memory.device

    @property
    def pointer(self) -> int:
        """The device address of its first element."""
        return self.memory.pointer + self.offset

    @property
    def is_aligned(self) -> bool:
        """Whether a kernel may read or write it in place."""
        return self.pointer % ALIGNED_BYTES == 0

    def overlaps(self, other: DeviceArray) -> bool:
        """Whether a write to one may change the other."""
        first, second = self.pointer, other.pointer
        return first < second + other.nbytes and second < first + self.nbytes

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of unsized object")
        return self.shape[0]

    def __getitem__(self, rows: slice) -> DeviceArray:
        """Return a contiguous range of its rows, in place. Raises: TypeError, ValueError."""
        if not isinstance(rows, slice):
            raise TypeError("a tensor on a device can be sliced by rows only")
        start, stop, step = rows.indices(len(self))
        if step != 1:
            raise ValueError("the rows of a tensor on a device must be sliced with a step of 1")
        count = max(stop - start, 0)
        row_bytes = self.nbytes // len(self) if len(self) else 0
        return DeviceArray(self.memory, self.offset + start * row_bytes, (count, *self.shape[1:]), self.dtype)

    def read(self, into: Array) -> None:
        """Copy it into a C-contiguous host array of the same size. Raises: InferError (INVALID)."""
        self.memory.read(self.offset, into)

    def reshape(self, *shape: int | tuple[int, ...]) -> DeviceArray:
        """Return it with another shape of as many elements, as numpy does. Raises: ValueError."""
        requested = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
        dims = cast("tuple[int, ...]", requested)
        if -1 in dims:
            # numpy's own rules, on an array that takes no memory
            dims = np.broadcast_to(np.zeros((), np.bool_), self.shape).reshape(dims).shape
        if math.prod(dims) != self.size:
            raise ValueError(f"cannot reshape array of size {self.size} into shape {dims}")
        return DeviceArray(self.memory, self.offset, dims, self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Copy it to the host. Raises: InferError (INVALID); ValueError if no copy is allowed."""
        if copy is False:
            raise ValueError("a tensor on a device must be copied to the host before its values can be read")
        host: Array = np.empty(self.shape, self.dtype)
        if host.nbytes:
            self.read(host)
        return host if dtype is None else host.astype(dtype, copy=False)

    def __repr__(self) -> str:
        return f"DeviceArray(device={self.device}, shape={self.shape}, dtype={self.dtype})"
