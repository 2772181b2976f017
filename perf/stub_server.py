"""The same small answer to every request, over HTTP and gRPC: `python -m penstock.perf.stub_server PORT`.

What a load generator is tested against must be cheap and predictable: there is no model, no routing, and no parsing
except to find the end of a request. A connection that begins with HTTP/2's preface speaks gRPC, any other HTTP/1.1.
Answers are sent at once; or a fixed time after the request, as if each had a server of its own (`--delay-us`); or at
the time given by a virtual queue: one server, first come first served, with service times in order of arrival (`--law`,
`--mean-us`; queueing.py). No work is done in that time: the answer is only held back, by a kernel timer that is
accurate to microseconds where asyncio's timers are accurate to a millisecond.

Not supported, because the clients here do not need it: pipelining, chunked bodies, padding, compression, and clients
that close their flow-control window, which these answers never fill.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import gc
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

import uvloop

from penstock.server.http2 import frames
from penstock.server.protobuf import service_pb2

from .generator.alarm import alarm
from .queueing import LAWS, Line, services_ns

HOST = "127.0.0.1"
BODY = b'{"model_name":"bare","outputs":[{"name":"output","datatype":"FP32","shape":[1,3],"data":[0.1,0.2,0.7]}]}'
_HTTP_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
_SERVICES = 1 << 16
_SPIN_NS = 100_000
"""The timer wakes the loop this long before an answer is due; the loop then spins until it is."""
_GRPC_HEAD = b"\x88\x0f\x10\x10application/grpc"  # :status 200, content-type; literals that no table keeps (RFC 7541)
_GRPC_TRAILER = b"\x00\x0bgrpc-status\x010"
_WINDOW_INCREMENT = frames.MAX_WINDOW - frames.DEFAULT_WINDOW
_PREFIX_BYTES = 5


@functools.cache
def _message() -> bytes:
    message = (
        service_pb2().ModelInferResponse()
    )  # without a name, it is a ModelStreamInferResponse without an error too
    message.outputs.add(name="output", datatype="FP32", shape=[1, 3])
    message.raw_output_contents.append(bytes(12))
    content: bytes = message.SerializeToString()
    return b"\0" + len(content).to_bytes(4, "big") + content


class _Connection(Protocol):
    """The connection that a request arrived on."""

    def answer(self, key: int) -> None:
        """Make the answer to request `key`."""
        ...

    def flush(self) -> None:
        """Send the answers made."""
        ...


class Answering(Protocol):
    """Decides when answers are sent."""

    def on_request(self, connection: _Connection, key: int) -> None:
        """Take a request. The connection itself flushes what is answered within this call."""
        ...


class ImmediateAnswers:
    """Sends answers as soon as possible."""

    def on_request(self, connection: _Connection, key: int) -> None:
        connection.answer(key)


class DelayedAnswers:
    """Sends each answer when it is due. Invariant: answers are sent in the order of their requests."""

    def __init__(self) -> None:
        self._alarm = alarm(self._ring)
        self._due: deque[tuple[int, _Connection, int]] = deque()

    def due_at_ns(self, now_ns: int) -> int:
        """Return when the answer to a request that arrives now is due."""
        raise NotImplementedError

    def on_request(self, connection: _Connection, key: int) -> None:
        due_at_ns = self.due_at_ns(time.monotonic_ns())
        self._due.append((due_at_ns, connection, key))
        if len(self._due) == 1:
            self._alarm.set(due_at_ns - _SPIN_NS)

    def _ring(self) -> None:
        due = self._due
        while due:
            due_at_ns, connection, key = due[0]
            if due_at_ns - time.monotonic_ns() > _SPIN_NS:
                self._alarm.set(due_at_ns - _SPIN_NS)
                return
            while time.monotonic_ns() < due_at_ns:
                pass
            due.popleft()
            connection.answer(key)
            connection.flush()
        self._alarm.disarm()


class FixedDelay(DelayedAnswers):
    """Sends each answer a fixed time after its request."""

    def __init__(self, delay_ns: int) -> None:
        super().__init__()
        self._delay_ns = delay_ns

    def due_at_ns(self, now_ns: int) -> int:
        return now_ns + self._delay_ns


class VirtualQueue(DelayedAnswers):
    """Sends each answer at the time given by the virtual queue."""

    def __init__(self, law: str, mean_ns: int, seed: int) -> None:
        super().__init__()
        self._line = Line()
        self._services: Iterator[int] = iter(services_ns(law, mean_ns, _SERVICES, seed).tolist())

    def due_at_ns(self, now_ns: int) -> int:
        return self._line.departure(now_ns, next(self._services))


class Http1(asyncio.Protocol):
    """One HTTP/1.1 connection, or one whose protocol is not known yet."""

    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self._received = b""
        self._request_number = b""
        self._answers = 0
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if data == self._request_number or self._whole(data):  # most clients here repeat the same request
            self._answering.on_request(self, 0)
            if self._answers:
                self.flush()

    def _whole(self, data: bytes) -> bool:
        request = self._received + data
        if request.startswith(frames.PREFACE[:4]):
            http2 = Http2(self._answering)
            self._transport.set_protocol(http2)
            http2.connection_made(self._transport)
            http2.data_received(request)
            return False
        end = request.find(b"\r\n\r\n") + 4
        position = request.lower().find(b"\r\ncontent-length:", 0, end) if end > 4 else -1
        size = int(request[position + 17 : request.index(b"\r", position + 2)]) if position >= 0 else 0
        if end < 4 or len(request) < end + size:
            self._received = request
            return False
        self._received, self._request_number = b"", request
        return True

    def answer(self, key: int) -> None:
        """Make the answer."""
        self._answers += 1

    def flush(self) -> None:
        """Send it."""
        if self._transport is not None:
            self._transport.write(_HTTP_ANSWER * self._answers)
        self._answers = 0

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None


class Http2(asyncio.Protocol):
    """One gRPC connection over HTTP/2: each message is answered by a message, the end of a stream by its trailers."""

    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self._received = b""
        self._at = len(frames.PREFACE)
        self._out: list[bytes] = []
        self._parts: dict[int, bytes] = {}
        self._waiting: dict[int, int] = {}
        self._ended: set[int] = set()
        self._next_key: set[int] = set()
        self._consumed_bytes = 0
        self._transport: Any = None
        self._message = _message()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        values = {frames.INITIAL_WINDOW_SIZE: frames.MAX_WINDOW, frames.MAX_CONCURRENT_STREAMS: 1 << 20}
        self._out += (frames.settings(values), frames.window_update(0, _WINDOW_INCREMENT))

    def data_received(self, data: bytes) -> None:
        received, position = self._received + data if self._received else data, self._at
        while len(received) - position >= frames.FRAME_HEADER_BYTES:
            size_and_type, flags, stream = frames.FRAME_HEADER.unpack_from(received, position)
            end = position + frames.FRAME_HEADER_BYTES + (size_and_type >> 8)
            if end > len(received):
                break
            kind = size_and_type & 0xFF
            if kind == frames.DATA:
                self._consumed_bytes += size_and_type >> 8
                self._body(stream, received[position + frames.FRAME_HEADER_BYTES : end], flags & frames.END_STREAM)
            elif kind != frames.HEADERS:
                self._other(kind, flags, received[position + frames.FRAME_HEADER_BYTES : end])
            position = end
        self._received, self._at = received[position:], max(position - len(received), 0)
        if self._consumed_bytes > _WINDOW_INCREMENT // 2:
            self._out.append(frames.window_update(0, self._consumed_bytes))
            self._consumed_bytes = 0
        if self._out:
            self.flush()

    def _body(self, stream: int, payload: bytes, end_flag: int) -> None:
        if self._parts:
            payload = self._parts.pop(stream, b"") + payload
        if end_flag:
            self._ended.add(stream)
        while len(payload) >= _PREFIX_BYTES:
            size = _PREFIX_BYTES + int.from_bytes(payload[1:_PREFIX_BYTES], "big")
            if len(payload) < size:
                break
            payload = payload[size:]
            self._waiting[stream] = self._waiting.get(stream, 0) + 1
            self._answering.on_request(self, stream)
        if payload:
            self._parts[stream] = payload
        if end_flag and stream in self._ended and not self._waiting.get(stream):  # all was answered before the end
            self._end(stream)

    def _other(self, kind: int, flags: int, payload: bytes) -> None:
        if kind in (frames.SETTINGS, frames.PING) and not flags & frames.ACK:
            self._out.append(frames.frame(kind, frames.ACK, 0, payload if kind == frames.PING else b""))

    def answer(self, key: int) -> None:
        """Make the next answer of a stream."""
        if key not in self._next_key:
            self._next_key.add(key)
            self._out.append(frames.frame(frames.HEADERS, frames.END_HEADERS, key, _GRPC_HEAD))
        self._out.append(frames.frame(frames.DATA, 0, key, self._message))
        self._waiting[key] -= 1
        if not self._waiting[key] and key in self._ended:
            self._end(key)

    def _end(self, stream: int) -> None:
        self._out.append(frames.frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, stream, _GRPC_TRAILER))
        self._waiting.pop(stream, None)
        self._ended.discard(stream)
        self._next_key.discard(stream)

    def flush(self) -> None:
        """Send the frames made."""
        if self._transport is not None:
            self._transport.write(b"".join(self._out))
        self._out.clear()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None


async def serve(args: argparse.Namespace) -> None:
    """Answer until cancelled."""
    loop = asyncio.get_running_loop()
    answering: Answering = ImmediateAnswers()
    _message()  # slow the first time, so done before the first connection
    if args.delay_us:
        answering = FixedDelay(args.delay_us * 1000)
    elif args.law:
        answering = VirtualQueue(args.law, args.mean_us * 1000, args.seed)
    server = await loop.create_server(lambda: Http1(answering), HOST, args.port, backlog=1024)
    await server.serve_forever()


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser(prog="python -m penstock.perf.stub_server", description=__doc__)
    parser.add_argument("--delay-us", type=int, default=0, help="hold each answer back so long")
    parser.add_argument("--law", choices=LAWS, help="hold answers back as a queue with such service times would")
    parser.add_argument("--mean-us", type=int, default=8000, help="the mean service time")
    parser.add_argument("--seed", type=int, default=0, help="of the service times")
    parser.add_argument("port", type=int)
    gc.disable()
    uvloop.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
