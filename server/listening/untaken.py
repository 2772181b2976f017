"""Untaken: what clients have not taken of their answers, over all ports of a process, and its bound.

Made by the composition roots; the connections of both lanes say what they keep.
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
"""What is passed is brought down by one part in so many, so that a look at all who wait is worth it."""
_LOOKED_AT, _DROPPED = 1 << 16, 4096
"""So many are looked at in one turn of the loop, those who have waited longest, and so many dropped at most."""
_JUST_NOW_S = 0.001


class Holder(Protocol):
    """What keeps an answer: a connection whose socket is full, a call whose window is, or one who has it compressed."""

    def give_up(self) -> None:
        """Drop what is kept, and tell the client, if that can be done; or send it, if not the client has held it up."""


class Untaken:
    """What clients have not taken.

    Invariants: `held_bytes` is what all holders keep. It is brought below `most_bytes` at the end of the loop turn in
    which it has passed that, or within a few if there are very many holders. Who keeps most for longest is dropped
    first: a client that reads has only just begun to wait.
    Threads: the event loop's.
    """

    def __init__(self, most_bytes: int = sys.maxsize, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Make it; `loop` is the running one unless told."""
        self.most_bytes = most_bytes
        self.held_bytes = 0
        self._loop = loop
        self._holders: dict[Holder, tuple[int, float]] = {}
        self._due = False

    def keep(self, holder: Holder, size: int) -> None:
        """Learn that so much is kept there now, as more has come."""
        loop = self._loop or asyncio.get_running_loop()
        now = loop.time()
        before, since = self._holders.get(holder, (0, now))
        # what has come now has not waited yet: the time is that of a byte on the average
        self._holders[holder] = size, now - (now - since) * before / max(size, 1)
        self.held_bytes += size - before
        if self.held_bytes > self.most_bytes and not self._due:
            self._due = True
            loop.call_soon(self._relieve, loop)

    def lessen(self, holder: Holder, size: int = 0) -> None:
        """Learn that so much is left there, if it is known that anything was kept at all."""
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
        """Drop what weighs most, until there is room again."""
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
                except Exception:  # the others are still to go
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
