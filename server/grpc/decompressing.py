"""Decompression: decompresses one message step by step; and Decompressor, which accounts for the results.

Used by the calls. Source: grpc/doc/compression.md.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from .framing import WBITS, MessageError
from .method import Status

if TYPE_CHECKING:
    import asyncio

    from .connection import GrpcShared

_INLINE_BYTES = 1 << 18
"""The most that is decompressed on the event loop. The compressed size says little: it may grow a thousandfold."""
_INLINE_COMPRESSED_BYTES = 1 << 15
_STEP_BYTES = 16 << 20
"""The most that is decompressed on a thread before it is counted."""
_PIECE_BYTES = 1 << 16


class Decompression:
    """One message being decompressed: `size` bytes are done, at most `max_bytes` plus one.

    Threads: one at a time.
    """

    __slots__ = ("_coding", "_compressed", "_decoder", "_input", "_parts", "max_bytes", "size")

    def __init__(self, compressed: bytes, coding: bytes, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.size = 0
        self._coding = coding
        self._compressed = memoryview(compressed)
        self._input: bytes | memoryview = b""
        self._parts: list[bytes] = []
        self._decoder = zlib.decompressobj(wbits=WBITS[coding])

    def step(self, max_step_bytes: int) -> bool:
        """Decompress up to `max_step_bytes` more. Returns: whether the message is complete. Raises: MessageError."""
        decoder, end = self._decoder, min(self.size + max_step_bytes, self.max_bytes + 1)
        while self.size < end and not decoder.eof:
            if not self._input:
                self._input, self._compressed = self._compressed[:_PIECE_BYTES], self._compressed[_PIECE_BYTES:]
            ended = not self._input
            try:
                part = decoder.decompress(self._input, end - self.size)
            except zlib.error:
                raise self._invalid() from None
            self._input = decoder.unconsumed_tail
            if part:
                self._parts.append(part)
                self.size += len(part)
            elif ended and not decoder.eof:
                raise self._invalid()
        if self.size > self.max_bytes:
            text = f"Received message larger than max when decompressed ({self.max_bytes})"
            raise MessageError(Status.RESOURCE_EXHAUSTED, text)
        if decoder.eof and (decoder.unused_data or self._compressed):
            raise self._invalid()
        if decoder.eof:
            self._parts = [b"".join(self._parts)]
        return decoder.eof

    def message(self) -> bytes:
        """Return the message, once it is complete."""
        return self._parts[0]

    def _invalid(self) -> MessageError:
        return MessageError(Status.INTERNAL, f"failed to decompress the {self._coding.decode()} message")


def decompress(message: bytes, coding: bytes, max_bytes: int) -> bytes:
    """Decompress a message in one go, to at most `max_bytes` bytes. Raises: MessageError."""
    decompression = Decompression(message, coding, max_bytes)
    while not decompression.step(_STEP_BYTES):
        pass
    return decompression.message()


class Decompressor:
    """The compressed messages of one call, one after another.

    Invariants: `busy` while a thread has one. `counted_bytes` is its decompressed size, included in `shared.held_bytes`
    until it is `stop_counting` or the call ends: the service holds the single message of a unary call that long.
    Threads: the event loop's, except for the steps.
    """

    __slots__ = ("_coding", "_ended", "_on_done", "_shared", "busy", "counted_bytes")

    def __init__(
        self, shared: GrpcShared, coding: bytes, on_done: Callable[[bytes, BaseException | None], None]
    ) -> None:
        self._shared = shared
        self._coding = coding
        self._on_done = on_done
        self.counted_bytes = 0
        self._ended = False
        self.busy = False

    def decompress(self, message: bytes) -> bytes | None:
        """Decompress a message. Returns: it; None if a thread does it and `on_done` is called. Raises: MessageError."""
        decompression = Decompression(message, self._coding, self._shared.grpc_limits.max_message_bytes)
        if len(message) < _INLINE_COMPRESSED_BYTES and decompression.step(_INLINE_BYTES):
            return decompression.message()
        self.busy = True
        self._run_step(decompression)
        return None

    def stop_counting(self) -> None:
        """Stop counting the message: its new owner counts what it keeps."""
        self._count(0)

    def end(self) -> None:
        """Stop counting: the call has ended."""
        self._ended = True
        self._count(0)

    def _run_step(self, decompression: Decompression) -> None:
        step = self._shared.loop.run_in_executor(None, decompression.step, _STEP_BYTES)
        step.add_done_callback(partial(self._on_step, decompression))

    def _on_step(self, decompression: Decompression, step: asyncio.Future[bool]) -> None:
        error = None if step.cancelled() else step.exception()  # an exception that is never retrieved would be logged
        if self._ended or step.cancelled():
            return
        shared = self._shared
        if error is None:
            self._count(decompression.size)
            if shared.held_bytes > shared.max_receive_bytes:
                error = MessageError(Status.RESOURCE_EXHAUSTED, receive_limit_text(shared.max_receive_bytes))
            elif not step.result():
                self._run_step(decompression)
                return
        self.busy = False
        self._on_done(b"" if error is not None else decompression.message(), error)

    def _count(self, size: int) -> None:
        self._shared.held_bytes += size - self.counted_bytes
        self.counted_bytes = size


def receive_limit_text(max_bytes: int) -> str:
    """Return the error text for too much stored data."""
    return f"incomplete requests exceed the limit of {max_bytes} bytes"
