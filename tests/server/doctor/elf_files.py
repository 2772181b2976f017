"""Minimal shared libraries written by hand: only the names of the libraries they need."""

from __future__ import annotations

import struct
from collections.abc import Sequence

_START = 0x1000


def library(needed: Sequence[str]) -> bytes:
    """Write a 64-bit ELF file that needs these libraries."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name in needed)
    places = [1 + sum(len(name.encode()) + 1 for name in needed[:index]) for index in range(len(needed))]
    head_bytes = 64 + 2 * 56
    entries = [(1, place) for place in places] + [(5, _START + head_bytes), (10, len(names)), (0, 0)]
    dynamic = b"".join(struct.pack("<QQ", *entry) for entry in entries)
    head = b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 2, 64, 0, 0)
    size = head_bytes + len(names) + len(dynamic)
    load = struct.pack("<IIQQQQQQ", 1, 4, 0, _START, _START, size, size, 4096)
    where = head_bytes + len(names)
    dynamic_segment = struct.pack(
        "<IIQQQQQQ", 2, 4, where, _START + where, _START + where, len(dynamic), len(dynamic), 8
    )
    return head + load + dynamic_segment + names + dynamic
