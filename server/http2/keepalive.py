"""Keepalive: PINGs that check whether a silent client is alive, and limits on the PINGs of clients.

Owned by Http2Connection. Source: gRPC's keepalive rules (A8, A9).
"""

from __future__ import annotations

import asyncio

from .budget import FrameBudget
from .frames import ACK, PING, ErrorCode, Http2Error, frame
from .outbox import Outbox
from .shared import Http2Shared

_KEEPALIVE_PING = b"are you?"
_MIN_IDLE_PING_INTERVAL_S = 7200.0
"""The minimum interval between a client's pings without calls, as in gRPC's servers."""
_EXACT_BELOW_S = 60.0
"""With a keepalive time of at least this, the sweep sends PINGs, a second or two late. Below it there is a timer, and
each read takes the time, which is a hundredth of the cost of a call."""
_MIN_CHECK_INTERVAL_S = 0.1
"""Clients without calls are checked at most this often."""
_TIMER_SLACK_S = 0.0005
_LATE_S, _SUSPENDED_S = 0.05, 1.0
"""A late timer means that the loop has not read meanwhile, so the check is repeated after reading. A very late one
means that the process was stopped, so the client's time starts again."""


class Keepalive:
    """The keepalive state of one connection.

    Invariants: `received_since_tick`: something has been received since the last tick; `_silent_s` is the time without
    input before it. If `uses_timer`, `last_received_s` is the time of the last input, and a timer runs from `begin` to
    `end`. `_ping_sent_s` is how long ago an unanswered PING was sent, or if `uses_timer` when it was sent; negative if
    there is none.
    """

    __slots__ = (
        "_budget", "_check_due_s", "_frames_at_client_ping", "_frames_at_own_ping", "_last_client_ping_s", "_limits",
        "_loop", "_outbox", "_ping_sent_s", "_pings_without_answers", "_rechecking", "_silent_s", "_strikes", "_timer",
        "last_received_s", "received_since_tick", "uses_timer",
    )  # fmt: skip

    def __init__(self, shared: Http2Shared, outbox: Outbox, budget: FrameBudget) -> None:
        self._limits = limits = shared.limits
        self._loop = shared.loop
        self._outbox = outbox
        self._budget = budget
        self.received_since_tick = True
        self._silent_s = 0.0
        self.uses_timer = 0 < limits.keepalive_s < _EXACT_BELOW_S
        self.last_received_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._check_due_s = 0.0
        self._ping_sent_s = -1.0
        self._rechecking = False
        self._pings_without_answers = 0
        self._frames_at_own_ping = 0
        self._last_client_ping_s = -1e9
        self._frames_at_client_ping = 0
        self._strikes = 0

    def received(self) -> None:
        """Record that something has been received. Http2Connection does this inline on its hot path."""
        self.received_since_tick = True
        if self.uses_timer:
            self.last_received_s = self._loop.time()

    def process_ping(self, flags: int, payload: bytes) -> None:
        """Answer a PING, or process the answer to one of ours.

        Raises: Http2Error.
        """
        if len(payload) != 8:
            raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"PING of {len(payload)} bytes")
        if flags & ACK:
            self._ping_sent_s = -1.0
            return
        self._budget.charge("PING")
        self._strike()
        self._outbox.write(frame(PING, ACK, 0, payload))

    def _strike(self) -> None:
        """Count a PING that comes too soon after the last. Source: gRPC's keepalive rules (A8)."""
        limits, outbox, now = self._limits, self._outbox, self._loop.time()
        if outbox.sent_frames != self._frames_at_client_ping:
            # data was sent in between, so a PING is legitimate
            self._strikes = 0
            self._frames_at_client_ping = outbox.sent_frames
            self._last_client_ping_s = now
            return
        idle = not outbox.streams and not limits.keepalive_without_calls
        min_interval_s = _MIN_IDLE_PING_INTERVAL_S if idle else limits.min_ping_interval_s
        too_soon = now - self._last_client_ping_s < min_interval_s
        self._last_client_ping_s = now
        if not too_soon:
            return
        self._strikes += 1
        if limits.max_ping_strikes and self._strikes > limits.max_ping_strikes:
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, "too_many_pings")

    # -- server PINGs ------------------------------------------------------------------------------------------

    def tick(self, elapsed_s: float) -> None:
        """Check whether a PING is due or unanswered, if that need not be exact."""
        limits = self._limits
        self._silent_s = 0.0 if self.received_since_tick else self._silent_s + elapsed_s
        self.received_since_tick = False
        if self.uses_timer:
            return
        if self._ping_sent_s >= 0:
            self._ping_sent_s += elapsed_s
            if not self._silent_s:
                self._ping_sent_s = -1.0
            elif self._ping_sent_s > limits.keepalive_timeout_s:
                self._outbox.transport.abort()
        elif 0 < limits.keepalive_s < self._silent_s and self._send_ping():
            self._ping_sent_s = 0.0

    def begin(self) -> None:
        """Start watching a client that has sent its preface."""
        if self.uses_timer:
            self._schedule_check(self._limits.keepalive_s)

    def end(self) -> None:
        """Stop watching."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _schedule_check(self, seconds: float) -> None:
        self._check_due_s = self._loop.time() + seconds
        self._timer = self._loop.call_later(seconds, self._check)

    def _check(self) -> None:
        """Do the exact check."""
        limits, now = self._limits, self._loop.time()
        self._timer = None
        if 0 <= self._ping_sent_s <= self.last_received_s:
            self._ping_sent_s = -1.0
        if self._ping_sent_s >= 0:
            if now - self._check_due_s > _SUSPENDED_S:
                self._ping_sent_s = now
            remaining_s = self._ping_sent_s + limits.keepalive_timeout_s - now
            if remaining_s < _TIMER_SLACK_S:
                if self._rechecking or now - self._check_due_s < _LATE_S:
                    self._outbox.transport.abort()
                    return
                self._rechecking, remaining_s = True, 2 * _TIMER_SLACK_S
        else:
            remaining_s = self.last_received_s + limits.keepalive_s - now
            if remaining_s < _TIMER_SLACK_S:
                remaining_s = max(limits.keepalive_s, _MIN_CHECK_INTERVAL_S)
                if self._send_ping():
                    self._ping_sent_s, remaining_s, self._rechecking = now, limits.keepalive_timeout_s, False
        # a client that has answered may be silent again before that time is over
        self._schedule_check(min(remaining_s, max(limits.keepalive_s, _MIN_CHECK_INTERVAL_S)))

    def _send_ping(self) -> bool:
        """Send a PING, if allowed now. Returns: whether it is."""
        limits, outbox = self._limits, self._outbox
        if not outbox.streams and not limits.keepalive_without_calls:
            return False
        if self._frames_at_own_ping != outbox.sent_frames:
            self._frames_at_own_ping = outbox.sent_frames
            self._pings_without_answers = 0
        if 0 < limits.max_pings_without_data <= self._pings_without_answers:
            return False
        self._pings_without_answers += 1
        outbox.write(frame(PING, 0, 0, _KEEPALIVE_PING))
        return True
