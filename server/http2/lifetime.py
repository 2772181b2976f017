"""Lifetime: how an HTTP/2 connection begins and ends, and what it may take of time and of patience.

Part of Http2Connection, between `pings.py` and `connection.py`.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import select
import sys
import termios
from typing import Any

from .frames import MAX_WINDOW, PING, Fault, Http2Error, frame, goaway
from .pings import DRAIN_PING, Pings
from .shared import Http2Shared

logger = logging.getLogger("penstock.http2")

LINGER_S = 5.0
"""How long what a refused peer still sends is read and dropped: closing on it would take the GOAWAY with it."""
GOODBYE_S = 1.0
"""The same for a peer that has been told to go, and has had all its answers."""
DRAIN_LINGER_S = 0.5
"""How long a call that is on its way may still arrive after the first GOAWAY, if the peer does not answer its PING."""
_CREDIT_FRAMES = 8
"""Frames that ask for nothing which one sent frame makes up for, or one call that is under way or was taken back."""
_MOST_SETTINGS = 100
"""In a second. Each may change the windows of all streams, and has all that waits looked at; what earns other frames
their credit, a thousand open calls for one, makes these cost more."""


class Lifetime(Pings):
    """The life of a connection.

    Invariants: `closed` is never left, and nothing that arrives is looked at then. `_waiting` says that what arrives
    must be looked at before its frames are. `leaving` is set with the final GOAWAY: no stream above `last_id` is opened
    any more, and the connection closes with its last stream. `late` says that it came while its port was drained: no
    work is begun for it, and it is told to go after a moment; where it is `hurried`, once it has asked something. Not
    before: of grpcio's clients (1.85) that got a GOAWAY just after the SETTINGS, one in a thousand took the connection
    for good, and waited there until its deadline.
    """

    __slots__ = (
        "_age_s", "_answered_before", "_closed_s", "_idle_frames", "_idle_s", "_linger_s", "_resets", "_sent_before",
        "_settings", "_stuck_s", "_unfinished_s", "_unsent", "_waiting", "begun", "hurried", "last_id", "late",
    )  # fmt: skip

    def __init__(self, shared: Http2Shared) -> None:
        super().__init__(shared)
        self.last_id = 0
        self.late = self.hurried = False
        self._waiting = True
        self.begun = False
        self._linger_s = LINGER_S
        self._unfinished_s = 0.0
        self._closed_s = 0.0
        self._unsent = 0
        self._stuck_s = 0.0
        self._age_s = 0.0
        self._idle_s = 0.0
        self._idle_frames = 0
        self._resets = 0
        self._settings = 0
        self._answered_before = 0
        self._sent_before = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection, or drop it when there are too many."""
        self.transport = transport
        connections = self.shared.connections
        if len(connections) >= self.limits.max_connections:
            self.shared.tally.full(self.limits.max_connections)
            self.closed = True
            self.transport.abort()
            return
        connections.add(self)
        self.over_tls = transport.get_extra_info("sslcontext") is not None
        if self.shared.draining:
            self.late = True
            self.shared.loop.call_later(DRAIN_LINGER_S, self._let_go)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget everything; the calls under way are cancelled."""
        self.closed = self._waiting = True
        self.end_keepalive()
        self.shared.connections.discard(self)
        self.shared.untaken.lessen(self)
        self._drop_streams(Fault.CANCEL)
        self.out.clear()

    def eof_received(self) -> bool:
        """Close: a peer that sends no more cannot open windows either."""
        return False

    def _drop_streams(self, code: Fault) -> None:
        self.blocked.clear()
        streams = list(self.streams.values())
        self.streams.clear()
        for stream in streams:
            stream.unsent = None
            self.shared.untaken.lessen(stream)
            try:
                stream.lost(code)
            except Exception:  # the others are still to learn of it
                logger.exception("a stream of an HTTP/2 connection could not be ended")

    # -- endings -----------------------------------------------------------------------------------------------

    def fail(self, fault: Http2Error) -> None:
        """End the connection with GOAWAY and the code of what was wrong."""
        if self.closed:
            return
        logger.debug("connection ends with %s: %s", fault.code.name, fault.text)
        self.out.append(goaway(self.last_id, fault.code, fault.text))
        self._end()

    def _end(self) -> None:
        """Write what there is, then only read and drop until the peer has seen it."""
        self.closed = self._waiting = True
        self._drop_streams(Fault.CANCEL)
        if self.transport.is_closing():
            return
        out, self.out = self.out, []
        self.transport.write(b"".join(out))
        if not self.transport.can_write_eof():
            self.transport.close()
            return
        self.transport.write_eof()

    def shutdown(self) -> None:
        """Drain: say so, answer what was sent before the peer learned it, then close."""
        if self.draining or self.closed:
            return
        if self.late and not self.last_id:
            self.hurried = True
            return
        self.draining = True
        if self.begun:
            self.say_goodbye()
        else:
            self.shared.loop.call_later(DRAIN_LINGER_S, self._drop_silent)

    def say_goodbye(self) -> None:
        """Tell the peer to open no more streams; its answer to the PING says that it knows."""
        self.write(goaway(MAX_WINDOW, Fault.NO_ERROR) + frame(PING, 0, 0, DRAIN_PING))
        self.shared.loop.call_later(DRAIN_LINGER_S, self.leave)

    def _let_go(self) -> None:
        """End a connection that came late; one that has asked nothing need not be told."""
        if self.last_id:
            self.shutdown()
        elif not self.closed:
            self.transport.close()

    def _drop_silent(self) -> None:
        if not self.begun and not self.closed:
            self.transport.close()

    def leave(self) -> None:
        """Take no more calls: the peer has had time to learn that it should not send any."""
        if self.leaving or self.closed:
            return
        self.leaving = True
        self.write(goaway(self.last_id, Fault.NO_ERROR))

    def settle(self) -> None:
        """Close: what was accepted has been answered."""
        if not self.closed and not self.streams:
            self._linger_s = GOODBYE_S
            self._end()

    # -- patience ----------------------------------------------------------------------------------------------

    def charge(self, kind: str) -> None:
        """Count a frame that asks for nothing.

        Raises: Http2Error when a second has had too many.
        """
        self._idle_frames += 1
        # a client may answer each frame of ours with window updates, and a long stream is one call; gRPC's clients send
        # one with each call too, and a thousand calls at once are no flood
        earned = _CREDIT_FRAMES * (self.sent_frames - self._sent_before + len(self.streams) + self._resets)
        if self._idle_frames > self.limits.max_idle_frames + earned:
            raise Http2Error(Fault.ENHANCE_YOUR_CALM, f"too many frames that ask for nothing, such as {kind}")

    def charge_reset(self) -> None:
        """Count a call that was opened only to be reset.

        Raises: Http2Error when a second has had too many. Source: CVE-2023-44487.
        """
        self._resets += 1
        if self._resets > self.limits.max_resets + self.answered - self._answered_before:
            raise Http2Error(Fault.ENHANCE_YOUR_CALM, "too many calls were opened and reset")

    def charge_settings(self) -> None:
        """Count a SETTINGS frame. Raises: Http2Error when a second has had too many."""
        self._settings += 1
        if self._settings > _MOST_SETTINGS:
            raise Http2Error(Fault.ENHANCE_YOUR_CALM, "too many SETTINGS")

    # -- time --------------------------------------------------------------------------------------------------

    def tick(self, elapsed_s: float) -> None:
        """Count time without progress, and close when a limit is passed."""
        self._idle_frames = self._resets = self._settings = 0
        self._answered_before = self.answered
        self._sent_before = self.sent_frames
        self._age_s += elapsed_s
        self.silent_s = 0.0 if self.heard else self.silent_s + elapsed_s
        self.heard = False
        if self.closed:
            self._closed_s += elapsed_s
            if self._closed_s > self._linger_s:
                self.transport.abort()
        elif not self.begun:
            if self._age_s > self.limits.preface_timeout_s:
                self.transport.abort()
        elif not self._tick_unsent(elapsed_s) and not self._tick_unfinished(elapsed_s):
            for stream in list(self.streams.values()):
                stream.tick(elapsed_s)
            self._tick_age(elapsed_s)
            self.tick_keepalive(elapsed_s)

    def _tick_unsent(self, elapsed_s: float) -> bool:
        """Drop a peer that takes nothing of what waits for it."""
        unsent, before = self.transport.get_write_buffer_size(), self._unsent
        if not unsent and self.over_tls:
            unsent = _below_tls(self.transport)
        self._unsent = unsent
        self._stuck_s = self._stuck_s + elapsed_s if unsent and unsent >= before > 0 else 0.0
        if self._stuck_s <= self.limits.write_timeout_s:
            return False
        self.transport.abort()
        return True

    def _tick_unfinished(self, elapsed_s: float) -> bool:
        """Refuse a frame or a header block that does not come to its end."""
        if not self.stuck():
            self._unfinished_s = 0.0
            return False
        self._unfinished_s += elapsed_s
        if self._unfinished_s <= self.limits.receive_timeout_s:
            return False
        self.fail(Http2Error(Fault.ENHANCE_YOUR_CALM, "a frame or a header block was not finished in time"))
        return True

    def stuck(self) -> bool:
        """Tell whether the same frame or header block has been under way since this was last asked."""
        raise NotImplementedError

    def _tick_age(self, elapsed_s: float) -> None:
        limits = self.limits
        self._idle_s = 0.0 if self.streams else self._idle_s + elapsed_s
        old = 0 < limits.max_age_s < self._age_s
        if old and self.draining:
            if 0 < limits.max_age_grace_s <= self._age_s - limits.max_age_s:
                self.transport.abort()
        elif old or 0 < limits.idle_timeout_s < self._idle_s:
            if old:
                # its grace begins as it is told, which may be a second late
                self._age_s = limits.max_age_s
            self.shutdown()


def _below_tls(transport: Any) -> int:
    """Give the bytes that the socket below TLS has not got rid of; 0 while it takes more.

    What waits between TLS and the socket, up to one write, no transport tells; but while it does, the socket is full.
    """
    socket = transport.get_extra_info("socket")
    descriptor = -1 if socket is None else socket.fileno()
    if descriptor < 0:
        return 0
    writable = select.poll()
    writable.register(descriptor, select.POLLOUT)
    if writable.poll(0):
        return 0
    try:
        return int.from_bytes(fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    except OSError:  # a system that does not tell
        return 0
