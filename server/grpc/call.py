"""GrpcCall: one RPC on its stream, which implements `method.Call`. Made by the lane's connection.

A unary call whose message arrives in one frame and whose answer fits in one takes a fast path through `received` and
`answer`; everything else goes through the methods below them.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.backends.errors import InferError
from penstock.server.errors import GRPC_STATUS, pushback_ms
from penstock.server.http2.frames import ErrorCode

from . import answer_frames
from .answering_stream import AnsweringStream, run_on_cancel
from .decompressing import Decompressor, receive_limit_text
from .framing import MESSAGES_PER_TURN, PREFIX, PREFIX_BYTES, IncomingMessages, MessageError
from .method import Reader, Status

if TYPE_CHECKING:
    from .connection import GrpcConnection
    from .request import GrpcRequest

logger = logging.getLogger("penstock.grpc")

_head_of = PREFIX.unpack_from


class GrpcCall(AnsweringStream):
    """One RPC.

    Invariants: once `ended`, nothing is sent except what waits for its window, and `on_cancel` is not called. What
    `_incoming` holds is counted in `shared.held_bytes`. So is a message decompressed on a thread: until it is delivered
    if the call is a stream, otherwise until the call ends.
    """

    __slots__ = ("_decompressor", "_incoming", "_message", "_reader", "_stalled_s")

    def __init__(self, connection: GrpcConnection, stream_id: int, request: GrpcRequest) -> None:
        self.connection = connection
        self.stream_id = stream_id
        self.request = request
        self.credit = 0
        self.receive_window = connection.limits.stream_window_bytes
        self.remote_ended = False
        self.unsent = None
        self.ended = False
        self.headers_sent = False
        self.deadline_ns = 0
        self.context = None
        self.on_cancel = None
        self.drain_waiter = None
        self._incoming: IncomingMessages | None = None
        self._message: bytes | None = None
        self._decompressor: Decompressor | None = None
        self._reader: Reader | None = None
        self._stalled_s = 0.0

    # -- receiving ---------------------------------------------------------------------------------------------

    def received(self, payload: bytes, end_stream: int) -> None:
        """Process a DATA frame's payload; a complete message goes directly to its method."""
        request = self.request
        size, unary = len(payload) - PREFIX_BYTES, request.unary
        if (
            end_stream
            and 0 <= size <= self.connection.max_message_bytes
            and self._incoming is None
            and unary is not None
            and not self.ended
        ):
            flag, length = _head_of(payload)
            if length == size and not flag and (request.length < 0 or request.length == len(payload)):
                self.remote_ended = True
                try:
                    unary(self, payload[PREFIX_BYTES:])
                except Exception as error:  # noqa: BLE001 - whatever a method raises, its client gets an answer
                    self.fail(error)
                return
        self._receive(payload, end_stream)

    def received_part(self, payload: memoryview, end_stream: int) -> None:
        """Process the payload of a long DATA frame, or a part of it."""
        incoming = self._incoming
        if incoming is None and end_stream:
            self.received(bytes(payload), end_stream)
        elif (
            incoming is None or end_stream or not incoming.storage_decided or not self._store_middle(incoming, payload)
        ):
            self._receive(payload, end_stream)

    def _store_middle(self, incoming: IncomingMessages, payload: memoryview) -> bool:
        """Store a middle part of a message, the most common kind of a large one. Returns: False if it is not one."""
        size, connection = len(payload), self.connection
        shared, receive_window = connection.shared, self.receive_window - size
        if (
            incoming.stored_bytes + size >= incoming.needed_bytes
            or receive_window < connection.refill_stream_below
            or shared.held_bytes + size > shared.max_receive_bytes
            or 0 <= self.request.length < incoming.received_bytes + size
        ):
            return False
        self.receive_window = receive_window
        self._stalled_s = 0.0
        incoming.feed(payload)
        incoming.counted_bytes += size
        shared.held_bytes += size
        return True

    def _receive(self, payload: bytes | memoryview, end_stream: int) -> None:
        if not self._accept_bytes(len(payload), end_stream):
            return
        incoming = self._incoming
        if incoming is None:
            incoming = self._incoming = IncomingMessages(self.connection.shared.grpc_limits.max_message_bytes)
        incoming.feed(payload)
        self._process_received(incoming, end_stream)

    def get_buffer(self) -> memoryview | None:
        """Return the buffer for the next payload: inside the current message, if it is large."""
        return None if self._incoming is None else self._incoming.get_buffer()

    def buffer_updated(self, size: int, end_stream: int) -> None:
        """Process `size` bytes written to that buffer."""
        incoming = self._incoming
        if self._accept_bytes(size, end_stream) and incoming is not None:
            incoming.buffer_updated(size)
            self._process_received(incoming, end_stream)

    def _accept_bytes(self, size: int, end_stream: int) -> bool:
        """Account for received bytes. Returns: whether they are still needed."""
        self.receive_window -= size
        self._stalled_s = 0.0
        if self.receive_window < 0:
            self.connection.reset(self.stream_id, ErrorCode.FLOW_CONTROL_ERROR)
            return False
        if end_stream:
            self.remote_ended = True
        # after the end, its answer is only waiting for its window
        return not self.ended

    def _process_received(self, incoming: IncomingMessages, end_stream: int) -> None:
        """Process what has arrived so far."""
        length = self.request.length
        if length >= 0 and (incoming.received_bytes > length or (end_stream and incoming.received_bytes < length)):
            # RFC 9113 8.1.1
            self.connection.reset(self.stream_id, ErrorCode.PROTOCOL_ERROR)
            return
        self._deliver_messages()

    def _deliver_messages(self, in_next_turn: bool = False) -> None:
        """Deliver complete messages, as long as answers to them can be sent, some in each turn of the loop."""
        incoming = self._incoming
        if incoming is None or self.ended:
            return
        if in_next_turn:
            incoming.turn_messages = MESSAGES_PER_TURN
        try:
            while self._can_deliver(incoming) and (next_message := incoming.next()) is not None:
                flag, message = next_message
                incoming.turn_messages -= 1
                if flag:
                    self._decompress(message)
                else:
                    self._deliver(message)
                if not incoming.turn_messages:
                    self.connection.shared.loop.call_soon(self._deliver_messages, True)
            # the end needs no room: a stream notified only when all is sent would not end in a drain
            if self.remote_ended and self._is_listening():
                self._on_half_close(incoming)
        except MessageError as message_error:
            self._abort_and_cancel(message_error.status, message_error.text)
        except Exception as error:  # noqa: BLE001 - whatever a method raises, its client gets an answer
            self.fail(error)
        if not self.ended:
            self._update_counted_bytes(incoming)

    def _can_deliver(self, incoming: IncomingMessages) -> bool:
        """Whether the next message may be delivered."""
        return incoming.turn_messages > 0 and self.writable and self._is_listening()

    def _is_listening(self) -> bool:
        return not self.ended and not (self._decompressor is not None and self._decompressor.busy)

    def _deliver(self, message: bytes) -> None:
        if self._reader is not None:
            self._reader.on_message(message)
        elif self._message is None:
            self._message = message
        else:
            raise MessageError(Status.UNIMPLEMENTED, "more than one message for a method that takes one")

    def _decompress(self, message: bytes) -> None:
        """Decompress and deliver a message; on a thread if it becomes large, which would block the event loop."""
        coding, shared = self.request.coding, self.connection.shared
        if not coding:
            raise MessageError(Status.INTERNAL, "compressed message without grpc-encoding")
        if self._decompressor is None:
            self._decompressor = Decompressor(shared, coding, self._on_decompressed)
        if (decompressed := self._decompressor.decompress(message)) is not None:
            self._deliver(decompressed)

    def _on_decompressed(self, message: bytes, error: BaseException | None) -> None:
        if self.ended:
            return
        try:
            if error is not None:
                raise error
            if self._reader is not None and self._decompressor is not None:
                self._decompressor.stop_counting()
            self._deliver(message)
        except MessageError as message_error:
            self._abort_and_cancel(message_error.status, message_error.text)
        except Exception as failure:  # noqa: BLE001 - whatever a method raises, its client gets an answer
            self.fail(failure)
        self._deliver_messages()

    def _on_half_close(self, incoming: IncomingMessages) -> None:
        """Process the end of the client's data."""
        if incoming.stored_bytes:
            if incoming.stored_bytes >= incoming.needed_bytes:
                return
            raise MessageError(Status.INTERNAL, "the stream ended within a message")
        if self._reader is not None:
            reader, self._reader = self._reader, None
            self._release_messages()
            reader.on_half_close()
        elif self._message is None:
            raise MessageError(Status.UNIMPLEMENTED, "no message for a method that takes one")
        else:
            message, self._message = self._message, None
            self._release_messages()
            self.request.unary(self, message)

    def _update_counted_bytes(self, incoming: IncomingMessages) -> None:
        """Update the count of stored bytes, and let the client continue sending."""
        if self._incoming is None:
            return
        shared, stored, decompressor = self.connection.shared, incoming.stored_bytes, self._decompressor
        if self._message is not None:
            stored += max(0, len(self._message) - (decompressor.counted_bytes if decompressor is not None else 0))
        shared.held_bytes += stored - incoming.counted_bytes
        incoming.counted_bytes = stored
        if shared.held_bytes > shared.max_receive_bytes:
            self._abort_and_cancel(Status.RESOURCE_EXHAUSTED, receive_limit_text(shared.max_receive_bytes))
            return
        used_up = self.receive_window < self.connection.refill_stream_below
        if used_up and not self.remote_ended and self._can_deliver(incoming):
            self.refill()

    def _release_messages(self) -> None:
        """Release stored messages."""
        if self._incoming is not None:
            self.connection.shared.held_bytes -= self._incoming.counted_bytes
            self._incoming = None
        self._message = None

    # -- end of the call ---------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a call other than a plain unary one: a deadline, a stream, a rejection."""
        request = self.request
        if request.rejection is not None:
            self.release()
            self.connection.outbox.answer_count += 1
            http_status, status, text = request.rejection
            self.count_error(status)
            self.connection.end(self, answer_frames.trailers_only(self.stream_id, status, text, http_status))
            return
        if request.timeout_ns:
            deadlines = self.connection.shared.deadlines
            self.deadline_ns = deadlines.clock() + request.timeout_ns
            deadlines.add(self)
        method = request.method
        if method is not None and method.streaming is not None:
            try:
                self._reader = method.streaming(self)
            except Exception as error:  # noqa: BLE001 - whatever a method raises, its client gets an answer
                self.fail(error)

    def fail(self, error: Exception) -> None:
        """End the call with the error its method raised; other work that a Reader has begun is cancelled."""
        abort = self.abort if self.request.unary is not None else self._abort_and_cancel
        if isinstance(error, InferError):
            abort(GRPC_STATUS[error.code], error.message, pushback_ms(error))
            return
        error_id = uuid.uuid4().hex
        logger.error("call failed", exc_info=error, extra={"request_id": error_id})
        abort(Status.INTERNAL, f"internal error, id {error_id}")

    def expire(self) -> None:
        """End the call because its deadline has passed."""
        self._abort_and_cancel(Status.DEADLINE_EXCEEDED, "Deadline Exceeded")

    def on_reset(self, code: ErrorCode) -> None:
        """Handle the loss of the call: it cannot be answered."""
        if self.ended:
            self._release_messages()
            self.wake()
            return
        run_on_cancel(self.release())

    def _abort_and_cancel(self, status: Status, text: str, pushback_ms: int = 0) -> None:
        if not self.ended:
            on_cancel = self.on_cancel
            self.abort(status, text, pushback_ms)
            run_on_cancel(on_cancel)

    def release(self) -> Callable[[], None] | None:
        """Mark the call as ended, and release its resources. Returns: the callback for its end."""
        self.ended = True
        on_cancel, self.on_cancel = self.on_cancel, None
        self._reader = None
        self._release_messages()
        if self._decompressor is not None:
            self._decompressor.end()
        if self.deadline_ns:
            self.connection.shared.deadlines.discard(self)
        self.wake()
        return on_cancel

    def tick(self, elapsed_s: float) -> None:
        """Count time without progress."""
        limits = self.connection.limits
        unsent = self.unsent
        if unsent is not None:
            unsent.stalled_s += elapsed_s
            if unsent.stalled_s > limits.write_timeout_s:
                self.connection.reset(self.stream_id, ErrorCode.CANCEL)
            return
        if self.remote_ended or self.ended:
            return
        incoming = self._incoming
        if self._reader is not None and (incoming is None or not (incoming.stored_bytes and incoming.turn_messages)):
            return
        self._stalled_s += elapsed_s
        if self._stalled_s > limits.receive_timeout_s:
            text = f"request was not received within {limits.receive_timeout_s:g} s"
            self._abort_and_cancel(Status.DEADLINE_EXCEEDED, text)

    def on_writable(self) -> None:
        """Continue: what was sent has left."""
        self.wake()
        if self._incoming is not None and not self.ended:
            self.connection.shared.loop.call_soon(self._deliver_messages)
