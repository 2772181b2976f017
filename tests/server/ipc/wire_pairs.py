"""Both ends of a wire in one process, and counts of the process's descriptors and mappings."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from penstock.server.ipc.wire import Message, Wire
from tests.processes import descriptors


def mappings() -> int:
    """Count the mappings of shared segments in this process."""
    return Path("/proc/self/maps").read_text("utf-8").count("memfd:penstock")


def memory_use() -> tuple[int, int]:
    """Count both, after a garbage collection."""
    uvloop.new_event_loop().close()  # the first one opens a pipe that libuv keeps
    gc.collect()
    return descriptors(), mappings()


class Pair:
    """Two wires: `there` is fed what `here` puts, in pieces of the given sizes, and the reverse."""

    def __init__(self, arena_bytes: int = 64 << 20) -> None:
        self.here = Wire(lambda: None, arena_bytes)
        self.there = Wire(lambda: None, arena_bytes)

    def pass_on(self, pieces: Sequence[int] = ()) -> list[Message]:
        """Carry what `here` has put to `there`."""
        return carry(self.here, self.there, pieces)

    def pass_back(self) -> list[Message]:
        """Carry what `there` has put, including freed slots, to `here`."""
        self.there.put_freed()
        return carry(self.there, self.here)

    def close(self) -> None:
        self.here.close()
        self.there.close()


@contextlib.contextmanager
def pair(arena_bytes: int = 64 << 20) -> Iterator[Pair]:
    """Yield a Pair for the block."""
    new_pair = Pair(arena_bytes)
    try:
        yield new_pair
    finally:
        new_pair.close()


def carry(source: Wire, target: Wire, pieces: Sequence[int] = ()) -> list[Message]:
    """Carry bytes and descriptors from one wire to another, which then owns the descriptors."""
    raw = b"".join(source.out)
    source.out.clear()
    sent = [received(descriptor) for descriptor in source.descriptors]
    source.descriptors.clear()
    messages: list[Message] = []
    start = 0
    for size in pieces:
        messages += target.feed(memoryview(raw)[start : start + size], sent)
        sent = []
        start += size
    return messages + target.feed(memoryview(raw)[start:], sent)


def received(descriptor: int) -> int:
    """Return the descriptor that the other process would get, and close this one, as sending does."""
    duplicate = os.dup(descriptor)
    os.close(descriptor)
    return duplicate


def sockets() -> tuple[socket.socket, socket.socket]:
    """Make a pair of connected sockets."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


def same(one: Any, other: Any) -> bool:
    """Whether two tensors, or None, are equal in datatype, shape and content; NaN equals NaN."""
    if one is None or other is None:
        return one is other
    if one.dtype.hasobject or other.dtype.hasobject:
        return bool(one.shape == other.shape and one.tolist() == other.tolist())
    if one.dtype.newbyteorder("=") != other.dtype or one.shape != other.shape:
        return False
    return _native(one) == _native(other)


def _native(array: Any) -> bytes:
    return bytes(np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="))).tobytes())
