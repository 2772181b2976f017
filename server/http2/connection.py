"""Http2Connection: the receiving half of an HTTP/2 connection, an asyncio protocol. Its gRPC kind is in `server/grpc`.

The two frames of a plain request take a straight way through `_take_frames`; every other frame, and every doubt, goes
through `taking.py`. Long frames of DATA are handed on as they come, and what is still to come of one is read to where
it belongs. Source: RFC 9113.
"""

from __future__ import annotations

import logging

from penstock.server.listening.landing import Straight

from .frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEAD,
    HEAD_BYTES,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_CONCURRENT_STREAMS,
    MAX_FRAME_SIZE,
    MAX_HEADER_LIST_SIZE,
    MAX_WINDOW,
    MIN_FRAME_BYTES,
    PADDED,
    PREFACE,
    Fault,
    Http2Error,
    settings,
)  # fmt: skip
from .shared import Http2Shared
from .stream import Stream
from .taking import Taking

logger = logging.getLogger("penstock.http2")

_LONG = MIN_FRAME_BYTES << 8
"""A frame of DATA from here on, one of many or a large one, is handed on uncopied, and before it is whole."""
_STRAIGHT_BYTES = 32768
"""So much that is still to come of a frame is read to where it belongs."""

_MOST_IDS = 256
"""After so many, of which every second is a stream's, the others have their turn: 256 KiB may be 9000 calls that are
answered at once, and 32 times as much is read in one turn of the loop."""
_MOST_FRAMES = 2048
"""Frames likewise: 256 KiB of a message in crumbs are 20,000, and take 70 ms."""


class Http2Connection(Taking):
    """What comes in.

    Invariants: `_partial` is the front of a frame that has not arrived whole; of a long one of DATA all that came is
    handed on, and `_rest` is what is still to come of it. While `_straight` is there, the transport reads by `room` and
    `filled`; `_target` is what the last `room` is of.
    """

    __slots__ = (
        "_most_streams", "_moved", "_partial", "_rest", "_rest_flags", "_rest_id", "_resting", "_straight", "_target",
        "_tired",
    )  # fmt: skip

    def __init__(self, shared: Http2Shared) -> None:
        super().__init__(shared)
        self._moved = False
        self._resting = self._tired = False
        self._partial = b""
        self._rest = self._rest_flags = self._rest_id = 0
        self._straight: Straight | None = None
        self._target: Stream | None = None
        self._most_streams = self.limits.max_streams

    # -- what the protocol above adds --------------------------------------------------------------------------

    def greet(self, data: bytes) -> bytes:
        """Give what is answered to a client that does not speak HTTP/2."""
        return b""

    # -- what arrives ------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Take bytes: every whole frame, and keep what is left."""
        self.heard = True
        if self.exact:
            self.heard_at_s = self.shared.loop.time()
        if self._waiting:
            data = self._gather(data)
        most_id = min(self.last_id + _MOST_IDS, MAX_WINDOW)
        try:
            at = self._take_frames(data, most_id)
        except Http2Error as fault:
            self.fail(fault)
            return
        except Exception:
            logger.exception("an HTTP/2 connection failed")
            self.fail(Http2Error(Fault.INTERNAL_ERROR, ""))
            return
        if at < len(data) and not self.closed:
            self._partial = data[at:] if at else data
            self._waiting = True
            self._moved |= at > 0
        elif self._rest >= _STRAIGHT_BYTES and self._straight is None and self.room() is not self.shared.scratch:
            self._straight = Straight(self)
            self.transport.set_protocol(self._straight)
        if (self._tired or self.last_id > most_id) and not self._resting:
            self._resting, self._tired = True, False
            self.transport.pause_reading()
            self.shared.loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        self._resting = False
        if not self.transport.is_closing():
            self.transport.resume_reading()
            self.data_received(b"")

    def _take_frames(self, data: bytes, most_id: int) -> int:
        """Take whole frames, up to one that opens a stream above `most_id`. Returns: where the rest begins."""
        at, size = self._go_on(data) if self._rest and data else 0, len(data)
        streams, headers = self.streams, self._headers
        known, unpack = headers.known, HEAD.unpack_from
        left = _MOST_FRAMES
        while left and size - at >= HEAD_BYTES:
            left -= 1
            word, flags, stream_id = unpack(data, at)
            start = at + HEAD_BYTES
            end = start + (word >> 8)
            if end > size:
                return self._take_front(data, at)
            at = end
            kind = word & 0xFF
            if kind == DATA and headers.block is None and flags <= END_STREAM and end > start:
                stream = streams.get(stream_id)
                if stream is not None and not stream.remote_ended:
                    self.window_left -= end - start
                    if self.window_left < self._window_low:
                        self._refill()
                    if word < _LONG:
                        stream.received(data[start:end], flags)
                    else:
                        self.check_size(word, flags)
                        stream.part(memoryview(data)[start:end], flags)
                    continue
            elif kind == HEADERS and headers.block is None and flags | END_STREAM == END_HEADERS | END_STREAM:
                head = known.get(data[start:end])
                if (
                    head is not None
                    and self.last_id < stream_id <= most_id
                    and stream_id & 1
                    and len(streams) < self._most_streams
                    and not self.leaving
                ):
                    self.last_id = stream_id
                    self.open(stream_id, head, flags & END_STREAM)
                    continue
            self._frame(kind, flags, stream_id & MAX_WINDOW, data[start:end])
            if self.closed or self.last_id > most_id:
                break
        self._tired = not left
        return at

    def _take_front(self, data: bytes, at: int) -> int:
        """Take a frame that is not whole, if it is a long one of DATA. Returns: where the rest begins."""
        word, flags, stream_id = HEAD.unpack_from(data, at)
        start = at + HEAD_BYTES
        self.check_size(word, flags)
        if word < _LONG or word & 0xFF != DATA or flags & PADDED or start == len(data):
            return at
        self._check_turn(DATA, flags, stream_id)
        self._rest, self._rest_flags, self._rest_id = word >> 8, flags, stream_id & MAX_WINDOW
        return start + self._go_on(data, start)

    def _go_on(self, data: bytes, at: int = 0) -> int:
        """Hand on what has come of a long frame. Returns: how much that was."""
        size = min(self._rest, len(data) - at)
        self._rest -= size
        self._moved = True
        part = memoryview(data)[at : at + size]
        self._take_payload(0 if self._rest else self._rest_flags, self._rest_id, part)
        return size

    # -- what arrives where it belongs -------------------------------------------------------------------------

    def room(self) -> memoryview:
        """Give where what comes next is written: into a message, or for a moment to a place that all share."""
        stream = self.streams.get(self._rest_id) if self._rest else None
        room = None if stream is None or stream.remote_ended else stream.room()
        self._target = None if room is None else stream
        return self.shared.scratch if room is None else room[: self._rest]

    def filled(self, size: int) -> None:
        """Take what has been written there."""
        target, self._target = self._target, None
        if target is None:
            self.data_received(bytes(self.shared.scratch[:size]))
            if self.room() is self.shared.scratch and self._straight is not None:
                self._straight = None
                self.transport.set_protocol(self)
            return
        self.heard = self._moved = True
        if self.exact:
            self.heard_at_s = self.shared.loop.time()
        self._rest -= size
        try:
            self._count(size)
            target.landed(size, 0 if self._rest else self._rest_flags & END_STREAM)
        except Http2Error as fault:
            self.fail(fault)

    def _gather(self, data: bytes) -> bytes:
        """Put what was kept before what has come; nothing while the client has not said that it speaks HTTP/2."""
        if self.closed:
            return b""
        data = self._partial + data if self._partial else data
        self._partial = b""
        if self.begun:
            self._waiting = False
            return data
        if not data.startswith(PREFACE[: len(data)]):
            self.out.append(self.greet(data))
            self._end()
            return b""
        if len(data) < len(PREFACE):
            self._partial = data
            return b""
        self._waiting = False
        self._begin()
        return data[len(PREFACE) :]

    def _begin(self) -> None:
        limits = self.limits
        self.begun = True
        values = {
            MAX_CONCURRENT_STREAMS: limits.max_streams,
            INITIAL_WINDOW_SIZE: limits.stream_window_bytes,
            MAX_FRAME_SIZE: limits.frame_bytes,
            MAX_HEADER_LIST_SIZE: limits.max_header_bytes,
        }
        self.write(settings(values))
        self._refill()
        self.begin_keepalive()
        if self.draining:
            self.say_goodbye()

    def stuck(self) -> bool:
        """Tell whether the same frame or header block has been under way since this was last asked."""
        moved, self._moved = self._moved, False
        return self._headers.block is not None or ((bool(self._partial) or self._rest > 0) and not moved)
