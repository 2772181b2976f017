"""One RPC without sockets: status, error texts, deadlines, compression, malformed messages."""

from __future__ import annotations

import asyncio
import gzip
import random
import zlib
from typing import Any

import pytest

from penstock.server.grpc.answer_frames import percent_encoded
from penstock.server.grpc.call import GrpcCall
from penstock.server.grpc.decompressing import Decompression
from penstock.server.grpc.framing import MessageError
from penstock.server.grpc.method import Call, Method, Status
from penstock.server.http2 import frames
from tests.server.http2.wire import BIDI, BREAK, ECHO, GIVE, HOLD, OK, REFUSE, Echo, Wire, message_of, payload

MANY = b"many " * 1000


def status_of(wire: Wire, sent: bytes) -> tuple[int, str]:
    wire.feed(sent)
    return wire.answers()[1][1:]


def test_an_error_with_a_status_code_is_answered_with_that_status() -> None:
    assert status_of(Wire(), Wire().call(REFUSE, b"no such thing")) == (Status.NOT_FOUND, "no such thing")


def test_an_internal_error_is_answered_with_an_id_and_logged_with_its_details(caplog: pytest.LogCaptureFixture) -> None:
    status, text = status_of(Wire(), Wire().call(BREAK))

    assert status == Status.INTERNAL
    assert text.startswith("internal error, id ")
    assert "secret" not in text
    assert "a secret" in caplog.text
    assert caplog.records[0].__dict__["request_id"] in text


def test_a_rejected_call_is_answered_with_one_header_block() -> None:
    wire = Wire()
    wire.feed(wire.call("/no"))
    frame, reset = wire.frames()

    assert (reset.kind, reset.payload[-1]) == (frames.RST_STREAM, frames.ErrorCode.NO_ERROR)
    assert frame.flags == frames.END_HEADERS | frames.END_STREAM
    assert wire.fields(frame) == {
        ":status": "200", "content-type": "application/grpc", "grpc-status": "12",
        "grpc-message": "unknown method /no", "grpc-accept-encoding": "identity, deflate, gzip",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "http", "status"),
    [
        ({"content_type": "text/html"}, "415", 13), ({"content_type": None}, "415", 13),
        ({"content_type": "application/grpcx"}, "415", 13), ({"content_type": "application/grpc+json"}, "200", 13),
        ({"__method": "GET"}, "405", 13), ({"te": None}, "400", 13), ({"__path": "/nobody.Here/X"}, "200", 12),
        ({"grpc_timeout": "1"}, "200", 13), ({"grpc_timeout": "123456789S"}, "200", 13),
        ({"grpc_timeout": "-1S"}, "200", 13), ({"grpc_encoding": "snappy"}, "200", 12),
    ],
    ids=str,
)  # fmt: skip
def test_a_request_with_headers_invalid_in_grpc_is_rejected(fields: dict[str, Any], http: str, status: int) -> None:
    wire = Wire()
    wire.feed(wire.headers(**fields) + payload(message_of(b"x"), end=True))
    first = wire.frames()[0]

    found = wire.fields(first)
    assert (found[":status"], found["grpc-status"]) == (http, str(status))


@pytest.mark.parametrize("kind", ["application/grpc", "application/grpc+proto", "application/grpc;charset=utf-8"])
def test_every_content_type_of_grpc_is_accepted(kind: str) -> None:
    wire = Wire()
    wire.feed(wire.headers(content_type=kind) + payload(message_of(b"x"), end=True))

    assert wire.answers() == {1: (b"x", OK, "")}


def test_metadata_has_lower_case_names_and_joined_values() -> None:
    wire = Wire()
    block = wire.encoder.encode([
        (":method", "POST"), (":scheme", "http"), (":path", HOLD), (":authority", "host"), ("te", "trailers"),
        ("content-type", "application/grpc"), ("x", "1"), ("x", "2"), ("y-bin", "AAE"),
    ])  # fmt: skip
    wire.feed(frames.frame(frames.HEADERS, 4, 1, block) + payload(message_of(b""), end=True))
    metadata = wire.held[0].metadata

    assert (metadata["x"], metadata["y-bin"], metadata[":authority"]) == ("1,2", "AAE", "host")


BAD_MESSAGES = {
    "none": (b"", Status.UNIMPLEMENTED),
    "two": (message_of(b"1") + message_of(b"2"), Status.UNIMPLEMENTED),
    "half a prefix": (b"\0\0\0", Status.INTERNAL),
    "half a message": (message_of(b"12345")[:-1], Status.INTERNAL),
    "more than announced": (message_of(b"12345") + b"6", Status.INTERNAL),
    "unknown flags": (message_of(b"1", 2), Status.INTERNAL),
    "compressed without a coding": (message_of(b"1", 1), Status.INTERNAL),
    "too large": (b"\0\0\1\0\0", Status.RESOURCE_EXHAUSTED),
}


@pytest.mark.parametrize(("sent", "status"), BAD_MESSAGES.values(), ids=BAD_MESSAGES)
def test_a_unary_request_that_is_not_exactly_one_valid_message_is_rejected(sent: bytes, status: Status) -> None:
    wire = Wire(grpc={"max_message_bytes": 65535})
    wire.feed(wire.headers() + payload(sent, end=True))

    assert wire.answers()[1][1] == status
    assert wire.shared.held_bytes == 0
    assert wire.connection.streams == {}


def test_a_message_too_large_by_its_prefix_is_rejected_and_its_stream_reset() -> None:
    wire = Wire(grpc={"max_message_bytes": 65535})
    wire.feed(wire.headers() + payload(b"\0\0\1\0\0"))
    found = wire.frames()

    assert wire.fields(found[0])["grpc-message"] == "Received message larger than max (65536 vs. 65535)"
    assert [(frame.kind, frame.payload[-1]) for frame in found[1:]] == [(frames.RST_STREAM, 0)]
    wire.feed(payload(b"x" * 50, end=True) + wire.call(stream=3))
    assert wire.answers().keys() == {3}


def test_a_too_large_message_in_a_single_frame_is_rejected() -> None:
    wire = Wire(grpc={"max_message_bytes": 10})
    wire.feed(wire.call(message=bytes(10)) + wire.call(message=bytes(11), stream=3))

    assert {stream: status for stream, (_, status, _) in wire.answers().items()} == {1: OK, 3: 8}


def test_a_streaming_call_is_cancelled_when_its_next_message_is_malformed() -> None:
    class Begins(Echo):
        def __init__(self, call: Call) -> None:
            super().__init__(call)
            call.on_cancel = lambda: cancelled.append(call.ended)

    cancelled: list[bool] = []
    wire = Wire()
    wire.shared.methods = {BIDI: Method(BIDI, streaming=Begins)}
    wire.feed(wire.headers(__path=BIDI) + payload(message_of(b"x") + message_of(b"y", 7)))

    assert wire.answers()[1][1] == Status.INTERNAL
    assert cancelled == [True]


@pytest.mark.parametrize("cut", [1, 4, 5, 6, 9])
def test_messages_may_be_split_across_frames_at_any_byte(cut: int) -> None:
    wire = Wire()
    sent = message_of(b"first") + message_of(b"") + message_of(b"third")
    parts = [sent[at : at + cut] for at in range(0, len(sent), cut)]
    wire.feed(wire.headers(__path=BIDI) + b"".join(payload(part) for part in parts) + payload(b"", end=True))
    bodies = b"".join(frame.payload for frame in wire.frames() if frame.kind == frames.DATA)

    assert bodies == sent


# -- compression -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("coding", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_compressed_and_plain_messages_are_accepted_on_a_compressed_call(coding: str, compress: object) -> None:
    wire = Wire()
    sent = compress(MANY)  # type: ignore[operator]
    wire.feed(wire.headers(grpc_encoding=coding) + payload(message_of(sent, 1), end=True))
    assert wire.answers() == {1: (MANY, OK, "")}

    wire.feed(wire.headers(3, grpc_encoding=coding) + payload(message_of(b"plain"), 3, end=True))
    assert wire.answers() == {3: (b"plain", OK, "")}


@pytest.mark.parametrize("path", [ECHO, BIDI])
def test_large_compressed_messages_are_decompressed_on_a_thread_and_handled_in_order(path: str) -> None:
    wire = Wire()
    large = random.Random(1).randbytes(40_000)
    sent = [message_of(gzip.compress(large), 1)]
    if path == BIDI:
        sent += [message_of(b"second"), message_of(gzip.compress(large), 1)]
    wire.feed(wire.headers(__path=path, grpc_encoding="gzip") + frames.window_update(0, 10**6))
    wire.connection.data_received(
        frames.settings({frames.INITIAL_WINDOW_SIZE: 10**6}) + payload(b"".join(sent), end=True)
    )
    assert wire.connection.streams[1].remote_ended
    wire.loop.turn()
    bodies = b"".join(frame.payload for frame in wire.frames() if frame.kind == frames.DATA)

    expected = [large] if path == ECHO else [large, b"second", large]
    assert bodies == b"".join(message_of(content) for content in expected)
    assert wire.connection.streams == {}
    assert wire.shared.held_bytes == 0


def test_a_small_message_that_expands_to_a_large_one_is_decompressed_on_a_thread() -> None:
    wire = Wire()
    wire.connection.data_received(
        wire.headers(grpc_encoding="gzip") + payload(message_of(gzip.compress(bytes(10**7)), 1), end=True)
    )
    wire.connection.outbox.flush()
    assert frames.HEADERS not in [frame.kind for frame in wire.frames()]
    wire.loop.turn()

    assert frames.HEADERS in [frame.kind for frame in wire.frames()]
    assert wire.shared.held_bytes == 0


def test_a_decompressed_message_of_a_stream_is_not_counted_after_it_is_handed_over() -> None:
    wire = Wire()
    sent = message_of(gzip.compress(bytes(10**6)), 1)
    wire.connection.data_received(wire.headers(__path=BIDI, grpc_encoding="gzip") + payload(sent))
    wire.loop.turn()

    assert not wire.connection.streams[1].remote_ended
    assert wire.shared.held_bytes == 0


def test_the_receive_memory_limit_counts_the_decompressed_bytes_of_all_messages() -> None:
    wire = Wire(grpc={"max_receive_bytes": 40 << 20})
    bomb = message_of(gzip.compress(bytes(30 << 20)), 1)
    for stream_id in (1, 3):
        wire.connection.data_received(
            wire.headers(stream_id, grpc_encoding="gzip") + payload(bomb, stream_id, end=True)
        )
    wire.loop.turn()

    refused = "incomplete requests exceed the limit of 41943040 bytes"
    assert wire.answers()[1][1:] == (Status.RESOURCE_EXHAUSTED, refused)
    assert wire.shared.held_bytes == 0


def test_a_corrupt_large_compressed_message_is_rejected_unless_its_call_has_ended() -> None:
    wire = Wire()
    sent = message_of(b"nonsense" * 5000, 1)
    wire.connection.data_received(wire.headers(1, grpc_encoding="gzip") + payload(sent, 1, end=True))
    wire.connection.data_received(wire.headers(3, grpc_encoding="gzip") + payload(sent, 3, end=True))
    wire.connection.data_received(frames.reset(3, frames.ErrorCode.CANCEL))
    wire.loop.turn()

    assert wire.answers() == {1: (b"", Status.INTERNAL, "failed to decompress the gzip message")}


@pytest.mark.parametrize("sent", [b"nonsense", gzip.compress(b"x", mtime=0)[:-1], gzip.compress(b"x", mtime=0) + b"y"])
def test_a_message_that_fails_to_decompress_is_rejected(sent: bytes) -> None:
    wire = Wire()
    wire.feed(wire.headers(grpc_encoding="gzip") + payload(message_of(sent, 1), end=True))

    assert wire.answers()[1][1:] == (Status.INTERNAL, "failed to decompress the gzip message")


def test_a_decompression_bomb_is_rejected() -> None:
    wire = Wire(grpc={"max_message_bytes": 10**6})
    bomb = gzip.compress(bytes(10**8))
    wire.feed(wire.headers(grpc_encoding="gzip") + payload(message_of(bomb, 1), end=True))

    assert wire.answers()[1][1:] == (
        Status.RESOURCE_EXHAUSTED,
        "Received message larger than max when decompressed (1000000)",
    )


def test_decompression_stops_one_byte_above_the_limit() -> None:
    decompression = Decompression(gzip.compress(bytes(10**7)), b"gzip", 10**6)
    with pytest.raises(MessageError, match="larger than max"):
        decompression.step(10**7)

    assert decompression.size == 10**6 + 1


@pytest.mark.parametrize(
    ("accepts", "coding"), [("identity, deflate, gzip", "gzip"), ("deflate", "deflate"), ("identity", ""), (None, "")]
)
@pytest.mark.parametrize("path", [ECHO, BIDI])
def test_answers_are_compressed_with_the_best_coding_that_the_client_accepts(
    accepts: str | None, coding: str, path: str
) -> None:
    wire = Wire(grpc={"compression": 6})
    wire.feed(wire.headers(__path=path, grpc_accept_encoding=accepts) + payload(message_of(MANY), end=True))
    first, second, *_ = wire.frames()

    assert wire.fields(first).get("grpc-encoding", "") == coding
    assert second.payload[0] == bool(coding)
    windows = {"gzip": 31, "deflate": 15}
    content = second.payload[5:]
    assert (zlib.decompress(content, windows[coding]) if coding else content) == MANY


def test_small_answers_are_not_compressed_and_compression_is_off_by_default() -> None:
    small = Wire(grpc={"compression": 6})
    small.feed(small.headers(grpc_accept_encoding="gzip") + payload(message_of(b"small"), end=True))
    uncompressed = Wire()
    uncompressed.feed(uncompressed.headers(grpc_accept_encoding="gzip") + payload(message_of(MANY), end=True))

    assert small.answers()[1][0] == b"small"
    assert uncompressed.answers()[1][0] == MANY


# -- deadlines -------------------------------------------------------------------------------------------------


def test_a_call_is_answered_deadline_exceeded_and_cancelled_when_its_deadline_passes() -> None:
    wire = Wire()
    wire.feed(wire.headers(1, __path=HOLD, grpc_timeout="50m") + payload(message_of(b""), 1, end=True))
    wire.feed(wire.headers(3, __path=HOLD, grpc_timeout="2S") + payload(message_of(b""), 3, end=True))
    assert wire.held[0].deadline_ns == wire.loop.clock() + 50_000_000
    wire.loop.pass_time(0.049)
    assert wire.answers() == {}
    wire.loop.pass_time(0.006)

    assert wire.answers() == {1: (b"", Status.DEADLINE_EXCEEDED, "Deadline Exceeded")}
    assert wire.cancelled == 1
    wire.loop.pass_time(2.0)
    assert wire.answers().keys() == {3}


def test_a_call_that_ends_before_its_deadline_leaves_no_deadline_behind() -> None:
    wire = Wire()
    wire.feed(wire.headers(1, grpc_timeout="50m") + payload(message_of(b"x"), 1, end=True))
    wire.feed(wire.headers(3, __path=HOLD, grpc_timeout="50m") + payload(message_of(b""), 3, end=True))
    wire.feed(frames.reset(3, frames.ErrorCode.CANCEL))
    assert wire.shared.deadlines._slot_of == {}
    wire.loop.pass_time(1.0)

    assert wire.answers() == {1: (b"x", OK, "")}
    assert (wire.shared.deadlines._slots, wire.shared.deadlines._slot_heap) == ({}, [])


@pytest.mark.parametrize("name", ["expire", "on_reset"])
def test_an_exception_while_one_call_is_ended_does_not_keep_other_calls_from_ending(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = getattr(GrpcCall, name)

    def fail_once(*_: object) -> None:
        monkeypatch.setattr(GrpcCall, name, original)
        raise ZeroDivisionError("it goes on")

    wire = Wire()
    for stream in (1, 3, 5):
        timeout = "50m" if stream != 5 else "5S"
        wire.feed(wire.headers(stream, __path=HOLD, grpc_timeout=timeout) + payload(message_of(b""), stream, end=True))
    monkeypatch.setattr(GrpcCall, name, fail_once)
    if name == "on_reset":
        wire.connection.connection_lost(None)
        assert [call.ended for call in wire.held] == [False, True, True]
    else:
        wire.loop.pass_time(0.06)
        assert [call.ended for call in wire.held] == [False, True, False]
        wire.loop.pass_time(5.0)
        assert [call.ended for call in wire.held] == [False, True, True]
    assert "it goes on" in caplog.text


def test_an_exception_in_on_cancel_does_not_keep_other_calls_from_ending(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ZeroDivisionError("it goes on")

    wire = Wire()
    for stream in (1, 3):
        wire.feed(wire.headers(stream, __path=HOLD, grpc_timeout="50m") + payload(message_of(b""), stream, end=True))
    wire.feed(wire.call(HOLD, stream=5) + wire.call(HOLD, stream=7))
    wire.held[0].on_cancel = wire.held[2].on_cancel = fail
    wire.loop.pass_time(0.06)

    assert wire.answers().keys() == {1, 3}
    assert wire.cancelled == 1
    wire.connection.connection_lost(None)
    assert wire.cancelled == 2
    assert [call.ended for call in wire.held] == [True] * 4
    assert len(caplog.records) == 2


@pytest.mark.parametrize("text", ["99999999H", "1M", "30S", "5000m"])
def test_a_distant_deadline_expires_on_time(text: str) -> None:
    wire = Wire()
    seconds = int(text[:-1]) * {"H": 3600, "M": 60, "S": 1, "m": 0.001}[text[-1]]
    wire.feed(wire.headers(1, __path=HOLD, grpc_timeout=text) + payload(message_of(b""), end=True))
    for _ in range(6):
        wire.loop.pass_time((seconds - 0.01) / 6)
        assert wire.held[0].ended is False
    for _ in range(3):
        wire.loop.pass_time(0.01)

    assert wire.held[0].ended


# -- streams ---------------------------------------------------------------------------------------------------


def test_an_error_after_messages_is_sent_in_the_trailers() -> None:
    wire = Wire()
    wire.feed(wire.call(HOLD))
    wire.held[0].send(b"one")
    wire.held[0].abort(Status.ABORTED, "enough")
    wire.loop.turn()

    assert wire.answers() == {1: (b"one", Status.ABORTED, "enough")}


def test_a_stream_may_end_without_a_message() -> None:
    wire = Wire()
    wire.feed(wire.call(HOLD))
    wire.held[0].finish()
    wire.loop.turn()

    assert wire.answers() == {1: (b"", OK, "")}


def test_an_exception_in_on_message_ends_the_call() -> None:
    class Breaks:
        def on_message(self, message: bytes) -> None:
            raise ZeroDivisionError

        def on_half_close(self) -> None:
            raise AssertionError

    wire = Wire()
    wire.shared.methods = {BIDI: Method(BIDI, streaming=lambda call: Breaks())}
    wire.feed(wire.headers(__path=BIDI) + payload(message_of(b"x") * 3, end=True))

    assert wire.answers()[1][1] == Status.INTERNAL


def test_drain_waits_until_the_queued_messages_are_sent_or_the_call_is_reset() -> None:
    async def wait() -> list[str]:
        wire = Wire()
        wire.loop.create_future = asyncio.get_running_loop().create_future  # type: ignore[attr-defined]
        wire.feed(frames.window_update(0, 10**6) + wire.call(HOLD))
        call, events = wire.held[0], []
        call.send(bytes(200_000))
        assert not call.writable
        waiting = asyncio.ensure_future(call.drain())
        await asyncio.sleep(0)
        wire.feed(frames.window_update(1, 10_000))
        await asyncio.sleep(0)
        events.append("waits" if not waiting.done() else "left")
        wire.feed(frames.window_update(1, 100_000))
        await waiting
        assert call.writable
        call.send(bytes(200_000))
        waiting = asyncio.ensure_future(call.drain())
        await asyncio.sleep(0)
        wire.feed(frames.reset(1, frames.ErrorCode.CANCEL))
        await waiting
        return events

    assert asyncio.run(wait()) == ["waits"]


# -- texts -----------------------------------------------------------------------------------------------------


def test_status_messages_are_percent_encoded_and_truncated() -> None:
    assert percent_encoded("a b~%\n\u00e9") == b"a b~%25%0A%C3%A9"
    assert percent_encoded("\ud800") == b"?"
    assert len(percent_encoded("\u00e9" * 5000)) <= 4096


def test_a_method_must_be_either_unary_or_streaming() -> None:
    with pytest.raises(ValueError, match="exactly one of"):
        Method(GIVE)
