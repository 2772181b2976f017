"""gRPC client calls: one request and one answer, which is only counted or also kept.

Used by `grpc.py`; `grpc_streams.py` has calls with several. Source: grpc/doc/PROTOCOL-HTTP2.md.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from penstock.server.grpc.decompressing import decompress
from penstock.server.grpc.framing import DEFLATE, GZIP, PREFIX, PREFIX_BYTES, IncomingMessages, MessageError
from penstock.server.grpc.method import Status
from penstock.server.http2.frames import MAX_WINDOW

from .carriers import Slot
from .grpc_status import NOTHING, Head, reset_error
from .http2_sending import Stream

_MOST_BYTES = MAX_WINDOW
_CODINGS = {coding.decode(): coding for coding in (GZIP, DEFLATE)}


def error_in(head: Head | None) -> str:
    """Return the error with which a stream ended; empty: none."""
    return NOTHING if head is None or head.error is None else head.error


class Unary(Stream):
    """One request. Only the presence of an answer and its status are checked, not its content."""

    __slots__ = ("slot",)

    in_flight = True

    def __init__(self, request: bytes, slot: Slot) -> None:
        super().__init__(request)
        self.slot = slot

    def on_end(self) -> None:
        error = error_in(self.head)
        if not error and self.in_left == MAX_WINDOW:
            error = f"{Status.INTERNAL.name}: the answer has no message"
        self.connection.answers.append((self.slot, error))

    def on_reset(self, code: int) -> None:
        self.connection.answers.append((self.slot, reset_error(code)))

    def on_lost(self, reason: str) -> None:
        notify_lost(self.slot, self.connection, reason)


def notify_lost(slot: Slot, connection: Any, reason: str) -> None:
    """Notify a slot that its request was lost with the connection. If that was leaving, it is only an error."""
    now_ns = time.monotonic_ns()
    if connection is not None and connection.leaving:
        slot.on_answer(now_ns, f"{Status.UNAVAILABLE.name}: {reason}")
    else:
        slot.on_lost(now_ns, reason)


class MessageStream(Stream):
    """A stream whose messages are read."""

    __slots__ = ("_incoming",)

    listens = True

    def __init__(self, first_message: bytes) -> None:
        super().__init__(first_message)
        self._incoming = IncomingMessages(_MOST_BYTES)

    def on_data(self, payload: bytes) -> None:
        incoming = self._incoming
        try:
            if not incoming.stored_bytes and len(payload) >= PREFIX_BYTES and PREFIX.unpack_from(payload) == (
                0, len(payload) - PREFIX_BYTES,
            ):  # fmt: skip
                self.message(payload[PREFIX_BYTES:])  # the usual case: whole, and alone in its frame
                return
            incoming.feed(payload)
            while (framed := incoming.next()) is not None:
                flag, message = framed
                self.message(self._plain(message) if flag else message)
        except MessageError as error:
            self.broken(f"{error.status.name}: {error.text}")

    def _plain(self, message: bytes) -> bytes:
        coding = _CODINGS.get(self.head.coding if self.head is not None else "")
        if coding is None:
            raise MessageError(Status.INTERNAL, "a compressed message without a known grpc-encoding")
        return decompress(message, coding, _MOST_BYTES)

    def message(self, message: bytes) -> None:
        """Handle a whole message."""
        raise NotImplementedError

    def broken(self, error: str) -> None:
        """Handle data that cannot be parsed."""
        raise NotImplementedError


class KeptCall(MessageStream):
    """One request whose answer is kept: `answer` is its message, CallError, or ConnectionError if none came."""

    __slots__ = ("_message", "answer")

    in_flight = True

    def __init__(self, request: bytes) -> None:
        super().__init__(request)
        self._message: bytes | None = None
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def message(self, message: bytes) -> None:
        self._message = message

    def broken(self, error: str) -> None:
        self._end(error)

    def on_end(self) -> None:
        self._end(error_in(self.head))

    def on_reset(self, code: int) -> None:
        self._end(reset_error(code))

    def on_lost(self, reason: str) -> None:
        if not self.answer.done():
            self.answer.set_exception(ConnectionError(reason))

    def _end(self, error: str) -> None:
        if self.answer.done():
            return
        if error or self._message is None:
            self.answer.set_exception(CallError(error or f"{Status.INTERNAL.name}: the answer has no message"))
        else:
            self.answer.set_result(self._message)


class CallError(Exception):
    """A call that ended with an error, such as `NOT_FOUND: no such model`."""

    @property
    def status(self) -> str:
        """Return the name of its status."""
        return str(self).partition(":")[0]
