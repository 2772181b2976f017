"""A gRPC connection without sockets: a transport that records, a loop whose clock a test moves, methods that echo."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from hpack import Decoder, Encoder

from penstock.backends.errors import Code, InferError
from penstock.server.grpc.connection import GrpcConnection, GrpcShared
from penstock.server.grpc.limits import GrpcLimits
from penstock.server.grpc.method import Call, Method, Status
from penstock.server.http2 import frames
from penstock.server.http2.limits import Http2Limits

ECHO, BIDI, HOLD, BREAK, REFUSE, GIVE = (f"/t.T/{name}" for name in ("Echo", "Bidi", "Hold", "Break", "Refuse", "Give"))
REQUEST = {
    ":method": "POST", ":scheme": "http", ":path": ECHO, ":authority": "a",
    "te": "trailers", "content-type": "application/grpc",
}  # fmt: skip


class FakeLoop:
    """The part of an event loop that the lane uses. `turn` runs due callbacks; only a test moves the clock."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.soon: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self.timers: list[FakeTimer] = []

    def time(self) -> float:
        return self.now

    def clock(self) -> int:
        return round(self.now * 1e9)

    def call_soon(self, function: Callable[..., Any], *args: Any) -> None:
        self.soon.append((function, args))

    def call_later(self, delay: float, function: Callable[..., Any], *args: Any) -> FakeTimer:
        timer = FakeTimer(self.now + delay, function, args)
        self.timers.append(timer)
        return timer

    def run_in_executor(self, executor: None, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Run the function now, and report its result later."""
        done: Future[Any] = Future()
        future: Future[Any] = Future()
        try:
            done.set_result(function(*args))
        except Exception as error:  # noqa: BLE001 - as an executor
            done.set_exception(error)

        def resolve() -> None:
            if done.exception() is not None:
                future.set_exception(done.exception())
            else:
                future.set_result(done.result())

        self.call_soon(resolve)
        return future

    def turn(self) -> None:
        while self.soon:
            soon, self.soon = self.soon, []
            for function, args in soon:
                function(*args)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for timer in [timer for timer in self.timers if timer.when <= self.now + 1e-9]:
            self.timers.remove(timer)
            if not timer.cancelled:
                timer.function(*timer.args)
        self.turn()


@dataclass(eq=False)
class FakeTimer:
    when: float
    function: Callable[..., Any]
    args: tuple[Any, ...]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


class FakeTransport:
    """Records what is written. `stuck` is the number of bytes that it reports as unsent."""

    def __init__(self, protocol: Any = None) -> None:
        self.protocol = protocol
        self.written = bytearray()
        self.writes = 0
        self.stuck = 0
        self.reading = True
        self.ended = self.closed = self.aborted = False

    def get_extra_info(self, name: str) -> None:
        """Return nothing: there is no TLS."""

    def write(self, sent: bytes) -> None:
        self.written += sent
        self.writes += 1

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol

    @property
    def straight(self) -> bool:
        """Whether the protocol provides the buffer for arriving bytes."""
        return isinstance(self.protocol, asyncio.BufferedProtocol)

    def arrive(self, data: bytes) -> None:
        """Pass bytes to the protocol, in the way in which it currently reads."""
        while data and self.straight:
            room = self.protocol.get_buffer(-1)
            part, data = data[: len(room)], data[len(room) :]
            room[: len(part)] = part
            self.protocol.buffer_updated(len(part))
        if data:
            self.protocol.data_received(data)

    def pause_reading(self) -> None:
        assert self.reading
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.reading
        self.reading = True

    def is_closing(self) -> bool:
        return self.closed or self.aborted

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = True

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True

    def get_write_buffer_size(self) -> int:
        return self.stuck

    @property
    def over(self) -> bool:
        return self.ended or self.closed or self.aborted


class Echo:
    """The Reader that sends back what it receives."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def on_message(self, message: bytes) -> None:
        self._call.send(message)

    def on_half_close(self) -> None:
        self._call.finish()


@dataclass(frozen=True)
class Frame:
    kind: int
    flags: int
    stream: int
    payload: bytes


class Wire:
    """One connection and what its peer sees. `held` are the calls of HOLD, `cancelled` how many were cancelled."""

    def __init__(self, *, begun: bool = True, grpc: dict[str, Any] | None = None, **limits: Any) -> None:
        self.loop = FakeLoop()
        self.held: list[Any] = []
        self.cancelled = 0
        methods = [
            Method(ECHO, lambda call, message: call.answer(message)),
            Method(BIDI, streaming=Echo),
            Method(HOLD, self._hold),
            Method(BREAK, self._break),
            Method(REFUSE, self._refuse),
            Method(GIVE, lambda call, message: call.answer(bytes(int(message) % 2**21 if message.isdigit() else 0))),
        ]
        grpc_limits = GrpcLimits(http2=Http2Limits(**limits), **(grpc or {}))
        loop: Any = self.loop
        self.shared = GrpcShared(
            {method.path: method for method in methods}, grpc_limits, loop=loop, clock=self.loop.clock
        )
        self.encoder = Encoder()
        self.decoder = Decoder()
        self._read = 0
        self.connect()
        if begun:
            self.feed(frames.PREFACE + frames.settings({}))
            self.frames()

    def connect(self) -> None:
        self.connection = GrpcConnection(self.shared)
        self.transport = FakeTransport(self.connection)
        self.connection.connection_made(self.transport)  # type: ignore[arg-type]

    def _hold(self, call: Call, message: bytes) -> None:
        call.on_cancel = self._cancel
        self.held.append(call)

    def _cancel(self) -> None:
        self.cancelled += 1

    def _break(self, call: Call, message: bytes) -> None:
        raise ZeroDivisionError("a secret")

    def _refuse(self, call: Call, message: bytes) -> None:
        raise InferError(Code.NOT_FOUND, message.decode())

    # -- what the peer sends -----------------------------------------------------------------------------------

    def feed(self, sent: bytes) -> None:
        self.transport.arrive(sent)
        self.loop.turn()

    def headers(self, stream: int = 1, *, end: bool = False, **fields: str | None) -> bytes:
        """Build HEADERS; a field that is None is left out."""
        named = {name.replace("__", ":").replace("_", "-"): value for name, value in fields.items()}
        merged = {**REQUEST, **named}
        block = self.encoder.encode([(name, value) for name, value in merged.items() if value is not None])
        return frames.frame(frames.HEADERS, frames.END_HEADERS | end, stream, block)

    def call(self, path: str = ECHO, message: bytes = b"hello", stream: int = 1) -> bytes:
        """Build a unary call in two frames."""
        return self.headers(stream, __path=path) + payload(message_of(message), stream, end=True)

    # -- what the peer sees ------------------------------------------------------------------------------------

    def frames(self) -> list[Frame]:
        """Return the frames received since the last call."""
        written, self._read = self.transport.written[self._read :], len(self.transport.written)
        return frames_of(bytes(written))

    def fields(self, frame: Frame) -> dict[str, str]:
        return dict(self.decoder.decode(frame.payload))  # type: ignore[arg-type]

    def answers(self) -> dict[int, tuple[bytes, int, str]]:
        """Return message bytes, status and text of every call answered since the last call."""
        bodies: dict[int, bytes] = {}
        found = {}
        for frame in self.frames():
            if frame.kind == frames.DATA:
                bodies[frame.stream] = bodies.get(frame.stream, b"") + frame.payload
            elif frame.kind == frames.HEADERS:
                fields = self.fields(frame)
                if frame.flags & frames.END_STREAM:
                    body = bodies.get(frame.stream, b"")
                    found[frame.stream] = (body[5:], int(fields["grpc-status"]), fields.get("grpc-message", ""))
        return found

    def goaway(self) -> tuple[int, str] | None:
        """Return code and text of the last GOAWAY since the last call."""
        found = [frame for frame in self.frames() if frame.kind == frames.GOAWAY]
        return (struct.unpack_from(">I", found[-1].payload, 4)[0], found[-1].payload[8:].decode()) if found else None

    def reset_of(self, stream: int) -> int | None:
        """Return the code that a stream was reset with since the last call."""
        for frame in self.frames():
            if frame.kind == frames.RST_STREAM and frame.stream == stream:
                return int.from_bytes(frame.payload, "big")
        return None


def frames_of(sent: bytes) -> list[Frame]:
    """Split bytes into frames, all of which must be complete."""
    found, at = [], 0
    while at < len(sent):
        word, flags, stream = frames.FRAME_HEADER.unpack_from(sent, at)
        start = at + frames.FRAME_HEADER_BYTES
        at = start + (word >> 8)
        assert at <= len(sent)
        found.append(Frame(word & 0xFF, flags, stream, sent[start:at]))
    return found


def message_of(content: bytes, flag: int = 0) -> bytes:
    return struct.pack(">BI", flag, len(content)) + content


def payload(content: bytes, stream: int = 1, *, end: bool = False) -> bytes:
    """Build DATA frames."""
    size = frames.MIN_FRAME_BYTES
    parts = [content[at : at + size] for at in range(0, len(content), size)] or [b""]
    last = len(parts) - 1
    return b"".join(frames.frame(frames.DATA, end and at == last, stream, part) for at, part in enumerate(parts))


OK = int(Status.OK)
