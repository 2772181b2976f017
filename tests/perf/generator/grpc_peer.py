"""A gRPC server without sockets: a script of frames for the client, and what the client sent."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpack import Decoder, Encoder

from penstock.perf.generator.grpc import Channel, GrpcOpener
from penstock.perf.generator.grpc_status import head_of
from penstock.perf.generator.http2 import Http2Client
from penstock.perf.generator.http2_request_headers import Openings
from penstock.perf.generator.http2_sending import Owner
from penstock.perf.generator.orders import GrpcCall, Target
from penstock.server.http2 import frames

METHOD = "/inference.GRPCInferenceService/ModelInfer"
END = frames.END_STREAM


def message(content: bytes, flag: int = 0) -> bytes:
    return bytes((flag,)) + len(content).to_bytes(4, "big") + content


@dataclass(frozen=True)
class Frame:
    kind: int
    flags: int
    stream: int
    payload: bytes


class FakeTransport(asyncio.Transport):
    """Records what is written, and tells the protocol on the next loop turn when it is closed."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._protocol = protocol
        self.written = bytearray()
        self.writes = 0
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data
        self.writes += 1

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)

    def abort(self) -> None:
        self.close()


class Peer:
    """The server's side of one connection."""

    def __init__(self, owner: Owner, openings: Openings, **settings: int) -> None:
        self.client = Http2Client(openings, head_of, owner)
        self.transport: Any = FakeTransport(self.client)
        self.client.connection_made(self.transport)
        self._encoder, self._decoder = Encoder(), Decoder()
        self._read = len(frames.PREFACE)
        values = {getattr(frames, name.upper()): value for name, value in settings.items()}
        self.feed(frames.settings(values))
        self.sent()

    def feed(self, *sent: bytes) -> None:
        self.client.data_received(b"".join(sent))

    def sent(self) -> list[Frame]:
        """Give the frames that the client sent since this was last asked."""
        self.client.flush()
        sent_frames, written = [], self.transport.written
        while self._read < len(written):
            word, flags, stream = frames.FRAME_HEADER.unpack_from(written, self._read)
            start = self._read + frames.FRAME_HEADER_BYTES
            self._read = start + (word >> 8)
            sent_frames.append(Frame(word & 0xFF, flags, stream, bytes(written[start : self._read])))
        return sent_frames

    def kinds(self) -> list[tuple[int, int]]:
        return [(frame.kind, frame.stream) for frame in self.sent()]

    def fields(self, frame: Frame) -> dict[str, str]:
        return {str(name): str(value) for name, value in self._decoder.decode(frame.payload)}

    def requests(self) -> dict[int, bytes]:
        """Give the payload of every stream, of what was sent since this was last asked."""
        bodies: dict[int, bytes] = {}
        for frame in self.sent():
            if frame.kind == frames.DATA:
                bodies[frame.stream] = bodies.get(frame.stream, b"") + frame.payload
        return bodies

    # -- what a server sends -----------------------------------------------------------------------------------

    def block(self, **fields: str) -> bytes:
        return self._encoder.encode([(name.replace("__", ":").replace("_", "-"), fields[name]) for name in fields])

    def headers(self, stream: int, /, flags: int = 0, **fields: str) -> bytes:
        return frames.frame(frames.HEADERS, frames.END_HEADERS | flags, stream, self.block(**fields))

    def begun(self, stream: int, **fields: str) -> bytes:
        return self.headers(stream, 0, __status="200", content_type="application/grpc", **fields)

    def ended(self, stream: int, status: str = "0", **fields: str) -> bytes:
        return self.headers(stream, END, grpc_status=status, **fields)

    def message(self, stream: int, content: bytes = b"yes", flag: int = 0) -> bytes:
        return frames.frame(frames.DATA, 0, stream, message(content, flag))

    def answer(self, stream: int, content: bytes = b"yes") -> bytes:
        return self.begun(stream) + self.message(stream, content) + self.ended(stream)


@dataclass
class FakeSlot:
    """Counts what it is told. `parts`: of each answer, responses before the last, and those with something in them.

    `again`: sends that many more requests, each when the one before it has its answer.
    """

    ends: list[str] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)
    times: list[int] = field(default_factory=list)
    parts: list[tuple[int, int]] = field(default_factory=list)
    again: int = 0
    send: Callable[[FakeSlot], None] = lambda slot: None

    def on_responses(self, earlier_ns: Sequence[int], count: int) -> None:
        self.parts.append((len(earlier_ns), count))

    def on_answer(self, now_ns: int, error: str) -> None:
        self.ends.append(error)
        self.times.append(now_ns)
        if self.again:
            self.again -= 1
            self.send(self)

    def on_lost(self, now_ns: int, reason: str) -> None:
        self.losses.append(reason)


class Server:
    """What a channel connects to: a new Peer each time, until it is `down`."""

    def __init__(self, call: GrpcCall | None = None, **settings: int) -> None:
        self.opener = GrpcOpener(Target("::1", 8001, grpc=call or GrpcCall(METHOD)))
        self._openings = self.opener._connector._openings
        self.opener._connector = self  # type: ignore[assignment]
        self._settings = settings
        self.peers: list[Peer] = []
        self.down = False
        self.on_lost: list[str] = []

    async def connect(self, owner: Owner) -> Http2Client:
        await asyncio.sleep(0)
        if self.down:
            raise ConnectionRefusedError("nobody there")
        self.peers.append(Peer(owner, self._openings, **self._settings))
        return self.peers[-1].client

    async def open(self) -> Channel:
        channel = await self.opener.open(self.on_lost.append)
        assert isinstance(channel, Channel)
        return channel

    @property
    def peer(self) -> Peer:
        return self.peers[-1]


async def turns(count: int = 6) -> None:
    """Let the loop do what is due."""
    for _ in range(count):
        await asyncio.sleep(0)


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


def counted(slots: list[FakeSlot]) -> Counter[str]:
    return Counter(end for slot in slots for end in slot.ends)
