"""System regions: POSIX shared memory that clients share by name.

`SystemRegions` registers regions in the same table as CUDA regions (`regions.py`). A region is a file that its client
can truncate at any moment, and touching a page of a mapping beyond the end kills the process. Reads and writes
therefore go through the descriptor, which at worst transfers less. A region is mapped as well, but its addresses are
only given to the kernel, whose copies also transfer less (docs/adr/0008-shared-memory.md).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.backends.device_array import HOST
from penstock.backends.errors import Code, InferError

from .regions import MAX_NAME_BYTES, RESERVED_PREFIXES, SYSTEM, RegionKind, Regions

if TYPE_CHECKING:
    from penstock.backends.backend import Array

DIRECTORY = Path("/dev/shm")  # noqa: S108 - where shm_open keeps its objects
_MAP_FAILED = ctypes.c_void_p(-1).value


class _File:
    """An open descriptor, closed when no longer referenced."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


class _Mapping:
    """A mapped part of a file, for the kernel to copy from; unmapped when no longer referenced.

    `pointer` is the address of its first byte, 0 if it cannot be mapped. Python's mmap would hold a second descriptor.
    """

    def __init__(self, file: _File, offset: int, size: int) -> None:
        padding = offset % mmap.ALLOCATIONGRANULARITY
        self._size = padding + size
        protection = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED
        self._start = _libc().mmap(None, self._size, *protection, file.descriptor, offset - padding)
        self.pointer = 0 if self._start == _MAP_FAILED else self._start + padding

    def __del__(self) -> None:
        if self.pointer:
            _libc().munmap(self._start, self._size)


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
    )  # fmt: skip
    libc.munmap.argtypes = ctypes.c_void_p, ctypes.c_size_t
    return libc


class _SystemRegion:
    """A part of one file in DIRECTORY. Implements `DeviceMemory`."""

    kind = SYSTEM
    device = HOST

    def __init__(self, name: str, key: str, offset: int, byte_size: int, file: _File) -> None:
        self.name = name
        self.byte_size = byte_size
        self._key = key
        self._offset = offset
        self._file = file
        self._mapping = _Mapping(file, offset, byte_size)
        self.pointer = self._mapping.pointer

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "key": self._key, "offset": self._offset, "byte_size": self.byte_size}

    def export(self) -> tuple[dict[str, Any], list[int]]:
        return self.describe(), [self._file.descriptor]

    def check(self, end: int) -> None:
        """Check that the file still extends `end` bytes into the region. Raises: as `read`."""
        if os.lseek(self._file.descriptor, 0, os.SEEK_END) < self._offset + end:
            raise self._truncated()

    def read(self, offset: int, into: Array) -> None:
        position, descriptor = self._offset + offset, self._file.descriptor
        try:
            # usually all of it: making a view of the rest takes longer than reading 1 KiB
            done = os.preadv(descriptor, [into], position)  # type: ignore[list-item]  # a Buffer to mypy from 3.12 on
            while done < into.nbytes:
                count = os.preadv(descriptor, [into.data.cast("B")[done:]], position + done)
                if not count:
                    raise self._truncated()
                done += count
        except OSError as error:
            raise self.access_error("read", error) from None

    def write(self, offset: int, raw: bytes | memoryview) -> None:
        position, descriptor = self._offset + offset, self._file.descriptor
        try:
            # a write past the end would grow the file again; if it is truncated at this moment, it grows at most to the
            # size that the client itself had registered. lseek returns the end in a third of the time of fstat
            self.check(offset + len(raw))
            done = os.pwrite(descriptor, raw, position)
            while done < len(raw):
                done += os.pwrite(descriptor, memoryview(raw)[done:], position + done)
        except OSError as error:
            raise self.access_error("write to", error) from None

    def _truncated(self) -> InferError:
        text = "its file is smaller than when it was registered"
        return InferError(Code.INVALID, f"Invalid shared memory region: '{self.name}', {text}")

    def access_error(self, doing: str, _error: Exception) -> InferError:
        return InferError(Code.INVALID, f"unable to {doing} shared memory region: '{self.name}'")


class SystemRegions(RegionKind):
    """POSIX shared memory: keys are those of shm_open, and refer only to files in DIRECTORY."""

    def __init__(self, regions: Regions, directory: Path = DIRECTORY) -> None:
        super().__init__(SYSTEM, regions)
        self._directory = directory

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Register `byte_size` bytes of a shared memory object from `offset`.

        Raises: InferError (UNSUPPORTED, ALREADY_EXISTS, INVALID, OVERLOADED).
        """
        self.regions.check()
        component = self._parse_key(name, key)
        self.regions.check_name(name)
        file = self._open(component, key)
        end = offset + byte_size
        if offset < 0 or byte_size <= 0 or end > os.fstat(file.descriptor).st_size:
            raise InferError(Code.INVALID, f"failed to register shared memory region '{name}': invalid args")
        self.regions.add(_SystemRegion(name, key, offset, byte_size, file))

    def adopt(self, name: str, key: str, offset: int, byte_size: int, descriptor: int) -> None:
        """Add a region that another process of this server has registered; takes over `descriptor`, its file."""
        self.regions.add(_SystemRegion(name, key, offset, byte_size, _File(descriptor)))

    def _parse_key(self, name: str, key: str) -> str:
        # like shm_open, which strips every leading slash
        component = key.lstrip("/")
        for prefix in RESERVED_PREFIXES:
            if component.startswith(prefix):
                reason = f"as the key contains the reserved prefix '{prefix}'"
                text = f"cannot register shared memory region '{name}' with key '{key}' {reason}"
                raise InferError(Code.INVALID, text)
        is_invalid = component in ("", ".", "..") or "/" in component or "\0" in component
        if is_invalid or len(component.encode("utf-8", "replace")) > MAX_NAME_BYTES:
            raise self._cannot_open(key)
        return component

    def _open(self, component: str, key: str) -> _File:
        # O_NONBLOCK, because opening a FIFO would otherwise block
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            file = _File(os.open(self._directory / component, flags))
            if stat.S_ISREG(os.fstat(file.descriptor).st_mode):
                return file
        except (OSError, UnicodeEncodeError):
            pass
        raise self._cannot_open(key)

    @staticmethod
    def _cannot_open(key: str) -> InferError:
        return InferError(Code.INVALID, f"Unable to open shared memory region: '{key}'")
