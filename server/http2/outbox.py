"""Outbox: the sending side of an HTTP/2 connection: the peer's flow control, backpressure, one write per loop turn.

Owned by Http2Connection; the gRPC lane itself adds answers that fit. Source: RFC 9113 (5.2, 6.9).
"""

from __future__ import annotations

import fcntl
import select
import sys
import termios
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .frames import (
    ACK,
    DATA,
    DEFAULT_TABLE_BYTES,
    DEFAULT_WINDOW,
    FRAME_HEADER,
    HEADER_TABLE_SIZE,
    INITIAL_WINDOW_SIZE,
    MAX_FRAME_SIZE,
    MAX_WINDOW,
    MIN_FRAME_BYTES,
    SETTINGS,
    ErrorCode,
    Http2Error,
    frame,
    read_settings,
)  # fmt: skip
from .headers import TABLE_SIZE_ZERO, prepend_to_block
from .stream import LOW_BYTES, Stream, Unsent

if TYPE_CHECKING:
    from penstock.server.listening.mapped_buffer import Body

    from .shared import Http2Shared

_MAX_TURN_BYTES = 1 << 18
"""The most that is joined for one write while more is pending. Above it, the transport reports whether the peer keeps
up."""
_MAX_PAUSED_FRAMES = 10000
"""The most frames kept for a peer that does not read. Answers wait in their streams; only replies to frames reach
this."""


class Outbox:
    """The data to send.

    Invariants: `frames` are sent in order. `window` is the connection's, `initial_window` what the peer gives each new
    stream, and `max_frame` its largest frame. `max_direct_bytes` is the largest answer that may go directly to
    `frames`: 0 while the transport is full or anything is in `blocked`, otherwise `max_frame`. `table_size_update` must
    begin the next header block. A stream with an Unsent is in `blocked`. `on_flush`, if set, is called after each
    write. Once it is `closed`, pending data is not sent. `streams` are the connection's.
    """

    __slots__ = (
        "_shared", "answer_count", "blocked", "closed", "dirty", "frames", "initial_window", "max_direct_bytes",
        "max_frame", "on_flush", "over_tls", "paused", "sent_frames", "streams", "table_size_update", "transport",
        "window",
    )  # fmt: skip

    def __init__(self, shared: Http2Shared, streams: dict[int, Stream]) -> None:
        self._shared = shared
        self.streams = streams
        self.transport: Any = None
        self.frames: list[bytes | memoryview] = []
        self.dirty = False
        self.on_flush: Callable[[], None] | None = None
        self.over_tls = False
        self.paused = False
        self.closed = False
        self.blocked: dict[int, Stream] = {}
        self.window = DEFAULT_WINDOW
        self.initial_window = DEFAULT_WINDOW
        self.max_frame = MIN_FRAME_BYTES
        self.max_direct_bytes = MIN_FRAME_BYTES
        self.table_size_update = b""
        self.answer_count = 0
        self.sent_frames = 0

    # -- the transport -----------------------------------------------------------------------------------------

    def write(self, frames: bytes) -> None:
        """Send frames that are not subject to flow control."""
        self.frames.append(frames)
        if not self.dirty:
            self._shared.schedule_flush(self)

    def flush(self) -> None:
        """Write all of `frames`; then call `on_flush`, which may close the connection."""
        frames = self.frames
        if self.transport.is_closing():
            frames.clear()
        elif frames:
            if self.paused and len(frames) > _MAX_PAUSED_FRAMES:
                self.transport.abort()
                return
            if not self.paused:
                self.frames = []
                self._write(b"".join(frames))
        if self.on_flush is not None:
            self.on_flush()

    def _write(self, data: bytes) -> None:
        if not self.over_tls or len(data) <= _MAX_TURN_BYTES:
            self.transport.write(data)
            return
        # TLS passes on all of one write before it learns that the socket is full, and does not report those bytes
        for offset in range(0, len(data), _MAX_TURN_BYTES):
            self.transport.write(data[offset : offset + _MAX_TURN_BYTES])
        if self.paused:
            self._shared.unread.grow(self, self.transport.get_write_buffer_size())

    def pause(self) -> None:
        """Record that the peer does not keep up."""
        self.paused = True
        self.max_direct_bytes = 0
        self._shared.unread.grow(self, self.transport.get_write_buffer_size())

    def resume(self) -> None:
        """Resume sending."""
        self.paused = False
        self._shared.unread.shrink(self)
        self.pump()

    def close(self) -> None:
        """Discard what is pending except `frames`; the connection ends the streams."""
        self.closed = True
        self.on_flush = None
        self.blocked.clear()

    def shed(self) -> None:
        """Drop a peer that does not read, without telling it, since it would not read that either."""
        self.transport.abort()
        # the streams are lost in a later turn, with the connection; counted until then, they would make others be
        # dropped
        for stream in self.streams.values():
            stream.untrack_unsent()

    def unsent_bytes(self) -> int:
        """Return how many bytes the transport has not yet sent."""
        unsent: int = self.transport.get_write_buffer_size()
        return _unsent_below_tls(self.transport) if self.over_tls and not unsent else unsent

    # -- the peer's windows ------------------------------------------------------------------------------------

    def update_window(self, increment: int) -> None:
        """Process a connection WINDOW_UPDATE. Raises: Http2Error."""
        if not increment:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE without an increment")
        self.window += increment
        if self.window > MAX_WINDOW:
            raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "the connection's window is too large")
        if self.blocked and self.window <= increment:  # the window was exhausted, and held back what is pending
            self.pump()

    def update_stream_window(self, stream: Stream, increment: int) -> bool:
        """Process a stream WINDOW_UPDATE. Returns: False if the window becomes too large."""
        stream.credit += increment
        if self.initial_window + stream.credit > MAX_WINDOW:
            return False
        if stream.unsent is not None:
            self.pump(stream)
        return True

    def apply_settings(self, payload: bytes) -> None:
        """Process the peer's SETTINGS, and acknowledge them. Raises: Http2Error."""
        for name, value in read_settings(payload):
            if name == INITIAL_WINDOW_SIZE:
                self._resize_windows(value)
            elif name == MAX_FRAME_SIZE:
                self.max_frame = value
            elif name == HEADER_TABLE_SIZE and value < DEFAULT_TABLE_BYTES:
                self.table_size_update = TABLE_SIZE_ZERO
        self.write(frame(SETTINGS, ACK, 0))
        self.pump()

    def _resize_windows(self, value: int) -> None:
        self.initial_window = value
        if any(value + stream.credit > MAX_WINDOW for stream in self.streams.values()):
            raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, f"SETTINGS_INITIAL_WINDOW_SIZE of {value} is too large")

    # -- streams -----------------------------------------------------------------------------------------------

    def queue(self, stream: Stream, pieces: tuple[Body, ...]) -> None:
        """Send payload as flow control permits."""
        unsent = stream.unsent
        if unsent is None:
            unsent = stream.unsent = Unsent()
            self.blocked[stream.stream_id] = stream
        for piece in pieces:
            if piece:
                unsent.pieces.append(memoryview(piece))
                unsent.size += len(piece)
                unsent.held_bytes += len(piece)
        self.pump(stream)
        if stream.unsent is not None:
            self._shared.unread.grow(stream, stream.unsent.held_bytes)

    def pump(self, only_stream: Stream | None = None) -> None:
        """Send pending data, in turns per stream, until the windows or the transport are full.

        `only_stream`: this stream has new data or window and nothing else has changed, so other streams still cannot
        send.
        """
        streams = list(self.blocked.values()) if only_stream is None else [only_stream]
        while not self.paused and streams and not self.closed:
            sent_bytes = 0
            for stream in streams:
                if stream.unsent is not None:
                    sent_bytes += self._send_stream_data(stream, stream.unsent)
                if sent_bytes >= _MAX_TURN_BYTES:
                    break
            if sent_bytes < _MAX_TURN_BYTES:
                break
            self.flush()
            streams = list(self.blocked.values())
        if self.frames and not self.dirty:
            self._shared.schedule_flush(self)
        self.max_direct_bytes = 0 if self.paused or self.blocked else self.max_frame

    def _send_stream_data(self, stream: Stream, unsent: Unsent) -> int:
        """Send one stream's share of a turn. Returns: how many bytes."""
        window = min(self.window, self.initial_window + stream.credit, _MAX_TURN_BYTES)
        pieces, sent_bytes = unsent.pieces, 0
        stream_id = stream.stream_id
        while pieces and sent_bytes < window:
            capacity = min(window - sent_bytes, self.max_frame)
            parts, size = [], 0
            while pieces and size < capacity:
                piece = pieces.popleft()
                if len(piece) > capacity - size:
                    pieces.appendleft(piece[capacity - size :])
                    piece = piece[: capacity - size]
                else:
                    unsent.held_bytes -= len(piece.obj)  # type: ignore[arg-type]
                parts.append(piece)
                size += len(piece)
            self.frames.append(FRAME_HEADER.pack(size << 8 | DATA, 0, stream_id))
            self.frames += parts
            self.sent_frames += 1
            sent_bytes += size
        if sent_bytes:
            unsent.size -= sent_bytes
            unsent.stalled_s = 0.0
            self.window -= sent_bytes
            stream.credit -= sent_bytes
            self._shared.unread.shrink(stream, unsent.held_bytes)
            # round robin: a stream that was served moves to the end, one that was not stays in front
            self.blocked[stream_id] = self.blocked.pop(stream_id)
        if not pieces:
            del self.blocked[stream_id]
            stream.unsent = None
            if unsent.last_frame:
                stream.connection.end(stream, unsent.last_frame)
        if unsent.size <= LOW_BYTES:
            stream.on_writable()
        return sent_bytes

    def send_headers(self, headers: bytes) -> None:
        """Send a HEADERS frame, with the next write like all of `frames`."""
        if self.table_size_update:
            headers, self.table_size_update = prepend_to_block(self.table_size_update, headers), b""
        self.frames.append(headers)
        self.sent_frames += 1
        if not self.dirty:
            self._shared.schedule_flush(self)

    def discard(self, stream: Stream) -> None:
        """Discard a stream's pending data."""
        stream.unsent = None
        self._shared.unread.shrink(stream)
        self.blocked.pop(stream.stream_id, None)
        self.max_direct_bytes = 0 if self.paused or self.blocked else self.max_frame


def _unsent_below_tls(transport: Any) -> int:
    """Return the unsent bytes in the socket below TLS; 0 if the socket can take more.

    No transport reports what is between TLS and the socket, up to one write; but while there is any, the socket is
    full.
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
    except OSError:  # not supported by the system
        return 0
