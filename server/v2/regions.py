"""Regions: memory that clients share with the server, by name, and the leases that requests hold on it.

`Regions` is the table of all regions of one server, filled by `system_regions.py` and `cuda_regions.py`. Used by the
endpoints of both transports, by decoding (inputs) and by `finish.py` (outputs).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakValueDictionary

import numpy as np

from penstock.backends.device_array import HOST, DeviceArray
from penstock.backends.errors import Code, InferError

if TYPE_CHECKING:
    from penstock.backends.backend import Array

SYSTEM, CUDA = "system", "CUDA"
RESERVED_PREFIXES = ("triton_python_backend_shm_region_", "penstock_", "sem.")
"""Reserved names and keys: Triton's, Penstock's, and POSIX semaphores, which are files in the same directory."""
MAX_REGIONS = 1024
"""Each system region holds a file descriptor."""
MAX_NAME_BYTES = 255
INLINE_BYTES = 2 << 20
"""The most the event loop copies itself: half a millisecond."""
DISABLED_TEXT = "client shared memory is disabled. Use --allow-client-shm=true to enable it."
_MAX_SIZE = 2**64 - 1
Location = tuple[str, int, int]
"""A part of a region, as `Regions.lease` takes it: the region's name, and the offset and size within it."""


class LargeRead(Exception):  # noqa: N818 - control flow, not an error
    """More bytes must be copied than the event loop should copy; the operation must be repeated on a thread."""


class Region(Protocol):
    """One region. `offset`s come from the client and are already checked against `byte_size`.

    Implements `DeviceMemory`, which documents `device`, `pointer`, `read` and `access_error`.
    """

    name: str
    kind: str
    byte_size: int
    device: int
    pointer: int

    def describe(self) -> dict[str, Any]:
        """Return the description for a status answer."""

    def export(self) -> tuple[dict[str, Any], list[int]]:
        """Return what another process of this server needs to use the region: a description, and descriptors."""

    def check(self, end: int) -> None:
        """Check that the memory still extends to `end`. Raises: InferError (INVALID) if it does not."""

    def read(self, offset: int, into: Array) -> None:
        """Fill `into`, which is C-contiguous. Raises: InferError (INVALID) if the memory is gone."""

    def write(self, offset: int, raw: bytes | memoryview) -> None:
        """Write `raw`. Raises: as `read`."""

    def access_error(self, doing: str, error: Exception) -> InferError:
        """Return the error for the client, after the operation `doing` has failed."""


class Lease:
    """A part of a region that one request reads or writes; it keeps the region alive even if that is unregistered.

    Ends with `release`, or when it is garbage-collected.
    """

    __slots__ = ("_region", "byte_size", "offset")

    def __init__(self, region: Region, offset: int, byte_size: int) -> None:
        self._region: Region | None = region
        self.offset = offset
        self.byte_size = byte_size

    def read(self) -> memoryview:
        """Return a copy of the bytes. Raises: InferError (INVALID) if the memory is gone."""
        into: Array = np.empty(self.byte_size, np.uint8)
        if self.byte_size:
            self._leased_region().read(self.offset, into)
        return into.data

    def write(self, raw: bytes | memoryview) -> None:
        """Write from the lease's first byte; `raw` must not be longer than the lease. Raises: as `read`."""
        if len(raw) > self.byte_size:
            raise InferError(Code.INTERNAL, "the data is larger than the lease")
        if len(raw):
            self._leased_region().write(self.offset, raw)

    @property
    def location(self) -> Location:
        """The arguments for leasing it again."""
        return self._leased_region().name, self.offset, self.byte_size

    @property
    def device(self) -> int:
        """The number of the device the memory is on; HOST after its release."""
        return HOST if self._region is None else self._region.device

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> DeviceArray:
        """Return the device memory as a tensor that holds the region itself. No values are copied."""
        return DeviceArray(self._leased_region(), self.offset, shape, dtype)

    def is_same_memory(self, array: Array | DeviceArray) -> bool:
        """Return whether a tensor already is this device memory, so nothing needs to be written."""
        return type(array) is DeviceArray and array.memory is self._region and array.offset == self.offset

    def release(self) -> None:
        """Release the region."""
        self._region = None

    def _leased_region(self) -> Region:
        if self._region is None:
            raise InferError(Code.INTERNAL, "a lease was used after its release")
        return self._region


class Regions:
    """All regions of one server by name, of both kinds; a name belongs to one of them.

    A region that is unregistered while in use is freed when the last request that uses it ends. Until then it is listed
    and further requests may use it, unless its name is registered again.
    Source: Triton server, qa/L0_shared_memory, test_unregister_shm_during_inference_*.
    Threads: regions are registered on the event loop; leases are taken and used on any thread. `on_add` and `on_drop`
    are called after the change, and inform the server's other processes (`fronts/shared_state.py`).
    `max_copy_bytes` is how much the holder of the table may copy at once; for more, LargeRead must be raised.
    """

    max_copy_bytes = sys.maxsize

    def __init__(self, *, allowed: bool = False) -> None:
        self.on_add: Callable[[Region], None] = lambda _region: None
        self.on_drop: Callable[[str, str], None] = lambda _kind, _name: None
        self._allowed = allowed
        self._by_name: dict[str, Region] = {}
        self._unregistered: WeakValueDictionary[str, Region] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[Region]:
        return iter(list(self._by_name.values()))

    def check(self) -> None:
        """Reject if clients may not share memory. Raises: InferError (UNSUPPORTED)."""
        if not self._allowed:
            raise InferError(Code.UNSUPPORTED, DISABLED_TEXT)

    def check_name(self, name: str) -> None:
        """Check the name of a new region. Raises: InferError."""
        self.check()
        if not name or len(name.encode("utf-8", "replace")) > MAX_NAME_BYTES or "\0" in name:
            raise InferError(Code.INVALID, f"the name of a shared memory region must have 1 to {MAX_NAME_BYTES} bytes")
        if name.startswith(RESERVED_PREFIXES):
            raise InferError(Code.INVALID, f"cannot register shared memory region '{name}', its name is reserved")
        if name in self._by_name:
            raise InferError(Code.ALREADY_EXISTS, f"shared memory region '{name}' already in manager")
        if len(self._by_name) >= MAX_REGIONS:
            raise InferError(Code.OVERLOADED, f"the maximum of {MAX_REGIONS} shared memory regions is registered")

    def add(self, region: Region) -> None:
        """Add a region that `check_name` has accepted."""
        self._by_name[region.name] = region
        self.on_add(region)

    def drop(self, kind: str, name: str = "") -> None:
        """Remove a region, or all of one kind; an unknown name is not an error. Leases stay valid."""
        self.check()
        for each in [each for each, region in self._by_name.items() if region.kind == kind and name in ("", each)]:
            # from here on held only by its leases, if any
            self._unregistered[each] = self._by_name.pop(each)
        self.on_drop(kind, name)

    def describe(self, kind: str, name: str = "") -> list[dict[str, Any]]:
        """Describe one region or all of one kind. Raises: InferError (NOT_FOUND)."""
        self.check()
        if not name:
            regions = sorted({**self._unregistered, **self._by_name}.items())
            return [region.describe() for _, region in regions if region.kind == kind]
        region = self._lookup(name)
        kind_name = kind.lower()
        if region is None:
            raise InferError(Code.NOT_FOUND, f"Unable to find {kind_name} shared memory region: '{name}'")
        if region.kind != kind:
            text = f"The region named '{name}' is registered as {region.kind} shared memory, not {kind} shared memory"
            raise InferError(Code.NOT_FOUND, text)
        return [region.describe()]

    def lease(self, name: str, offset: int, byte_size: int) -> Lease:
        """Lease a part of a region for one request. Raises: as `find`."""
        return Lease(self.find(name, offset, byte_size), offset, byte_size)

    def find(self, name: str, offset: int, byte_size: int) -> Region:
        """Return the region that contains such a part. Raises: InferError (NOT_FOUND, INVALID, UNSUPPORTED)."""
        if not self._allowed:
            self.check()
        region = self._lookup(name)
        if region is None:
            raise InferError(Code.NOT_FOUND, f"Unable to find shared memory region: '{name}'")
        if not 0 <= offset < region.byte_size:
            raise InferError(Code.INVALID, f"Invalid offset for shared memory region: '{name}'")
        if byte_size < 0 or offset + byte_size > _MAX_SIZE:
            text = (
                f"byte_size ({byte_size}) + offset ({offset}) exceeds maximum value ({_MAX_SIZE}) for region '{name}'"
            )
            raise InferError(Code.INVALID, f"Integer overflow detected: {text}")
        if offset + byte_size > region.byte_size:
            raise InferError(Code.INVALID, f"Invalid offset + byte size for shared memory region: '{name}'")
        return region

    def _lookup(self, name: str) -> Region | None:
        return self._by_name.get(name) or self._unregistered.get(name)


class RegionKind:
    """The regions of one kind, all of which are in the table `regions`. A subclass registers them."""

    def __init__(self, kind: str, regions: Regions) -> None:
        self.kind = kind
        self.regions = regions

    def unregister(self, name: str = "") -> None:
        """Unregister a region, or all of the kind. Raises: InferError (UNSUPPORTED)."""
        self.regions.drop(self.kind, name)

    def status(self, name: str = "") -> list[dict[str, Any]]:
        """Describe a region, or all of the kind. Raises: InferError (UNSUPPORTED, NOT_FOUND)."""
        return self.regions.describe(self.kind, name)


class InlineRegions(Regions):
    """The same table for use on the event loop: more than `max_copy_bytes` must be read on a thread."""

    def __init__(self, regions: Regions, max_copy_bytes: int = INLINE_BYTES) -> None:
        super().__init__(allowed=regions._allowed)  # noqa: SLF001 - same class
        self._by_name, self._unregistered = regions._by_name, regions._unregistered  # noqa: SLF001
        self.max_copy_bytes = max_copy_bytes
