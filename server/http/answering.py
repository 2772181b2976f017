"""AnsweringConnection: the part of a connection that its Service uses. FastLane adds the receiving part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.server.listening.rejection_pacer import EARLY_RETRY_S
from penstock.server.listening.tally import FIRST_ERROR

from .connection import BUSY, DRAIN_LINGER_S, HEAD, HELD, Connection

if TYPE_CHECKING:
    from penstock.server.listening.mapped_buffer import Body

    from .head import Head

_APART_BYTES = 64 << 10
"""A body of at least this size is not copied behind its head. Both still leave in one write, because uvloop buffers the
head until the turn ends or this many bytes are pending."""
_AGAIN = b"retry-after: "
_BODILESS = (204, 304)
"""Statuses whose answers have no body and no Content-Length. Source: RFC 9110, 8.6."""


class AnsweringConnection(Connection):
    """The answering side. `head` is that of the current request, or of the last one.

    `_told` is the path of the last rejection with a Retry-After, and the time before which the client should not repeat
    it; `_held` is a delayed rejection, as the arguments of `answer`.
    """

    __slots__ = ("_held", "_port", "_told", "head")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.head: Head | None = None
        self._told: tuple[bytes, float] | None = None
        self._held: tuple[int, Body, bytes, bytes] | None = None
        self._port = self.shared  # looking it up on the class is slower

    def answer_ok(self, body: Body, json_bytes: int = 0) -> None:
        """Answer 200 with a JSON body, or `json_bytes` of JSON followed by tensors: the common case, in one write."""
        head, shared = self.head, self._port
        if self._state != BUSY or head is None:
            return
        if not head.keep_alive or head.old or shared.draining or self._half_closed:
            self._answer_ok(body, json_bytes)
            return
        lines = shared.answers.ok(self.server_state.default_headers, len(body), json_bytes)
        if len(body) < _APART_BYTES:  # inlined from `_write`, because a call costs a hundredth of a small request
            self.transport.write(lines + body)
        else:
            self._write(lines, body)
        self._lived = True
        self._state = HEAD
        if self._buffer or self.flow.read_paused:
            self._continue()

    def _answer_ok(self, body: Body, json_bytes: int) -> None:
        """Answer the same on the general path."""
        extra = b"inference-header-content-length: %d\r\n" % json_bytes if json_bytes else b""
        self.answer(200, body, b"application/octet-stream" if json_bytes else b"application/json", extra)

    def answer(self, status: int, body: Body, content_type: bytes, extra: bytes = b"") -> None:
        """Answer the current request; `extra` is whole header lines. A second answer is ignored.

        An empty `content_type` is not sent. HEAD gets the same answer as GET, without the body. Raises: ValueError for
        a status that does not end an exchange: the client would take the next answer for this one.
        """
        head = self.head
        if self._state != BUSY or head is None:
            return
        if not 200 <= status <= 999:
            raise ValueError(f"an answer of status {status}")
        if status == 503 and _AGAIN in extra and self._is_early(head) and self.shared.pacer.hold(self, self.loop):
            self._state, self._held = HELD, (status, body, content_type, extra)
            return
        if status >= FIRST_ERROR and not self.transport.is_closing():
            self.shared.tally.count_error(status)
        ending = self.shared.draining or self._half_closed
        # what has already arrived is answered first
        keep_alive = head.keep_alive and (not ending or bool(self._buffer))
        connection = b"connection: close\r\n" if not keep_alive else b"connection: keep-alive\r\n" if head.old else b""
        lines = self.shared.answers.head(status, self.server_state.default_headers)
        if content_type:
            extra += b"content-type: " + content_type + b"\r\n"
        length, body = (b"\r\n", b"") if status in _BODILESS else (b"content-length: %d\r\n\r\n" % len(body), body)
        self._write(b"".join((lines, connection, extra, length)), b"" if head.method == b"HEAD" else body)
        self._lived = True
        if not keep_alive:
            if head.keep_alive:  # its client may be sending another request
                self._part()
                self.loop.call_later(DRAIN_LINGER_S, self.transport.close)
            else:
                self._close()
            return
        self._state = HEAD
        if self._buffer or self.flow.read_paused:
            self._continue()

    def _is_early(self, head: Head) -> bool:
        """Record a rejection. Returns: whether its client repeated it before the Retry-After, and sent nothing else."""
        told, now_s = self._told, self.loop.time()
        self._told = head.path, now_s + EARLY_RETRY_S
        return told is not None and told[0] == head.path and now_s < told[1] and not self._buffer

    def send_held(self) -> None:
        """Send the delayed rejection, because it is due or the client has sent another request."""
        self.shared.pacer.discard(self)
        held, self._held, self._told = self._held, None, None
        if self._state == HELD and held is not None:
            self._state = BUSY
            AnsweringConnection.answer(self, *held)

    def _write(self, head: bytes, body: Body) -> None:
        if len(body) < _APART_BYTES:
            self.transport.write(head + body)
        else:
            self.transport.write(head)
            self.transport.write(body)
