"""FrameReader: parses frames from what arrives on an HTTP/2 connection. Owned by Http2Connection, which processes them.

The two frames of a plain request take a fast path in `_take_frames`, where calls would be a tenth of their cost; all
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
    HEAD,
    HEAD_BYTES,
    HEADERS,
    MAX_WINDOW,
    MIN_FRAME_BYTES,
    PADDED,
    PREFACE,
    PUSH_PROMISE,
    SETTINGS,
    Fault,
    Http2Error,
    unpadded,
)  # fmt: skip

if TYPE_CHECKING:
    from .connection import Http2Connection
    from .stream import Stream

_LONG = MIN_FRAME_BYTES << 8
"""DATA frames of at least this size, usually part of large messages, are passed on uncopied and before they are
complete."""
_STRAIGHT_BYTES = 32768
"""If at least this much of a frame is missing, it is read directly to its destination."""

_MOST_IDS = 256
"""After this many stream ids, of which clients use every second, other connections have their turn: 256 KiB may hold
9000 calls that are answered at once, and 32 times as much is read in one turn of the loop."""
_MOST_FRAMES = 2048
"""The same limit for frames: 256 KiB of a message in tiny pieces are 20,000, and take 70 ms."""


class FrameReader:
    """The receiving side. The connection is passed to each call and not stored, so that it is freed when it ends.

    Invariants: `_waiting`: input must be examined before its frames. `_partial` is the beginning of an incomplete
    frame; a long DATA frame is instead passed on as it arrives, and `_rest` is the number of bytes missing. While
    `_straight`, the transport reads through `read_buffer` and `on_read`; `_target` is the stream of the last `room`.
    `_introduced`: the client's SETTINGS have been received.
    """

    __slots__ = (
        "_introduced", "_moved", "_partial", "_rest", "_rest_flags", "_rest_id", "_resting", "_straight", "_target",
        "_tired", "_waiting",
    )  # fmt: skip

    def __init__(self) -> None:
        self._waiting = True
        self._introduced = self._moved = self._resting = self._straight = self._tired = False
        self._partial = b""
        self._rest = self._rest_flags = self._rest_id = 0
        self._target: Stream | None = None

    def feed(self, connection: Http2Connection, data: bytes) -> None:
        """Process bytes: every complete frame; keep the rest. Raises: Http2Error."""
        if self._waiting:
            data = self._gather(connection, data)
        most_id = min(connection.last_id + _MOST_IDS, MAX_WINDOW)
        at = self._take_frames(connection, data, most_id)
        if at < len(data) and not connection.closed:
            self._partial = data[at:] if at else data
            self._waiting = True
            self._moved |= at > 0
        elif self._rest >= _STRAIGHT_BYTES and not self._straight and self._has_room(connection):
            self._straight = True
            connection.transport.set_protocol(DirectReader(connection))
        if (self._tired or connection.last_id > most_id) and not self._resting:
            self._resting, self._tired = True, False
            connection.transport.pause_reading()
            connection.shared.loop.call_soon(self._read_on, connection)

    def stop(self) -> None:
        """Stop processing input, and release the stream that data is read into."""
        self._waiting = True
        self._target = None

    def _read_on(self, connection: Http2Connection) -> None:
        self._resting = False
        if not connection.transport.is_closing():
            connection.transport.resume_reading()
            connection.data_received(b"")

    def _gather(self, connection: Http2Connection, data: bytes) -> bytes:
        """Prepend what was kept; b"" until the client has sent the HTTP/2 preface."""
        if connection.closed:
            return b""
        data = self._partial + data if self._partial else data
        self._partial = b""
        if connection.begun:
            self._waiting = False
            return data
        if not data.startswith(PREFACE[: len(data)]):
            connection.outbox.frames.append(connection.greet(data))
            connection.close()
            return b""
        if len(data) < len(PREFACE):
            self._partial = data
            return b""
        self._waiting = False
        connection.begin()
        return data[len(PREFACE) :]

    # -- frames ------------------------------------------------------------------------------------------------

    def _take_frames(self, connection: Http2Connection, data: bytes, most_id: int) -> int:
        """Process complete frames, up to one that opens a stream above `most_id`. Returns: where the rest begins."""
        at, size = self._go_on(connection, data) if self._rest and data else 0, len(data)
        streams, headers, window = connection.streams, connection.headers, connection.window
        known, unpack = headers.known, HEAD.unpack_from
        left = _MOST_FRAMES
        while left and size - at >= HEAD_BYTES:
            left -= 1
            word, flags, stream_id = unpack(data, at)
            start = at + HEAD_BYTES
            end = start + (word >> 8)
            if end > size:
                return self._take_front(connection, data, at)
            at = end
            kind = word & 0xFF
            if kind == DATA and headers.block is None and flags <= END_STREAM and end > start:
                stream = streams.get(stream_id)
                if stream is not None and not stream.remote_ended:
                    window.left -= end - start
                    if window.left < window.low:
                        window.refill()
                    if word < _LONG:
                        stream.received(data[start:end], flags)
                    else:
                        _check_size(connection, word, flags)
                        stream.part(memoryview(data)[start:end], flags)
                    continue
            elif kind == HEADERS and headers.block is None and flags | END_STREAM == END_HEADERS | END_STREAM:
                head = known.get(data[start:end])
                if (
                    head is not None
                    and connection.last_id < stream_id <= most_id
                    and stream_id & 1
                    and len(streams) < connection.max_streams
                ):
                    connection.last_id = stream_id
                    connection.open(stream_id, head, flags & END_STREAM)
                    continue
            self._check(connection, word, flags, stream_id & MAX_WINDOW)
            connection.take_frame(kind, flags, stream_id & MAX_WINDOW, data[start:end])
            if connection.outbox.closed or connection.last_id > most_id:
                break
        self._tired = not left
        return at

    def _check(self, connection: Http2Connection, word: int, flags: int, stream_id: int) -> None:
        """Reject a frame that is too large, or not allowed at this point."""
        if word >= _LONG:
            _check_size(connection, word, flags)
        kind = word & 0xFF
        if not self._introduced:
            if kind != SETTINGS or flags & ACK:
                raise Http2Error(Fault.PROTOCOL_ERROR, "the preface was not followed by SETTINGS")
            self._introduced = True
        headers = connection.headers
        if headers.block is not None and (kind != CONTINUATION or stream_id != headers.stream_id):
            raise Http2Error(Fault.PROTOCOL_ERROR, "a header block was not continued")
        if kind == HEADERS and not stream_id & 1:
            raise Http2Error(Fault.PROTOCOL_ERROR, f"HEADERS on stream {stream_id}")
        if kind == PUSH_PROMISE:
            raise Http2Error(Fault.PROTOCOL_ERROR, "a client sent PUSH_PROMISE")

    def _take_front(self, connection: Http2Connection, data: bytes, at: int) -> int:
        """Process an incomplete frame if it is a long DATA frame. Returns: where the rest begins."""
        word, flags, stream_id = HEAD.unpack_from(data, at)
        start = at + HEAD_BYTES
        _check_size(connection, word, flags)
        if word < _LONG or word & 0xFF != DATA or flags & PADDED or start == len(data):
            return at
        self._check(connection, word, flags, stream_id & MAX_WINDOW)
        self._rest, self._rest_flags, self._rest_id = word >> 8, flags, stream_id & MAX_WINDOW
        return start + self._go_on(connection, data, start)

    def _go_on(self, connection: Http2Connection, data: bytes, at: int = 0) -> int:
        """Pass on what has arrived of a long frame. Returns: how many bytes."""
        size = min(self._rest, len(data) - at)
        self._rest -= size
        self._moved = True
        part = memoryview(data)[at : at + size]
        take_data(connection, 0 if self._rest else self._rest_flags, self._rest_id, part)
        return size

    # -- direct reads ------------------------------------------------------------------------------------------

    def room(self, connection: Http2Connection) -> memoryview:
        """Return the buffer for the next read: inside a message, or the shared scratch buffer."""
        stream = connection.streams.get(self._rest_id) if self._rest else None
        room = None if stream is None or stream.remote_ended else stream.room()
        self._target = None if room is None else stream
        return connection.shared.scratch if room is None else room[: self._rest]

    def _has_room(self, connection: Http2Connection) -> bool:
        return self.room(connection) is not connection.shared.scratch

    def filled(self, connection: Http2Connection, size: int) -> None:
        """Process `size` bytes written to that buffer. Raises: Http2Error."""
        target, self._target = self._target, None
        if target is None:
            self.feed(connection, bytes(connection.shared.scratch[:size]))
            if self._straight and not self._has_room(connection):
                self._straight = False
                connection.transport.set_protocol(connection)
            return
        self._moved = True
        self._rest -= size
        connection.window.take(size)
        target.landed(size, 0 if self._rest else self._rest_flags & END_STREAM)

    def stuck(self, connection: Http2Connection) -> bool:
        """Return whether the same frame or header block has made no progress since the last call."""
        moved, self._moved = self._moved, False
        return connection.headers.block is not None or ((bool(self._partial) or self._rest > 0) and not moved)


def _check_size(connection: Http2Connection, word: int, flags: int) -> None:
    """Reject a frame that is too large; `word` is as in HEAD."""
    size = word >> 8
    if size > MIN_FRAME_BYTES and (size > connection.limits.frame_bytes or word & 0xFF != DATA or flags & PADDED):
        raise Http2Error(Fault.FRAME_SIZE_ERROR, f"a frame of {size} bytes")


def take_data(connection: Http2Connection, flags: int, stream_id: int, payload: bytes | memoryview) -> None:
    """Pass the payload of DATA, or a part of it, to its stream. Raises: Http2Error."""
    if not stream_id:
        raise Http2Error(Fault.PROTOCOL_ERROR, "DATA without a stream")
    size = len(payload)
    connection.window.take(size)
    if flags & PADDED:
        payload = unpadded(bytes(payload))
    ended = flags & END_STREAM
    if not payload and not ended:
        connection.budget.charge("empty DATA")
    stream = connection.streams.get(stream_id)
    if stream is not None and not stream.remote_ended:
        stream.in_left -= size - len(payload)
        stream.part(payload, ended) if type(payload) is memoryview else stream.received(bytes(payload), ended)
    elif connection.is_idle(stream_id):
        raise Http2Error(Fault.PROTOCOL_ERROR, f"DATA on stream {stream_id}, which is idle")
    elif stream_id not in connection.pardoned and stream_id <= connection.last_id:
        connection.budget.charge("DATA on a closed stream")
        connection.reset(stream_id, Fault.STREAM_CLOSED)
