"""FrameReader: parses frames from what arrives on an HTTP/2 connection. Owned by Http2Connection, which processes them.

The two frames of a plain request take a fast path in `_process_frames`, where calls would be a tenth of their cost; all
other frames, and unclear cases, go to the connection. Long DATA frames are passed on as they arrive, and the rest of
one is read directly to its destination. Source: RFC 9113 (3.4, 4).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.server.listening.body_buffer import DirectReader

from .frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME_HEADER,
    FRAME_HEADER_BYTES,
    HEADERS,
    MAX_WINDOW,
    MIN_FRAME_BYTES,
    PADDED,
    PREFACE,
    PUSH_PROMISE,
    SETTINGS,
    ErrorCode,
    Http2Error,
    unpadded,
)  # fmt: skip

if TYPE_CHECKING:
    from .connection import Http2Connection
    from .stream import Stream

_LONG_FRAME_WORD = MIN_FRAME_BYTES << 8
"""DATA frames of at least this size, usually part of large messages, are passed on uncopied and before they are
complete."""
_DIRECT_READ_BYTES = 32768
"""If at least this much of a frame is missing, it is read directly to its destination."""

_MAX_IDS_PER_TURN = 256
"""After this many stream ids, of which clients use every second, other connections have their turn: 256 KiB may hold
9000 calls that are answered at once, and 32 times as much is read in one turn of the loop."""
_MAX_FRAMES_PER_TURN = 512
"""The same limit for frames: 256 KiB of a message in tiny pieces are 20,000, and take 70 ms. Of those that are requests
on a stream, as many take longer than calls do."""


class FrameReader:
    """The receiving side. The connection is passed to each call and not stored, so that it is freed when it ends.

    Invariants: `_needs_prepending`: input must be examined before its frames. `_partial` is the beginning of an
    incomplete frame; a long DATA frame is instead passed on as it arrives, and `_remaining_bytes` is the number of
    bytes missing. While `_reads_directly`, the transport reads through `read_buffer` and `on_read`; `_target` is the
    stream of the last `get_buffer`. `_settings_received`: the client's SETTINGS have been received.
    """

    __slots__ = (
        "_frame_flags", "_frame_stream_id", "_limit_reached", "_needs_prepending", "_partial", "_progressed",
        "_reads_directly", "_remaining_bytes", "_settings_received", "_target", "_yielding",
    )  # fmt: skip

    def __init__(self) -> None:
        self._needs_prepending = True
        self._settings_received = self._progressed = self._yielding = self._reads_directly = self._limit_reached = False
        self._partial = b""
        self._remaining_bytes = self._frame_flags = self._frame_stream_id = 0
        self._target: Stream | None = None

    def feed(self, connection: Http2Connection, data: bytes) -> None:
        """Process bytes: every complete frame; keep the rest. Raises: Http2Error."""
        if self._needs_prepending:
            data = self._prepend_partial(connection, data)
        max_id = min(connection.last_id + _MAX_IDS_PER_TURN, MAX_WINDOW)
        offset = self._process_frames(connection, data, max_id)
        if offset < len(data) and not connection.closed:
            self._partial = data[offset:] if offset else data
            self._needs_prepending = True
            self._progressed |= offset > 0
        elif self._remaining_bytes >= _DIRECT_READ_BYTES and not self._reads_directly and self._has_room(connection):
            self._reads_directly = True
            connection.transport.set_protocol(DirectReader(connection))
        if (self._limit_reached or connection.last_id > max_id) and not self._yielding:
            self._yielding, self._limit_reached = True, False
            connection.transport.pause_reading()
            connection.shared.loop.call_soon(self._resume_reading, connection)

    def stop(self) -> None:
        """Stop processing input, and release the stream that data is read into."""
        self._needs_prepending = True
        self._target = None

    def _resume_reading(self, connection: Http2Connection) -> None:
        self._yielding = False
        if not connection.transport.is_closing():
            connection.transport.resume_reading()
            connection.data_received(b"")

    def _prepend_partial(self, connection: Http2Connection, data: bytes) -> bytes:
        """Prepend what was kept; b"" until the client has sent the HTTP/2 preface."""
        if connection.closed:
            return b""
        data = self._partial + data if self._partial else data
        self._partial = b""
        if connection.preface_received:
            self._needs_prepending = False
            return data
        if not data.startswith(PREFACE[: len(data)]):
            connection.outbox.frames.append(connection.answer_non_http2(data))
            connection.close()
            return b""
        if len(data) < len(PREFACE):
            self._partial = data
            return b""
        self._needs_prepending = False
        connection.begin()
        return data[len(PREFACE) :]

    # -- frames ------------------------------------------------------------------------------------------------

    def _process_frames(self, connection: Http2Connection, data: bytes, max_id: int) -> int:
        """Process complete frames, up to one that opens a stream above `max_id`. Returns: where the rest begins."""
        offset, size = self._continue_frame(connection, data) if self._remaining_bytes and data else 0, len(data)
        streams, headers, window = connection.streams, connection.headers, connection.window
        cached, unpack = headers.cached, FRAME_HEADER.unpack_from
        remaining_frames = _MAX_FRAMES_PER_TURN
        while remaining_frames and size - offset >= FRAME_HEADER_BYTES:
            remaining_frames -= 1
            word, flags, stream_id = unpack(data, offset)
            start = offset + FRAME_HEADER_BYTES
            end = start + (word >> 8)
            if end > size:
                return self._process_incomplete(connection, data, offset)
            offset = end
            frame_type = word & 0xFF
            if frame_type == DATA and headers.block is None and flags <= END_STREAM and end > start:
                stream = streams.get(stream_id)
                if stream is not None and not stream.remote_ended:
                    window.remaining -= end - start
                    if window.remaining < window.refill_below:
                        window.refill()
                    if word < _LONG_FRAME_WORD:
                        stream.received(data[start:end], flags)
                    else:
                        _check_size(connection, word, flags)
                        stream.received_part(memoryview(data)[start:end], flags)
                    continue
            elif frame_type == HEADERS and headers.block is None and flags | END_STREAM == END_HEADERS | END_STREAM:
                head = cached.get(data[start:end])
                if (
                    head is not None
                    and connection.last_id < stream_id <= max_id
                    and stream_id & 1
                    and len(streams) < connection.max_streams
                ):
                    connection.last_id = stream_id
                    connection.open(stream_id, head, flags & END_STREAM)
                    continue
            self._check(connection, word, flags, stream_id & MAX_WINDOW)
            connection.process_frame(frame_type, flags, stream_id & MAX_WINDOW, data[start:end])
            if connection.outbox.closed or connection.last_id > max_id:
                break
        self._limit_reached = not remaining_frames
        return offset

    def _check(self, connection: Http2Connection, word: int, flags: int, stream_id: int) -> None:
        """Reject a frame that is too large, or not allowed at this point."""
        if word >= _LONG_FRAME_WORD:
            _check_size(connection, word, flags)
        frame_type = word & 0xFF
        if not self._settings_received:
            if frame_type != SETTINGS or flags & ACK:
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, "the preface was not followed by SETTINGS")
            self._settings_received = True
        headers = connection.headers
        if headers.block is not None and (frame_type != CONTINUATION or stream_id != headers.stream_id):
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "a header block was not continued")
        if frame_type == HEADERS and not stream_id & 1:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"HEADERS on stream {stream_id}")
        if frame_type == PUSH_PROMISE:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "a client sent PUSH_PROMISE")

    def _process_incomplete(self, connection: Http2Connection, data: bytes, offset: int) -> int:
        """Process an incomplete frame if it is a long DATA frame. Returns: where the rest begins."""
        word, flags, stream_id = FRAME_HEADER.unpack_from(data, offset)
        start = offset + FRAME_HEADER_BYTES
        _check_size(connection, word, flags)
        if word < _LONG_FRAME_WORD or word & 0xFF != DATA or flags & PADDED or start == len(data):
            return offset
        self._check(connection, word, flags, stream_id & MAX_WINDOW)
        self._remaining_bytes, self._frame_flags, self._frame_stream_id = word >> 8, flags, stream_id & MAX_WINDOW
        return start + self._continue_frame(connection, data, start)

    def _continue_frame(self, connection: Http2Connection, data: bytes, offset: int = 0) -> int:
        """Pass on what has arrived of a long frame. Returns: how many bytes."""
        size = min(self._remaining_bytes, len(data) - offset)
        self._remaining_bytes -= size
        self._progressed = True
        part = memoryview(data)[offset : offset + size]
        process_data(connection, 0 if self._remaining_bytes else self._frame_flags, self._frame_stream_id, part)
        return size

    # -- direct reads ------------------------------------------------------------------------------------------

    def get_buffer(self, connection: Http2Connection) -> memoryview:
        """Return the buffer for the next read: inside a message, or the shared scratch buffer."""
        stream = connection.streams.get(self._frame_stream_id) if self._remaining_bytes else None
        buffer = None if stream is None or stream.remote_ended else stream.get_buffer()
        self._target = None if buffer is None else stream
        return connection.shared.scratch if buffer is None else buffer[: self._remaining_bytes]

    def _has_room(self, connection: Http2Connection) -> bool:
        return self.get_buffer(connection) is not connection.shared.scratch

    def buffer_updated(self, connection: Http2Connection, size: int) -> None:
        """Process `size` bytes written to that buffer. Raises: Http2Error."""
        target, self._target = self._target, None
        if target is None:
            self.feed(connection, bytes(connection.shared.scratch[:size]))
            if self._reads_directly and not self._has_room(connection):
                self._reads_directly = False
                connection.transport.set_protocol(connection)
            return
        self._progressed = True
        self._remaining_bytes -= size
        connection.window.consume(size)
        target.buffer_updated(size, 0 if self._remaining_bytes else self._frame_flags & END_STREAM)

    def is_stalled(self, connection: Http2Connection) -> bool:
        """Return whether the same frame or header block has made no progress since the last call."""
        progressed, self._progressed = self._progressed, False
        return connection.headers.block is not None or (
            (bool(self._partial) or self._remaining_bytes > 0) and not progressed
        )


def _check_size(connection: Http2Connection, word: int, flags: int) -> None:
    """Reject a frame that is too large; `word` is as in FRAME_HEADER."""
    size = word >> 8
    if size > MIN_FRAME_BYTES and (size > connection.limits.frame_bytes or word & 0xFF != DATA or flags & PADDED):
        raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"a frame of {size} bytes")


def process_data(connection: Http2Connection, flags: int, stream_id: int, payload: bytes | memoryview) -> None:
    """Pass the payload of DATA, or a part of it, to its stream. Raises: Http2Error."""
    if not stream_id:
        raise Http2Error(ErrorCode.PROTOCOL_ERROR, "DATA without a stream")
    size = len(payload)
    connection.window.consume(size)
    if flags & PADDED:
        payload = unpadded(bytes(payload))
    end_stream = flags & END_STREAM
    if not payload and not end_stream:
        connection.budget.charge("empty DATA")
    stream = connection.streams.get(stream_id)
    if stream is not None and not stream.remote_ended:
        stream.receive_window -= size - len(payload)
        stream.received_part(payload, end_stream) if type(payload) is memoryview else stream.received(
            bytes(payload), end_stream
        )
    elif connection.is_idle(stream_id):
        raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"DATA on stream {stream_id}, which is idle")
    elif stream_id not in connection.recently_closed and stream_id <= connection.last_id:
        connection.budget.charge("DATA on a closed stream")
        connection.reset(stream_id, ErrorCode.STREAM_CLOSED)
