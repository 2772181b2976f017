"""Keepalive: PINGs that ask a silent client whether it lives, and those of clients, which may not come too often.

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
"""Without calls, pings are expected this far apart, as gRPC's servers have it."""
_EXACT_BELOW_S = 60.0
"""A client that may be silent for so long is asked a second or two after that, by the sweep. Where it is less there is
a timer, and each read looks at the clock, which is a hundredth of a call."""
_LEAST_S = 0.1
"""Who has no calls is looked at no more often than this."""
_A_MOMENT_S = 0.0005
_LATE_S, _STOOD_STILL_S = 0.05, 1.0
"""A timer that is late tells of a loop that has read nothing meanwhile: it looks once more when that has been done. One
that is so late tells of a process that stood still, whose client has all the time anew."""


class Keepalive:
    """Who is asked, and when.

    Invariants: `heard` says that something has come since the last tick, `_silent_s` how long before that nothing has;
    `heard_at_s` is when it came, where that is to be `exact`, and there is a timer then from `begin` to `end`.
    `_asked_s` is how long ago a PING was sent that has no answer yet, or when, if it is to be exact; else below 0.
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
        """Learn that something has come. What comes often, Http2Connection notes without a call."""
        self.heard = True
        if self.exact:
            self.heard_at_s = self._loop.time()

    def take_ping(self, flags: int, payload: bytes) -> None:
        """Answer a PING, or take the answer to one of ours.

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
            # there was something to measure the line with
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

    # -- ours --------------------------------------------------------------------------------------------------

    def tick(self, elapsed_s: float) -> None:
        """Look whether a client is to be asked, or has not answered, where that need not be exact."""
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
        """Begin to watch a client that has said that it speaks HTTP/2."""
        if self.exact:
            self._look_in(self._limits.keepalive_s)

    def end(self) -> None:
        """Watch it no longer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_in(self, seconds: float) -> None:
        self._due_s = self._loop.time() + seconds
        self._timer = self._loop.call_later(seconds, self._look)

    def _look(self) -> None:
        """Look at the same where it is to be exact."""
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
        # who has answered may be silent again before that is over
        self._look_in(min(left_s, max(limits.keepalive_s, _LEAST_S)))

    def _ask(self) -> bool:
        """Send a PING, if that is allowed now. Returns: whether it is."""
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
