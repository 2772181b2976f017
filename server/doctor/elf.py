"""ELF: lists the libraries that a shared library needs, without loading anything.

Source: the System V ABI, chapters 4 and 5 (ELF header, program header, dynamic section).
"""

from __future__ import annotations

import struct
from typing import BinaryIO

_MAGIC = b"\x7fELF\x02\x01"  # 64 bits, little-endian
_HEADER_BYTES, _SEGMENT_BYTES, _ENTRY_BYTES = 64, 56, 16
_SEGMENT_LOADED, _SEGMENT_DYNAMIC = 1, 2
_NEEDED, _STRINGS, _STRINGS_BYTES = 1, 5, 10
_MAX_SEGMENTS, _MAX_BYTES = 256, 1 << 20
"""Far above the sizes of real libraries: a file that exceeds them is not one."""


def needed_libraries(file: BinaryIO) -> tuple[str, ...]:
    """Return the libraries that a library needs (DT_NEEDED), in its order. Raises: ValueError for any other file."""
    header = _read_at(file, 0, _HEADER_BYTES)
    if not header.startswith(_MAGIC):
        raise ValueError("is not a 64-bit ELF file")
    (table,), (size, count) = struct.unpack_from("<Q", header, 32), struct.unpack_from("<HH", header, 54)
    if size != _SEGMENT_BYTES or count > _MAX_SEGMENTS:
        raise ValueError("has a broken ELF header")
    segments = [struct.unpack("<IIQQQQQQ", _read_at(file, table + size * index, size)) for index in range(count)]
    dynamic = next((segment for segment in segments if segment[0] == _SEGMENT_DYNAMIC), None)
    if dynamic is None:
        return ()
    raw = _read_at(file, dynamic[2], dynamic[5])
    entries = list(struct.iter_unpack("<QQ", raw[: len(raw) // _ENTRY_BYTES * _ENTRY_BYTES]))
    addresses = dict(entries)
    names = _read_at(file, _file_offset(segments, addresses.get(_STRINGS, 0)), addresses.get(_STRINGS_BYTES, 0))
    return tuple(_read_name(names, value) for tag, value in entries if tag == _NEEDED)


def _file_offset(segments: list[tuple[int, ...]], address: int) -> int:
    """Return the file offset of a loaded address."""
    for kind, _, offset, start, _, size, *_ in segments:
        if kind == _SEGMENT_LOADED and start <= address < start + size:
            return offset + address - start
    raise ValueError("has no string table")


def _read_at(file: BinaryIO, offset: int, size: int) -> bytes:
    if size > _MAX_BYTES or offset >= 1 << 62:
        raise ValueError("has a broken ELF header")
    file.seek(offset)
    content = file.read(size)
    if len(content) != size:
        raise ValueError("ends too early")
    return content


def _read_name(names: bytes, start: int) -> str:
    end = names.find(b"\0", start)
    if start >= len(names) or end < 0:
        raise ValueError("has a broken string table")
    return names[start:end].decode("utf-8", "replace")
