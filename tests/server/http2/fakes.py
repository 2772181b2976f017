"""Stand-ins for testing one part of an HTTP/2 connection without the connection."""

from __future__ import annotations

from typing import Any

from penstock.server.http2.budget import FrameBudget
from penstock.server.http2.frames import DATA, HEADERS, ErrorCode, Http2Error
from penstock.server.http2.headers import HeaderDecoder
from penstock.server.http2.limits import Http2Limits
from penstock.server.http2.reader import FrameReader, process_data
from penstock.server.http2.shared import Http2Shared
from penstock.server.http2.stream import Stream
from penstock.server.http2.window import ReceiveWindow

from .wire import FakeLoop, FakeTransport


def make_shared(**limits: Any) -> Http2Shared:
    """Return the shared state of a port, on a loop whose clock the test moves."""
    loop: Any = FakeLoop()
    return Http2Shared(loop, Http2Limits(**limits), 1 << 30)


class FakeOutbox:
    """Records what is written. A test sets its counts."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.frames: list[bytes] = []
        self.streams: dict[int, Any] = {}
        self.answer_count = self.sent_frames = self.unsent = 0
        self.closed = False
        self.transport = FakeTransport()
        self.on_flush: Any = None

    def write(self, sent: bytes) -> None:
        self.written.append(sent)

    def unsent_bytes(self) -> int:
        return self.unsent


class FakeStream(Stream):
    """A stream that records its events in a list; while it has a `place`, data may be received into it.

    `lent` counts the bytes passed as views, and `had_place` those received into `place`.
    """

    def __init__(self, stream_id: int, events: list[tuple[Any, ...]], connection: Any = None) -> None:
        self.stream_id = stream_id
        self.connection = connection
        self.credit = 0
        self.receive_window = 1 << 30
        self.remote_ended = False
        self.unsent = None
        self.place: memoryview | None = None
        self.lent = self.had_place = 0
        self._events = events

    def received(self, payload: bytes, ended: int) -> None:
        self._tell(bytes(payload), ended)

    def received_part(self, payload: memoryview, ended: int) -> None:
        self.lent += len(payload)
        self._tell(bytes(payload), ended)

    def get_buffer(self) -> memoryview | None:
        return self.place

    def buffer_updated(self, size: int, ended: int) -> None:
        assert self.place is not None
        self.had_place += size
        self._tell(bytes(self.place[:size]), ended)

    def _tell(self, payload: bytes, ended: int) -> None:
        self.receive_window -= len(payload)
        self.remote_ended = bool(ended)
        self._events.append((DATA, self.stream_id, payload, ended))

    def on_writable(self) -> None:
        self._events.append(("left", self.stream_id))

    def on_reset(self, code: ErrorCode) -> None:
        self._events.append(("lost", self.stream_id, code))

    def tick(self, elapsed_s: float) -> None:
        self._events.append(("tick", self.stream_id, elapsed_s))


class FakeConnection:
    """The receiver of a FrameReader's frames: `events` records them, and a stream's DATA as the stream gets it.

    A stream is open from its HEADERS, whatever their block, until it is reset. An error closes this object, as it
    closes a connection.
    """

    def __init__(self, *, begun: bool = True, **limits: Any) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.shared = make_shared(**limits)
        self.loop: FakeLoop = self.shared.loop  # type: ignore[assignment]
        self.limits = self.shared.limits
        outbox: Any = FakeOutbox()
        self.outbox: FakeOutbox = outbox
        self.transport = outbox.transport
        self.transport.protocol = self
        self.streams: dict[int, FakeStream] = outbox.streams
        self.preface_received = begun
        self.last_id = 0
        self.max_streams = self.limits.max_streams
        self.recently_closed: set[int] = set()
        self.headers: HeaderDecoder[Any] = HeaderDecoder(self.limits.max_header_bytes)
        self.window = ReceiveWindow(1 << 30, outbox)
        self.window.refill()
        self.budget = FrameBudget(self.limits, outbox)
        self.reader = FrameReader()
        self.place: memoryview | None = None

    # -- the transport -----------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        connection: Any = self
        try:
            self.reader.feed(connection, data)
        except Http2Error as error:
            self.fail(error)

    def read_buffer(self) -> memoryview:
        connection: Any = self
        return self.reader.get_buffer(connection)

    def on_read(self, size: int) -> None:
        connection: Any = self
        try:
            self.reader.buffer_updated(connection, size)
        except Http2Error as error:
            self.fail(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """Do nothing, like the methods below, which the interface requires."""

    def eof_received(self) -> None: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...

    # -- what the reader calls ---------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self.outbox.closed

    def begin(self) -> None:
        self.preface_received = True
        self.events.append(("begin",))

    def answer_non_http2(self, data: bytes) -> bytes:
        return b"no: " + data

    def close(self) -> None:
        self.outbox.closed = True
        self.reader.stop()
        self.events.append(("close",))

    def fail(self, error: Http2Error) -> None:
        self.events.append(("fail", error.code, error.text))
        self.close()

    def open(self, stream_id: int, head: Any, ended: int) -> None:
        self.events.append(("open", stream_id, head, ended))
        stream = self.streams[stream_id] = FakeStream(stream_id, self.events, self)
        stream.place, stream.remote_ended = self.place, bool(ended)

    def process_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        connection: Any = self
        if kind == DATA:
            process_data(connection, flags, stream_id, payload)
            return
        self.events.append((kind, flags, stream_id, payload))
        if kind == HEADERS and stream_id > self.last_id:
            self.last_id = stream_id
            self.open(stream_id, payload, flags & 1)

    def is_idle(self, stream_id: int) -> bool:
        return stream_id > self.last_id

    def reset(self, stream_id: int, code: ErrorCode) -> None:
        self.events.append(("reset", stream_id, code))
        self.streams.pop(stream_id, None)
        self.recently_closed.add(stream_id)
