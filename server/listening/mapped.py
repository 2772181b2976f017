"""Mapped: where a large answer is put together, and the threads that do it. Called by the dialects that encode.

What a thread asks malloc for is of an arena of its own, which keeps up to 64 MiB of what is freed; and what is small
and comes to lie behind large answers on the heap keeps all of them: 50 of 30 MB left 1.5 GB (docs/adr/0022).
"""

from __future__ import annotations

import asyncio
import mmap
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, TypeVar

import numpy as np

from penstock.server.threads import Threads, begin

LARGE_BYTES = 2 << 20
"""What the event loop itself may put together: half a millisecond."""
_LONG_BYTES = 1 << 20
"""JSON from here on takes a thread for tens of milliseconds."""
_FIRST_BYTES = 1 << 22
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS

Body = bytes | memoryview
"""An answer. What is no bytes is Mapped."""
T = TypeVar("T")
_left: ContextVar[threading.Event | None] = ContextVar("left", default=None)
"""Set once nobody takes what is encoded here."""


class LeftError(Exception):
    """Nobody takes the answer any more."""


def demand_taker() -> None:
    """Stop what a thread encodes once nobody takes it. Raises: LeftError."""
    left = _left.get()
    if left is not None and left.is_set():
        raise LeftError


class Mapped:
    """Bytes that are put one after another into memory of their own, which goes back to the system with its last view.

    Invariants: `size` bytes have been put. Pages that nothing was put into are not had.
    """

    __slots__ = ("_memory", "size")

    def __init__(self, size: int = _FIRST_BYTES) -> None:
        """Make it; `size` is how many bytes will come, if that is known."""
        self._memory = mmap.mmap(-1, size, flags=_FLAGS)
        with suppress(OSError):  # a kernel without: 30 MB take 21 ms then, and 6 in huge pages
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.size = 0

    def put(self, part: Body) -> None:
        """Add bytes; without the GIL, which a memoryview would keep while it copies. Raises: LeftError."""
        demand_taker()
        if not part:
            return
        end = self.size + len(part)
        if end > len(self._memory):
            self._memory.resize(max(end, 2 * len(self._memory)))
        np.frombuffer(self._memory, np.uint8)[self.size : end] = np.frombuffer(part, np.uint8)
        self.size = end

    def whole(self) -> memoryview:
        """Give all of it; nothing may be put after that."""
        if self.size < len(self._memory):
            self._memory.resize(self.size)
        return memoryview(self._memory)


def together(parts: Sequence[Body]) -> memoryview:
    """Put parts together, Mapped."""
    mapped = Mapped(sum(map(len, parts)))
    for part in parts:
        mapped.put(part)
    return mapped.whole()


class LargeAnswers:
    """Has large answers encoded, few at a time: the event loop waits for the GIL and a core behind all who are at it.

    Threads: of its own. Long JSON has one, as orjson keeps the GIL, and nothing else waits for it. The rest has two, or
    a burst of answers of 30 MB has a sixth more memory for a moment: what waits are the model's arrays.
    """

    def __init__(self) -> None:
        self._others = Threads(2, "penstock-answer")
        self._long = Threads(1, "penstock-json-answer")

    async def encode(self, json_bytes: int, function: Callable[..., T], *args: Any) -> T:
        """Call on a thread what encodes an answer with about so much JSON."""
        executor = self._long if json_bytes >= _LONG_BYTES else self._others
        left = threading.Event()
        try:
            return await begin(executor, _call, left, function, args)
        except asyncio.CancelledError:
            left.set()  # who is next need not wait for what nobody takes
            raise


def _call(left: threading.Event, function: Callable[..., T], args: Sequence[Any]) -> T:
    _left.set(left)
    return function(*args)
