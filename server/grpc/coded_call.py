"""CodedCall: a call of a port that compresses its answers. Made by the lane's connection.

Source: grpc/doc/compression.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.server.http2.frames import Fault

from . import answers
from .call import GrpcCall
from .framing import MIN_COMPRESSED, compress
from .packing import LARGE_BYTES, Packing

if TYPE_CHECKING:
    from penstock.server.listening.mapped_buffer import Body

    from .connection import GrpcConnection
    from .request import GrpcRequest


class CodedCall(GrpcCall):
    """One RPC whose answers are compressed, if its client accepts that.

    Invariants: while `packing` is set, messages are sent through it, and the response headers have been sent.
    """

    __slots__ = ("packing",)

    def __init__(self, connection: GrpcConnection, stream_id: int, request: GrpcRequest) -> None:
        super().__init__(connection, stream_id, request)
        self.packing: Packing | None = None

    def answer(self, message: Body) -> None:
        """Send the single message of a unary answer, and OK."""
        self.send(message)
        self.finish()

    def send(self, message: Body, flag: int = 0, coding: bytes = b"") -> None:
        """Send one message of a stream."""
        if self.ended:
            return
        connection, coding = self.connection, self.request.wanted
        if self.packing is not None:
            self.packing.add(message)
        elif not coding or len(message) < MIN_COMPRESSED:
            super().send(message, 0, coding)
        elif len(message) < LARGE_BYTES:
            super().send(compress(message, coding, connection.compression), 1, coding)
        else:
            if not self.begun:
                self.begun = True
                connection.outbox.send_headers(answers.begin(self.stream_id, coding))
            self.packing = Packing(self, coding, message)
            self.packing.go_on()

    def pass_on(self, message: Body, flag: int, coding: bytes) -> None:
        """Send a message that a Packing has prepared."""
        super().send(message, flag, coding)

    def packed(self, last: bytes) -> None:
        """Handle the end of a Packing; `last` ends the stream, if it is set."""
        self.packing = None
        if not last:
            if self.writable:
                self.left()
        elif self.unsent is None:
            self.connection.end(self, last)
        else:
            self.unsent.last = last

    def _last(self, last: bytes) -> None:
        if self.packing is None:
            super()._last(last)
            return
        self.let_go()
        self.connection.outbox.answered += 1
        self.packing.last = last

    @property
    def writable(self) -> bool:
        """Whether all or nearly all that was sent has left."""
        return self.packing is None and super().writable

    def uncount(self) -> None:
        """Stop counting pending data, including messages being compressed."""
        super().uncount()
        if self.packing is not None:
            self.packing.drop()

    def lost(self, code: Fault) -> None:
        """Handle the loss of the call: it cannot be answered."""
        if self.packing is not None:
            self.packing.drop()
            self.packing = None
        super().lost(code)

    def tick(self, elapsed_s: float) -> None:
        """Count time without progress; not while a thread compresses, which is not the client's fault."""
        if self.packing is None or self.unsent is not None:
            super().tick(elapsed_s)
