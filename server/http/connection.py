"""Connection: the life cycle of one connection: how it begins, its time limits, how it ends.

Called by the transport, by uvicorn (`shutdown`) and by `HttpShared.sweep` (`tick`); `fastlane.py` adds reading and
answering. The uvicorn internals that both rely on are pinned in pyproject.toml and checked by
tests/server/http/test_uvicorn_contract.py.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from penstock.batching.registry import STOPPING_MESSAGE
from penstock.server.health import EXITING

from .head import HttpError

if TYPE_CHECKING:
    import asyncio

    from penstock.server.listening.mapped_buffer import Body

    from .chunks import ChunkedBody
    from .head import Head
    from .limits import Limits
    from .service import HttpShared

HEAD, BODY, CHUNKS, ANSWERING, DELAYED, UVICORN, CLOSED = range(7)
"""States of a connection: it is receiving a head, a body of known length, or a chunked body; the Service is answering;
a rejection is delayed; the request is uvicorn's; no further request is accepted."""
EOF_GRACE_S = 1.0
"""How long a request may still be answered after its client has closed its sending side, or the connection."""
DRAIN_LINGER_S = 0.5
"""How long an idle connection stays open while draining, to answer a request that is on its way."""
_READ_GRACE_S = 0.01
"""Time enough for the loop to read what had already arrived."""
REJECTED_LINGER_S = 5.0
"""How long further input from a rejected client is read and dropped: closing at once could discard the answer."""

_RETRY_AFTER = b"retry-after: 1\r\n"
_SAFE_METHODS = frozenset((b"GET", b"HEAD", b"OPTIONS", b"TRACE"))
"""Source: RFC 9110, 9.2.1, the safe methods."""


class Cancellable(Protocol):
    """What is producing an answer: a task or its equivalent."""

    def cancel(self) -> Any: ...


class Connection(HttpToolsProtocol):
    """The state of one connection, and how it begins and ends.

    Invariants: `_state` says whose turn it is, and CLOSED is final. A connection is in `shared.connections` from
    `connection_made` to `connection_lost`. `head` is that of the current request, or of the last one. The rest of the
    current body is in `_chunked`, or in `_remaining_bytes` if that is None; with a `_rejection`, the body is dropped.
    `request`, `task` and `plan` belong to the Service, which cancels the first two in `abandon`.
    `_accepted_in_drain`: it was accepted while its port was draining, so no work is started for it.
    """

    __slots__ = (
        "_accepted_in_drain", "_buffer", "_chunked", "_half_closed", "_last_unsent_bytes", "_progressed",
        "_rejection", "_remaining_bytes", "_service", "_stalled_s", "_state", "_yielding", "head", "plan", "request",
        "task",
    )  # fmt: skip

    shared: ClassVar[HttpShared]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.head: Head | None = None
        self.request: Any = None
        self.task: Cancellable | None = None
        self.plan: Any = None
        self._service = self.shared.service
        self.access_log, self.access_logger = True, self.shared.access_logger  # type: ignore[assignment]  # uvicorn's answers
        self._state = HEAD
        self._buffer = bytearray()
        self._remaining_bytes = 0
        self._chunked: ChunkedBody | None = None
        self._rejection: Any = None
        self._progressed = True
        self._stalled_s = 0.0
        self._last_unsent_bytes = 0
        self._half_closed = False
        self._accepted_in_drain = self._yielding = False

    @property
    def busy(self) -> bool:
        """Whether a Service has a request to answer. Used for measurements (perf/micro.py)."""
        return self._state == ANSWERING

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection, or reject it if there are too many."""
        super().connection_made(transport)
        self.shared.connections.add(self)
        if len(self.shared.connections) > self.shared.limits.max_connections:
            self.shared.tally.count_over_limit(self.shared.limits.max_connections)
            self._reject(HttpError(503, "too many connections"))
            self.transport.close()
        elif self.shared.draining:
            self._accepted_in_drain = True
            self.loop.call_later(DRAIN_LINGER_S, self._close_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        """Release everything; a request in progress is cancelled."""
        busy = self._state == ANSWERING
        self._state = CLOSED
        self.shared.connections.discard(self)
        self.shared.unread.shrink(self)
        self.shared.pacer.discard(self)
        try:
            if busy:
                self._service.abandon(self)
        finally:
            self.request = self.task = None
            super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Treat the end of the client's data as a disconnect: its request is cancelled after a grace period.

        A client that is gone and one that has only closed its sending side look the same. The latter still gets an
        answer that comes within the grace period.
        """
        self._half_closed = True
        if self._state in (ANSWERING, UVICORN):
            self.loop.call_later(
                EOF_GRACE_S, self._close_if_unanswered, self._state, self.request, self.task, self.cycle
            )
        paused = self._state == HEAD and (self.flow.write_paused or self.flow.read_paused)
        return self._awaits_answer() or ((paused or self._yielding) and bool(self._buffer))

    def _close_if_unanswered(self, *pending: Any) -> None:
        if (self._state, self.request, self.task, self.cycle) == pending:
            self.transport.close()

    def pause_writing(self) -> None:
        """Record that the client does not keep up."""
        super().pause_writing()
        self._progressed = True
        self.shared.unread.grow(self, self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """Process buffered input, once the client has read the earlier answers."""
        super().resume_writing()
        self.shared.unread.shrink(self)
        self._progressed = True
        self._resume()

    def _resume(self) -> None:
        """Process buffered input."""
        raise NotImplementedError

    def send_held(self) -> None:
        """Send the delayed rejection."""
        raise NotImplementedError

    def shed(self) -> None:
        """Abort the connection of a client that does not read its answer."""
        self.transport.abort()

    # -- ending ------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Drain: answer what is in progress or on its way, then close. Called by uvicorn once per connection."""
        self.shared.draining = True
        if self._state == UVICORN:
            # an answer already begun has announced keep-alive, so the client may continue
            if not getattr(self.cycle, "response_started", False) or self.cycle.response_complete:
                super().shutdown()
        elif self._state == HEAD:
            self.loop.call_later(DRAIN_LINGER_S, self._close_idle)
        elif self._state == CLOSED and not self._accepted_in_drain:
            self.transport.close()

    def _close_idle(self, checked: bool = False) -> None:
        """Close an idle connection, once its client has read the last answer and had time to send another request.

        The last answer may have announced keep-alive. `checked`: the loop has since read what had arrived. A busy loop
        runs due timers before it reads, and closing despite a waiting request would cost its client the 503.
        """
        if self._state != HEAD or self._buffer:
            return
        if self.flow.write_paused:
            self.loop.call_later(DRAIN_LINGER_S, self._close_idle)
        elif not checked:
            self.loop.call_later(_READ_GRACE_S, self._close_idle, True)
        else:
            self._close()

    def _reject(self, error: HttpError) -> None:
        """Answer a request that cannot be framed, and close: what follows cannot be separated from it."""
        if self.transport.is_closing() or not self._reclaim_request():
            self._close()
            return
        status, content_type, body = self.shared.format_error(error)
        self.shared.tally.count_error(status)
        lines = self.shared.answers.head(status, self.server_state.default_headers)
        retry_after = _RETRY_AFTER if status == HTTPStatus.SERVICE_UNAVAILABLE else b""
        template = b"connection: close\r\n%bcontent-type: %b\r\ncontent-length: %d\r\n\r\n"
        self._write(lines + template % (retry_after, content_type, len(body)), body)
        self._close_lingering()

    def _write(self, head: bytes, body: Body) -> None:
        """Write an answer."""
        raise NotImplementedError

    def _reclaim_request(self) -> bool:
        """Take a request back from uvicorn; False if it has begun to answer."""
        cycle = self.cycle
        if self._state != UVICORN or cycle is None:
            return self._state != UVICORN
        if cycle.response_started:
            return False
        # as uvicorn does when the connection is lost
        cycle.disconnected = True
        cycle.message_event.set()
        return True

    def _close_lingering(self) -> None:
        """Close the sending side, then read and drop input until the client closes too.

        Closing at once would reset the connection, which could discard the last answer (RFC 9112, 9.6).
        """
        if self._half_closed or not self.transport.can_write_eof():
            self._close()
            return
        self._state = CLOSED
        self._buffer.clear()
        self._progressed = True
        self.transport.write_eof()
        self.flow.resume_reading()

    def _close(self) -> None:
        self._state = CLOSED
        self._buffer.clear()
        self._progressed = True
        self.transport.close()

    # -- time --------------------------------------------------------------------------------------------------

    def tick(self, elapsed_s: float) -> None:
        """Count time without progress, and close when a limit is exceeded."""
        limits = self.shared.limits
        if self._progressed:
            self._progressed = False
            self._stalled_s = 0.0
            return
        if self._yielding:
            return  # input is waiting to be processed, so the time is not the client's
        self._stalled_s += elapsed_s
        if self.flow.write_paused or self._state == CLOSED:
            self._tick_unsent(limits)
        elif self._is_receiving():
            if self._stalled_s > limits.receive_timeout_s:
                self._reject(HttpError(408, f"request was not received within {limits.receive_timeout_s:g} s"))
        elif self._state == HEAD:
            if self._stalled_s > limits.idle_timeout_s:
                self._close()
        else:
            self._stalled_s = 0.0

    def _tick_unsent(self, limits: Limits) -> None:
        unsent, previous = self.transport.get_write_buffer_size(), self._last_unsent_bytes
        self._last_unsent_bytes = unsent
        if unsent and unsent < previous:
            # slow, but still reading
            self._stalled_s = 0.0
        elif self._stalled_s > (limits.write_timeout_s if unsent else REJECTED_LINGER_S):
            self.transport.abort()

    def reject_incomplete(self) -> None:
        """Reject a request that is still arriving, to free its memory."""
        text = f"incomplete requests exceed the {self.shared.limits.max_receive_bytes} bytes of"
        self._reject(HttpError(503, f"{text} --http-receive-memory-bytes"))

    # -- state queries -----------------------------------------------------------------------------------------

    def _is_finished(self) -> bool:
        """Whether no request can follow: a half-closed connection will not complete a partial one."""
        if self._state == HEAD:
            return self._half_closed and not self.flow.write_paused
        return self._half_closed and self._is_receiving()

    def _awaits_answer(self) -> bool:
        """Whether a complete request is waiting for its answer."""
        return self._state in (ANSWERING, DELAYED) or (self._state == UVICORN and not self._is_receiving())

    @property
    def incomplete_bytes(self) -> int:
        """How many bytes are held of a request that is still arriving."""
        if not self._is_receiving() or self._rejection is not None:
            return 0
        if self._state == HEAD or self.head is None:
            return len(self._buffer)
        return self._chunked.received_bytes if self._chunked is not None else self.head.length - self._remaining_bytes

    def _is_receiving(self) -> bool:
        if self._state == UVICORN:
            return not self._chunked.done if self._chunked is not None else self._remaining_bytes > 0
        return self._state in (BODY, CHUNKS) or (self._state == HEAD and bool(self._buffer))


def require_safe(head: Head) -> None:
    """Accept only unclaimed safe requests on a connection accepted while draining. Raises: HttpError (503)."""
    if head.route is not None or head.method not in _SAFE_METHODS:
        raise HttpError(503, STOPPING_MESSAGE if head.route is not None else EXITING)
