"""FastLane: the HTTP/1.1 protocol class that answers inference itself and leaves every other path to uvicorn.

Passed to uvicorn through its public `http=` setting by `listening/ports.py`. A request claimed by a `Service` is framed
here and answered without ASGI (at half the cost: `make bench`); any other is passed byte for byte to uvicorn's
httptools protocol, which this class extends by way of AnsweringConnection and Connection.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT

from penstock.server.listening.body_buffer import LARGE_BYTES, BodyBuffer, DirectReader

from .answering_connection import AnsweringConnection
from .chunks import ChunkedBody, too_large_text
from .connection import ANSWERING, BODY, CHUNKS, CLOSED, DELAYED, DRAIN_LINGER_S, HEAD, UVICORN, require_safe
from .head import HttpError, TooLargeError, check_partial_head, parse_head, sanitize_for_uvicorn
from .uvicorn_answers import PARTS, BodyParts, Unchunked

if TYPE_CHECKING:
    from .head import Head

_END = b"\r\n\r\n"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_READ_AHEAD_BYTES = 65536
_MAX_STEPS_PER_TURN = 64
"""After this many steps, other connections have their turn: 256 KiB may hold 3000 requests to reject, and up to 32
times as much is read in one turn of the loop."""
_UNBOUNDED_STATES = frozenset((HEAD, CHUNKS, UVICORN))
"""States with an unlimited number of steps: requests, or one request in small chunks."""
_MAX_PARTS = 1024
"""The most parts of a body that are kept separate; beyond this, for a client that sends tiny pieces, they are
joined."""


class FastLane(AnsweringConnection):
    """One connection: the receiving side.

    Invariants: one request at a time, so answers are in order; meanwhile input waits in `_buffer`, and reading pauses
    beyond 64 KiB of it. While a request is uvicorn's, exactly the bytes of that request are passed to it. After a large
    body, the transport reads through `read_buffer` and `on_read` until something else arrives; `data_received` may
    still be called then. `_body_buffer` receives the current body, if it is large.
    """

    __slots__ = (
        "_answered", "_body_buffer", "_direct_reader", "_head_bytes", "_heads", "_parts", "_processing",
        "_scanned_bytes",
    )  # fmt: skip

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._heads = self.shared.heads
        self._scanned_bytes = 0
        self._parts: list[bytes | bytearray | memoryview] = []
        self._body_buffer: BodyBuffer | None = None
        self._direct_reader: DirectReader | None = None
        self._head_bytes = 0
        self._processing = False
        self._answered = False

    # -- receiving ---------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Receive bytes; a whole request with a known head goes directly to the Service."""
        state = self._state
        if state == HEAD and not self._buffer and not self.flow.write_paused and not self._accepted_in_drain:
            raw, ended, body = data.partition(_END)  # finding the end and slicing takes twice as long
            head = self._heads.get(raw)
            if head is not None and ended and head.length >= len(body):
                if head.length == len(body):
                    self._state = ANSWERING
                    self.head = head
                    if head.length >= LARGE_BYTES:
                        self._read_directly(len(raw) + len(_END))
                    self._service.begin(self, head, body)
                    return
                self._progressed = True
                self._begin_body(head, len(raw) + len(_END))
                self._append_part(body)
                return
        elif state == BODY and len(data) <= self._remaining_bytes and not self._buffer:
            self._append_part(data)
            if not self._remaining_bytes:
                self._begin()
            elif len(self._parts) > _MAX_PARTS:
                self._join_parts()
            return
        if state == CLOSED:
            return
        if state == HEAD and not self._buffer:
            self._progressed = True
        self._buffer += data
        self._process_buffer()

    def _process_buffer(self) -> None:
        """Process the buffer until it is empty or a request must be answered first."""
        if self._processing:
            return
        self._processing = True
        try:
            steps = 0
            while self._step():
                steps += 1
                if steps >= _MAX_STEPS_PER_TURN and self._state in _UNBOUNDED_STATES and self._buffer:
                    self._yield_turn()
                    return
        except HttpError as error:
            self._reject(error)
        finally:
            self._processing = False
        if len(self._buffer) > _READ_AHEAD_BYTES and (self._awaits_answer() or self.flow.write_paused):
            self.flow.pause_reading()
        if self._is_finished():
            self._close()

    def _step(self) -> bool:
        if self._state == HEAD:
            return self._read_head() if self._buffer and not self.flow.write_paused else False
        if self._state == BODY:
            return self._read_body()
        if self._state == CHUNKS:
            return self._read_chunks()
        if self._state == UVICORN:
            return self._forward_to_uvicorn()
        if self._state == DELAYED and self._buffer:
            self.send_held()  # so that what follows does not wait for it
            return True
        return False

    def _find_head(self) -> int:
        """Return where the head at the front of the buffer ends; 0 if it is incomplete."""
        buffer, max_bytes = self._buffer, self.shared.limits.max_header_bytes
        if buffer[:2] == b"\r\n":
            # RFC 9112 2.2: an empty line before a request is ignored
            del buffer[:2]
        end = buffer.find(_END, self._scanned_bytes) + 4
        if end > 3 and end <= max_bytes:
            self._scanned_bytes = 0
            return end
        check_partial_head(buffer, self._scanned_bytes, max_bytes)
        self._scanned_bytes = max(0, len(buffer) - 3)
        return 0

    def _read_head(self) -> bool:
        end = self._find_head()
        if not end:
            return False
        buffer, limits = self._buffer, self.shared.limits
        raw = bytes(buffer[:end])
        head = self._heads.get(raw[:-4])
        if head is None:
            head = parse_head(raw, limits)
            if head.length > limits.max_body_bytes:
                raise TooLargeError(too_large_text(head.length, limits))
            head.route = self._service.claim(head)
            if head.route is not None and not head.expects_continue:
                self.shared.cache_head(raw[:-4], head)
        if self._accepted_in_drain:
            require_safe(head)
        del buffer[:end]
        self._begin_body(head, end)
        if head.route is None:
            self._state = UVICORN
            self._answered = False
            needs_sanitizing = b"upgrade" in head.header or b" \r" in raw or b"\t" in raw
            super().data_received(sanitize_for_uvicorn(raw) if needs_sanitizing else raw)
            if self.shared.draining and self.cycle is not None:
                self.cycle.keep_alive = False
            if head.is_http10 and self.cycle is not None:
                self.cycle.transport = Unchunked(self.transport)  # type: ignore[assignment]
                self.cycle.waiting_for_100_continue = False
            elif self.cycle is not None:
                self.cycle.scope["extensions"] = {PARTS: BodyParts(self.cycle)}  # type: ignore[dict-item]
        return True

    def _begin_body(self, head: Head, head_bytes: int) -> None:
        """Start reading the body of a request."""
        self.head, self._parts, self._body_buffer = head, [], None
        self._remaining_bytes = head.length
        self._chunked = ChunkedBody(self.shared.limits) if head.length < 0 else None
        if head.route is None:
            return
        if head.length > _READ_AHEAD_BYTES:
            # most clients read no answer before they have sent the body, so it is read, but not kept
            self._rejection = self._service.early_rejection(head)
            if self._rejection is None and head.length >= LARGE_BYTES:
                self._body_buffer = BodyBuffer(head.length)
                self._read_directly(head_bytes)
        if head.expects_continue:
            self.transport.write(_CONTINUE)
        self._state = CHUNKS if self._chunked else BODY

    def _read_body(self) -> bool:
        if self._remaining_bytes:
            if not self._buffer:
                return False
            with memoryview(self._buffer) as view:
                part = bytes(view[: self._remaining_bytes])
            del self._buffer[: len(part)]
            self._append_part(part)
            if self._remaining_bytes:
                return False
        self._begin()
        return True

    def _append_part(self, part: bytes | memoryview) -> None:
        if self._body_buffer is not None:
            self._body_buffer.append(part)
        elif self._rejection is None:
            self._parts.append(part)
        self._remaining_bytes -= len(part)

    def _read_chunks(self) -> bool:
        chunked = self._chunked
        if chunked is None or not self._buffer:
            return False
        consumed = chunked.feed(self._buffer)
        del self._buffer[:consumed]
        if not chunked.done:
            return consumed > 0
        self._parts = [chunked.body]
        self._begin()
        return True

    def _begin(self) -> None:
        buffer, parts = self._body_buffer, self._parts
        self._body_buffer, self._parts, self._chunked = None, [], None
        body = buffer.finish() if buffer is not None else bytes(parts[0]) if len(parts) == 1 else b"".join(parts)
        self._state = ANSWERING
        head, rejection = self.head, self._rejection
        if rejection is not None:
            self._rejection = None
            self._service.answer_error(self, rejection)
        elif head is not None:
            self._service.begin(self, head, body)

    def _join_parts(self) -> None:
        first, *others = self._parts
        gathered = first if type(first) is bytearray else bytearray(first)
        gathered += b"".join(others)
        self._parts = [gathered]

    # -- large bodies ------------------------------------------------------------------------------------------

    def _read_directly(self, head_bytes: int) -> None:
        """Let the kernel write input directly to its destination; assume the next head is as long as this one."""
        self._head_bytes = head_bytes
        if self._direct_reader is None:
            self._direct_reader = DirectReader(self)
            self.transport.set_protocol(self._direct_reader)

    def read_buffer(self) -> memoryview:
        """Return the buffer for the next read: inside the body, or the shared scratch buffer."""
        if self._body_buffer is not None and self._state == BODY:
            return self._body_buffer.free_space()
        scratch = self.shared.scratch
        # at most the size of the head, so that the body is read in place
        return scratch[: self._head_bytes] if self._state == HEAD and not self._buffer else scratch

    def on_read(self, size: int) -> None:
        """Process a read; anything but a large body takes the usual path, and so does what follows it."""
        body_buffer = self._body_buffer
        if body_buffer is not None and self._state == BODY:
            body_buffer.received_bytes += size
            self._remaining_bytes -= size
            if not self._remaining_bytes:
                self._begin()
            return
        self.data_received(bytes(self.shared.scratch[:size]))
        if self._body_buffer is None and not (self._state == HEAD and self._buffer) and self._direct_reader is not None:
            self._direct_reader = None
            self.transport.set_protocol(self)

    def _reject(self, error: HttpError) -> None:
        self._body_buffer, self._parts, self._chunked = None, [], None
        super()._reject(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """Also release what was read."""
        self._body_buffer = self._direct_reader = None
        super().connection_lost(exc)

    # -- uvicorn's requests ------------------------------------------------------------------------------------

    def _forward_to_uvicorn(self) -> bool:
        """Pass a request's bytes to uvicorn; once it is complete and answered, the connection is free again."""
        chunked = self._chunked
        if chunked is not None:
            raw = bytes(self._buffer[: chunked.feed(self._buffer)])
            chunked.body.clear()
            complete = chunked.done
        else:
            raw = bytes(self._buffer[: self._remaining_bytes])
            self._remaining_bytes -= len(raw)
            complete = not self._remaining_bytes
        del self._buffer[: len(raw)]
        if raw:
            super().data_received(raw)
        if complete and self._answered:
            self._unset_keepalive_if_required()
            self._await_request()
            return True
        return not complete and chunked is not None and bool(raw)

    def on_response_complete(self) -> None:
        """Record that uvicorn has answered."""
        super().on_response_complete()
        self._answered = True
        if self._state == UVICORN and not self.transport.is_closing():
            self._process_buffer()

    def _yield_turn(self) -> None:
        """Continue in the loop's next turn."""
        self.flow.pause_reading()
        if not self._yielding:
            self._yielding = True
            self.loop.call_soon(self._resume_reading)

    def _resume_reading(self) -> None:
        self._yielding = False
        if self._state == HEAD:
            self._resume()
        elif self._is_receiving():
            if not self._is_backpressured():
                self.flow.resume_reading()
            self._process_buffer()

    def _is_backpressured(self) -> bool:
        """Whether uvicorn has paused reading until its application has read the body so far."""
        cycle = self.cycle if self._state == UVICORN else None
        return cycle is not None and not cycle.response_complete and len(cycle.body) > HIGH_WATER_LIMIT

    # -- next request -------------------------------------------------------------------------------------------

    def _await_request(self) -> None:
        self._progressed = True
        self._state = HEAD
        if self._half_closed and not self._buffer:
            self._close()
        elif self.shared.draining:
            self.loop.call_later(DRAIN_LINGER_S, self._close_idle)

    def _resume(self) -> None:
        if self._state == HEAD:
            if not self.flow.write_paused:
                self.flow.resume_reading()
            if self._buffer:
                self._process_buffer()
