"""FastLane: the HTTP/1.1 protocol class that answers inference itself and leaves every other path to uvicorn.

Given to uvicorn through its public `http=` setting by `server/serve.py`. A request that a `Service` claims is framed
here and answered without ASGI (9 us against 20 for the barest ASGI application, `make bench`); any other is passed
through byte for byte to uvicorn's httptools protocol, from which this class descends. What it relies on inside uvicorn
is pinned in pyproject.toml and checked by tests/server/http/test_uvicorn_contract.py.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from penstock.server.errors import error_body

from .answers import Answers
from .chunks import ChunkedBody, too_large
from .head import Head, HttpError, parse, without_upgrade

if TYPE_CHECKING:
    from .limits import Limits

_HEAD, _BODY, _CHUNKS, _BUSY, _FOREIGN, _CLOSED = range(6)
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_READ_AHEAD_BYTES = 65536
_KEPT_HEADS = 1024
_KEPT_HEAD_BYTES = 2048
_MOST_PARTS = 1024
"""Parts of a body that are kept apart; more of them, from a client that sends it in crumbs, are put together."""
EOF_GRACE_S = 0.1
"""How long a request is still answered after its client has closed its sending side, or altogether."""
DRAIN_LINGER_S = 0.5
"""How long an idle connection stays open while draining: a request that is on its way is still answered."""
REFUSED_LINGER_S = 5.0
"""How long what a refused client still sends is read and dropped: closing on it would take the answer with it."""


class Service(Protocol):
    """What answers the requests that it claims. One object per server."""

    def claim(self, head: Head) -> Any:
        """Give the route of a head, or None to leave the request to uvicorn. Kept with the head's bytes."""

    def turn_away(self, head: Head) -> Any:
        """Give the error of a request that would be refused now, before its body; None to let it come."""

    def refuse(self, connection: FastLane, error: Any) -> None:
        """Answer a request that was turned away, its body read and dropped."""

    def begin(self, connection: FastLane, head: Head, body: bytes) -> None:
        """Answer a whole request, now or later, by one call of `connection.answer`."""

    def abandon(self, connection: FastLane) -> None:
        """Forget the request under way: its client has gone."""


class Shared:
    """What all connections of one server share."""

    def __init__(self, service: Service, limits: Limits) -> None:
        self.service = service
        self.limits = limits
        self.heads: dict[bytes, Head] = {}
        self.answers = Answers()
        self.connections: set[FastLane] = set()
        self.draining = False

    def remember(self, raw: bytes, head: Head) -> None:
        """Keep a parsed head by its bytes."""
        if len(raw) <= _KEPT_HEAD_BYTES:
            if len(self.heads) >= _KEPT_HEADS:
                self.heads.clear()
            self.heads[raw] = head

    def sweep(self, elapsed_s: float) -> None:
        """Close connections that are idle, slow to send or slow to read. Called every second or so.

        One pass over all connections instead of a timer for each request.
        """
        for connection in list(self.connections):
            connection.tick(elapsed_s)


class FastLane(HttpToolsProtocol):
    """One connection.

    Invariants: one request at a time, so answers leave in order; what arrives meanwhile waits in `_buffer`, and
    reading pauses beyond 64 KiB of it. While a request is uvicorn's, the bytes of that request and no others are
    passed to it. `request` and `task` belong to the Service, which cancels them in `abandon`.
    """

    shared: ClassVar[Shared]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.request: Any = None
        self.task: asyncio.Task[None] | None = None
        self.plan: Any = None
        self.head: Head | None = None
        self._heads = self.shared.heads
        self._service = self.shared.service
        self._state = _HEAD
        self._buffer = bytearray()
        self._scanned = 0
        self._parts: list[bytes | bytearray] = []
        self._missing = 0
        self._refusal: Any = None
        self._chunked: ChunkedBody | None = None
        self._advancing = False
        self._answered = False
        self._lived = True
        self._waited_s = 0.0
        self._unsent = 0
        self._half_closed = False

    # -- what arrives ------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Take bytes; a whole request with a head seen before goes straight to the Service."""
        state = self._state
        if state == _HEAD and not self._buffer and not self.flow.write_paused:
            end = data.find(b"\r\n\r\n") + 4
            head = self._heads.get(data[:end])
            if head is not None and head.length == len(data) - end:
                self._state = _BUSY
                self.head = head
                self._service.begin(self, head, data[end:])
                return
        elif state == _BODY and len(data) <= self._missing and not self._buffer:
            if self._refusal is None:
                self._parts.append(data)
            self._missing -= len(data)
            if not self._missing:
                self._begin()
            elif len(self._parts) > _MOST_PARTS:
                self._gather_parts()
            return
        if state == _CLOSED:
            return
        if state == _HEAD and not self._buffer:
            self._lived = True
        self._buffer += data
        self._advance()

    def _advance(self) -> None:
        """Work through the buffer until it is empty or a request must be answered first."""
        if self._advancing:
            return
        self._advancing = True
        try:
            while self._step():
                pass
        except HttpError as error:
            self._refuse(error)
        finally:
            self._advancing = False
        if len(self._buffer) > _READ_AHEAD_BYTES and (self._answer_due() or self.flow.write_paused):
            self.flow.pause_reading()
        if self._state == _HEAD and not self.flow.write_paused and self._ended():
            self._close()

    def _step(self) -> bool:
        if self._state == _HEAD:
            return self._read_head() if self._buffer and not self.flow.write_paused else False
        if self._state == _BODY:
            return self._read_body()
        if self._state == _CHUNKS:
            return self._read_chunks()
        if self._state == _FOREIGN:
            return self._pass_on()
        return False

    def _find_head(self) -> int:
        """Find where the head at the front of the buffer ends; 0 while its end is not there."""
        buffer, most = self._buffer, self.shared.limits.max_header_bytes
        if buffer[:2] == b"\r\n":
            # RFC 9112 2.2: an empty line before a request is to be ignored
            del buffer[:2]
        end = buffer.find(b"\r\n\r\n", self._scanned) + 4
        if end > 3 and end <= most:
            self._scanned = 0
            return end
        if len(buffer) >= most:
            raise HttpError(431, f"request head exceeds {most} bytes")
        if buffer and buffer != b"\r" and not 65 <= buffer[0] <= 90:
            # a TLS handshake, for one, which would wait for its answer as long as this for its end
            raise HttpError(400, "invalid HTTP request: it does not begin with a method")
        self._scanned = max(0, len(buffer) - 3)
        return 0

    def _read_head(self) -> bool:
        end = self._find_head()
        if not end:
            return False
        buffer, limits = self._buffer, self.shared.limits
        raw = bytes(buffer[:end])
        head = self._heads.get(raw)
        if head is None:
            head = parse(raw, limits)
            if head.length > limits.max_body_bytes:
                raise HttpError(400, too_large(head.length, limits))
            head.route = self._service.claim(head)
            if head.route is not None and not head.expects:
                self.shared.remember(raw, head)
        del buffer[:end]
        self.head = head
        self._parts = []
        self._missing = head.length
        self._chunked = ChunkedBody(limits) if head.length < 0 else None
        if head.route is None:
            self._state = _FOREIGN
            self._answered = False
            super().data_received(without_upgrade(raw) if b"upgrade" in head.header else raw)
            return True
        self._await_body(head)
        return True

    def _await_body(self, head: Head) -> None:
        if head.length > _READ_AHEAD_BYTES:
            # most clients read no answer before they have sent the body, so it is read; but it is not kept
            self._refusal = self._service.turn_away(head)
        if head.expects:
            self.transport.write(_CONTINUE)
        self._state = _CHUNKS if self._chunked else _BODY

    def _read_body(self) -> bool:
        if self._missing:
            if not self._buffer:
                return False
            part = bytes(self._buffer[: self._missing])
            del self._buffer[: len(part)]
            if self._refusal is None:
                self._parts.append(part)
            self._missing -= len(part)
            if self._missing:
                return False
        self._begin()
        return True

    def _read_chunks(self) -> bool:
        chunked = self._chunked
        if chunked is None or not self._buffer:
            return False
        chunked.feed(self._buffer)
        if not chunked.done:
            return False
        self._parts = [chunked.body]
        self._begin()
        return True

    def _begin(self) -> None:
        parts, self._parts, self._chunked = self._parts, [], None
        body = bytes(parts[0]) if len(parts) == 1 else b"".join(parts)
        self._state = _BUSY
        head, refusal = self.head, self._refusal
        if refusal is not None:
            self._refusal = None
            self._service.refuse(self, refusal)
        elif head is not None:
            self._service.begin(self, head, body)

    def _gather_parts(self) -> None:
        first, *others = self._parts
        gathered = first if type(first) is bytearray else bytearray(first)
        gathered += b"".join(others)
        self._parts = [gathered]

    # -- requests that are uvicorn's ---------------------------------------------------------------------------

    def _pass_on(self) -> bool:
        """Give uvicorn the bytes of its request; when it is whole and answered, the connection is ours again."""
        chunked = self._chunked
        if chunked is not None:
            before = bytes(self._buffer)
            chunked.feed(self._buffer)
            chunked.body.clear()
            raw = before[: len(before) - len(self._buffer)]
            whole = chunked.done
        else:
            raw = bytes(self._buffer[: self._missing])
            del self._buffer[: len(raw)]
            self._missing -= len(raw)
            whole = not self._missing
        if raw:
            super().data_received(raw)
        if whole and self._answered:
            self._unset_keepalive_if_required()
            self._next()
            return True
        return False

    def on_response_complete(self) -> None:
        """Note that uvicorn has answered."""
        super().on_response_complete()
        self._answered = True
        if self._state == _FOREIGN and not self.transport.is_closing():
            self._advance()

    @property
    def busy(self) -> bool:
        """Whether a Service has a request to answer."""
        return self._state == _BUSY

    # -- answers -----------------------------------------------------------------------------------------------

    def answer_json(self, body: bytes) -> None:
        """Answer 200 with a JSON body: the usual answer, in one write."""
        head = self.head
        if self._state != _BUSY or head is None:
            return
        if not head.keep_alive or head.old or self.shared.draining or self._half_closed:
            self.answer(200, body, b"application/json")
            return
        self.transport.write(self.shared.answers.ok_json(self.server_state.default_headers) % len(body) + body)
        self._lived = True
        self._state = _HEAD
        if self._buffer or self.flow.read_paused:
            self._continue()

    def answer(self, status: int, body: bytes, content_type: bytes, extra: bytes = b"") -> None:
        """Answer the request under way; `extra` is whole header lines. A second answer is ignored."""
        head = self.head
        if self._state != _BUSY or head is None:
            return
        ending = self.shared.draining or self._half_closed
        # what has arrived already is answered first
        keep_alive = head.keep_alive and (not ending or bool(self._buffer))
        connection = b"connection: close\r\n" if not keep_alive else b"connection: keep-alive\r\n" if head.old else b""
        lines = self.shared.answers.head(status, self.server_state.default_headers)
        self.transport.write(
            b"%b%b%bcontent-type: %b\r\ncontent-length: %d\r\n\r\n%b"
            % (lines, connection, extra, content_type, len(body), body)
        )
        self._lived = True
        if not keep_alive:
            self._close()
            return
        self._state = _HEAD
        self._continue()

    def _next(self) -> None:
        self._lived = True
        self._state = _HEAD
        if (self.shared.draining or self._half_closed) and not self._buffer:
            self._close()

    def _continue(self) -> None:
        if self._state == _HEAD:
            if not self.flow.write_paused:
                self.flow.resume_reading()
            if self._buffer:
                self._advance()

    def _refuse(self, error: HttpError) -> None:
        """Answer a request that cannot be framed, and close: what follows it cannot be told from it."""
        if self.transport.is_closing() or not self._withdraw():
            self._close()
            return
        body = error_body(error.text)
        lines = self.shared.answers.head(error.status, self.server_state.default_headers)
        self.transport.write(
            b"%bconnection: close\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (lines, len(body), body)
        )
        self._state = _CLOSED
        self._buffer.clear()
        self._lived = True
        if self._half_closed or not self.transport.can_write_eof():
            self.transport.close()
            return
        self.transport.write_eof()
        self.flow.resume_reading()

    def _withdraw(self) -> bool:
        """Take a request back from uvicorn; False when it has begun to answer."""
        cycle = self.cycle
        if self._state != _FOREIGN or cycle is None:
            return self._state != _FOREIGN
        if cycle.response_started:
            return False
        # as uvicorn does itself when the connection is lost
        cycle.disconnected = True
        cycle.message_event.set()
        return True

    def _close(self) -> None:
        self._state = _CLOSED
        self._buffer.clear()
        self._lived = True
        self.transport.close()

    # -- life of the connection --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, or refuse it when there are too many."""
        super().connection_made(transport)
        self.shared.connections.add(self)
        if len(self.shared.connections) > self.shared.limits.max_connections:
            self._refuse(HttpError(503, "too many connections"))
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget everything; a request under way is cancelled."""
        busy = self._state == _BUSY
        self._state = _CLOSED
        self.shared.connections.discard(self)
        if busy:
            self._service.abandon(self)
        self.request = self.task = None
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Take the end of what the client sends for its end: what it asked for is cancelled after a moment.

        A client that has gone and one that has only closed its sending side look the same. The second kind still gets
        an answer that comes within the moment.
        """
        self._half_closed = True
        if self._state == _BUSY:
            self.loop.call_later(EOF_GRACE_S, self._give_up, self.request, self.task)
        return self._answer_due() or (self._state == _HEAD and self.flow.write_paused and bool(self._buffer))

    def _give_up(self, request: Any, task: asyncio.Task[None] | None) -> None:
        if self._state == _BUSY and self.request is request and self.task is task:
            self.transport.close()

    def pause_writing(self) -> None:
        """Note that the client has fallen behind."""
        super().pause_writing()
        self._lived = True

    def resume_writing(self) -> None:
        """Go on with what has arrived, once the client has taken the answers before."""
        super().resume_writing()
        self._lived = True
        self._continue()

    def shutdown(self) -> None:
        """Drain: answer what is under way or on its way, then close. Called by uvicorn once, for each connection."""
        self.shared.draining = True
        if self._state == _FOREIGN:
            super().shutdown()
        elif self._state == _HEAD:
            self.loop.call_later(DRAIN_LINGER_S, self._close_idle)
        elif self._state == _CLOSED:
            self.transport.close()

    def _close_idle(self) -> None:
        if self._state == _HEAD and not self._buffer:
            self._close()

    def tick(self, elapsed_s: float) -> None:
        """Count time without progress, and close when a limit is passed."""
        limits = self.shared.limits
        if self._lived:
            self._lived = False
            self._waited_s = 0.0
            return
        self._waited_s += elapsed_s
        if self.flow.write_paused or self._state == _CLOSED:
            self._tick_unsent(limits)
        elif self._receiving():
            if self._waited_s > limits.receive_timeout_s:
                self._refuse(HttpError(408, f"request was not received within {limits.receive_timeout_s:g} s"))
        elif self._state == _HEAD:
            if self._waited_s > limits.idle_timeout_s:
                self._close()
        else:
            self._waited_s = 0.0

    def _tick_unsent(self, limits: Limits) -> None:
        unsent, before = self.transport.get_write_buffer_size(), self._unsent
        self._unsent = unsent
        if unsent and unsent < before:
            # slow, but it takes what it is given
            self._waited_s = 0.0
        elif self._waited_s > (limits.write_timeout_s if unsent else REFUSED_LINGER_S):
            self.transport.abort()

    def _ended(self) -> bool:
        """Whether no request is to come: what is left of a half-closed connection will never be a whole one."""
        return self._half_closed or (self.shared.draining and not self._buffer)

    def _answer_due(self) -> bool:
        """Whether a request has arrived whole and waits for its answer."""
        return self._state == _BUSY or (self._state == _FOREIGN and not self._receiving())

    def _receiving(self) -> bool:
        if self._state == _FOREIGN:
            return not self._chunked.done if self._chunked is not None else self._missing > 0
        return self._state in (_BODY, _CHUNKS) or (self._state == _HEAD and bool(self._buffer))
