"""An HTTP/2 client: one connection, its streams, and what arrives on it. It knows nothing of the payload.

The three frames of a plain answer take a fast path through `_take_frames`; all others have a method of their own.
Header blocks are decoded once and cached by their bytes. Source: RFC 9113.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from penstock.server.http2.frames import (
    ACK,
    CONTINUATION,
    DATA,
    DEFAULT_TABLE_BYTES,
    DEFAULT_WINDOW,
    ENABLE_PUSH,
    END_HEADERS,
    END_STREAM,
    FRAME_HEADER,
    FRAME_HEADER_BYTES,
    GOAWAY,
    HEADER_TABLE_SIZE,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_CONCURRENT_STREAMS,
    MAX_FRAME_SIZE,
    MAX_HEADER_LIST_SIZE,
    MAX_WINDOW,
    MIN_FRAME_BYTES,
    PADDED,
    PING,
    PREFACE,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    ErrorCode,
    Http2Error,
    frame,
    goaway,
    read_settings,
    read_word,
    settings,
    unpadded,
    window_update,
)  # fmt: skip
from penstock.server.http2.headers import Fields, HeaderDecoder

from .carriers import Slot
from .http2_request_headers import Openings
from .http2_sending import Owner, Sending, Stream

_MAX_HEADER_BYTES = 64 << 10
_WINDOW_LOW, _WINDOW_FULL = MAX_WINDOW // 2, MAX_WINDOW - 1
"""When a window is refilled, and to what: less than initially, so that a stream shows whether it received anything."""
_FOREIGN = "the server does not speak HTTP/2"


class Http2Client(Sending):
    """The receiving half.

    Invariants: `_partial` is the beginning of a frame that has not arrived whole. `answers` are those of one read:
    slots are notified together at its end, with the time at which it began.
    """

    def __init__(self, openings: Openings, resolve: Callable[[Fields], Any], owner: Owner) -> None:
        super().__init__(openings, owner)
        self.answers: list[tuple[Slot, str]] = []
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._partial = b""
        self._resolve = resolve
        self._headers: HeaderDecoder[Any] = HeaderDecoder(_MAX_HEADER_BYTES)
        self._window_left = DEFAULT_WINDOW
        self._reason = ""

    # -- the transport -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        values = {ENABLE_PUSH: 0, INITIAL_WINDOW_SIZE: MAX_WINDOW, MAX_HEADER_LIST_SIZE: _MAX_HEADER_BYTES}
        self.write(PREFACE + settings(values))
        self._refill()

    @property
    def alpn(self) -> str:
        """Return the protocol chosen by ALPN."""
        tls = self.transport.get_extra_info("ssl_object") if self.transport is not None else None
        return (tls.selected_alpn_protocol() if tls is not None else None) or ""

    def data_received(self, data: bytes) -> None:
        """Process every whole frame, and keep the rest. Then notify the slots that have an answer, and write."""
        now_ns = time.monotonic_ns()
        if self._partial:
            data, self._partial = self._partial + data, b""
        self.dirty = True
        fault = None
        try:
            position = self._take_frames(data)
            if position < len(data):
                self._partial = data[position:]
        except Http2Error as error:
            fault = error
        if self.answers:
            answers, self.answers = self.answers, []
            for slot, text in answers:
                slot.on_answer(now_ns, text)
        if fault is not None:
            self._fail(fault)
        self.flush()

    def connection_lost(self, error: Exception | None) -> None:
        reason = self._reason or (str(error) if error else "the server closed the connection")
        self.transport = None
        if not self.ready.done():
            self.ready.set_exception(ConnectionError(reason))
            self.ready.exception()  # whoever opened it may have gone
        streams = [*self.streams.values(), *self.waiting]
        self.streams.clear()
        self.waiting.clear()
        owner, self.owner = self.owner, None
        if owner is not None:
            owner.on_connection_end(self, reason, had_requests=any(stream.in_flight for stream in streams))
            for stream in streams:
                stream.on_lost(reason)

    def close(self) -> None:
        """Close the connection without notifying anyone."""
        self.owner = None
        if self.transport is not None:
            self.transport.abort()

    def _fail(self, fault: Http2Error) -> None:
        self._reason = fault.text if self.ready.done() else f"{_FOREIGN} ({fault.text})"
        self.out.append(goaway(0, fault.code, fault.text))
        super().flush()
        self.transport.close()

    def flush(self) -> None:
        """Write all of `out`. A connection that is leaving ends with its last stream."""
        if self.transport is None:
            return
        super().flush()
        if self.leaving and not self.streams:
            self.transport.close()

    # -- what arrives ------------------------------------------------------------------------------------------

    def _take_frames(self, data: bytes) -> int:
        """Process every whole frame. Returns: where the rest begins."""
        position, size = 0, len(data)
        streams, headers = self.streams, self._headers
        cached_headers = headers.cached
        while size - position >= FRAME_HEADER_BYTES:
            size_and_type, flags, stream_id = FRAME_HEADER.unpack_from(data, position)
            start = position + FRAME_HEADER_BYTES
            end = start + (size_and_type >> 8)
            if size_and_type >> 8 > MIN_FRAME_BYTES:
                raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"a frame of {size_and_type >> 8} bytes")
            if end > size:
                break
            position = end
            kind = size_and_type & 0xFF
            if headers.block is not None or stream_id not in streams:
                self._frame(kind, flags, stream_id & MAX_WINDOW, data[start:end])
            elif kind == HEADERS and flags | END_STREAM == END_HEADERS | END_STREAM:
                head = cached_headers.get(data[start:end])
                stream = streams[stream_id]
                stream.head = headers.decode(data[start:end], self._resolve) if head is None else head
                if flags & END_STREAM:
                    self.forget(stream)
                    stream.on_end()
            elif kind == DATA and not flags:
                stream = streams[stream_id]
                stream.in_left -= end - start
                self._window_left -= end - start
                if stream.listens:
                    stream.on_data(data[start:end])
                if stream.in_left < _WINDOW_LOW or self._window_left < _WINDOW_LOW:
                    self._refill(stream)
            else:
                self._frame(kind, flags, stream_id, data[start:end])
        return position

    def _refill(self, stream: Stream | None = None) -> None:
        """Refill the windows that the peer has used."""
        if self._window_left < _WINDOW_LOW:
            self.write(window_update(0, _WINDOW_FULL - self._window_left))
            self._window_left = _WINDOW_FULL
        if stream is not None and stream.in_left < _WINDOW_LOW:
            self.write(window_update(stream.stream_id, _WINDOW_FULL - stream.in_left))
            stream.in_left = _WINDOW_FULL

    # -- frames ------------------------------------------------------------------------------------------------

    def _frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        """Process a frame of any kind. Raises: Http2Error."""
        if not self.ready.done() and (kind != SETTINGS or flags & ACK):
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"frame of type {kind} before SETTINGS")
        headers = self._headers
        if headers.block is not None and (kind != CONTINUATION or stream_id != headers.stream_id):
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "a header block was not continued")
        if kind == DATA:
            self._take_payload(flags, stream_id, payload)
        elif kind == HEADERS:
            self._take_block(headers.start_block(flags, stream_id, payload))
        elif kind == CONTINUATION:
            self._take_block(headers.continue_block(flags, payload))
        elif kind == SETTINGS:
            self._take_settings(flags, payload)
        elif kind in {PING, WINDOW_UPDATE, RST_STREAM, GOAWAY}:
            self._steer(kind, flags, stream_id, payload)
        elif kind == PUSH_PROMISE:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE, which was refused")

    def _take_payload(self, flags: int, stream_id: int, payload: bytes) -> None:
        stream = self.streams.get(stream_id)
        self._window_left -= len(payload)
        if stream is not None:
            stream.in_left -= len(payload)
        if flags & PADDED:
            payload = unpadded(payload)
        if stream is not None and stream.listens and payload:
            stream.on_data(payload)
        self._refill(stream)
        if stream is not None and flags & END_STREAM:
            self.forget(stream)
            stream.on_end()

    def _take_block(self, block: bytes | None) -> None:
        """Process a whole header block. It is always decoded, since the header table depends on it."""
        if block is None:
            return
        headers = self._headers
        head = headers.cached.get(block)
        head = headers.decode(block, self._resolve) if head is None else head
        stream = self.streams.get(headers.stream_id)
        if stream is not None:
            stream.head = head
            if headers.end_stream:
                self.forget(stream)
                stream.on_end()

    def _take_settings(self, flags: int, payload: bytes) -> None:
        if flags & ACK:
            return
        for name, value in read_settings(payload):
            self._set(name, value)
        self.write(frame(SETTINGS, ACK, 0))
        if not self.ready.done():
            self.ready.set_result(None)
        self.pump()
        while self.waiting and not self.leaving and len(self.streams) < self.most_streams:
            self.begin(self.waiting.popleft())

    def _set(self, name: int, value: int) -> None:
        if name == INITIAL_WINDOW_SIZE:
            self.peer_window = value
        elif name == MAX_FRAME_SIZE:
            self.peer_frame = value
        elif name == MAX_CONCURRENT_STREAMS:
            self.most_streams = value
        elif name == HEADER_TABLE_SIZE and value < DEFAULT_TABLE_BYTES:
            self.forget_header_table()

    def _steer(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        """Process PING, WINDOW_UPDATE, RST_STREAM or GOAWAY. Raises: Http2Error."""
        if len(payload) < (8 if kind in {PING, GOAWAY} else 4):
            raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"frame of type {kind} of {len(payload)} bytes")
        if kind == PING:
            if not flags & ACK:
                self.write(frame(PING, ACK, 0, payload))
        elif kind == GOAWAY:
            if code := read_word(payload, 4):
                self._reason = f"GOAWAY {_named(code)} {payload[8:].decode('utf-8', 'replace')}".rstrip()
            self.leave(read_word(payload))
        elif kind == WINDOW_UPDATE:
            self._widen(self.streams.get(stream_id), stream_id, read_word(payload))
        elif (stream := self.streams.get(stream_id)) is not None:
            self.drop(stream)
            self.forget(stream)
            stream.on_reset(read_word(payload))

    def _widen(self, stream: Stream | None, stream_id: int, increment: int) -> None:
        if not stream_id:
            self.out_window += increment
        elif stream is not None:
            stream.credit += increment
        if self.blocked:
            self.pump()


def _named(code: int) -> str:
    return ErrorCode(code).name if code in set(ErrorCode) else str(code)
