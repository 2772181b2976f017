"""Http2Connection: one HTTP/2 connection as an asyncio protocol: its streams, and the effect of each frame on them.

Each of its parts has one job and keeps no reference to it, so that it is freed once it has ended: FrameReader parses
frames, HeaderDecoder decodes header blocks, ReceiveWindow and Outbox do flow control in the two directions, FrameBudget
and Timeouts limit what a peer may cost, Keepalive checks that the peer is alive, Drain does the graceful shutdown. The
gRPC subclass is in `server/grpc`. Source: RFC 9113.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from typing import Any

from . import frames
from .budget import FrameBudget
from .drain import DRAIN_PING, Drain
from .frames import ErrorCode, Http2Error
from .headers import Fields, HeaderDecoder
from .keepalive import Keepalive
from .outbox import Outbox
from .reader import FrameReader, process_data
from .shared import Http2Shared
from .stream import Stream
from .timeouts import LINGER_S, Timeouts
from .window import ReceiveWindow

logger = logging.getLogger("penstock.http2")

_SMALL_INCREMENT = 256
_MAX_RECENTLY_CLOSED = 1024


class Http2Connection(asyncio.Protocol):
    """A client's connection.

    Invariants: `last_id` is the highest stream opened; `max_streams` is how many may be open, 0 once the final GOAWAY
    is sent. `recently_closed` are the streams that this side ended most recently, for which frames may still arrive.
    Once it is `closed`, input is ignored.
    """

    __slots__ = (
        "budget", "drain", "headers", "keepalive", "last_id", "limits", "max_streams", "outbox", "preface_received",
        "reader", "recently_closed", "shared", "streams", "timeouts", "transport", "window",
    )  # fmt: skip

    def __init__(self, shared: Http2Shared) -> None:
        limits = shared.limits
        self.shared = shared
        self.limits = limits
        self.transport: Any = None
        self.preface_received = False
        self.streams: dict[int, Stream] = {}
        self.last_id = 0
        self.max_streams = limits.max_streams
        self.recently_closed: OrderedDict[int, None] = OrderedDict()
        self.outbox = Outbox(shared, self.streams)
        self.headers: HeaderDecoder[Any] = HeaderDecoder(limits.max_header_bytes)
        self.window = ReceiveWindow(limits.connection_window_bytes, self.outbox)
        self.reader = FrameReader()
        self.budget = FrameBudget(limits, self.outbox)
        self.keepalive = Keepalive(shared, self.outbox, self.budget)
        self.timeouts = Timeouts()
        self.drain = Drain(shared.loop)

    # -- subclass interface ------------------------------------------------------------------------------------

    def answer_non_http2(self, data: bytes) -> bytes:
        """Return the answer to a client that does not speak HTTP/2."""
        return b""

    def resolve(self, fields: Fields) -> Any:
        """Convert a header list to the argument of `open`; None if it is malformed. Cached with the block."""
        raise NotImplementedError

    def open(self, stream_id: int, head: Any, end_stream: int) -> None:
        """Open a stream: add it to `streams` and begin."""
        raise NotImplementedError

    # -- the transport -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept the connection, or drop it if there are too many."""
        self.transport = self.outbox.transport = transport
        connections = self.shared.connections
        if len(connections) >= self.limits.max_connections:
            self.shared.tally.count_over_limit(self.limits.max_connections)
            self.outbox.close()
            self.transport.abort()
            return
        connections.add(self)
        self.outbox.over_tls = transport.get_extra_info("sslcontext") is not None
        if self.shared.draining:
            self.drain.schedule_late_close(self)

    def data_received(self, data: bytes) -> None:
        """Process received bytes."""
        keepalive = self.keepalive
        keepalive.received_since_tick = (
            True  # inlined from `received`: a call would be a hundredth of the lane's cost per request
        )
        if keepalive.uses_timer:
            keepalive.last_received_s = self.shared.loop.time()
        try:
            self.reader.feed(self, data)
        except Exception as error:  # noqa: BLE001 - any error ends this connection
            self.fail(error)

    def read_buffer(self) -> memoryview:
        """Return the buffer for the next read, while a large message arrives."""
        return self.reader.get_buffer(self)

    def on_read(self, size: int) -> None:
        """Process `size` bytes written to that buffer."""
        self.keepalive.received()
        try:
            self.reader.buffer_updated(self, size)
        except Exception as error:  # noqa: BLE001 - as above
            self.fail(error)

    def pause_writing(self) -> None:
        """Record that the peer does not keep up."""
        self.outbox.pause()

    def resume_writing(self) -> None:
        """Resume sending."""
        self.outbox.resume()

    def eof_received(self) -> bool:
        """Close: a peer that sends nothing more cannot open windows either."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Release everything; calls in progress are cancelled."""
        self._drop_streams()
        self.shared.connections.discard(self)
        self.shared.unread.shrink(self.outbox)
        self.outbox.frames.clear()

    def begin(self) -> None:
        """Answer the client's preface."""
        self.preface_received = True
        self.outbox.write(self.shared.settings)
        self.window.refill()
        self.keepalive.begin()
        if self.drain.draining:
            self.drain.announce(self)

    def tick(self, elapsed_s: float) -> None:
        """Count elapsed time."""
        self.budget.renew()
        self.timeouts.tick(self, elapsed_s)

    # -- ending ------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether it has ended, except that the peer may still have to read the end."""
        return self.outbox.closed

    def shutdown(self) -> None:
        """Drain."""
        if not self.closed:
            self.drain.begin(self)

    def fail(self, error: Exception) -> None:
        """End the connection with a GOAWAY that carries the error's code."""
        if not isinstance(error, Http2Error):
            logger.error("an HTTP/2 connection failed", exc_info=error)
            error = Http2Error(ErrorCode.INTERNAL_ERROR, "")
        if not self.closed:
            logger.debug("connection ends with %s: %s", error.code.name, error.text)
            self.outbox.frames.append(frames.goaway(self.last_id, error.code, error.text))
            self.close()

    def close(self, linger_s: float = LINGER_S) -> None:
        """Write what is pending, then read and drop input until the peer has read it."""
        self.timeouts.linger_s = linger_s
        self._drop_streams()
        if not self.transport.is_closing():
            pending, self.outbox.frames = self.outbox.frames, []
            self.transport.write(b"".join(pending))
            self.transport.write_eof() if self.transport.can_write_eof() else self.transport.close()

    def _drop_streams(self) -> None:
        self.reader.stop()
        self.keepalive.end()
        self.outbox.close()
        streams = list(self.streams.values())
        self.streams.clear()
        for stream in streams:
            stream.unsent = None
            self.shared.unread.shrink(stream)
            try:
                stream.on_reset(ErrorCode.CANCEL)
            except Exception:  # the other streams must still be notified
                logger.exception("a stream of an HTTP/2 connection could not be ended")

    # -- frames ------------------------------------------------------------------------------------------------

    def process_frame(self, frame_type: int, flags: int, stream_id: int, payload: bytes) -> None:
        """Process a frame that is allowed at this point. Raises: Http2Error."""
        if frame_type == frames.DATA:
            process_data(self, flags, stream_id, payload)
        elif frame_type == frames.HEADERS:
            self._process_headers(self.headers.start_block(flags, stream_id, payload))
        elif frame_type == frames.CONTINUATION:
            if not payload:
                self.budget.charge("empty CONTINUATION")
            self._process_headers(self.headers.continue_block(flags, payload))
        elif frame_type == frames.WINDOW_UPDATE:
            self._process_window_update(stream_id, payload)
        elif frame_type == frames.RST_STREAM:
            self._process_reset(stream_id, payload)
        elif frame_type in {frames.SETTINGS, frames.PING, frames.GOAWAY}:
            self._process_connection_frame(frame_type, flags, stream_id, payload)
        else:
            self.budget.charge(f"type {frame_type}")
            if frame_type == frames.PRIORITY:
                self._process_priority(stream_id, payload)

    def _process_headers(self, block: bytes | None) -> None:
        """Process a complete header block. It is always decoded, because the header table depends on it."""
        if block is None:
            return
        stream_id, end_stream = self.headers.stream_id, self.headers.end_stream
        head = self.headers.decode(block, self.resolve)
        stream = self.streams.get(stream_id)
        if stream is not None and stream.remote_ended:
            raise Http2Error(ErrorCode.STREAM_CLOSED, f"HEADERS on stream {stream_id}, which is half closed")
        if stream is not None:
            stream.received(b"", end_stream) if end_stream else self.reset(stream_id, ErrorCode.PROTOCOL_ERROR)
        elif stream_id > self.last_id:
            self._open(stream_id, head, end_stream)
        elif stream_id not in self.recently_closed:
            raise Http2Error(ErrorCode.STREAM_CLOSED, f"HEADERS on stream {stream_id}, which is closed")

    def _process_priority(self, stream_id: int, payload: bytes) -> None:
        """Validate the frame and ignore it: RFC 9113 deprecates priorities."""
        if not stream_id:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "PRIORITY without a stream")
        if len(payload) != 5:
            if stream_id not in self.streams:
                raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"PRIORITY of {len(payload)} bytes")
            self.reset(stream_id, ErrorCode.FRAME_SIZE_ERROR)

    def _process_reset(self, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"RST_STREAM of {len(payload)} bytes")
        if self.is_idle(stream_id):
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"RST_STREAM on stream {stream_id}, which is idle")
        stream = self.streams.get(stream_id)
        if stream is None:
            self.budget.charge("RST_STREAM")
            return
        stream.remote_ended = True
        self.remove(stream)
        stream.on_reset(ErrorCode.CANCEL)
        self.budget.charge_reset()
        if self.drain.final_goaway_sent and not self.outbox.dirty:
            self.shared.schedule_flush(self.outbox)

    def _process_window_update(self, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"WINDOW_UPDATE of {len(payload)} bytes")
        increment = frames.read_word(payload)
        if increment < _SMALL_INCREMENT:
            self.budget.charge("small WINDOW_UPDATE")
        if not stream_id:
            self.outbox.update_window(increment)
            return
        stream = self.streams.get(stream_id)
        if stream is None:
            if self.is_idle(stream_id):
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"WINDOW_UPDATE on stream {stream_id}, which is idle")
        elif not increment:
            self.reset(stream_id, ErrorCode.PROTOCOL_ERROR)
        elif not self.outbox.update_stream_window(stream, increment):
            self.reset(stream_id, ErrorCode.FLOW_CONTROL_ERROR)

    def _process_connection_frame(self, frame_type: int, flags: int, stream_id: int, payload: bytes) -> None:
        """Process a frame that belongs to the connection."""
        if stream_id:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"frame of type {frame_type} on a stream")
        if frame_type == frames.SETTINGS:
            self.budget.charge_settings()
            if not flags & frames.ACK:
                self.outbox.apply_settings(payload)
            elif payload:
                raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS with ACK and a payload")
        elif frame_type == frames.PING:
            if flags & frames.ACK and payload == DRAIN_PING:
                self.drain.acknowledged(self)
            self.keepalive.process_ping(flags, payload)
        elif len(payload) < 8:
            raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"GOAWAY of {len(payload)} bytes")
        else:
            # the client opens no more streams, and closes once it has its answers
            self.budget.charge("GOAWAY")

    # -- streams -----------------------------------------------------------------------------------------------

    def is_idle(self, stream_id: int) -> bool:
        """Whether no such stream was opened; after the final GOAWAY a client may still open some that are ignored."""
        return not stream_id & 1 or (stream_id > self.last_id and not self.drain.final_goaway_sent)

    def _open(self, stream_id: int, head: Any, end_stream: int) -> None:
        if self.drain.final_goaway_sent:
            return
        self.last_id = stream_id
        if head is None:
            self.budget.charge("malformed requests")
            self.reset(stream_id, ErrorCode.PROTOCOL_ERROR)
        elif len(self.streams) >= self.max_streams:
            self.budget.charge("streams beyond the limit")
            self.reset(stream_id, ErrorCode.REFUSED_STREAM)
        else:
            self.open(stream_id, head, end_stream)

    def end(self, stream: Stream, last_frame: bytes) -> None:
        """Send the frame that ends a stream, and remove it; reset the peer's side if it has not ended."""
        self.outbox.send_headers(last_frame)
        if not stream.remote_ended:
            self.outbox.frames.append(frames.reset(stream.stream_id, ErrorCode.NO_ERROR))
        self.remove(stream)

    def reset(self, stream_id: int, code: ErrorCode) -> None:
        """End a stream with an error; if it is open, its owner is notified."""
        stream = self.streams.get(stream_id)
        if stream is None:
            self._remember_closed(stream_id)
        else:
            self.remove(stream)
            stream.on_reset(code)
        self.outbox.write(frames.reset(stream_id, code))

    def remove(self, stream: Stream) -> None:
        """Remove a stream from every collection."""
        self.streams.pop(stream.stream_id, None)
        if stream.unsent is not None:
            self.outbox.discard(stream)
        if not stream.remote_ended:
            self._remember_closed(stream.stream_id)

    def _remember_closed(self, stream_id: int) -> None:
        """Accept frames for a stream that were in flight when this side ended it."""
        self.recently_closed[stream_id] = None
        if len(self.recently_closed) > _MAX_RECENTLY_CLOSED:
            self.recently_closed.popitem(last=False)
