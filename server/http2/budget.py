"""FrameBudget: how many frames that ask for nothing, resets and SETTINGS one connection may send in a second.

Owned by Http2Connection, which renews it. Source: CVE-2019-9511 to 9518, CVE-2023-44487.
"""

from __future__ import annotations

from .frames import Fault, Http2Error
from .limits import Http2Limits
from .outbox import Outbox

_CREDIT_FRAMES = 8
"""Frames that ask for nothing which one sent frame makes up for, or one call that is under way or was taken back."""
_MOST_SETTINGS = 100
"""In a second. Each may change the windows of all streams, and has all that waits looked at; what earns other frames
their credit, a thousand open calls for one, makes these cost more."""


class FrameBudget:
    """What has been spent since it was last renewed. What is sent and answered earns more."""

    __slots__ = ("_answered_before", "_idle_frames", "_limits", "_outbox", "_resets", "_sent_before", "_settings")

    def __init__(self, limits: Http2Limits, outbox: Outbox) -> None:
        self._limits = limits
        self._outbox = outbox
        self.renew()

    def renew(self) -> None:
        """Begin another second."""
        self._idle_frames = self._resets = self._settings = 0
        self._answered_before = self._outbox.answered
        self._sent_before = self._outbox.sent_frames

    def charge(self, kind: str) -> None:
        """Count a frame that asks for nothing.

        Raises: Http2Error when a second has had too many.
        """
        self._idle_frames += 1
        outbox = self._outbox
        # a client may answer each frame of ours with window updates, and a long stream is one call; gRPC's clients send
        # one with each call too, and a thousand calls at once are no flood
        earned = _CREDIT_FRAMES * (outbox.sent_frames - self._sent_before + len(outbox.streams) + self._resets)
        if self._idle_frames > self._limits.max_idle_frames + earned:
            raise Http2Error(Fault.ENHANCE_YOUR_CALM, f"too many frames that ask for nothing, such as {kind}")

    def charge_reset(self) -> None:
        """Count a call that was opened only to be reset.

        Raises: Http2Error when a second has had too many. Source: CVE-2023-44487.
        """
        self._resets += 1
        if self._resets > self._limits.max_resets + self._outbox.answered - self._answered_before:
            raise Http2Error(Fault.ENHANCE_YOUR_CALM, "too many calls were opened and reset")

    def charge_settings(self) -> None:
        """Count a SETTINGS frame. Raises: Http2Error when a second has had too many."""
        self._settings += 1
        if self._settings > _MOST_SETTINGS:
            raise Http2Error(Fault.ENHANCE_YOUR_CALM, "too many SETTINGS")
