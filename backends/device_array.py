"""DeviceArray: a tensor that lies in memory of somebody else's, as far as it need be like a numpy array.

A request's input may be one, where the client shares memory: a device's, which the model's Binding reads there, or the
host's, which is gathered from there, and which its client may take away at any moment. So may an output on a device.
Whoever asks for its values gets a copy of his own, so that what does not know it is right, only slower.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

if TYPE_CHECKING:
    from penstock.backends.errors import InferError

    from .backend import Array

HOST = -1
"""The number that stands for no device."""
ALIGNED_BYTES = 256
"""What every allocation of a runtime begins at a multiple of. Kernels count on it: what lies elsewhere is copied."""


class DeviceMemory(Protocol):
    """Memory of one device, which stays there for as long as anything refers to this object.

    `device` may be HOST: then only the address stays, if it has one (`pointer` is not 0), and what is there may go: it
    is for the kernel to copy from, never for this process to touch.
    """

    device: int
    pointer: int
    byte_size: int

    def read(self, offset: int, into: Array) -> None:
        """Fill `into`, which is C-contiguous, and wait for that. Threads: any. Raises: InferError (INVALID)."""

    def failed(self, doing: str, error: Exception) -> InferError:
        """Give what who named this memory is told when the device has refused `doing` something with it; log why."""


class DeviceArray:
    """A C-contiguous tensor in the memory of device `device`, or of the HOST, from `pointer` on. It keeps `memory`.

    Slices of rows and other shapes are views. `numpy.asarray` copies to the host, anew each time.
    Units: `offset` and `nbytes` in bytes.
    Threads: any.
    """

    __slots__ = ("dtype", "memory", "nbytes", "ndim", "offset", "shape", "size")

    def __init__(self, memory: DeviceMemory, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        """`offset` is in bytes; that the memory has as many from there on is for the caller to have checked."""
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
    def aligned(self) -> bool:
        """Whether a kernel may read or write it where it lies."""
        return self.pointer % ALIGNED_BYTES == 0

    def overlaps(self, other: DeviceArray) -> bool:
        """Tell whether a write to one may change the other."""
        first, second = self.pointer, other.pointer
        return first < second + other.nbytes and second < first + self.nbytes

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of unsized object")
        return self.shape[0]

    def __getitem__(self, rows: slice) -> DeviceArray:
        """Give some of its rows, one after another; they stay where they are. Raises: TypeError, ValueError."""
        if not isinstance(rows, slice):
            raise TypeError("a tensor on a device is cut by rows only")
        start, stop, step = rows.indices(len(self))
        if step != 1:
            raise ValueError("rows of a tensor on a device are taken one after another")
        count = max(stop - start, 0)
        row_bytes = self.nbytes // len(self) if len(self) else 0
        return DeviceArray(self.memory, self.offset + start * row_bytes, (count, *self.shape[1:]), self.dtype)

    def read(self, into: Array) -> None:
        """Copy it into an array on the host that is C-contiguous and as large. Raises: InferError (INVALID)."""
        self.memory.read(self.offset, into)

    def reshape(self, *shape: int | tuple[int, ...]) -> DeviceArray:
        """Give it another shape of as many elements, as numpy does. Raises: ValueError."""
        wanted = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
        dims = cast("tuple[int, ...]", wanted)
        if -1 in dims:
            # numpy's own rules, on an array that takes no memory
            dims = np.broadcast_to(np.zeros((), np.bool_), self.shape).reshape(dims).shape
        if math.prod(dims) != self.size:
            raise ValueError(f"cannot reshape array of size {self.size} into shape {dims}")
        return DeviceArray(self.memory, self.offset, dims, self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Copy it to the host. Raises: InferError (INVALID); ValueError where no copy is allowed."""
        if copy is False:
            raise ValueError("a tensor on a device has no values on the host without a copy")
        host: Array = np.empty(self.shape, self.dtype)
        if host.nbytes:
            self.read(host)
        return host if dtype is None else host.astype(dtype, copy=False)

    def __repr__(self) -> str:
        return f"DeviceArray(device={self.device}, shape={self.shape}, dtype={self.dtype})"
