"""Http2Connection: the receiving half of an HTTP/2 connection, an asyncio protocol. Its gRPC kind is in `server/grpc`.

The two frames of a plain request take a straight way through `_take_frames`; every other frame, and every doubt, goes
through a method of its own. Source: RFC 9113.
"""

from __future__ import annotations

import logging
from typing import Any

from .frames import (
    ACK,
    CONTINUATION,
    DATA,
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEAD,
    HEAD_BYTES,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_CONCURRENT_STREAMS,
    MAX_HEADER_LIST_SIZE,
    MAX_WINDOW,
    MIN_FRAME_BYTES,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Fault,
    Http2Error,
    settings,
    unpadded,
    window_update,
)  # fmt: skip
from .headers import Fields, HeaderMemory
from .shared import Http2Shared
from .steering import Steering
from .stream import Stream

logger = logging.getLogger("penstock.http2")

_LARGEST = MIN_FRAME_BYTES << 8 | 0xFF


class Http2Connection(Steering):
    """What comes in.

    Invariants: `_partial` is the front of a frame that has not arrived whole. `window_left` is what the peer may still
    send on the whole connection; it is given back as soon as half is used, since what is kept is bounded by
    `shared.receive_bytes`.
    """

    def __init__(self, shared: Http2Shared) -> None:
        super().__init__(shared)
        self._introduced = False
        self._moved = False
        self._partial = b""
        self._headers: HeaderMemory[Any] = HeaderMemory(self.resolve, self.limits.max_header_bytes)
        self._most_streams = self.limits.max_streams
        self.window_left = DEFAULT_WINDOW
        self._window_low = 0

    # -- what the protocol above adds --------------------------------------------------------------------------

    def resolve(self, fields: Fields) -> Any:
        """Make of a header list what `open` takes; None when it is malformed. Kept with the block."""
        raise NotImplementedError

    def open(self, stream_id: int, head: Any, ended: int) -> None:
        """Open a stream: put it into `streams` and begin."""
        raise NotImplementedError

    def greet(self, data: bytes) -> bytes:
        """Give what is answered to a client that does not speak HTTP/2."""
        return b""

    # -- what arrives ------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Take bytes: every whole frame, and keep what is left."""
        self._heard = True
        if self._waiting:
            data = self._gather(data)
        try:
            at = self._take_frames(data)
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

    def _take_frames(self, data: bytes) -> int:
        """Take every whole frame. Returns: where the rest begins."""
        at, size = 0, len(data)
        streams, headers = self.streams, self._headers
        known = headers.known
        while size - at >= HEAD_BYTES:
            word, flags, stream_id = HEAD.unpack_from(data, at)
            start = at + HEAD_BYTES
            end = start + (word >> 8)
            if word > _LARGEST:
                raise Http2Error(Fault.FRAME_SIZE_ERROR, f"a frame of {word >> 8} bytes")
            if end > size:
                break
            at = end
            kind = word & 0xFF
            if kind == DATA and headers.block is None and flags <= END_STREAM and end > start:
                stream = streams.get(stream_id)
                if stream is not None and not stream.remote_ended:
                    self.window_left -= end - start
                    if self.window_left < self._window_low:
                        self._refill()
                    stream.received(data[start:end], flags)
                    continue
            elif kind == HEADERS and headers.block is None and flags | END_STREAM == END_HEADERS | END_STREAM:
                head = known.get(data[start:end])
                if (
                    head is not None
                    and self.last_id < stream_id <= MAX_WINDOW
                    and stream_id & 1
                    and len(streams) < self._most_streams
                    and not self.leaving
                ):
                    self.last_id = stream_id
                    self.open(stream_id, head, flags & END_STREAM)
                    continue
            self._frame(kind, flags, stream_id & MAX_WINDOW, data[start:end])
            if self.closed:
                break
        return at

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
            MAX_HEADER_LIST_SIZE: limits.max_header_bytes,
        }
        self._window_low = limits.connection_window_bytes // 2
        self.write(settings(values))
        self._refill()
        if self._draining:
            self.say_goodbye()

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

    def stuck(self) -> bool:
        """Tell whether the same frame or header block has been under way since this was last asked."""
        moved, self._moved = self._moved, False
        return self._headers.block is not None or (bool(self._partial) and not moved)

    # -- frames ------------------------------------------------------------------------------------------------

    def _frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        """Take a frame of any kind."""
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

    def _take_payload(self, flags: int, stream_id: int, payload: bytes) -> None:
        if not stream_id:
            raise Http2Error(Fault.PROTOCOL_ERROR, "DATA without a stream")
        size = len(payload)
        self.window_left -= size
        if self.window_left < self._window_low:
            self._refill()
        if flags & PADDED:
            payload = unpadded(payload)
        ended = flags & END_STREAM
        if not payload and not ended:
            self.charge("empty DATA")
        stream = self.streams.get(stream_id)
        if stream is not None and not stream.remote_ended:
            stream.in_left -= size - len(payload)
            stream.received(payload, ended)
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
        head = self._headers.decode(block) if known is None else known
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
