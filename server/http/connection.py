"""Connection: the life of one connection: how it begins, what it may take of time, how it ends.

Called by the transport, by uvicorn (`shutdown`) and by `Shared.sweep` (`tick`); `fastlane.py` adds what is read and
answered. What both rely on inside uvicorn is pinned in pyproject.toml and checked by
tests/server/http/test_uvicorn_contract.py.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from penstock.batching.loaded import STOPPING
from penstock.server.health import EXITING

from .head import HttpError

if TYPE_CHECKING:
    import asyncio

    from penstock.server.listening.mapped import Body

    from .chunks import ChunkedBody
    from .head import Head
    from .limits import Limits
    from .service import Shared

HEAD, BODY, CHUNKS, BUSY, HELD, FOREIGN, CLOSED = range(7)
"""States of a connection: it awaits a head, a body of known length, or one in chunks; the Service is to answer; it has
refused, and that waits for its time; the request is uvicorn's; no request is taken any more."""
EOF_GRACE_S = 1.0
"""How long a request is still answered after its client has closed its sending side, or altogether."""
DRAIN_LINGER_S = 0.5
"""How long an idle connection stays open while draining: a request that is on its way is still answered."""
_LOOK_S = 0.01
"""In so long a loop has read what had arrived."""
REFUSED_LINGER_S = 5.0
"""How long what a refused client still sends is read and dropped: closing on it would take the answer with it."""

_SOON = b"retry-after: 1\r\n"
_ASKING = frozenset((b"GET", b"HEAD", b"OPTIONS", b"TRACE"))
"""Source: RFC 9110, 9.2.1, of methods that are safe."""


class Cancellable(Protocol):
    """What works on an answer: a task, or what does without one."""

    def cancel(self) -> Any: ...


class Connection(HttpToolsProtocol):
    """The state of one connection, and how it begins and ends.

    Invariants: `_state` says whose turn it is, and CLOSED is never left. A connection is in `shared.connections` from
    `connection_made` to `connection_lost`. What is still to come of the body under way is in `_chunked`, or in
    `_missing` where that is None. `request`, `task` and `plan` belong to the Service, which cancels the first two in
    `abandon`. `_late` says that it came while its port was drained: no work is begun for it.
    """

    __slots__ = (
        "_buffer", "_chunked", "_half_closed", "_late", "_lived", "_missing", "_resting", "_service", "_state",
        "_unsent", "_waited_s", "plan", "request", "task",
    )  # fmt: skip

    shared: ClassVar[Shared]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.request: Any = None
        self.task: Cancellable | None = None
        self.plan: Any = None
        self._service = self.shared.service
        self.access_log, self.access_logger = True, self.shared.heard  # type: ignore[assignment]  # told of uvicorn's
        self._state = HEAD
        self._buffer = bytearray()
        self._missing = 0
        self._chunked: ChunkedBody | None = None
        self._lived = True
        self._waited_s = 0.0
        self._unsent = 0
        self._half_closed = False
        self._late = self._resting = False

    @property
    def busy(self) -> bool:
        """Whether a Service has a request to answer. Asked by who measures it (perf/micro.py)."""
        return self._state == BUSY

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, or refuse it when there are too many."""
        super().connection_made(transport)
        self.shared.connections.add(self)
        if len(self.shared.connections) > self.shared.limits.max_connections:
            self.shared.tally.full(self.shared.limits.max_connections)
            self._refuse(HttpError(503, "too many connections"))
            self.transport.close()
        elif self.shared.draining:
            self._late = True
            self.loop.call_later(DRAIN_LINGER_S, self._close_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget everything; a request under way is cancelled."""
        busy = self._state == BUSY
        self._state = CLOSED
        self.shared.connections.discard(self)
        self.shared.untaken.lessen(self)
        self.shared.pace.forget(self)
        try:
            if busy:
                self._service.abandon(self)
        finally:
            self.request = self.task = None
            super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Take the end of what the client sends for its end: what it asked for is cancelled after a moment.

        A client that has gone and one that has only closed its sending side look the same. The second kind still gets
        an answer that comes within the moment.
        """
        self._half_closed = True
        if self._state in (BUSY, FOREIGN):
            self.loop.call_later(EOF_GRACE_S, self._give_up, self._state, self.request, self.task, self.cycle)
        paused = self._state == HEAD and (self.flow.write_paused or self.flow.read_paused)
        return self._answer_due() or ((paused or self._resting) and bool(self._buffer))

    def _give_up(self, *asked: Any) -> None:
        if (self._state, self.request, self.task, self.cycle) == asked:
            self.transport.close()

    def pause_writing(self) -> None:
        """Note that the client has fallen behind."""
        super().pause_writing()
        self._lived = True
        self.shared.untaken.keep(self, self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """Go on with what has arrived, once the client has taken the answers before."""
        super().resume_writing()
        self.shared.untaken.lessen(self)
        self._lived = True
        self._continue()

    def _continue(self) -> None:
        """Go on with what has arrived meanwhile."""
        raise NotImplementedError

    def send_held(self) -> None:
        """Send the refusal that is held."""
        raise NotImplementedError

    def give_up(self) -> None:
        """Drop a client that does not take its answer."""
        self.transport.abort()

    # -- endings -----------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Drain: answer what is under way or on its way, then close. Called by uvicorn once, for each connection."""
        self.shared.draining = True
        if self._state == FOREIGN:
            # an answer that has begun has said that the connection stays open: who has it may go on
            if not getattr(self.cycle, "response_started", False) or self.cycle.response_complete:
                super().shutdown()
        elif self._state == HEAD:
            self.loop.call_later(DRAIN_LINGER_S, self._close_idle)
        elif self._state == CLOSED and not self._late:
            self.transport.close()

    def _close_idle(self, looked: bool = False) -> None:
        """Close unless the client asks for more, for which it has a while once it has taken the answer before.

        That one may have said that the connection stays open. `looked`: what had arrived has been read since this was
        due. A loop that was busy calls what is due first, and to close on a request would cost its client the 503.
        """
        if self._state != HEAD or self._buffer:
            return
        if self.flow.write_paused:
            self.loop.call_later(DRAIN_LINGER_S, self._close_idle)
        elif not looked:
            self.loop.call_later(_LOOK_S, self._close_idle, True)
        else:
            self._close()

    def _refuse(self, error: HttpError) -> None:
        """Answer a request that cannot be framed, and close: what follows it cannot be told from it."""
        if self.transport.is_closing() or not self._withdraw():
            self._close()
            return
        status, content_type, body = self.shared.refusal(error)
        self.shared.tally.error(status)
        lines = self.shared.answers.head(status, self.server_state.default_headers)
        again = _SOON if status == HTTPStatus.SERVICE_UNAVAILABLE else b""
        last = b"connection: close\r\n%bcontent-type: %b\r\ncontent-length: %d\r\n\r\n"
        self._write(lines + last % (again, content_type, len(body)), body)
        self._part()

    def _write(self, head: bytes, body: Body) -> None:
        """Write an answer."""
        raise NotImplementedError

    def _withdraw(self) -> bool:
        """Take a request back from uvicorn; False when it has begun to answer."""
        cycle = self.cycle
        if self._state != FOREIGN or cycle is None:
            return self._state != FOREIGN
        if cycle.response_started:
            return False
        # as uvicorn does itself when the connection is lost
        cycle.disconnected = True
        cycle.message_event.set()
        return True

    def _part(self) -> None:
        """End by closing the sending side: what the client still sends is read and dropped till it closes, too.

        Closing on it would reset the connection, and might take the last answer with it (RFC 9112, 9.6).
        """
        if self._half_closed or not self.transport.can_write_eof():
            self._close()
            return
        self._state = CLOSED
        self._buffer.clear()
        self._lived = True
        self.transport.write_eof()
        self.flow.resume_reading()

    def _close(self) -> None:
        self._state = CLOSED
        self._buffer.clear()
        self._lived = True
        self.transport.close()

    # -- time --------------------------------------------------------------------------------------------------

    def tick(self, elapsed_s: float) -> None:
        """Count time without progress, and close when a limit is passed."""
        limits = self.shared.limits
        if self._lived:
            self._lived = False
            self._waited_s = 0.0
            return
        if self._resting:
            return  # what has arrived has not been looked at: that is no time of the client's
        self._waited_s += elapsed_s
        if self.flow.write_paused or self._state == CLOSED:
            self._tick_unsent(limits)
        elif self._receiving():
            if self._waited_s > limits.receive_timeout_s:
                self._refuse(HttpError(408, f"request was not received within {limits.receive_timeout_s:g} s"))
        elif self._state == HEAD:
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

    # -- what is to come ---------------------------------------------------------------------------------------

    def _ended(self) -> bool:
        """Whether no request is to come: what is left of a half-closed connection will never be a whole one."""
        if self._state == HEAD:
            return self._half_closed and not self.flow.write_paused
        return self._half_closed and self._receiving()

    def _answer_due(self) -> bool:
        """Whether a request has arrived whole and waits for its answer."""
        return self._state in (BUSY, HELD) or (self._state == FOREIGN and not self._receiving())

    def _receiving(self) -> bool:
        if self._state == FOREIGN:
            return not self._chunked.done if self._chunked is not None else self._missing > 0
        return self._state in (BODY, CHUNKS) or (self._state == HEAD and bool(self._buffer))


def demand_asking(head: Head) -> None:
    """Let pass what only asks, on a connection that came while its port was drained. Raises: HttpError (503)."""
    if head.route is not None or head.method not in _ASKING:
        raise HttpError(503, STOPPING if head.route is not None else EXITING)
