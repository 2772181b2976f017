"""Inflation: decompresses one message step by step; and Unpacking, which accounts for the results.

Used by the calls. Source: grpc/doc/compression.md.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from .framing import WINDOW, MessageError
from .method import Status

if TYPE_CHECKING:
    import asyncio

    from .connection import GrpcShared

_LITTLE_BYTES = 1 << 18
"""The most that is decompressed on the event loop. The compressed size says little: it may grow a thousandfold."""
_LITTLE_PACKED_BYTES = 1 << 15
_STEP_BYTES = 16 << 20
"""The most that is decompressed on a thread before it is counted."""
_PIECE_BYTES = 1 << 16


class Inflation:
    """One message being decompressed: `size` bytes are done, at most `most` plus one.

    Threads: one at a time.
    """

    __slots__ = ("_coding", "_decoder", "_packed", "_parts", "_rest", "most", "size")

    def __init__(self, packed: bytes, coding: bytes, most: int) -> None:
        self.most = most
        self.size = 0
        self._coding = coding
        self._packed = memoryview(packed)
        self._rest: bytes | memoryview = b""
        self._parts: list[bytes] = []
        self._decoder = zlib.decompressobj(wbits=WINDOW[coding])

    def step(self, most_bytes: int) -> bool:
        """Decompress up to `most_bytes` more. Returns: whether the message is complete. Raises: MessageError."""
        decoder, end = self._decoder, min(self.size + most_bytes, self.most + 1)
        while self.size < end and not decoder.eof:
            if not self._rest:
                self._rest, self._packed = self._packed[:_PIECE_BYTES], self._packed[_PIECE_BYTES:]
            ended = not self._rest
            try:
                part = decoder.decompress(self._rest, end - self.size)
            except zlib.error:
                raise self._broken() from None
            self._rest = decoder.unconsumed_tail
            if part:
                self._parts.append(part)
                self.size += len(part)
            elif ended and not decoder.eof:
                raise self._broken()
        if self.size > self.most:
            text = f"Received message larger than max when decompressed ({self.most})"
            raise MessageError(Status.RESOURCE_EXHAUSTED, text)
        if decoder.eof and (decoder.unused_data or self._packed):
            raise self._broken()
        if decoder.eof:
            self._parts = [b"".join(self._parts)]
        return decoder.eof

    def whole(self) -> bytes:
        """Return the message, once it is complete."""
        return self._parts[0]

    def _broken(self) -> MessageError:
        return MessageError(Status.INTERNAL, f"failed to decompress the {self._coding.decode()} message")


def decompress(message: bytes, coding: bytes, most: int) -> bytes:
    """Decompress a message in one go, to at most `most` bytes. Raises: MessageError."""
    inflation = Inflation(message, coding, most)
    while not inflation.step(_STEP_BYTES):
        pass
    return inflation.whole()


class Unpacking:
    """The compressed messages of one call, one after another.

    Invariants: `busy` while a thread has one. `counted` is its decompressed size, included in `shared.held_bytes` until
    it is `passed_on` or the call ends: the service holds the single message of a unary call that long.
    Threads: the event loop's, except for the steps.
    """

    __slots__ = ("_coding", "_done", "_ended", "_shared", "busy", "counted")

    def __init__(self, shared: GrpcShared, coding: bytes, done: Callable[[bytes, BaseException | None], None]) -> None:
        self._shared = shared
        self._coding = coding
        self._done = done
        self.counted = 0
        self._ended = False
        self.busy = False

    def take(self, message: bytes) -> bytes | None:
        """Decompress a message. Returns: it; None if a thread does it and `done` is called. Raises: MessageError."""
        inflation = Inflation(message, self._coding, self._shared.grpc.max_message_bytes)
        if len(message) < _LITTLE_PACKED_BYTES and inflation.step(_LITTLE_BYTES):
            return inflation.whole()
        self.busy = True
        self._go_on(inflation)
        return None

    def passed_on(self) -> None:
        """Stop counting the message: its new owner counts what it keeps."""
        self._count(0)

    def end(self) -> None:
        """Stop counting: the call has ended."""
        self._ended = True
        self._count(0)

    def _go_on(self, inflation: Inflation) -> None:
        step = self._shared.loop.run_in_executor(None, inflation.step, _STEP_BYTES)
        step.add_done_callback(partial(self._stepped, inflation))

    def _stepped(self, inflation: Inflation, step: asyncio.Future[bool]) -> None:
        error = None if step.cancelled() else step.exception()  # an exception that is never retrieved would be logged
        if self._ended or step.cancelled():
            return
        shared = self._shared
        if error is None:
            self._count(inflation.size)
            if shared.held_bytes > shared.receive_bytes:
                error = MessageError(Status.RESOURCE_EXHAUSTED, kept_text(shared.receive_bytes))
            elif not step.result():
                self._go_on(inflation)
                return
        self.busy = False
        self._done(b"" if error is not None else inflation.whole(), error)

    def _count(self, size: int) -> None:
        self._shared.held_bytes += size - self.counted
        self.counted = size


def kept_text(most: int) -> str:
    """Return the error text for too much stored data."""
    return f"the server keeps {most} bytes of requests that have not arrived whole, and no more"
