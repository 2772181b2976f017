"""Taking: every frame that does not go the straight way, and every doubt.

Part of Http2Connection, between `steering.py` and `connection.py`. Source: RFC 9113.
"""

from __future__ import annotations

from typing import Any

from .frames import (
    ACK,
    CONTINUATION,
    DATA,
    DEFAULT_WINDOW,
    END_STREAM,
    GOAWAY,
    HEADERS,
    MIN_FRAME_BYTES,
    PADDED,
    PING,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Fault,
    Http2Error,
    unpadded,
    window_update,
)  # fmt: skip
from .headers import Fields, HeaderMemory
from .shared import Http2Shared
from .steering import Steering
from .stream import Stream


class Taking(Steering):
    """What a frame does.

    Invariant: `window_left` is what the peer may still send on the whole connection; it is given back as soon as half
    is used, since what is kept is bounded by `shared.receive_bytes`.
    """

    __slots__ = ("_headers", "_introduced", "_window_low", "window_left")

    def __init__(self, shared: Http2Shared) -> None:
        super().__init__(shared)
        self._introduced = False
        self._headers: HeaderMemory[Any] = HeaderMemory(self.limits.max_header_bytes)
        self.window_left = DEFAULT_WINDOW
        self._window_low = self.limits.connection_window_bytes // 2

    def resolve(self, fields: Fields) -> Any:
        """Make of a header list what `open` takes; None when it is malformed. Kept with the block."""
        raise NotImplementedError

    def open(self, stream_id: int, head: Any, ended: int) -> None:
        """Open a stream: put it into `streams` and begin."""
        raise NotImplementedError

    # -- the window ----------------------------------------------------------------------------------------------

    def _count(self, size: int) -> None:
        self.window_left -= size
        if self.window_left < self._window_low:
            self._refill()

    def _refill(self) -> None:
        """Give back the connection's window.

        Raises: Http2Error when the peer has sent more than it.
        """
        if self.window_left < 0:
            raise Http2Error(Fault.FLOW_CONTROL_ERROR, "more DATA than the connection's window")
        increment = self.limits.connection_window_bytes - self.window_left
        if increment > 0:
            self.window_left += increment
            self.write(window_update(0, increment))

    # -- frames ------------------------------------------------------------------------------------------------

    def _frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        """Take a frame of any kind."""
        self.check_size(len(payload) << 8 | kind, flags)
        self._check_turn(kind, flags, stream_id)
        if kind == DATA:
            self._take_payload(flags, stream_id, payload)
        elif kind == HEADERS:
            self._take_block(self._headers.begun(flags, stream_id, payload))
        elif kind == CONTINUATION:
            if not payload:
                self.charge("empty CONTINUATION")
            self._take_block(self._headers.continued(flags, payload))
        elif kind == WINDOW_UPDATE:
            self.window_received(stream_id, payload)
        elif kind == RST_STREAM:
            self.reset_received(stream_id, payload)
        elif kind == PUSH_PROMISE:
            raise Http2Error(Fault.PROTOCOL_ERROR, "a client sent PUSH_PROMISE")
        elif kind in {SETTINGS, PING, GOAWAY}:
            self._connection_frame(kind, flags, stream_id, payload)
        else:
            self.charge(f"type {kind}")
            if kind == PRIORITY:
                self.priority_received(stream_id, payload)

    def check_size(self, word: int, flags: int) -> None:
        """Refuse a frame that is too large; `word` as in HEAD. Raises: Http2Error."""
        size = word >> 8
        if size > MIN_FRAME_BYTES and (size > self.limits.frame_bytes or word & 0xFF != DATA or flags & PADDED):
            raise Http2Error(Fault.FRAME_SIZE_ERROR, f"a frame of {size} bytes")

    def _check_turn(self, kind: int, flags: int, stream_id: int) -> None:
        if not self._introduced:
            if kind != SETTINGS or flags & ACK:
                raise Http2Error(Fault.PROTOCOL_ERROR, "the preface was not followed by SETTINGS")
            self._introduced = True
        headers = self._headers
        if headers.block is not None and (kind != CONTINUATION or stream_id != headers.stream_id):
            raise Http2Error(Fault.PROTOCOL_ERROR, "a header block was not continued")
        if kind == HEADERS and not stream_id & 1:
            raise Http2Error(Fault.PROTOCOL_ERROR, f"HEADERS on stream {stream_id}")

    def _connection_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise Http2Error(Fault.PROTOCOL_ERROR, f"frame of type {kind} on a stream")
        if kind == SETTINGS:
            self.settings_received(flags, payload)
        elif kind == PING:
            self.ping_received(flags, payload)
        elif len(payload) < 8:
            raise Http2Error(Fault.FRAME_SIZE_ERROR, f"GOAWAY of {len(payload)} bytes")
        else:
            # the client opens no more streams, and closes when it has its answers
            self.charge("GOAWAY")

    def _take_payload(self, flags: int, stream_id: int, payload: bytes | memoryview) -> None:
        if not stream_id:
            raise Http2Error(Fault.PROTOCOL_ERROR, "DATA without a stream")
        size = len(payload)
        self._count(size)
        if flags & PADDED:
            payload = unpadded(bytes(payload))
        ended = flags & END_STREAM
        if not payload and not ended:
            self.charge("empty DATA")
        stream = self.streams.get(stream_id)
        if stream is not None and not stream.remote_ended:
            stream.in_left -= size - len(payload)
            stream.part(payload, ended) if type(payload) is memoryview else stream.received(bytes(payload), ended)
        elif (stream_id > self.last_id and not self.leaving) or not stream_id & 1:
            raise Http2Error(Fault.PROTOCOL_ERROR, f"DATA on stream {stream_id}, which is idle")
        elif stream_id not in self.pardoned and stream_id <= self.last_id:
            self.charge("DATA on a closed stream")
            self.reset(stream_id, Fault.STREAM_CLOSED)

    def _take_block(self, block: bytes | None) -> None:
        """Take a header block that is whole. It is decoded whatever becomes of its stream: the table depends on it."""
        if block is None:
            return
        stream_id, ended = self._headers.stream_id, self._headers.ended
        known = self._headers.known.get(block)
        head = self._headers.decode(block, self.resolve) if known is None else known
        stream = self.streams.get(stream_id)
        if stream is not None:
            self._trailers(stream, ended)
        elif stream_id > self.last_id:
            self._open(stream_id, head, ended)
        elif stream_id not in self.pardoned:
            raise Http2Error(Fault.STREAM_CLOSED, f"HEADERS on stream {stream_id}, which is closed")

    def _trailers(self, stream: Stream, ended: int) -> None:
        if stream.remote_ended:
            raise Http2Error(Fault.STREAM_CLOSED, f"HEADERS on stream {stream.stream_id}, which is half closed")
        if not ended:
            self.reset(stream.stream_id, Fault.PROTOCOL_ERROR)
            return
        stream.received(b"", END_STREAM)

    def _open(self, stream_id: int, head: Any, ended: int) -> None:
        if self.leaving:
            return
        self.last_id = stream_id
        if head is None:
            self.charge("malformed requests")
            self.reset(stream_id, Fault.PROTOCOL_ERROR)
        elif len(self.streams) >= self.limits.max_streams:
            self.charge("streams beyond the limit")
            self.reset(stream_id, Fault.REFUSED_STREAM)
        else:
            self.open(stream_id, head, ended)
