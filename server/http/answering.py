"""Answering: the half of a connection that its Service uses. Part of FastLane, which adds what arrives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.server.listening.tally import FIRST_ERROR

from .connection import BUSY, DRAIN_LINGER_S, HEAD, Connection

if TYPE_CHECKING:
    from .head import Head

_APART_BYTES = 64 << 10
"""A body from this size on is not copied to stand behind its head. Both leave in one write all the same: uvloop waits
with the head until the turn ends, or until so many bytes are to be written."""
_BODILESS = (204, 304)
"""Statuses of answers that have no body, and so say nothing of its length. Source: RFC 9110, 8.6."""


class Answering(Connection):
    """What is answered. `head` is that of the request under way, or of the last one."""

    __slots__ = ("_port", "head")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.head: Head | None = None
        self._port = self.shared  # what is the class's takes longer to find

    def answer_ok(self, body: bytes, json_bytes: int = 0) -> None:
        """Answer 200 with a JSON body, or so much JSON and tensors behind it: the usual answers, in one write."""
        head, shared = self.head, self._port
        if self._state != BUSY or head is None:
            return
        if not head.keep_alive or head.old or shared.draining or self._half_closed:
            self._answer_ok(body, json_bytes)
            return
        lines = shared.answers.ok(self.server_state.default_headers, len(body), json_bytes)
        if len(body) < _APART_BYTES:  # as `_write` has it; a call is a hundredth of a small request
            self.transport.write(lines + body)
        else:
            self._write(lines, body)
        self._lived = True
        self._state = HEAD
        if self._buffer or self.flow.read_paused:
            self._continue()

    def _answer_ok(self, body: bytes, json_bytes: int) -> None:
        """Answer the same by the way of all others."""
        extra = b"inference-header-content-length: %d\r\n" % json_bytes if json_bytes else b""
        self.answer(200, body, b"application/octet-stream" if json_bytes else b"application/json", extra)

    def answer(self, status: int, body: bytes, content_type: bytes, extra: bytes = b"") -> None:
        """Answer the request under way; `extra` is whole header lines. A second answer is ignored.

        An empty `content_type` is not sent. To HEAD the answer is what it would be to GET, without the body.
        """
        head = self.head
        if self._state != BUSY or head is None:
            return
        if status >= FIRST_ERROR:
            self.shared.tally.error(status)
        ending = self.shared.draining or self._half_closed
        # what has arrived already is answered first
        keep_alive = head.keep_alive and (not ending or bool(self._buffer))
        connection = b"connection: close\r\n" if not keep_alive else b"connection: keep-alive\r\n" if head.old else b""
        lines = self.shared.answers.head(status, self.server_state.default_headers)
        if content_type:
            extra += b"content-type: " + content_type + b"\r\n"
        length = b"\r\n" if status in _BODILESS else b"content-length: %d\r\n\r\n" % len(body)
        self._write(b"".join((lines, connection, extra, length)), b"" if head.method == b"HEAD" else body)
        self._lived = True
        if not keep_alive:
            if head.keep_alive:  # its client may be sending another
                self._part()
                self.loop.call_later(DRAIN_LINGER_S, self.transport.close)
            else:
                self._close()
            return
        self._state = HEAD
        if self._buffer or self.flow.read_paused:
            self._continue()

    def _write(self, head: bytes, body: bytes) -> None:
        if len(body) < _APART_BYTES:
            self.transport.write(head + body)
        else:
            self.transport.write(head)
            self.transport.write(body)
