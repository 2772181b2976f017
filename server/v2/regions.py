"""Regions: memory that clients share with the server, by name, and the leases that requests hold on it.

`Regions` is the table of all regions of one server, which `system_regions.py` and `cuda_regions.py` register. Called by
the endpoints of both transports, by decoding (inputs) and by `finish.py` (outputs).
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
PRIVATE = ("triton_python_backend_shm_region_", "penstock_", "sem.")
"""Names and keys that are not the clients': Triton's own, ours, and POSIX semaphores, which are files there too."""
MAX_REGIONS = 1024
"""Each holds a descriptor."""
MAX_NAME_BYTES = 255
INLINE_BYTES = 2 << 20
"""What the event loop itself may copy: half a millisecond."""
OFF = "client shared memory is disabled. Use --allow-client-shm=true to enable it."
_MAX_SIZE = 2**64 - 1
Where = tuple[str, int, int]
"""A part of a region, as `Regions.lease` takes it: the region's name, and the offset and size there."""


class LargeRead(Exception):  # noqa: N818 - a turn of the road, not an error
    """More is to be copied than the event loop should wait for: the same is to be done on a thread."""


class Region(Protocol):
    """One region. `offset`s are the client's, checked against `byte_size` before they come here.

    Fulfils `DeviceMemory`, which says more of `device`, `pointer`, `read` and `failed`.
    """

    name: str
    kind: str
    byte_size: int
    device: int
    pointer: int

    def described(self) -> dict[str, Any]:
        """Give what a status answer says."""

    def shared(self) -> tuple[dict[str, Any], list[int]]:
        """Give what another process of this server needs to have the same region: words, and descriptors to pass on."""

    def check(self, end: int) -> None:
        """Look whether the memory reaches so far. Raises: InferError (INVALID) when it is not there any more."""

    def read(self, offset: int, into: Array) -> None:
        """Fill `into`, which is C-contiguous. Raises: InferError (INVALID) when the memory is not there any more."""

    def write(self, offset: int, raw: bytes | memoryview) -> None:
        """Write `raw`. Raises: as `read`."""

    def failed(self, doing: str, error: Exception) -> InferError:
        """Give the refusal of who named it, where `doing` something with it has failed."""


class Lease:
    """A part of a region that one request reads or writes; the region outlives it, unregistered or not.

    Ends with `release`, or when it is dropped.
    """

    __slots__ = ("_region", "byte_size", "offset")

    def __init__(self, region: Region, offset: int, byte_size: int) -> None:
        self._region: Region | None = region
        self.offset = offset
        self.byte_size = byte_size

    def read(self) -> memoryview:
        """Copy the bytes out. Raises: InferError (INVALID) when the memory is not there any more."""
        into: Array = np.empty(self.byte_size, np.uint8)
        if self.byte_size:
            self._held().read(self.offset, into)
        return into.data

    def write(self, raw: bytes | memoryview) -> None:
        """Write from the lease's first byte on; `raw` is as long as it at most. Raises: as `read`."""
        if len(raw) > self.byte_size:
            raise InferError(Code.INTERNAL, "more bytes than the lease has")
        if len(raw):
            self._held().write(self.offset, raw)

    @property
    def where(self) -> Where:
        """What to lease it again by."""
        return self._held().name, self.offset, self.byte_size

    @property
    def device(self) -> int:
        """The number of the device whose memory it is; HOST after its release, too."""
        return HOST if self._region is None else self._region.device

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> DeviceArray:
        """Give what it has on a device as a tensor, which holds the region itself. No values are copied."""
        return DeviceArray(self._held(), self.offset, shape, dtype)

    def holds(self, array: Array | DeviceArray) -> bool:
        """Tell whether a tensor is what it has on a device, so that nothing is left to be written."""
        return type(array) is DeviceArray and array.memory is self._region and array.offset == self.offset

    def release(self) -> None:
        """Let go of the region."""
        self._region = None

    def _held(self) -> Region:
        if self._region is None:
            raise InferError(Code.INTERNAL, "a lease is used after its release")
        return self._region


class Regions:
    """All regions of one server by name, of either kind; a name belongs to one of them.

    A region that is unregistered while requests use it goes when the last of them has ended. Until then it is listed
    and further requests may use it, unless its name is registered anew.
    Source: Triton server, qa/L0_shared_memory, test_unregister_shm_during_inference_*.
    Threads: registered on the event loop; leases are taken and used on any thread. `added` and `dropped` are called
    when that has been done; the server's other processes are told so (`fronts/shared_state.py`).
    `most_bytes` is how much may be copied out at once by who has it: for more, LargeRead is to be raised.
    """

    most_bytes = sys.maxsize

    def __init__(self, *, allowed: bool = False) -> None:
        self.added: Callable[[Region], None] = lambda _region: None
        self.dropped: Callable[[str, str], None] = lambda _kind, _name: None
        self._allowed = allowed
        self._by_name: dict[str, Region] = {}
        self._leaving: WeakValueDictionary[str, Region] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[Region]:
        return iter(list(self._by_name.values()))

    def check(self) -> None:
        """Refuse where clients may not share memory. Raises: InferError (UNSUPPORTED)."""
        if not self._allowed:
            raise InferError(Code.UNSUPPORTED, OFF)

    def check_new(self, name: str) -> None:
        """Check the name of a region to come. Raises: InferError."""
        self.check()
        if not name or len(name.encode("utf-8", "replace")) > MAX_NAME_BYTES or "\0" in name:
            raise InferError(Code.INVALID, f"the name of a shared memory region has 1 to {MAX_NAME_BYTES} bytes")
        if name.startswith(PRIVATE):
            raise InferError(Code.INVALID, f"cannot register shared memory region '{name}', its name is reserved")
        if name in self._by_name:
            raise InferError(Code.ALREADY_EXISTS, f"shared memory region '{name}' already in manager")
        if len(self._by_name) >= MAX_REGIONS:
            raise InferError(Code.OVERLOADED, f"{MAX_REGIONS} shared memory regions are registered, no more are taken")

    def add(self, region: Region) -> None:
        """Keep a region that `check_new` let pass."""
        self._by_name[region.name] = region
        self.added(region)

    def drop(self, kind: str, name: str = "") -> None:
        """Let go of a region, or of all of one kind; a name that is not there is no error. Leases go on."""
        self.check()
        for each in [each for each, region in self._by_name.items() if region.kind == kind and name in ("", each)]:
            # held by the leases alone from here on, or by nobody
            self._leaving[each] = self._by_name.pop(each)
        self.dropped(kind, name)

    def listed(self, kind: str, name: str = "") -> list[dict[str, Any]]:
        """Describe one region or all of one kind. Raises: InferError (NOT_FOUND)."""
        self.check()
        if not name:
            there = sorted({**self._leaving, **self._by_name}.items())
            return [region.described() for _, region in there if region.kind == kind]
        region = self._named(name)
        word = kind.lower()
        if region is None:
            raise InferError(Code.NOT_FOUND, f"Unable to find {word} shared memory region: '{name}'")
        if region.kind != kind:
            text = f"The region named '{name}' is registered as {region.kind} shared memory, not {kind} shared memory"
            raise InferError(Code.NOT_FOUND, text)
        return [region.described()]

    def lease(self, name: str, offset: int, byte_size: int) -> Lease:
        """Lease a part of a region for one request. Raises: as `find`."""
        return Lease(self.find(name, offset, byte_size), offset, byte_size)

    def find(self, name: str, offset: int, byte_size: int) -> Region:
        """Find the region that such a part is in. Raises: InferError (NOT_FOUND, INVALID, UNSUPPORTED)."""
        if not self._allowed:
            self.check()
        region = self._named(name)
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

    def _named(self, name: str) -> Region | None:
        return self._by_name.get(name) or self._leaving.get(name)


class InlineRegions(Regions):
    """The same table as seen from the event loop: what has more than `most` bytes is read elsewhere."""

    def __init__(self, regions: Regions, most: int = INLINE_BYTES) -> None:
        super().__init__(allowed=regions._allowed)  # noqa: SLF001 - its own kind
        self._by_name, self._leaving = regions._by_name, regions._leaving  # noqa: SLF001
        self.most_bytes = most
