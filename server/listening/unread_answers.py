"""UnreadAnswers: tracks answers that clients have not read, over all ports of a process, and limits their memory.

Made by the composition roots; the connections of both lanes report what they hold.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from itertools import islice
from operator import itemgetter
from typing import Protocol

logger = logging.getLogger("penstock.serve")

_HEADROOM = 8
"""When the limit is exceeded, memory is brought one part in this many below it, to make a scan of the holders
worthwhile."""
_MAX_EXAMINED, _MAX_DROPPED = 1 << 16, 4096
"""The most holders examined per turn of the loop, longest waiting first, and the most dropped."""
_MIN_WAIT_S = 0.001


class Holder(Protocol):
    """Something that holds an answer: a connection with a full socket, a call with a full window, or compression."""

    def shed(self) -> None:
        """Drop the answer and tell the client if possible; or send it, if the client is not the cause of the delay."""


class UnreadAnswers:
    """Answers that clients have not read.

    Invariants: `held_bytes` is the sum over all holders. If it exceeds `max_bytes`, it is reduced below that at the
    end of the same loop turn, or within a few turns if there are very many holders. Holders with the most bytes for the
    longest time are dropped first: a client that reads has only just begun to wait.
    Threads: the event loop's.
    """

    def __init__(self, max_bytes: int = sys.maxsize, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """`loop` defaults to the running loop."""
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self._loop = loop
        self._holders: dict[Holder, tuple[int, float]] = {}
        self._scheduled = False

    def grow(self, holder: Holder, size: int) -> None:
        """Record that a holder now holds `size` bytes, more than before."""
        loop = self._loop or asyncio.get_running_loop()
        now = loop.time()
        before, since = self._holders.get(holder, (0, now))
        # new bytes have not waited yet: the time is the average over all bytes
        self._holders[holder] = size, now - (now - since) * before / max(size, 1)
        self.held_bytes += size - before
        if self.held_bytes > self.max_bytes and not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._drop_excess, loop)

    def shrink(self, holder: Holder, size: int = 0) -> None:
        """Record that `size` bytes remain at a holder; ignored if it is unknown."""
        held = self._holders.get(holder)
        if held is None:
            return
        before, since = held
        self.held_bytes += size - before
        if size:
            self._holders[holder] = size, since
        else:
            del self._holders[holder]

    def _drop_excess(self, loop: asyncio.AbstractEventLoop) -> None:
        """Drop the heaviest holders until there is room again."""
        self._scheduled = False
        if self.held_bytes <= self.max_bytes:
            return
        now, target_bytes = loop.time(), self.max_bytes - self.max_bytes // _HEADROOM
        waiting = islice(self._holders.items(), _MAX_EXAMINED)
        by_weight = [(size * (now - since + _MIN_WAIT_S), holder) for holder, (size, since) in waiting]
        by_weight.sort(key=itemgetter(0), reverse=True)
        dropped = 0
        for _, holder in by_weight[:_MAX_DROPPED]:
            if self.held_bytes <= target_bytes:
                break
            if holder in self._holders:
                self.shrink(holder)
                dropped += 1
                try:
                    holder.shed()
                except Exception:  # the others must still be dropped
                    logger.exception("the unread answers of a client could not be dropped")
        logger.warning(
            "unsent answers exceed the %d bytes of --write-memory-bytes: dropped %d of them, or sent them uncompressed "
            "if they waited to be compressed",
            self.max_bytes,
            dropped,
        )
        if self.held_bytes > self.max_bytes and not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._drop_excess, loop)
