"""Inflation: a compressed message that becomes a plain one step by step; and Unpacking, which counts what it becomes.

Called by the calls. Source: grpc/doc/compression.md.
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
"""What is decompressed on the loop. How much was sent says little: it may grow a thousandfold."""
_LITTLE_PACKED_BYTES = 1 << 15
_STEP_BYTES = 16 << 20
"""What is decompressed on a thread before it is counted."""
_PIECE_BYTES = 1 << 16


class Inflation:
    """One message that is being decompressed: `size` bytes of it are there, and never more than `most` and one.

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
        """Decompress so much more, or all there is. Returns: whether that was all. Raises: MessageError."""
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
        """Give the message, once that was all."""
        return self._parts[0]

    def _broken(self) -> MessageError:
        return MessageError(Status.INTERNAL, f"failed to decompress the {self._coding.decode()} message")


def decompress(message: bytes, coding: bytes, most: int) -> bytes:
    """Take a message's coding off at once; it may have up to `most` bytes then. Raises: MessageError."""
    inflation = Inflation(message, coding, most)
    while not inflation.step(_STEP_BYTES):
        pass
    return inflation.whole()


class Unpacking:
    """The compressed messages of one call, one after another.

    Invariants: `busy` while a thread has one. `counted` is what that has become, and in `shared.held_bytes` until it is
    `passed_on`, or the call ends: who is to answer the one message of a call keeps it so long.
    Threads: the event loop's, but for the steps.
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
        """Decompress a message. Returns: it; None if a thread does it, and `done` is told. Raises: MessageError."""
        inflation = Inflation(message, self._coding, self._shared.grpc.max_message_bytes)
        if len(message) < _LITTLE_PACKED_BYTES and inflation.step(_LITTLE_BYTES):
            return inflation.whole()
        self.busy = True
        self._go_on(inflation)
        return None

    def passed_on(self) -> None:
        """Count the message no more: somebody else has it, and counts what he keeps."""
        self._count(0)

    def end(self) -> None:
        """Count nothing any more: the call has ended."""
        self._ended = True
        self._count(0)

    def _go_on(self, inflation: Inflation) -> None:
        step = self._shared.loop.run_in_executor(None, inflation.step, _STEP_BYTES)
        step.add_done_callback(partial(self._stepped, inflation))

    def _stepped(self, inflation: Inflation, step: asyncio.Future[bool]) -> None:
        error = None if step.cancelled() else step.exception()  # one that nobody asks for would be logged
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
    """Say that too much is kept."""
    return f"the server keeps {most} bytes of requests that have not arrived whole, and no more"
