"""AnsweringStream: the half of a call that its method uses: one answer or a stream of them, the status, the pace.

Part of GrpcCall, which adds what arrives and how the call ends; where answers are compressed, CodedCall has its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from penstock.server.http2.stream import LOW_BYTES, Stream

from . import answers
from .framing import PREFIX, PREFIX_BYTES
from .method import Status

if TYPE_CHECKING:
    from penstock.server.listening.mapped import Body

    from .connection import GrpcConnection
    from .request import GrpcRequest


logger = logging.getLogger("penstock.grpc")


class AnsweringStream(Stream):
    """What a method sends.

    Invariants: `begun` when the response's headers are out. Once `ended`, nothing is sent but what already waits; that
    may be `held`, a refusal (listening/pace.py), which is all that is left of its call.
    """

    __slots__ = ("begun", "cancelled", "context", "deadline_ns", "ended", "held", "request", "waiter")

    connection: GrpcConnection
    request: GrpcRequest
    deadline_ns: int
    held: bytes
    context: Any
    cancelled: Callable[[], None] | None
    ended: bool
    begun: bool
    waiter: asyncio.Future[None] | None

    @property
    def metadata(self) -> Mapping[str, str]:
        """Give the request's header fields."""
        return self.request.metadata

    def let_go(self) -> Callable[[], None] | None:
        """Mark the call as ended, and let go of all it has. Returns: what wanted to learn of it."""
        raise NotImplementedError

    def expire(self) -> None:
        """End the call because its deadline has passed."""
        raise NotImplementedError

    # -- answers -----------------------------------------------------------------------------------------------

    def answer(self, message: Body) -> None:
        """Send the one message of a unary answer, and OK."""
        if self.ended:
            return
        connection, stream_id, length = self.connection, self.stream_id, len(message)
        outbox, size = connection.outbox, length + PREFIX_BYTES
        if (
            size <= outbox.quick_bytes
            and size <= outbox.window
            and size <= outbox.initial_window + self.credit
            and self.remote_ended
            and not outbox.notice
            and not self.begun
        ):
            outbox.frames += answers.whole(stream_id, message, length)
            outbox.window -= size
            outbox.answered += 1
            outbox.sent_frames += 1
            del connection.streams[stream_id]
            self.ended = True
            if self.deadline_ns:
                connection.shared.deadlines.discard(self)
            if not outbox.dirty:
                connection.shared.mark(outbox)
            return
        self.send(message)
        self.finish()

    def send(self, message: Body, flag: int = 0, coding: bytes = b"") -> None:
        """Send one message of a stream. `coding` is a CodedCall's to say, which may have ended; flag 1: it is on it."""
        if self.ended and not coding:
            return
        outbox, stream_id = self.connection.outbox, self.stream_id
        if not self.begun:
            self.begun = True
            outbox.send_headers(answers.begin(stream_id, coding))
        size = len(message) + PREFIX_BYTES
        if (
            self.unsent is None
            and size <= outbox.quick_bytes
            and size <= outbox.window
            and size <= outbox.initial_window + self.credit
        ):
            outbox.frames += (answers.before_message(stream_id, len(message), flag), message)
            outbox.window -= size
            self.credit -= size
            outbox.sent_frames += 1
            if not outbox.dirty:
                self.connection.shared.mark(outbox)
            return
        outbox.queue(self, (PREFIX.pack(flag, len(message)), message))

    def finish(self) -> None:
        """End a stream with OK."""
        if not self.ended:
            self._last(answers.ok(self.stream_id) if self.begun else b"")

    def refuse(self, status: Status, text: str, pushback_ms: int = 0) -> None:
        """End the call with a status other than OK."""
        if self.ended:
            return
        if self.begun:
            last = answers.trailers(self.stream_id, status, text, pushback_ms)
        else:
            last = answers.trailers_only(self.stream_id, status, text, pushback_ms=pushback_ms)
            if status is Status.UNAVAILABLE and self.remote_ended and self._holds():
                self.let_go()
                self.held = last
                return
        self.erred(status)
        self._last(last)

    def _holds(self) -> bool:
        connection, shared = self.connection, self.connection.shared
        return connection.is_early() and shared.pace.holds(self, shared.loop)

    def send_held(self) -> None:
        """Send the refusal that is held, if there is still somebody to have it."""
        connection = self.connection
        if connection.streams.get(self.stream_id) is self:
            self.erred(Status.UNAVAILABLE)
            connection.outbox.answered += 1
            connection.end(self, self.held)

    def erred(self, status: Status) -> None:
        """Count an error that is told, in the place of the call's status or in a message."""
        self.connection.shared.tally.error(status.name)

    def _last(self, last: bytes) -> None:
        if not last:
            self.connection.outbox.send_headers(answers.begin(self.stream_id))
            last = answers.ok(self.stream_id)
        self.let_go()
        self.connection.outbox.answered += 1
        if self.unsent is None:
            self.connection.end(self, last)
        else:
            self.unsent.last = last

    # -- the pace ----------------------------------------------------------------------------------------------

    @property
    def writable(self) -> bool:
        """Whether what was sent has left or nearly so."""
        return self.unsent is None or self.unsent.size <= LOW_BYTES

    async def drained(self) -> None:
        """Wait until `writable`, or until the call has ended."""
        while not self.ended and not self.writable:
            if self.waiter is None:
                self.waiter = self.connection.shared.loop.create_future()
            await asyncio.shield(self.waiter)

    def wake(self) -> None:
        """Let whoever waits look again."""
        waiter, self.waiter = self.waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


def tell_of_end(cancelled: Callable[[], None] | None) -> None:
    """Call what wanted to learn of a call's end, if anything did. What fails there keeps no other call from its own."""
    if cancelled is not None:
        try:
            cancelled()
        except Exception:
            logger.exception("what a call has begun could not be cancelled")
