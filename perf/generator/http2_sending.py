"""The sending half of an HTTP/2 client connection: streams, both flow-control windows, one write per loop turn.

Part of `Http2Client`; `http2.py` adds what arrives. Source: RFC 9113.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from penstock.server.http2.frames import (
    DATA,
    DEFAULT_WINDOW,
    END_STREAM,
    FRAME_HEADER,
    MAX_WINDOW,
    MIN_FRAME_BYTES,
    ErrorCode,
    frame,
    reset,
)

from .http2_request_headers import Openings

_TURN_BYTES = 1 << 18
"""How much is assembled for one write while more waits. Above it, the transport decides whether the peer keeps up."""


class Stream:
    """One request, or a conversation. Made by the protocol above; opened by `Sending.begin`.

    Invariants: `credit` is the sum of the peer's WINDOW_UPDATEs less what was sent, so that `peer_window + credit` is
    the window; `in_left` is what the peer may still send. `unsent` waits for flow control; `ending` is END_STREAM if
    this side ends after it; `ended_here`: whether it has ended. `head` is the resolved header block of the peer.
    `first` is the first payload, kept for as long as the server may report that it has not begun the stream.
    """

    __slots__ = ("connection", "credit", "ended_here", "ending", "first", "head", "in_left", "stream_id", "unsent")

    whole = END_STREAM
    """Flags of the DATA frame that ends `first`: END_STREAM if nothing follows it."""
    listens = False
    """Whether `on_data` is called with the content of DATA frames."""
    in_flight: bool
    """Whether an answer is awaited."""

    def __init__(self, first_payload: bytes) -> None:
        self.first = first_payload
        self.connection: Any = None
        self.stream_id = 0
        self.credit = 0
        self.in_left = MAX_WINDOW
        self.unsent: memoryview | None = None
        self.ending = 0
        self.ended_here = 0
        self.head: Any = None

    def on_data(self, payload: bytes) -> None:
        """Handle the content of a DATA frame."""

    def on_end(self) -> None:
        """Handle the end of the stream by the peer, with `head`, or None if the peer sent none."""
        raise NotImplementedError

    def on_reset(self, code: int) -> None:
        """Handle a reset of the stream by the peer."""
        raise NotImplementedError

    def on_lost(self, reason: str) -> None:
        """Handle the end of the connection before that of the stream."""
        raise NotImplementedError


class Owner(Protocol):
    """The owner of a connection."""

    def on_leaving(self, connection: Any, not_begun: Sequence[Stream]) -> None:
        """Take back the streams that the server has not begun. The connection accepts no more, finishing the others."""

    def on_connection_end(self, connection: Any, reason: str, *, had_requests: bool) -> None:
        """Handle the end of the connection, before the streams. `had_requests`: while requests were in flight."""


class Sending(asyncio.Protocol):
    """The sending half.

    Invariants: `quick_bytes` is the largest payload that may go straight to `out`: 0 while anything is blocked,
    otherwise the peer's largest frame or a new stream's window. A stream with `unsent` is in `blocked`. `leaving`: no
    more streams are opened; `no_answer_yet`: the peer had begun none of them by then.
    """

    def __init__(self, openings: Openings, owner: Owner) -> None:
        self.owner: Owner | None = owner
        self.transport: Any = None
        self.streams: dict[int, Stream] = {}
        self.waiting: deque[Stream] = deque()
        self.most_streams = MAX_WINDOW
        self.next_id = 1
        self.leaving = False
        self.no_answer_yet = False
        self.peer_window = DEFAULT_WINDOW
        self.peer_frame = MIN_FRAME_BYTES
        self.out: list[bytes | memoryview] = []
        self.out_window = DEFAULT_WINDOW
        self.quick_bytes = MIN_FRAME_BYTES
        self.blocked: dict[int, Stream] = {}
        self.paused = False
        self.dirty = False
        self._openings = openings
        self._opening, self._then = openings.first, openings.rest

    def forget_header_table(self) -> None:
        """Stop using the peer's header table, which has become smaller."""
        if self._then is not self._openings.plain:
            self._opening, self._then = self._openings.shrunk, self._openings.plain

    # -- streams -----------------------------------------------------------------------------------------------

    def begin(self, stream: Stream) -> None:
        """Open a stream and send its first payload, or queue it."""
        stream_id = self.next_id
        if len(self.streams) >= self.most_streams or stream_id > MAX_WINDOW:
            self.waiting.append(stream)
            if stream_id > MAX_WINDOW:
                self.leave()
            return
        self.next_id = stream_id + 2
        self.streams[stream_id] = stream
        stream.connection = self
        stream.stream_id = stream_id
        payload, flags = stream.first, stream.whole
        size = len(payload)
        if size <= self.quick_bytes and size <= self.out_window:
            self.out_window -= size
            stream.credit = -size
            stream.ended_here = flags
            self.out += (self._opening.followed(stream_id, size, flags), payload)
        else:
            self.out.append(self._opening.alone(stream_id))
            stream.credit = stream.ended_here = 0
            self._queue(stream, payload, flags)
        self._opening = self._then
        if not self.dirty:
            self.mark()

    def resume(self, stream: Stream, payload: bytes, flags: int = 0) -> None:
        """Send more on an open stream."""
        size = len(payload)
        if size <= self.quick_bytes and size <= self.out_window and size <= self.peer_window + stream.credit:
            self.out_window -= size
            stream.credit -= size
            stream.ended_here = flags
            self.out += (FRAME_HEADER.pack(size << 8 | DATA, flags, stream.stream_id), payload)
            if not self.dirty:
                self.mark()
        else:
            self._queue(stream, payload, flags)

    def end(self, stream: Stream) -> None:
        """End this side of an open stream."""
        if stream.unsent is not None:
            stream.ending = END_STREAM
        elif not stream.ended_here:
            stream.ended_here = END_STREAM
            self.write(frame(DATA, END_STREAM, stream.stream_id))

    def forget(self, stream: Stream) -> None:
        """Remove a stream that the peer has ended and end this side of it; begin one that waits."""
        stream_id = stream.stream_id
        del self.streams[stream_id]
        if not stream.ended_here:
            self.drop(stream)
            self.write(reset(stream_id, ErrorCode.CANCEL))
        if self.waiting and not self.leaving:
            self.begin(self.waiting.popleft())

    def drop(self, stream: Stream) -> None:
        """Send nothing more of a stream."""
        stream.ended_here = END_STREAM
        if stream.unsent is not None:
            stream.unsent = None
            del self.blocked[stream.stream_id]
            self._update_quick_bytes()

    def leave(self, last_id: int = MAX_WINDOW) -> None:
        """Open no more streams, and return those that the peer has not begun: beyond `last_id`, or not yet sent."""
        not_begun = [self.streams.pop(each) for each in sorted(self.streams) if each > last_id]
        self.no_answer_yet = self.next_id <= 1 + 2 * len(not_begun)
        for stream in not_begun:
            self.drop(stream)
            stream.in_left, stream.head = MAX_WINDOW, None
        not_begun += self.waiting
        self.waiting.clear()
        self.leaving = True
        if self.owner is not None:
            self.owner.on_leaving(self, not_begun)

    # -- what waits --------------------------------------------------------------------------------------------

    def _queue(self, stream: Stream, payload: bytes, flags: int) -> None:
        """Send a payload as the windows allow. A stream has one in progress at a time."""
        stream.unsent = memoryview(payload)
        stream.ending = flags
        self.blocked[stream.stream_id] = stream
        self.pump()

    def pump(self) -> None:
        """Send what the windows and the transport allow, the oldest first, as gRPC's C core does.

        In turns, a thousand requests of 600 kB would all end when the last byte has arrived, and none before.
        """
        while self.blocked and not self.paused:
            sent_bytes = 0
            for stream in list(self.blocked.values()):
                sent_bytes += self._send_some(stream)
                if sent_bytes >= _TURN_BYTES:
                    break
            if sent_bytes < _TURN_BYTES:
                break
            self.flush()
        self._update_quick_bytes()
        if self.out and not self.dirty:
            self.mark()

    def _send_some(self, stream: Stream) -> int:
        """Send one stream's share of a turn. Returns: the number of bytes."""
        unsent = stream.unsent
        if unsent is None:
            return 0
        window = max(min(self.out_window, self.peer_window + stream.credit, _TURN_BYTES), 0)
        sent_bytes = 0
        while sent_bytes < window and sent_bytes < len(unsent):
            size = min(window - sent_bytes, len(unsent) - sent_bytes, self.peer_frame)
            last = sent_bytes + size == len(unsent)
            self.out.append(FRAME_HEADER.pack(size << 8 | DATA, stream.ending if last else 0, stream.stream_id))
            self.out.append(unsent[sent_bytes : sent_bytes + size])
            sent_bytes += size
        self.out_window -= sent_bytes
        stream.credit -= sent_bytes
        if sent_bytes < len(unsent):
            stream.unsent = unsent[sent_bytes:]
        else:
            del self.blocked[stream.stream_id]
            stream.unsent = None
            stream.ended_here = stream.ending
        return sent_bytes

    def _update_quick_bytes(self) -> None:
        self.quick_bytes = 0 if self.paused or self.blocked else min(self.peer_frame, self.peer_window)

    # -- the transport -----------------------------------------------------------------------------------------

    def mark(self) -> None:
        """Schedule a write at the end of this loop turn."""
        self.dirty = True
        asyncio.get_running_loop().call_soon(self.flush)

    def write(self, frames: bytes) -> None:
        """Send frames that are not flow-controlled."""
        self.out.append(frames)
        if not self.dirty:
            self.mark()

    def flush(self) -> None:
        """Write all of `out`."""
        self.dirty = False
        out = self.out
        if out and not self.transport.is_closing():
            self.out = []
            self.transport.write(b"".join(out))

    def pause_writing(self) -> None:
        """Record that the peer has fallen behind."""
        self.paused = True
        self.quick_bytes = 0

    def resume_writing(self) -> None:
        """Continue with what waited."""
        self.paused = False
        self.pump()
