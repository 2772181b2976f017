"""AnsweringConnection: the part of a connection that its Service uses. FastLane adds the receiving part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.server.listening.rejection_pacer import EARLY_RETRY_S
from penstock.server.listening.tally import FIRST_ERROR

from .connection import ANSWERING, DELAYED, DRAIN_LINGER_S, HEAD, Connection

if TYPE_CHECKING:
    from penstock.server.listening.mapped_buffer import Body

    from .head import Head

_SEPARATE_WRITE_BYTES = 64 << 10
"""A body of at least this size is not copied behind its head. Both still leave in one write, because uvloop buffers the
head until the turn ends or this many bytes are pending."""
_RETRY_AFTER = b"retry-after: "
_BODILESS = (204, 304)
"""Statuses whose answers have no body and no Content-Length. Source: RFC 9110, 8.6."""


class AnsweringConnection(Connection):
    """The answering side.

    `_last_rejection` is the path of the last rejection with a Retry-After, and the time before which the client should
    not repeat it; `_delayed_answer` is a delayed rejection, as the arguments of `answer`.
    """

    __slots__ = ("_delayed_answer", "_last_rejection", "_shared")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._last_rejection: tuple[bytes, float] | None = None
        self._delayed_answer: tuple[int, Body, bytes, bytes] | None = None
        self._shared = self.shared  # looking it up on the class is slower

    def answer_ok(self, body: Body, json_bytes: int = 0) -> None:
        """Answer 200 with a JSON body, or `json_bytes` of JSON followed by tensors: the common case, in one write."""
        head, shared = self.head, self._shared
        if self._state != ANSWERING or head is None:
            return
        if not head.keep_alive or head.is_http10 or shared.draining or self._half_closed:
            self._answer_ok(body, json_bytes)
            return
        lines = shared.answers.ok(self.server_state.default_headers, len(body), json_bytes)
        # inlined from `_write`, because a call costs a hundredth of a small request
        if len(body) < _SEPARATE_WRITE_BYTES:
            self.transport.write(lines + body)
        else:
            self._write(lines, body)
        self._progressed = True
        self._state = HEAD
        if self._buffer or self.flow.read_paused:
            self._resume()

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
        if self._state != ANSWERING or head is None:
            return
        if not 200 <= status <= 999:
            raise ValueError(f"invalid answer status {status}")
        if (
            status == 503
            and _RETRY_AFTER in extra
            and self._is_early_retry(head)
            and self.shared.pacer.hold(self, self.loop)
        ):
            self._state, self._delayed_answer = DELAYED, (status, body, content_type, extra)
            return
        if status >= FIRST_ERROR and not self.transport.is_closing():
            self.shared.tally.count_error(status)
        is_ending = self.shared.draining or self._half_closed
        # what has already arrived is answered first
        keep_alive = head.keep_alive and (not is_ending or bool(self._buffer))
        connection = (
            b"connection: close\r\n" if not keep_alive else b"connection: keep-alive\r\n" if head.is_http10 else b""
        )
        lines = self.shared.answers.head(status, self.server_state.default_headers)
        if content_type:
            extra += b"content-type: " + content_type + b"\r\n"
        length, body = (b"\r\n", b"") if status in _BODILESS else (b"content-length: %d\r\n\r\n" % len(body), body)
        self._write(b"".join((lines, connection, extra, length)), b"" if head.method == b"HEAD" else body)
        self._progressed = True
        if not keep_alive:
            if head.keep_alive:  # its client may be sending another request
                self._close_lingering()
                self.loop.call_later(DRAIN_LINGER_S, self.transport.close)
            else:
                self._close()
            return
        self._state = HEAD
        if self._buffer or self.flow.read_paused:
            self._resume()

    def _is_early_retry(self, head: Head) -> bool:
        """Record a rejection. Returns: whether its client repeated it before the Retry-After, and sent nothing else."""
        last, now_s = self._last_rejection, self.loop.time()
        self._last_rejection = head.path, now_s + EARLY_RETRY_S
        return last is not None and last[0] == head.path and now_s < last[1] and not self._buffer

    def send_held(self) -> None:
        """Send the delayed rejection, because it is due or the client has sent another request."""
        self.shared.pacer.discard(self)
        delayed, self._delayed_answer, self._last_rejection = self._delayed_answer, None, None
        if self._state == DELAYED and delayed is not None:
            self._state = ANSWERING
            AnsweringConnection.answer(self, *delayed)

    def _write(self, head: bytes, body: Body) -> None:
        if len(body) < _SEPARATE_WRITE_BYTES:
            self.transport.write(head + body)
        else:
            self.transport.write(head)
            self.transport.write(body)
