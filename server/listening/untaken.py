"""Untaken: tracks answers that clients have not read, over all ports of a process, and limits their memory.

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

_SPARED = 8
"""When the limit is exceeded, memory is brought one part in this many below it, to make a scan of the holders
worthwhile."""
_LOOKED_AT, _DROPPED = 1 << 16, 4096
"""The most holders examined per turn of the loop, longest waiting first, and the most dropped."""
_JUST_NOW_S = 0.001


class Holder(Protocol):
    """Something that holds an answer: a connection with a full socket, a call with a full window, or compression."""

    def give_up(self) -> None:
        """Drop the answer and tell the client if possible; or send it, if the client is not the cause of the delay."""


class Untaken:
    """Answers that clients have not read.

    Invariants: `held_bytes` is the sum over all holders. If it exceeds `most_bytes`, it is reduced below that at the
    end of the same loop turn, or within a few turns if there are very many holders. Holders with the most bytes for the
    longest time are dropped first: a client that reads has only just begun to wait.
    Threads: the event loop's.
    """

    def __init__(self, most_bytes: int = sys.maxsize, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """`loop` defaults to the running loop."""
        self.most_bytes = most_bytes
        self.held_bytes = 0
        self._loop = loop
        self._holders: dict[Holder, tuple[int, float]] = {}
        self._due = False

    def keep(self, holder: Holder, size: int) -> None:
        """Record that a holder now holds `size` bytes, more than before."""
        loop = self._loop or asyncio.get_running_loop()
        now = loop.time()
        before, since = self._holders.get(holder, (0, now))
        # new bytes have not waited yet: the time is the average over all bytes
        self._holders[holder] = size, now - (now - since) * before / max(size, 1)
        self.held_bytes += size - before
        if self.held_bytes > self.most_bytes and not self._due:
            self._due = True
            loop.call_soon(self._relieve, loop)

    def lessen(self, holder: Holder, size: int = 0) -> None:
        """Record that `size` bytes are left at a holder; ignored if it is unknown."""
        known = self._holders.get(holder)
        if known is None:
            return
        before, since = known
        self.held_bytes += size - before
        if size:
            self._holders[holder] = size, since
        else:
            del self._holders[holder]

    def _relieve(self, loop: asyncio.AbstractEventLoop) -> None:
        """Drop the heaviest holders until there is room again."""
        self._due = False
        if self.held_bytes <= self.most_bytes:
            return
        now, enough = loop.time(), self.most_bytes - self.most_bytes // _SPARED
        waiting = islice(self._holders.items(), _LOOKED_AT)
        weighed = [(size * (now - since + _JUST_NOW_S), holder) for holder, (size, since) in waiting]
        weighed.sort(key=itemgetter(0), reverse=True)
        dropped = 0
        for _, holder in weighed[:_DROPPED]:
            if self.held_bytes <= enough:
                break
            if holder in self._holders:
                self.lessen(holder)
                dropped += 1
                try:
                    holder.give_up()
                except Exception:  # the others must still be dropped
                    logger.exception("the unread answers of a client could not be dropped")
        logger.warning(
            "unsent answers exceed the %d bytes of --write-memory-bytes: dropped %d of them, or sent them uncompressed "
            "if they waited to be compressed",
            self.most_bytes,
            dropped,
        )
        if self.held_bytes > self.most_bytes and not self._due:
            self._due = True
            loop.call_soon(self._relieve, loop)
