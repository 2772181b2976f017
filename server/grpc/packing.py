"""Packing: the messages of one call that a thread compresses, and what is sent after them, in order.

Made by a CodedCall. Source: grpc/doc/compression.md.
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

    from penstock.server.listening.mapped import Body

    from .coded_call import CodedCall

LARGE_BYTES = 1 << 18
"""Messages from here on are compressed on a thread: at the highest level this takes some 8 ms, and all others wait."""
_PIECE_BYTES = 1 << 20

logger = logging.getLogger("penstock.grpc")


class Packing:
    """What of one call waits for a thread: its first message is on one, and the others follow one after another.

    Invariants: there is one for as long as something waits, and all of that is counted in `shared.untaken`. `last` ends
    the stream once all of it has been sent. Nothing becomes of it any more once it is dropped. `_now` is what a thread
    has, None once its work is of no use.
    Threads: the event loop's, but for the compression.
    """

    __slots__ = ("_call", "_coding", "_dropped", "_now", "_size", "_waiting", "last")

    def __init__(self, call: CodedCall, coding: bytes, message: Body) -> None:
        self._call = call
        self._coding = coding
        self._waiting: deque[Body] = deque()
        self._now: Body | None = None
        self._size = 0
        self._dropped = False
        self.last = b""
        self.add(message)

    def add(self, message: Body) -> None:
        """Send another message after those that wait."""
        self._waiting.append(message)
        self._size += len(message)
        self._call.connection.shared.untaken.keep(self, self._size)

    def drop(self) -> None:
        """Forget all of it: there is nobody to send it to."""
        self._dropped = True
        self._waiting.clear()
        self._now = None  # a thread may come to it much later
        self._call.connection.shared.untaken.lessen(self)

    def give_up(self) -> None:
        """Send what waits as it is: there is too much of it, and from then on it is the client's to take."""
        message, self._now = self._now, None
        if message is not None:
            self._waiting.appendleft(message)
        while self._waiting:
            message = self._waiting.popleft()
            self._send(len(message), message, 0)
        if not self._dropped:
            self._call.packed(self.last)

    def go_on(self) -> None:
        """Send what needs no thread, up to a message that does: small ones too, of which any number may wait."""
        while self._waiting:
            message = self._waiting.popleft()
            if len(message) >= MIN_COMPRESSED and self._begin(message):
                return
            self._send(len(message), message, 0)
        if not self._dropped:
            self._call.packed(self.last)

    def _begin(self, message: Body) -> bool:
        """Have a message compressed. Returns: False where no thread is to be had: it goes as it is."""
        connection = self._call.connection
        self._now = message
        try:
            begun = connection.shared.loop.run_in_executor(None, self._compress, connection.compression)
        except RuntimeError:
            self._now = None
            return False
        begun.add_done_callback(self._go_on_with)
        return True

    def _send(self, size: int, message: Body, flag: int) -> None:
        """Send what has taken so much here."""
        self._call.pass_on(message, flag, self._coding)
        self._size -= size
        self._call.connection.shared.untaken.lessen(self, self._size)

    def _go_on_with(self, packed: asyncio.Future[bytes]) -> None:
        error = None if packed.cancelled() else packed.exception()  # one that nobody asks for would be logged
        message, self._now = self._now, None
        if message is None or packed.cancelled():
            return
        if error is not None:
            logger.error("an answer could not be compressed", exc_info=error)
            self._call.connection.reset(self._call.stream_id, Fault.INTERNAL_ERROR)
            return
        self._send(len(message), packed.result(), 1)
        if not self._dropped:
            self.go_on()

    def _compress(self, level: int) -> bytes:
        """Compress, on a thread; not to the end if nobody waits for that any more."""
        message, parts = self._now, []
        if message is None:
            return b""
        encoder, view = zlib.compressobj(level, wbits=WINDOW[self._coding]), memoryview(message)
        for at in range(0, len(view), _PIECE_BYTES):
            if self._now is not message:
                return b""
            parts.append(encoder.compress(view[at : at + _PIECE_BYTES]))
        parts.append(encoder.flush())
        return b"".join(parts)
