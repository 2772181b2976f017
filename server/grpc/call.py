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
from penstock.server.http2.frames import Fault

from . import answers
from .answering import AnsweringStream, tell_of_end
from .framing import PREFIX, PREFIX_BYTES, Incoming, MessageError
from .inflating import Unpacking, kept_text
from .method import Reader, Status

if TYPE_CHECKING:
    from .connection import GrpcConnection
    from .request import GrpcRequest

logger = logging.getLogger("penstock.grpc")

_head_of = PREFIX.unpack_from


class GrpcCall(AnsweringStream):
    """One RPC.

    Invariants: once `ended`, nothing is sent except what waits for its window, and `cancelled` is not called. What
    `_incoming` holds is counted in `shared.held_bytes`. So is a message decompressed on a thread: until it is delivered
    if the call is a stream, otherwise until the call ends.
    """

    __slots__ = ("_given", "_incoming", "_reader", "_stalled_s", "_unpacking")

    def __init__(self, connection: GrpcConnection, stream_id: int, request: GrpcRequest) -> None:
        self.connection = connection
        self.stream_id = stream_id
        self.request = request
        self.credit = 0
        self.in_left = connection.limits.stream_window_bytes
        self.remote_ended = False
        self.unsent = None
        self.ended = False
        self.begun = False
        self.deadline_ns = 0
        self.context = None
        self.cancelled = None
        self.waiter = None
        self._incoming: Incoming | None = None
        self._given: bytes | None = None
        self._unpacking: Unpacking | None = None
        self._reader: Reader | None = None
        self._stalled_s = 0.0

    # -- receiving ---------------------------------------------------------------------------------------------

    def received(self, payload: bytes, ended: int) -> None:
        """Process a DATA frame's payload; a complete message goes directly to its method."""
        request = self.request
        size, unary = len(payload) - PREFIX_BYTES, request.unary
        if (
            ended
            and 0 <= size <= self.connection.most_bytes
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
                    self.failed(error)
                return
        self._receive(payload, ended)

    def part(self, payload: memoryview, ended: int) -> None:
        """Process the payload of a long DATA frame, or a part of it."""
        incoming = self._incoming
        if incoming is None and ended:
            self.received(bytes(payload), ended)
        elif incoming is None or ended or not incoming.settled or not self._keep(incoming, payload):
            self._receive(payload, ended)

    def _keep(self, incoming: Incoming, payload: memoryview) -> bool:
        """Store a middle part of a message, the most common kind of a large one. Returns: False if it is not one."""
        size, connection = len(payload), self.connection
        shared, left = connection.shared, self.in_left - size
        if (
            incoming.have + size >= incoming.need
            or left < connection.stream_window_low
            or shared.held_bytes + size > shared.receive_bytes
            or 0 <= self.request.length < incoming.total + size
        ):
            return False
        self.in_left = left
        self._stalled_s = 0.0
        incoming.feed(payload)
        incoming.held += size
        shared.held_bytes += size
        return True

    def _receive(self, payload: bytes | memoryview, ended: int) -> None:
        if not self._admits(len(payload), ended):
            return
        incoming = self._incoming
        if incoming is None:
            incoming = self._incoming = Incoming(self.connection.shared.grpc.max_message_bytes)
        incoming.feed(payload)
        self._look(incoming, ended)

    def room(self) -> memoryview | None:
        """Return the buffer for the next payload: inside the current message, if it is large."""
        return None if self._incoming is None else self._incoming.room()

    def landed(self, size: int, ended: int) -> None:
        """Process `size` bytes written to that buffer."""
        incoming = self._incoming
        if self._admits(size, ended) and incoming is not None:
            incoming.landed(size)
            self._look(incoming, ended)

    def _admits(self, size: int, ended: int) -> bool:
        """Account for received bytes. Returns: whether they are still needed."""
        self.in_left -= size
        self._stalled_s = 0.0
        if self.in_left < 0:
            self.connection.reset(self.stream_id, Fault.FLOW_CONTROL_ERROR)
            return False
        if ended:
            self.remote_ended = True
        # after the end, its answer is only waiting for its window
        return not self.ended

    def _look(self, incoming: Incoming, ended: int) -> None:
        """Process what has arrived so far."""
        length = self.request.length
        if length >= 0 and (incoming.total > length or (ended and incoming.total < length)):
            # RFC 9113 8.1.1
            self.connection.reset(self.stream_id, Fault.PROTOCOL_ERROR)
            return
        self._take_messages()

    def _take_messages(self) -> None:
        """Deliver complete messages, as long as answers to them can be sent."""
        incoming = self._incoming
        if incoming is None or self.ended:
            return
        try:
            while self._takes():
                found = incoming.next()
                if found is None:
                    break
                flag, message = found
                if flag:
                    self._unpack(message)
                else:
                    self._deliver(message)
            # the end needs no room: a stream told of it only when all is sent would not end in a drain
            if self.remote_ended and self._listens():
                self._all_received(incoming)
        except MessageError as fault:
            self._abandon(fault.status, fault.text)
        except Exception as error:  # noqa: BLE001 - whatever a method raises, its client gets an answer
            self.failed(error)
        if not self.ended:
            self._account(incoming)

    def _takes(self) -> bool:
        """Whether the next message may be delivered."""
        return self.writable and self._listens()

    def _listens(self) -> bool:
        return not self.ended and not (self._unpacking is not None and self._unpacking.busy)

    def _deliver(self, message: bytes) -> None:
        if self._reader is not None:
            self._reader.message(message)
        elif self._given is None:
            self._given = message
        else:
            raise MessageError(Status.UNIMPLEMENTED, "more than one message for a method that takes one")

    def _unpack(self, message: bytes) -> None:
        """Decompress and deliver a message; on a thread if it becomes large, which would block the event loop."""
        coding, shared = self.request.coding, self.connection.shared
        if not coding:
            raise MessageError(Status.INTERNAL, "compressed message without grpc-encoding")
        if self._unpacking is None:
            self._unpacking = Unpacking(shared, coding, self._unpacked)
        plain = self._unpacking.take(message)
        if plain is not None:
            self._deliver(plain)

    def _unpacked(self, message: bytes, error: BaseException | None) -> None:
        if self.ended:
            return
        try:
            if error is not None:
                raise error
            if self._reader is not None and self._unpacking is not None:
                self._unpacking.passed_on()
            self._deliver(message)
        except MessageError as fault:
            self._abandon(fault.status, fault.text)
        except Exception as failure:  # noqa: BLE001 - whatever a method raises, its client gets an answer
            self.failed(failure)
        self._take_messages()

    def _all_received(self, incoming: Incoming) -> None:
        """Process the end of the client's data."""
        if incoming.have:
            if incoming.have >= incoming.need:
                return
            raise MessageError(Status.INTERNAL, "the stream ended within a message")
        if self._reader is not None:
            reader, self._reader = self._reader, None
            self._release()
            reader.half_closed()
        elif self._given is None:
            raise MessageError(Status.UNIMPLEMENTED, "no message for a method that takes one")
        else:
            message, self._given = self._given, None
            self._release()
            self.request.unary(self, message)

    def _account(self, incoming: Incoming) -> None:
        """Update the count of stored bytes, and let the client continue sending."""
        if self._incoming is None:
            return
        shared = self.connection.shared
        kept = incoming.have
        if self._given is not None:
            kept += max(0, len(self._given) - (self._unpacking.counted if self._unpacking is not None else 0))
        shared.held_bytes += kept - incoming.held
        incoming.held = kept
        if shared.held_bytes > shared.receive_bytes:
            self._abandon(Status.RESOURCE_EXHAUSTED, kept_text(shared.receive_bytes))
        elif not self.remote_ended and self.in_left < self.connection.stream_window_low and self._takes():
            self.refill()

    def _release(self) -> None:
        """Release stored messages."""
        if self._incoming is not None:
            self.connection.shared.held_bytes -= self._incoming.held
            self._incoming = None
        self._given = None

    # -- end of the call ---------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a call other than a plain unary one: a deadline, a stream, a rejection."""
        request = self.request
        if request.refusal is not None:
            self.let_go()
            self.connection.outbox.answered += 1
            refusal = request.refusal
            self.erred(refusal.status)
            last = answers.trailers_only(self.stream_id, refusal.status, refusal.text, refusal.http)
            self.connection.end(self, last)
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
                self.failed(error)

    def failed(self, error: Exception) -> None:
        """End the call with the error its method raised; other work that a Reader has begun is cancelled."""
        end = self.refuse if self.request.unary is not None else self._abandon
        if isinstance(error, InferError):
            end(GRPC_STATUS[error.code], error.message, pushback_ms(error))
            return
        number = uuid.uuid4().hex
        logger.error("call failed", exc_info=error, extra={"request_id": number})
        end(Status.INTERNAL, f"internal error, id {number}")

    def expire(self) -> None:
        """End the call because its deadline has passed."""
        self._abandon(Status.DEADLINE_EXCEEDED, "Deadline Exceeded")

    def lost(self, code: Fault) -> None:
        """Handle the loss of the call: it cannot be answered."""
        if self.ended:
            self._release()
            self.wake()
            return
        tell_of_end(self.let_go())

    def _abandon(self, status: Status, text: str, pushback_ms: int = 0) -> None:
        if not self.ended:
            cancelled = self.cancelled
            self.refuse(status, text, pushback_ms)
            tell_of_end(cancelled)

    def let_go(self) -> Callable[[], None] | None:
        """Mark the call as ended, and release its resources. Returns: the callback for its end."""
        self.ended = True
        cancelled, self.cancelled = self.cancelled, None
        self._reader = None
        self._release()
        if self._unpacking is not None:
            self._unpacking.end()
        if self.deadline_ns:
            self.connection.shared.deadlines.discard(self)
        self.wake()
        return cancelled

    def tick(self, elapsed_s: float) -> None:
        """Count time without progress."""
        limits = self.connection.limits
        unsent = self.unsent
        if unsent is not None:
            unsent.waited_s += elapsed_s
            if unsent.waited_s > limits.write_timeout_s:
                self.connection.reset(self.stream_id, Fault.CANCEL)
            return
        if self.remote_ended or self.ended:
            return
        incoming = self._incoming
        if self._reader is not None and (incoming is None or not incoming.have):
            return
        self._stalled_s += elapsed_s
        if self._stalled_s > limits.receive_timeout_s:
            text = f"request was not received within {limits.receive_timeout_s:g} s"
            self._abandon(Status.DEADLINE_EXCEEDED, text)

    def left(self) -> None:
        """Continue: what was sent has left."""
        self.wake()
        if self._incoming is not None and not self.ended:
            self.connection.shared.loop.call_soon(self._take_messages)
