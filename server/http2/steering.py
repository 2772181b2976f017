"""Steering: the frames by which a peer steers a connection: SETTINGS, WINDOW_UPDATE, RST_STREAM, PRIORITY.

Part of Http2Connection, between `lifetime.py` and `connection.py`.
"""

from __future__ import annotations

from collections import deque

from .frames import (
    ACK,
    DEFAULT_TABLE_BYTES,
    HEADER_TABLE_SIZE,
    INITIAL_WINDOW_SIZE,
    MAX_FRAME_SIZE,
    MAX_WINDOW,
    SETTINGS,
    Fault,
    Http2Error,
    frame,
    read_settings,
    read_word,
    reset,
    window_update,
)  # fmt: skip
from .headers import SHRUNK
from .lifetime import Lifetime
from .shared import Http2Shared
from .stream import Stream

_SMALL_INCREMENT = 256
_PARDONED = 1024


class Steering(Lifetime):
    """What a peer may set.

    Invariant: `pardoned` are the streams that this side ended last, frames on which may have been on their way.
    """

    __slots__ = ("_pardon_order", "pardoned")

    def __init__(self, shared: Http2Shared) -> None:
        super().__init__(shared)
        self.pardoned: set[int] = set()
        self._pardon_order: deque[int] = deque()

    def priority_received(self, stream_id: int, payload: bytes) -> None:
        """Check what is not used: RFC 9113 deprecates priorities."""
        if not stream_id:
            raise Http2Error(Fault.PROTOCOL_ERROR, "PRIORITY without a stream")
        if len(payload) != 5:
            if stream_id not in self.streams:
                raise Http2Error(Fault.FRAME_SIZE_ERROR, f"PRIORITY of {len(payload)} bytes")
            self.reset(stream_id, Fault.FRAME_SIZE_ERROR)

    def window_received(self, stream_id: int, payload: bytes) -> None:
        """Take WINDOW_UPDATE. Raises: Http2Error."""
        if len(payload) != 4:
            raise Http2Error(Fault.FRAME_SIZE_ERROR, f"WINDOW_UPDATE of {len(payload)} bytes")
        increment = read_word(payload)
        if increment < _SMALL_INCREMENT:
            self.charge("small WINDOW_UPDATE")
        if stream_id:
            self._stream_window_received(stream_id, increment)
            return
        if not increment:
            raise Http2Error(Fault.PROTOCOL_ERROR, "WINDOW_UPDATE of nothing")
        self.out_window += increment
        if self.out_window > MAX_WINDOW:
            raise Http2Error(Fault.FLOW_CONTROL_ERROR, "the connection's window is too large")
        if self.blocked and self.out_window <= increment:  # before, it held back what waits
            self.pump()

    def _stream_window_received(self, stream_id: int, increment: int) -> None:
        stream = self.streams.get(stream_id)
        if stream is None:
            if (stream_id > self.last_id and not self.leaving) or not stream_id & 1:
                raise Http2Error(Fault.PROTOCOL_ERROR, f"WINDOW_UPDATE on stream {stream_id}, which is idle")
            return
        if not increment:
            self.reset(stream_id, Fault.PROTOCOL_ERROR)
            return
        stream.credit += increment
        if self.peer_window + stream.credit > MAX_WINDOW:
            self.reset(stream_id, Fault.FLOW_CONTROL_ERROR)
        elif stream.unsent is not None:
            self.pump(stream)

    def reset_received(self, stream_id: int, payload: bytes) -> None:
        """Take RST_STREAM. Raises: Http2Error."""
        if len(payload) != 4:
            raise Http2Error(Fault.FRAME_SIZE_ERROR, f"RST_STREAM of {len(payload)} bytes")
        if not stream_id & 1 or (stream_id > self.last_id and not self.leaving):
            raise Http2Error(Fault.PROTOCOL_ERROR, f"RST_STREAM on stream {stream_id}, which is idle")
        stream = self.streams.get(stream_id)
        if stream is None:
            self.charge("RST_STREAM")
            return
        stream.remote_ended = True
        self.forget(stream)
        stream.lost(Fault.CANCEL)
        self.charge_reset()
        if self.leaving and not self.dirty:
            self.shared.mark(self)

    def settings_received(self, flags: int, payload: bytes) -> None:
        """Take SETTINGS, or the acknowledgement of ours. Raises: Http2Error."""
        self.charge_settings()
        if flags & ACK:
            if payload:
                raise Http2Error(Fault.FRAME_SIZE_ERROR, "SETTINGS with ACK and a payload")
            return
        for name, value in read_settings(payload):
            if name == INITIAL_WINDOW_SIZE:
                self._change_window(value)
            elif name == MAX_FRAME_SIZE:
                self.peer_frame = value
            elif name == HEADER_TABLE_SIZE and value < DEFAULT_TABLE_BYTES:
                self.notice = SHRUNK
        self.write(frame(SETTINGS, ACK, 0))
        self.pump()

    def _change_window(self, value: int) -> None:
        self.peer_window = value
        if any(value + stream.credit > MAX_WINDOW for stream in self.streams.values()):
            raise Http2Error(Fault.FLOW_CONTROL_ERROR, f"SETTINGS_INITIAL_WINDOW_SIZE of {value} is too large")

    # -- streams -----------------------------------------------------------------------------------------------

    def reset(self, stream_id: int, code: Fault) -> None:
        """End a stream with an error; one that is open is lost to whoever serves it."""
        stream = self.streams.get(stream_id)
        if stream is None:
            self.pardon(stream_id)
        else:
            self.forget(stream)
            stream.lost(code)
        self.write(reset(stream_id, code))

    def pardon(self, stream_id: int) -> None:
        """Let frames pass that were on their way when this side ended the stream."""
        if stream_id not in self.pardoned:
            if len(self.pardoned) >= _PARDONED:
                self.pardoned.discard(self._pardon_order.popleft())
            self.pardoned.add(stream_id)
            self._pardon_order.append(stream_id)

    def refill(self, stream: Stream) -> None:
        """Give back a stream's window."""
        increment = self.limits.stream_window_bytes - stream.in_left
        stream.in_left += increment
        self.write(window_update(stream.stream_id, increment))
