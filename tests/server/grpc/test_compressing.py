"""Large answers compressed on a thread, without sockets: order, trailers, and events in the meantime."""

from __future__ import annotations

import asyncio
import random
import sys
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from penstock.server.grpc.call import GrpcCall
from penstock.server.grpc.method import Status
from penstock.server.http2 import frames
from tests.server.http2.wire import BIDI, ECHO, HOLD, OK, Wire, message_of, payload

LARGE = random.Random(1).randbytes(300_000)
WINDOW = 2**24


class Threads:
    """Runs the work that is given to threads when a test says so."""

    def __init__(self, wire: Wire) -> None:
        self.submitted: list[tuple[Callable[..., Any], tuple[Any, ...], Future[Any]]] = []
        wire.loop.run_in_executor = self._give  # type: ignore[method-assign]

    def _give(self, executor: None, function: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.submitted.append((function, args, future))
        return future

    def do(self) -> Any:
        function, args, future = self.submitted.pop(0)
        done = function(*args)
        future.set_result(done)
        return done


def wired(path: str, **fields: Any) -> tuple[Wire, Threads]:
    """Return a connection with large windows, on which a call that accepts gzip has begun, and its threads."""
    wire = Wire(grpc={"compression": 1})
    wire.feed(frames.window_update(0, WINDOW) + frames.settings({frames.INITIAL_WINDOW_SIZE: WINDOW}))
    wire.feed(wire.headers(__path=path, grpc_accept_encoding="gzip", **fields))
    return wire, Threads(wire)


def held(**fields: Any) -> tuple[Wire, Threads]:
    """Return the same with the one message of a call of HOLD."""
    wire, threads = wired(HOLD, **fields)
    wire.feed(payload(message_of(b""), end=True))
    return wire, threads


def refused(*_: Any) -> Any:
    raise RuntimeError("can't start new thread")


def messages_of(found: list[Any]) -> list[bytes]:
    """Return the decompressed messages in DATA frames."""
    body = b"".join(frame.payload for frame in found if frame.kind == frames.DATA)
    messages = []
    while body:
        size = int.from_bytes(body[1:5], "big")
        message, flag, body = body[5 : 5 + size], body[0], body[5 + size :]
        messages.append(zlib.decompress(message, 31) if flag else message)
    return messages


@pytest.mark.parametrize("path", [ECHO, BIDI])
def test_a_large_answer_is_compressed_on_a_thread_while_other_calls_are_answered(path: str) -> None:
    wire, threads = wired(path)
    wire.feed(payload(message_of(LARGE), end=True))
    wire.feed(wire.call(message=b"another", stream=3))
    assert wire.answers() == {3: (b"another", OK, "")}
    threads.do()
    wire.loop.turn()
    found = wire.frames()

    assert messages_of(found) == [LARGE]
    assert wire.fields(found[-1]) == {"grpc-status": "0"}
    assert found[-1].flags & frames.END_STREAM
    assert wire.connection.streams == {}


def test_messages_and_trailers_sent_after_a_large_message_wait_until_it_is_compressed() -> None:
    wire, threads = held()
    sent = [LARGE, b"small", b"many " * 100, LARGE, b"", b"last"]
    for message in sent:
        wire.held[0].send(message)
    wire.held[0].abort(Status.ABORTED, "enough")
    wire.loop.turn()
    found = wire.frames()
    assert messages_of(found) == []
    while threads.submitted:
        threads.do()
        wire.loop.turn()
        found += wire.frames()
    last = found[-1]
    block = [frame for frame in found if frame.kind == frames.HEADERS]

    assert messages_of(found) == sent
    assert wire.fields(block[0])["grpc-encoding"] == "gzip"
    assert wire.fields(last) == {"grpc-status": "10", "grpc-message": "enough"}


def test_messages_delayed_by_compression_and_then_by_the_window_keep_their_order() -> None:
    wire, threads = wired(BIDI)
    wire.feed(frames.settings({frames.INITIAL_WINDOW_SIZE: 1000}))
    wire.feed(payload(message_of(LARGE)))
    threads.do()
    wire.loop.turn()
    wire.feed(payload(message_of(b"second"), end=True))
    found = wire.frames()
    assert sum(len(frame.payload) for frame in found if frame.kind == frames.DATA) == 1000
    wire.feed(frames.window_update(1, WINDOW))
    found += wire.frames()

    assert messages_of(found) == [LARGE, b"second"]
    assert wire.fields(found[-1]) == {"grpc-status": "0"}
    assert wire.connection.streams == {}


def test_client_messages_wait_without_timing_out_while_an_answer_is_compressed() -> None:
    wire, threads = wired(BIDI)
    wire.feed(payload(message_of(LARGE)))
    wire.feed(payload(message_of(b"second")))
    wire.shared.sweep(3600.0)
    wire.loop.turn()
    threads.do()
    wire.loop.turn()

    assert messages_of(wire.frames()) == [LARGE, b"second"]


def test_a_half_close_reaches_the_method_while_an_answer_is_compressed() -> None:
    wire, threads = wired(BIDI)
    wire.feed(payload(message_of(LARGE)))
    [call] = wire.connection.streams.values()
    wire.feed(payload(b"", end=True))
    assert isinstance(call, GrpcCall)
    assert call.ended
    threads.do()
    wire.loop.turn()
    found = wire.frames()

    assert messages_of(found) == [LARGE]
    assert wire.fields(found[-1]) == {"grpc-status": "0"}


def test_messages_are_sent_uncompressed_when_no_thread_can_be_started() -> None:
    wire, threads = held()
    wire.held[0].send(LARGE)
    wire.held[0].send(LARGE)
    wire.loop.run_in_executor = refused  # type: ignore[assignment, method-assign]
    threads.do()
    wire.held[0].send(LARGE)
    wire.held[0].finish()
    wire.loop.turn()
    found = wire.frames()

    assert messages_of(found) == [LARGE] * 3
    assert wire.fields(found[-1]) == {"grpc-status": "0"}
    assert wire.shared.unread.held_bytes == 0


def test_drain_waits_until_a_large_message_is_compressed() -> None:
    async def wait() -> bool:
        wire, threads = held()
        wire.loop.create_future = asyncio.get_running_loop().create_future  # type: ignore[attr-defined]
        call = wire.held[0]
        call.send(LARGE)
        waiting = asyncio.ensure_future(call.drain())
        await asyncio.sleep(0)
        before: bool = waiting.done()
        threads.do()
        await waiting
        return before

    assert asyncio.run(wait()) is False


@pytest.mark.parametrize("finished", [False, True])
def test_compression_stops_when_the_call_is_reset(*, finished: bool) -> None:
    wire, threads = held()
    call = wire.held[0]
    call.send(LARGE)
    call.send(LARGE)
    if finished:
        call.finish()
    wire.loop.turn()
    wire.frames()
    wire.feed(frames.reset(1, frames.ErrorCode.CANCEL))
    assert threads.do() == b""
    wire.loop.turn()

    assert wire.cancelled == (not finished)
    assert (wire.frames(), threads.submitted) == ([], [])
    wire.feed(wire.call(message=b"another", stream=3))
    assert wire.answers() == {3: (b"another", OK, "")}


def test_an_answer_compressed_after_the_connection_is_lost_is_not_sent() -> None:
    wire, threads = wired(ECHO)
    wire.feed(payload(message_of(LARGE), end=True))
    wire.connection.connection_lost(None)

    assert threads.do() == b""
    assert wire.connection.outbox.frames == []


def test_a_draining_connection_stays_open_for_an_answer_being_compressed() -> None:
    wire, threads = wired(ECHO)
    wire.feed(payload(message_of(LARGE), end=True))
    wire.connection.shutdown()
    wire.loop.pass_time(1.0)
    assert not wire.transport.over
    wire.frames()
    threads.do()
    wire.loop.turn()

    assert messages_of(wire.frames()) == [LARGE]
    assert wire.transport.over


def test_a_deadline_exceeded_status_follows_the_message_being_compressed() -> None:
    wire, threads = held(grpc_timeout="50m")
    wire.held[0].send(LARGE)
    wire.loop.pass_time(0.1)
    assert (wire.cancelled, messages_of(wire.frames())) == (1, [])
    threads.do()
    wire.loop.turn()
    found = wire.frames()

    assert messages_of(found) == [LARGE]
    assert wire.fields(found[-1])["grpc-status"] == str(int(Status.DEADLINE_EXCEEDED))


def test_a_call_whose_answer_cannot_be_compressed_is_reset(caplog: pytest.LogCaptureFixture) -> None:
    wire, threads = wired(ECHO)
    wire.feed(payload(message_of(LARGE), end=True))
    threads.submitted.pop()[2].set_exception(MemoryError())
    wire.loop.turn()

    assert wire.reset_of(1) == frames.ErrorCode.INTERNAL_ERROR
    assert "an answer could not be compressed" in caplog.text


def test_messages_waiting_for_compression_count_as_unread_until_they_are_sent() -> None:
    wire, threads = held()
    counted = []
    for message in (LARGE, b"word", b"many " * 100):
        wire.held[0].send(message)
        counted.append(wire.shared.unread.held_bytes)
    while threads.submitted:
        threads.do()
        counted.append(wire.shared.unread.held_bytes)

    assert counted == [300_000, 300_004, 300_504, 500, 0]


def test_messages_over_the_unread_limit_are_sent_uncompressed_and_no_call_is_dropped() -> None:
    wire, threads = held()
    wire.shared.unread.max_bytes = 1_000_000
    wire.feed(wire.headers(3, grpc_accept_encoding="gzip") + payload(message_of(LARGE), 3, end=True))
    for _ in range(4):
        wire.held[0].send(LARGE)
    wire.held[0].finish()
    wire.loop.turn()
    found = wire.frames()
    assert messages_of(found) == [LARGE] * 4
    assert wire.fields(found[-1]) == {"grpc-status": "0"}
    assert (wire.cancelled, wire.shared.unread.held_bytes) == (0, len(LARGE))
    assert [threads.do() == b"" for _ in range(2)] == [False, True]
    wire.loop.turn()

    assert messages_of(wire.frames()) == [LARGE]
    assert (threads.submitted, wire.shared.unread.held_bytes, wire.connection.streams) == ([], 0, {})


def test_a_call_whose_uncompressed_messages_exceed_the_unread_limit_is_reset() -> None:
    wire, _ = held()
    wire.shared.unread.max_bytes = 1_000_000
    wire.feed(frames.settings({frames.INITIAL_WINDOW_SIZE: 0}))
    for _ in range(4):
        wire.held[0].send(LARGE)
    wire.loop.turn()

    assert wire.reset_of(1) == frames.ErrorCode.ENHANCE_YOUR_CALM
    assert (wire.cancelled, wire.shared.unread.held_bytes) == (1, 0)


def test_a_reset_call_releases_its_queued_messages_before_a_thread_reaches_them() -> None:
    wire, threads = held()
    before = sys.getrefcount(LARGE)
    wire.held[0].send(LARGE)
    wire.held[0].send(LARGE)
    wire.feed(frames.reset(1, frames.ErrorCode.CANCEL))

    assert len(threads.submitted) == 1
    assert sys.getrefcount(LARGE) == before
    assert wire.shared.unread.held_bytes == 0


def test_messages_being_compressed_are_not_counted_after_their_connection_is_shed() -> None:
    wire, threads = held()
    wire.held[0].send(LARGE)
    wire.connection.outbox.shed()
    assert wire.shared.unread.held_bytes == 0

    assert threads.do() == b""
    wire.connection.connection_lost(None)
    assert (wire.cancelled, wire.connection.streams) == (1, {})
