"""Regions: memory that clients share with the server, by name, and the leases that requests hold on it.

`Regions` is the table of all regions of one server, system and CUDA (`cuda_regions.py`); `SystemRegions` registers
POSIX shared memory. Called by the endpoints of both transports, by decoding (inputs) and by `finish.py` (outputs).

A region is a file that its client can truncate at any moment, and touching a page of a mapping that is gone kills the
process. So nothing is ever mapped: what is read and written goes through the descriptor, which only comes up short
(docs/adr/0008-shared-memory.md).
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from penstock.backends.device_array import DeviceArray, DeviceMemory
from penstock.backends.errors import Code, InferError

if TYPE_CHECKING:
    from penstock.backends.backend import Array

DIRECTORY = Path("/dev/shm")  # noqa: S108 - where shm_open keeps its objects
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
    """One region. `offset`s are the client's, checked against `byte_size` before they come here."""

    name: str
    kind: str
    byte_size: int

    def described(self) -> dict[str, Any]:
        """Give what a status answer says."""

    def shared(self) -> tuple[dict[str, Any], list[int]]:
        """Give what another process of this server needs to have the same region: words, and descriptors to pass on."""

    def read(self, offset: int, into: Array) -> None:
        """Fill `into`, which is C-contiguous. Raises: InferError (INVALID) when the memory is not there any more."""

    def write(self, offset: int, raw: bytes | memoryview) -> None:
        """Write `raw`. Raises: as `read`."""


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
        """The number of the device whose memory it is; -1 for the host's, and after its release."""
        return getattr(self._region, "device", -1)

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> DeviceArray:
        """Give what it has on a device as a tensor, which holds the region itself. No values are copied."""
        return DeviceArray(cast("DeviceMemory", self._held()), self.offset, shape, dtype)

    def holds(self, array: Array | DeviceArray) -> bool:
        """Tell whether a tensor is what it has on a device, so that nothing is left to be written."""
        region: object = self._region
        return type(array) is DeviceArray and array.memory is region and array.offset == self.offset

    def release(self) -> None:
        """Let go of the region."""
        self._region = None

    def _held(self) -> Region:
        if self._region is None:
            raise InferError(Code.INTERNAL, "a lease is used after its release")
        return self._region


class Regions:
    """All regions of one server by name, of either kind; a name belongs to one of them.

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
        """Forget a region, or all of one kind; a name that is not there is no error. Leases go on."""
        self.check()
        for region in list(self._by_name.values()):
            if region.kind == kind and name in ("", region.name):
                del self._by_name[region.name]
        self.dropped(kind, name)

    def listed(self, kind: str, name: str = "") -> list[dict[str, Any]]:
        """Describe one region or all of one kind. Raises: InferError (NOT_FOUND)."""
        self.check()
        if not name:
            return [region.described() for _, region in sorted(self._by_name.items()) if region.kind == kind]
        region = self._by_name.get(name)
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
        region = self._by_name.get(name)
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


class InlineRegions(Regions):
    """The same table as seen from the event loop: what has more than `most` bytes is read elsewhere."""

    def __init__(self, regions: Regions, most: int = INLINE_BYTES) -> None:
        super().__init__(allowed=regions._allowed)  # noqa: SLF001 - its own kind
        self._by_name = regions._by_name  # noqa: SLF001
        self.most_bytes = most


class _File:
    """An open descriptor, closed when nobody holds it any more."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


class _SystemRegion:
    """A part of one file in DIRECTORY."""

    kind = SYSTEM

    def __init__(self, name: str, key: str, offset: int, byte_size: int, file: _File) -> None:
        self.name = name
        self.byte_size = byte_size
        self._key = key
        self._offset = offset
        self._file = file

    def described(self) -> dict[str, Any]:
        return {"name": self.name, "key": self._key, "offset": self._offset, "byte_size": self.byte_size}

    def shared(self) -> tuple[dict[str, Any], list[int]]:
        return self.described(), [self._file.descriptor]

    def read(self, offset: int, into: Array) -> None:
        position, descriptor = self._offset + offset, self._file.descriptor
        try:
            # whole, as a rule: a view of the rest takes longer to make than 1 KiB to read
            done = os.preadv(descriptor, [into], position)  # type: ignore[list-item]  # a Buffer to mypy from 3.12 on
            while done < into.nbytes:
                count = os.preadv(descriptor, [into.data.cast("B")[done:]], position + done)
                if not count:
                    raise self._shrunk()
                done += count
        except OSError:
            raise self._failed("read") from None

    def write(self, offset: int, raw: bytes | memoryview) -> None:
        position, descriptor = self._offset + offset, self._file.descriptor
        try:
            # a write past the end would make the file grow again; if it is truncated right now, it does, to what the
            # client itself had registered at most. Its end is where fstat says, in a third of the time
            if os.lseek(descriptor, 0, os.SEEK_END) < position + len(raw):
                raise self._shrunk()
            done = os.pwrite(descriptor, raw, position)
            while done < len(raw):
                done += os.pwrite(descriptor, memoryview(raw)[done:], position + done)
        except OSError:
            raise self._failed("write to") from None

    def _shrunk(self) -> InferError:
        text = "its file is smaller than when it was registered"
        return InferError(Code.INVALID, f"Invalid shared memory region: '{self.name}', {text}")

    def _failed(self, doing: str) -> InferError:
        return InferError(Code.INVALID, f"unable to {doing} shared memory region: '{self.name}'")


class SystemRegions:
    """POSIX shared memory: keys are those of shm_open, and name files of DIRECTORY and nothing else."""

    def __init__(self, regions: Regions, directory: Path = DIRECTORY) -> None:
        self._regions = regions
        self._directory = directory

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Register `byte_size` bytes of a shared memory object from `offset` on.

        Raises: InferError (UNSUPPORTED, ALREADY_EXISTS, INVALID, OVERLOADED).
        """
        self._regions.check()
        component = self._component(name, key)
        self._regions.check_new(name)
        file = self._open(component, key)
        end = offset + byte_size
        if offset < 0 or byte_size <= 0 or end > os.fstat(file.descriptor).st_size:
            raise InferError(Code.INVALID, f"failed to register shared memory region '{name}': invalid args")
        self._regions.add(_SystemRegion(name, key, offset, byte_size, file))

    def adopt(self, name: str, key: str, offset: int, byte_size: int, descriptor: int) -> None:
        """Have a region that another process of this server has registered; `descriptor` is its file, kept here."""
        self._regions.add(_SystemRegion(name, key, offset, byte_size, _File(descriptor)))

    def unregister(self, name: str = "") -> None:
        """Forget a region, or all system regions. Raises: InferError (UNSUPPORTED)."""
        self._regions.drop(SYSTEM, name)

    def status(self, name: str = "") -> list[dict[str, Any]]:
        """Describe a region, or all system regions. Raises: InferError (UNSUPPORTED, NOT_FOUND)."""
        return self._regions.listed(SYSTEM, name)

    def lease(self, name: str, offset: int, byte_size: int) -> Lease:
        """Lease a part of a region, of either kind. Raises: InferError."""
        return self._regions.lease(name, offset, byte_size)

    def _component(self, name: str, key: str) -> str:
        # as shm_open, which takes off every leading slash
        component = key.lstrip("/")
        for prefix in PRIVATE:
            if component.startswith(prefix):
                why = f"as the key contains the reserved prefix '{prefix}'"
                text = f"cannot register shared memory region '{name}' with key '{key}' {why}"
                raise InferError(Code.INVALID, text)
        unusable = component in ("", ".", "..") or "/" in component or "\0" in component
        if unusable or len(component.encode("utf-8", "replace")) > MAX_NAME_BYTES:
            raise self._unusable(key)
        return component

    def _open(self, component: str, key: str) -> _File:
        # O_NONBLOCK for a FIFO, whose opening would otherwise wait
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            file = _File(os.open(self._directory / component, flags))
            if stat.S_ISREG(os.fstat(file.descriptor).st_mode):
                return file
        except (OSError, UnicodeEncodeError):
            pass
        raise self._unusable(key)

    @staticmethod
    def _unusable(key: str) -> InferError:
        return InferError(Code.INVALID, f"Unable to open shared memory region: '{key}'")
