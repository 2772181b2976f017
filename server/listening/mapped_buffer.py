"""MappedBuffer: memory for assembling a large answer, and the threads that do so. Used by the dialects that encode.

Memory that a thread allocates with malloc comes from its own arena, which keeps up to 64 MiB of freed memory; and small
objects placed behind large answers on the heap keep all of those: 50 of 30 MB left 1.5 GB (docs/adr/0022).
"""

from __future__ import annotations

import asyncio
import mmap
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from typing import TypeVar, TypeVarTuple

import numpy as np

from penstock.server.threads import ThreadPool, run_in_pool

LARGE_BYTES = 2 << 20
"""The most the event loop itself may assemble: half a millisecond."""
_LONG_JSON_BYTES = 1 << 20
"""JSON of at least this size takes a thread tens of milliseconds."""
_FIRST_BYTES = 1 << 22
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS

Body = bytes | memoryview
"""An answer. What is not bytes is a view of a MappedBuffer."""
T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_abandoned: ContextVar[threading.Event | None] = ContextVar("abandoned", default=None)
"""Set once the answer being encoded is no longer wanted."""


class AbandonedError(Exception):
    """The answer is no longer wanted."""


def raise_if_abandoned() -> None:
    """Stop what a thread encodes once nobody takes it. Raises: AbandonedError."""
    abandoned = _abandoned.get()
    if abandoned is not None and abandoned.is_set():
        raise AbandonedError


class MappedBuffer:
    """Bytes appended to a dedicated memory mapping, which is returned to the system with its last view.

    Invariants: `size` bytes have been appended. Pages not written to take no memory.
    """

    __slots__ = ("_memory", "size")

    def __init__(self, size: int = _FIRST_BYTES) -> None:
        """`size` is the number of bytes to come, if known."""
        self._memory = mmap.mmap(-1, size, flags=_FLAGS)
        with suppress(OSError):  # kernels without it: 30 MB then take 21 ms, and 6 in huge pages
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.size = 0

    def append(self, part: Body) -> None:
        """Append bytes, without the GIL, which a memoryview would hold while copying. Raises: AbandonedError."""
        raise_if_abandoned()
        if not part:
            return
        end = self.size + len(part)
        if end > len(self._memory):
            self._memory.resize(max(end, 2 * len(self._memory)))
        np.frombuffer(self._memory, np.uint8)[self.size : end] = np.frombuffer(part, np.uint8)
        self.size = end

    def finish(self) -> memoryview:
        """Return all of it; nothing may be appended after that."""
        if self.size < len(self._memory):
            self._memory.resize(self.size)
        return memoryview(self._memory)


def join_mapped(parts: Sequence[Body]) -> memoryview:
    """Join parts in a MappedBuffer."""
    buffer = MappedBuffer(sum(map(len, parts)))
    for part in parts:
        buffer.append(part)
    return buffer.finish()


class LargeAnswerEncoder:
    """Encodes large answers, few at a time: the event loop waits for the GIL and a core behind all that are running.

    Threads: its own. Long JSON has one, since orjson holds the GIL, and shares it with nothing else. The rest has two;
    otherwise a burst of 30 MB answers would take a sixth more memory for a moment, as what waits is the model's arrays.
    """

    def __init__(self) -> None:
        self._threads = ThreadPool(2, "penstock-answer")
        self._json_thread = ThreadPool(1, "penstock-json-answer")

    async def encode(self, json_bytes: int, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run a function on a thread that encodes an answer with about `json_bytes` of JSON."""
        executor = self._json_thread if json_bytes >= _LONG_JSON_BYTES else self._threads
        abandoned = threading.Event()
        try:
            return await run_in_pool(executor, _call, abandoned, function, args)
        except asyncio.CancelledError:
            abandoned.set()  # the next one need not wait for an answer that nobody wants
            raise


def _call(abandoned: threading.Event, function: Callable[[*Ts], T], args: tuple[*Ts]) -> T:
    _abandoned.set(abandoned)
    return function(*args)
