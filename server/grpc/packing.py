"""Packing: the messages of one call that a thread compresses, and what is sent after them, in order.

Called by the calls. Source: grpc/doc/compression.md.
"""

from __future__ import annotations

import logging
import zlib
from collections import deque
from typing import TYPE_CHECKING

from penstock.server.http2.frames import Fault

from .framing import MIN_COMPRESSED, WINDOW

if TYPE_CHECKING:
    import asyncio

    from .answering import Answering

LARGE_BYTES = 1 << 18
"""Messages from here on are compressed on a thread: at the highest level this takes some 8 ms, and all others wait."""
_PIECE_BYTES = 1 << 20

logger = logging.getLogger("penstock.grpc")


class Packing:
    """What of one call waits for a thread: its first message is on one, and the others follow one after another.

    Invariants: there is one for as long as something waits. `last` ends the stream once all of it has been sent.
    Nothing becomes of it any more once it is dropped.
    Threads: the event loop's, but for the compression.
    """

    __slots__ = ("_call", "_coding", "_dropped", "_waiting", "last")

    def __init__(self, call: Answering, coding: bytes, message: bytes) -> None:
        self._call = call
        self._coding = coding
        self._waiting = deque((message,))
        self._dropped = False
        self.last = b""
        self._go_on()

    def add(self, message: bytes) -> None:
        """Send another message after those that wait."""
        self._waiting.append(message)

    def drop(self) -> None:
        """Forget all of it: there is nobody to send it to."""
        self._dropped = True
        self._waiting.clear()

    def _go_on(self) -> None:
        """Send what needs no thread, up to a message that does."""
        waiting, call = self._waiting, self._call
        while waiting and len(waiting[0]) < MIN_COMPRESSED:
            call.put(waiting.popleft(), coding=self._coding)
        if not waiting:
            call.packed(self.last)
            return
        level = call.connection.compression
        # small ones, too: any number of them may wait
        packed = call.connection.shared.loop.run_in_executor(None, self._compress, waiting.popleft(), level)
        packed.add_done_callback(self._go_on_with)

    def _go_on_with(self, packed: asyncio.Future[bytes]) -> None:
        error = None if packed.cancelled() else packed.exception()  # one that nobody asks for would be logged
        if self._dropped or packed.cancelled():
            return
        if error is not None:
            logger.error("an answer could not be compressed", exc_info=error)
            self._call.connection.reset(self._call.stream_id, Fault.INTERNAL_ERROR)
            return
        self._call.put(packed.result(), 1, self._coding)
        if not self._dropped:
            self._go_on()

    def _compress(self, message: bytes, level: int) -> bytes:
        """Compress, on a thread; not to the end if nobody waits for it any more."""
        encoder, view = zlib.compressobj(level, wbits=WINDOW[self._coding]), memoryview(message)
        parts: list[bytes] = []
        for at in range(0, len(view), _PIECE_BYTES):
            if self._dropped:
                return b""
            parts.append(encoder.compress(view[at : at + _PIECE_BYTES]))
        parts.append(encoder.flush())
        return b"".join(parts)
