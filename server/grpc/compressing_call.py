"""CompressingCall: a call of a port that compresses its answers. Made by the lane's connection.

Source: grpc/doc/compression.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.server.http2.frames import ErrorCode

from . import answers
from .call import GrpcCall
from .compressing import LARGE_BYTES, Compressor
from .framing import MIN_COMPRESSED_BYTES, compress

if TYPE_CHECKING:
    from penstock.server.listening.mapped_buffer import Body

    from .connection import GrpcConnection
    from .request import GrpcRequest


class CompressingCall(GrpcCall):
    """One RPC whose answers are compressed, if its client accepts that.

    Invariants: while `compressor` is set, messages are sent through it, and the response headers have been sent.
    """

    __slots__ = ("compressor",)

    def __init__(self, connection: GrpcConnection, stream_id: int, request: GrpcRequest) -> None:
        super().__init__(connection, stream_id, request)
        self.compressor: Compressor | None = None

    def answer(self, message: Body) -> None:
        """Send the single message of a unary answer, and OK."""
        self.send(message)
        self.finish()

    def send(self, message: Body, flag: int = 0, coding: bytes = b"") -> None:
        """Send one message of a stream."""
        if self.ended:
            return
        connection, coding = self.connection, self.request.answer_coding
        if self.compressor is not None:
            self.compressor.add(message)
        elif not coding or len(message) < MIN_COMPRESSED_BYTES:
            super().send(message, 0, coding)
        elif len(message) < LARGE_BYTES:
            super().send(compress(message, coding, connection.compression), 1, coding)
        else:
            if not self.headers_sent:
                self.headers_sent = True
                connection.outbox.send_headers(answers.response_headers(self.stream_id, coding))
            self.compressor = Compressor(self, coding, message)
            self.compressor.resume()

    def send_compressed(self, message: Body, flag: int, coding: bytes) -> None:
        """Send a message that a Compressor has prepared."""
        super().send(message, flag, coding)

    def on_compressed(self, last_frame: bytes) -> None:
        """Handle the end of a Compressor; `last_frame` ends the stream, if it is set."""
        self.compressor = None
        if not last_frame:
            if self.writable:
                self.on_writable()
        elif self.unsent is None:
            self.connection.end(self, last_frame)
        else:
            self.unsent.last_frame = last_frame

    def _send_last(self, last_frame: bytes) -> None:
        if self.compressor is None:
            super()._send_last(last_frame)
            return
        self.release()
        self.connection.outbox.answer_count += 1
        self.compressor.last_frame = last_frame

    @property
    def writable(self) -> bool:
        """Whether all or nearly all that was sent has left."""
        return self.compressor is None and super().writable

    def untrack_unsent(self) -> None:
        """Stop counting pending data, including messages being compressed."""
        super().untrack_unsent()
        if self.compressor is not None:
            self.compressor.drop()

    def on_reset(self, code: ErrorCode) -> None:
        """Handle the loss of the call: it cannot be answered."""
        if self.compressor is not None:
            self.compressor.drop()
            self.compressor = None
        super().on_reset(code)

    def tick(self, elapsed_s: float) -> None:
        """Count time without progress; not while a thread compresses, which is not the client's fault."""
        if self.compressor is None or self.unsent is not None:
            super().tick(elapsed_s)
