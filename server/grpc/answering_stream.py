"""AnsweringStream: the part of a call that its method uses: one answer or a stream, the status, backpressure.

Base class of GrpcCall, which adds the receiving part and the end of the call; CompressingCall overrides it for
compressed answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from penstock.server.http2.stream import LOW_BYTES, Stream

from . import answer_frames
from .framing import PREFIX, PREFIX_BYTES
from .method import Status

if TYPE_CHECKING:
    from penstock.server.listening.mapped_buffer import Body

    from .connection import GrpcConnection
    from .request import GrpcRequest


logger = logging.getLogger("penstock.grpc")


class AnsweringStream(Stream):
    """The sending side of a call.

    Invariants: `headers_sent` once the response headers are sent. Once `ended`, nothing is sent except what is pending;
    that may be `delayed_answer`, a delayed rejection (listening/rejection_pacer.py), which is then all that is left of
    the call.
    """

    __slots__ = (
        "context", "deadline_ns", "delayed_answer", "drain_waiter", "ended", "headers_sent", "on_cancel", "request",
    )  # fmt: skip

    connection: GrpcConnection
    request: GrpcRequest
    deadline_ns: int
    delayed_answer: bytes
    context: Any
    on_cancel: Callable[[], None] | None
    ended: bool
    headers_sent: bool
    drain_waiter: asyncio.Future[None] | None

    @property
    def metadata(self) -> Mapping[str, str]:
        """The request's header fields."""
        return self.request.metadata

    def release(self) -> Callable[[], None] | None:
        """Mark the call as ended, and release its resources. Returns: the callback for its end."""
        raise NotImplementedError

    def expire(self) -> None:
        """End the call because its deadline has passed."""
        raise NotImplementedError

    # -- answers -----------------------------------------------------------------------------------------------

    def answer(self, message: Body) -> None:
        """Send the single message of a unary answer, and OK."""
        if self.ended:
            return
        connection, stream_id, length = self.connection, self.stream_id, len(message)
        outbox, size = connection.outbox, length + PREFIX_BYTES
        if (
            size <= outbox.max_direct_bytes
            and size <= outbox.window
            and size <= outbox.initial_window + self.credit
            and self.remote_ended
            and not outbox.table_size_update
            and not self.headers_sent
        ):
            outbox.frames += answer_frames.unary_answer(stream_id, message, length)
            outbox.window -= size
            outbox.answer_count += 1
            outbox.sent_frames += 1
            del connection.streams[stream_id]
            self.ended = True
            if self.deadline_ns:
                connection.shared.deadlines.discard(self)
            if not outbox.dirty:
                connection.shared.schedule_flush(outbox)
            return
        self.send(message)
        self.finish()

    def send(self, message: Body, flag: int = 0, coding: bytes = b"") -> None:
        """Send one message. Only a CompressingCall sets `coding`, also once it has ended; flag 1: compressed."""
        if self.ended and not coding:
            return
        outbox, stream_id = self.connection.outbox, self.stream_id
        if not self.headers_sent:
            self.headers_sent = True
            outbox.send_headers(answer_frames.response_headers(stream_id, coding))
        size = len(message) + PREFIX_BYTES
        if (
            self.unsent is None
            and size <= outbox.max_direct_bytes
            and size <= outbox.window
            and size <= outbox.initial_window + self.credit
        ):
            outbox.frames += (answer_frames.message_head(stream_id, len(message), flag), message)
            outbox.window -= size
            self.credit -= size
            outbox.sent_frames += 1
            if not outbox.dirty:
                self.connection.shared.schedule_flush(outbox)
            return
        outbox.queue(self, (PREFIX.pack(flag, len(message)), message))

    def finish(self) -> None:
        """End a stream with OK."""
        if not self.ended:
            self._send_last(answer_frames.ok_trailers(self.stream_id) if self.headers_sent else b"")

    def abort(self, status: Status, text: str, pushback_ms: int = 0) -> None:
        """End the call with a status other than OK."""
        if self.ended:
            return
        if self.headers_sent:
            last_frame = answer_frames.trailers(self.stream_id, status, text, pushback_ms)
        else:
            last_frame = answer_frames.trailers_only(self.stream_id, status, text, pushback_ms=pushback_ms)
            if status is Status.UNAVAILABLE and self.remote_ended and self._delay_rejection():
                self.release()
                self.delayed_answer = last_frame
                return
        self.count_error(status)
        self._send_last(last_frame)

    def _delay_rejection(self) -> bool:
        connection, shared = self.connection, self.connection.shared
        return connection.is_early_retry() and shared.pacer.hold(self, shared.loop)

    def send_held(self) -> None:
        """Send the held rejection, if the call is still open."""
        connection = self.connection
        if connection.streams.get(self.stream_id) is self:
            self.count_error(Status.UNAVAILABLE)
            connection.outbox.answer_count += 1
            connection.end(self, self.delayed_answer)

    def count_error(self, status: Status) -> None:
        """Count an error, sent as the call's status or in a message."""
        self.connection.shared.tally.count_error(status.name)

    def _send_last(self, last_frame: bytes) -> None:
        if not last_frame:
            self.connection.outbox.send_headers(answer_frames.response_headers(self.stream_id))
            last_frame = answer_frames.ok_trailers(self.stream_id)
        self.release()
        self.connection.outbox.answer_count += 1
        if self.unsent is None:
            self.connection.end(self, last_frame)
        else:
            self.unsent.last_frame = last_frame

    # -- backpressure ------------------------------------------------------------------------------------------

    @property
    def writable(self) -> bool:
        """Whether all or nearly all that was sent has left."""
        return self.unsent is None or self.unsent.size <= LOW_BYTES

    async def drain(self) -> None:
        """Wait until `writable`, or until the call has ended."""
        while not self.ended and not self.writable:
            if self.drain_waiter is None:
                self.drain_waiter = self.connection.shared.loop.create_future()
            await asyncio.shield(self.drain_waiter)

    def wake(self) -> None:
        """Wake the waiter, which checks again."""
        waiter, self.drain_waiter = self.drain_waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


def run_on_cancel(on_cancel: Callable[[], None] | None) -> None:
    """Call the callback for a call's end, if there is one. Its errors are logged, so they affect no other call."""
    if on_cancel is not None:
        try:
            on_cancel()
        except Exception:
            logger.exception("a call's cancellation failed")
