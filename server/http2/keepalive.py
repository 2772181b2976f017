"""Keepalive: PINGs that check whether a silent client is alive, and limits on the PINGs of clients.

Owned by Http2Connection. Source: gRPC's keepalive rules (A8, A9).
"""

from __future__ import annotations

import asyncio

from .budget import FrameBudget
from .frames import ACK, PING, Fault, Http2Error, frame
from .outbox import Outbox
from .shared import Http2Shared

_KEEPALIVE_PING = b"are you?"
_QUIET_AFTER_S = 7200.0
"""The minimum interval between a client's pings without calls, as in gRPC's servers."""
_EXACT_BELOW_S = 60.0
"""With a keepalive time of at least this, the sweep sends PINGs, a second or two late. Below it there is a timer, and
each read takes the time, which is a hundredth of the cost of a call."""
_LEAST_S = 0.1
"""Clients without calls are checked at most this often."""
_A_MOMENT_S = 0.0005
_LATE_S, _STOOD_STILL_S = 0.05, 1.0
"""A late timer means that the loop has not read meanwhile, so the check is repeated after reading. A very late one
means that the process was stopped, so the client's time starts again."""


class Keepalive:
    """The keepalive state of one connection.

    Invariants: `heard`: something has been received since the last tick; `_silent_s` is the time without input before
    it. If `exact`, `heard_at_s` is the time of the last input, and a timer runs from `begin` to `end`. `_asked_s` is
    how long ago an unanswered PING was sent, or if `exact` when it was sent; negative if there is none.
    """

    __slots__ = (
        "_again", "_asked_s", "_budget", "_due_s", "_frames_at_asking", "_frames_at_ping", "_limits", "_loop",
        "_outbox", "_ping_at_s", "_pings_without_answers", "_silent_s", "_strikes", "_timer", "exact", "heard",
        "heard_at_s",
    )  # fmt: skip

    def __init__(self, shared: Http2Shared, outbox: Outbox, budget: FrameBudget) -> None:
        self._limits = limits = shared.limits
        self._loop = shared.loop
        self._outbox = outbox
        self._budget = budget
        self.heard = True
        self._silent_s = 0.0
        self.exact = 0 < limits.keepalive_s < _EXACT_BELOW_S
        self.heard_at_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0
        self._asked_s = -1.0
        self._again = False
        self._pings_without_answers = 0
        self._frames_at_asking = 0
        self._ping_at_s = -1e9
        self._frames_at_ping = 0
        self._strikes = 0

    def received(self) -> None:
        """Record that something has been received. Http2Connection does this inline on its hot path."""
        self.heard = True
        if self.exact:
            self.heard_at_s = self._loop.time()

    def take_ping(self, flags: int, payload: bytes) -> None:
        """Answer a PING, or process the answer to one of ours.

        Raises: Http2Error.
        """
        if len(payload) != 8:
            raise Http2Error(Fault.FRAME_SIZE_ERROR, f"PING of {len(payload)} bytes")
        if flags & ACK:
            self._asked_s = -1.0
            return
        self._budget.charge("PING")
        self._strike()
        self._outbox.write(frame(PING, ACK, 0, payload))

    def _strike(self) -> None:
        """Count a PING that comes too soon after the last. Source: gRPC's keepalive rules (A8)."""
        limits, outbox, now = self._limits, self._outbox, self._loop.time()
        if outbox.sent_frames != self._frames_at_ping:
            # data was sent in between, so a PING is legitimate
            self._strikes = 0
            self._frames_at_ping = outbox.sent_frames
            self._ping_at_s = now
            return
        quiet = not outbox.streams and not limits.keepalive_without_calls
        wanted_s = _QUIET_AFTER_S if quiet else limits.min_ping_interval_s
        too_soon = now - self._ping_at_s < wanted_s
        self._ping_at_s = now
        if not too_soon:
            return
        self._strikes += 1
        if limits.max_ping_strikes and self._strikes > limits.max_ping_strikes:
            raise Http2Error(Fault.ENHANCE_YOUR_CALM, "too_many_pings")

    # -- server PINGs ------------------------------------------------------------------------------------------

    def tick(self, elapsed_s: float) -> None:
        """Check whether a PING is due or unanswered, if that need not be exact."""
        limits = self._limits
        self._silent_s = 0.0 if self.heard else self._silent_s + elapsed_s
        self.heard = False
        if self.exact:
            return
        if self._asked_s >= 0:
            self._asked_s += elapsed_s
            if not self._silent_s:
                self._asked_s = -1.0
            elif self._asked_s > limits.keepalive_timeout_s:
                self._outbox.transport.abort()
        elif 0 < limits.keepalive_s < self._silent_s and self._ask():
            self._asked_s = 0.0

    def begin(self) -> None:
        """Start watching a client that has sent its preface."""
        if self.exact:
            self._look_in(self._limits.keepalive_s)

    def end(self) -> None:
        """Stop watching."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_in(self, seconds: float) -> None:
        self._due_s = self._loop.time() + seconds
        self._timer = self._loop.call_later(seconds, self._look)

    def _look(self) -> None:
        """Do the exact check."""
        limits, now = self._limits, self._loop.time()
        self._timer = None
        if 0 <= self._asked_s <= self.heard_at_s:
            self._asked_s = -1.0
        if self._asked_s >= 0:
            if now - self._due_s > _STOOD_STILL_S:
                self._asked_s = now
            left_s = self._asked_s + limits.keepalive_timeout_s - now
            if left_s < _A_MOMENT_S:
                if self._again or now - self._due_s < _LATE_S:
                    self._outbox.transport.abort()
                    return
                self._again, left_s = True, 2 * _A_MOMENT_S
        else:
            left_s = self.heard_at_s + limits.keepalive_s - now
            if left_s < _A_MOMENT_S:
                left_s = max(limits.keepalive_s, _LEAST_S)
                if self._ask():
                    self._asked_s, left_s, self._again = now, limits.keepalive_timeout_s, False
        # a client that has answered may be silent again before that time is over
        self._look_in(min(left_s, max(limits.keepalive_s, _LEAST_S)))

    def _ask(self) -> bool:
        """Send a PING, if allowed now. Returns: whether it is."""
        limits, outbox = self._limits, self._outbox
        if not outbox.streams and not limits.keepalive_without_calls:
            return False
        if self._frames_at_asking != outbox.sent_frames:
            self._frames_at_asking = outbox.sent_frames
            self._pings_without_answers = 0
        if 0 < limits.max_pings_without_data <= self._pings_without_answers:
            return False
        self._pings_without_answers += 1
        outbox.write(frame(PING, 0, 0, _KEEPALIVE_PING))
        return True
