"""FrameBudget: how many unproductive frames, resets and SETTINGS one connection may send per second.

Owned by Http2Connection, which renews it. Source: CVE-2019-9511 to 9518, CVE-2023-44487.
"""

from __future__ import annotations

from .frames import ErrorCode, Http2Error
from .limits import Http2Limits
from .outbox import Outbox

_CREDIT_FRAMES = 8
"""The number of unproductive frames allowed for each frame sent, and for each open or cancelled call."""
_MAX_SETTINGS = 100
"""Per second. Each may change the windows of all streams and makes all pending data be examined; what earns credit for
other frames, such as a thousand open calls, makes these more expensive."""


class FrameBudget:
    """What has been spent since the last renewal. Sent frames and answers increase the budget."""

    __slots__ = ("_answered_before", "_idle_frames", "_limits", "_outbox", "_resets", "_sent_before", "_settings")

    def __init__(self, limits: Http2Limits, outbox: Outbox) -> None:
        self._limits = limits
        self._outbox = outbox
        self.renew()

    def renew(self) -> None:
        """Start the next second."""
        self._idle_frames = self._resets = self._settings = 0
        self._answered_before = self._outbox.answer_count
        self._sent_before = self._outbox.sent_frames

    def charge(self, frame_name: str) -> None:
        """Count a frame that requests nothing.

        Raises: Http2Error if there were too many within a second.
        """
        self._idle_frames += 1
        outbox = self._outbox
        # a client may answer each of our frames with window updates, and a long stream is one call; gRPC clients also
        # send one with each call, and a thousand calls at once are not a flood
        earned = _CREDIT_FRAMES * (outbox.sent_frames - self._sent_before + len(outbox.streams) + self._resets)
        if self._idle_frames > self._limits.max_idle_frames + earned:
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, f"too many frames that request nothing, such as {frame_name}")

    def charge_reset(self) -> None:
        """Count a call that was opened and then reset.

        Raises: Http2Error if there were too many within a second. Source: CVE-2023-44487.
        """
        self._resets += 1
        if self._resets > self._limits.max_resets + self._outbox.answer_count - self._answered_before:
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, "too many calls were opened and reset")

    def charge_settings(self) -> None:
        """Count a SETTINGS frame. Raises: Http2Error if there were too many within a second."""
        self._settings += 1
        if self._settings > _MAX_SETTINGS:
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, "too many SETTINGS")
