"""What a peer may send and what it may not: RFC 9113, frame by frame, against a connection without sockets."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from penstock.server.grpc.call import GrpcCall
from penstock.server.http2 import frames
from penstock.server.http2.frames import ErrorCode
from penstock.server.http2.keepalive import Keepalive

from .wire import BIDI, HOLD, OK, FakeTransport, Wire, message_of, payload


def frame(kind: int, flags: int = 0, stream: int = 0, content: bytes = b"") -> bytes:
    return frames.frame(kind, flags, stream, content)


def test_a_call_is_answered_in_one_write() -> None:
    wire = Wire()
    writes = wire.transport.writes

    wire.feed(wire.call(stream=1) + wire.call(stream=3, message=b"more"))

    assert wire.answers() == {1: (b"hello", OK, ""), 3: (b"more", OK, "")}
    assert wire.transport.writes == writes + 1


def test_the_server_sends_its_settings_after_the_client_preface() -> None:
    wire = Wire(begun=False)
    wire.feed(frames.PREFACE[:10])
    assert wire.frames() == []

    wire.feed(frames.PREFACE[10:] + frames.settings({}))

    kinds = [(item.kind, item.flags) for item in wire.frames()]
    assert kinds == [(frames.SETTINGS, 0), (frames.WINDOW_UPDATE, 0), (frames.SETTINGS, frames.ACK)]


def test_a_conversation_may_arrive_byte_by_byte() -> None:
    wire = Wire(begun=False)
    for byte in frames.PREFACE + frames.settings({}) + wire.call():
        wire.feed(bytes((byte,)))

    assert wire.answers() == {1: (b"hello", OK, "")}


def test_a_repeated_header_block_is_decoded_once() -> None:
    wire = Wire()
    wire.feed(wire.call(stream=1) + wire.call(stream=3))
    known = dict(wire.connection.headers.cached)
    wire.feed(wire.call(stream=5))

    assert len(known) == 1
    assert wire.connection.headers.cached == known
    assert wire.answers().keys() == {1, 3, 5}


def test_cached_header_blocks_are_dropped_when_the_hpack_table_changes() -> None:
    wire = Wire()
    for stream, value in ((1, "a"), (3, "a"), (5, "b"), (7, "a"), (9, "b")):
        wire.feed(wire.headers(stream, __path=HOLD, x=value) + payload(message_of(b""), stream, end=True))

    assert [call.metadata["x"] for call in wire.held] == ["a", "a", "b", "a", "b"]


def test_padding_and_priority_are_removed_from_headers_and_data() -> None:
    wire = Wire()
    block = wire.headers()[9:]
    padded = struct.pack(">B", 3) + struct.pack(">IB", 0, 7) + block + b"\0\0\0"
    flags = frames.PADDED | frames.HAS_PRIORITY | frames.END_HEADERS
    wire.feed(frame(frames.HEADERS, flags, 1, padded))
    wire.feed(frame(frames.DATA, frames.PADDED | frames.END_STREAM, 1, b"\x02" + message_of(b"hi") + b"\0\0"))

    assert wire.answers() == {1: (b"hi", OK, "")}


def test_a_header_block_may_be_split_into_continuation_frames() -> None:
    wire = Wire()
    block = wire.headers()[9:]
    parts = [frame(frames.HEADERS, 0, 1, block[:3]), frame(frames.CONTINUATION, 0, 1, block[3:6])]
    wire.feed(b"".join(parts) + frame(frames.CONTINUATION, frames.END_HEADERS, 1, block[6:]))
    wire.feed(payload(message_of(b"hi"), end=True))

    assert wire.answers() == {1: (b"hi", OK, "")}


def test_trailers_end_a_request() -> None:
    wire = Wire()
    trailers = frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, 1, wire.encoder.encode([("x", "y")]))
    wire.feed(wire.headers() + payload(message_of(b"hi")) + trailers)

    assert wire.answers() == {1: (b"hi", OK, "")}


def test_unknown_frames_and_priority_frames_are_ignored() -> None:
    wire = Wire()
    wire.feed(frame(0xFA, 0xFF, 77, b"x" * 50) + frame(frames.PRIORITY, 0, 9, b"\0\0\0\0\7") + wire.call())

    assert wire.answers() == {1: (b"hello", OK, "")}


def test_a_ping_is_answered_and_settings_are_acknowledged() -> None:
    wire = Wire()
    wire.feed(frame(frames.PING, 0, 0, b"12345678") + frames.settings({1: 0, 99: 5}))

    assert [(item.kind, item.flags, item.payload) for item in wire.frames()] == [
        (frames.PING, frames.ACK, b"12345678"), (frames.SETTINGS, frames.ACK, b""),
    ]  # fmt: skip


CONNECTION_ERRORS = {
    "DATA on stream 0": (frame(frames.DATA, 0, 0, b"x"), ErrorCode.PROTOCOL_ERROR),
    "DATA on an idle stream": (frame(frames.DATA, 0, 5, b"x"), ErrorCode.PROTOCOL_ERROR),
    "DATA on a stream of the server's": (frame(frames.DATA, 0, 2, b"x"), ErrorCode.PROTOCOL_ERROR),
    "HEADERS on stream 0": (frame(frames.HEADERS, 4, 0, b"\x82"), ErrorCode.PROTOCOL_ERROR),
    "HEADERS on an even stream": (frame(frames.HEADERS, 4, 2, b"\x82"), ErrorCode.PROTOCOL_ERROR),
    "HEADERS with too much padding": (frame(frames.HEADERS, 12, 1, b"\x09\x82"), ErrorCode.PROTOCOL_ERROR),
    "HEADERS without room for priority": (frame(frames.HEADERS, 0x24, 1, b"\x82"), ErrorCode.FRAME_SIZE_ERROR),
    "HEADERS of no block": (frame(frames.HEADERS, 4, 1, b"\xff\xff\xff\xff\xff\xff"), ErrorCode.COMPRESSION_ERROR),
    "an index beyond the table": (frame(frames.HEADERS, 4, 1, b"\xfe"), ErrorCode.COMPRESSION_ERROR),
    "a larger table than allowed": (frame(frames.HEADERS, 4, 1, b"\x3f\xe2\x1f\x82"), ErrorCode.COMPRESSION_ERROR),
    "three table sizes": (frame(frames.HEADERS, 4, 1, b"\x20\x21\x22\x82"), ErrorCode.COMPRESSION_ERROR),
    "CONTINUATION without HEADERS": (frame(frames.CONTINUATION, 4, 1, b"\x82"), ErrorCode.PROTOCOL_ERROR),
    "a block interrupted": (frame(frames.HEADERS, 0, 1, b"\x82") + frame(frames.PING), ErrorCode.PROTOCOL_ERROR),
    "a block continued elsewhere": (
        frame(frames.HEADERS, 0, 1, b"\x82") + frame(frames.CONTINUATION, 4, 3, b"\x82"), ErrorCode.PROTOCOL_ERROR,
    ),
    "PRIORITY on stream 0": (frame(frames.PRIORITY, 0, 0, b"12345"), ErrorCode.PROTOCOL_ERROR),
    "PRIORITY of 4 bytes": (frame(frames.PRIORITY, 0, 3, b"1234"), ErrorCode.FRAME_SIZE_ERROR),
    "RST_STREAM on an idle stream": (frames.reset(7, ErrorCode.CANCEL), ErrorCode.PROTOCOL_ERROR),
    "RST_STREAM on stream 0": (frames.reset(0, ErrorCode.CANCEL), ErrorCode.PROTOCOL_ERROR),
    "RST_STREAM of 3 bytes": (frame(frames.RST_STREAM, 0, 1, b"123"), ErrorCode.FRAME_SIZE_ERROR),
    "SETTINGS on a stream": (frame(frames.SETTINGS, 0, 1), ErrorCode.PROTOCOL_ERROR),
    "SETTINGS of 5 bytes": (frame(frames.SETTINGS, 0, 0, b"12345"), ErrorCode.FRAME_SIZE_ERROR),
    "an acknowledgement with a payload": (frame(frames.SETTINGS, 1, 0, b"123456"), ErrorCode.FRAME_SIZE_ERROR),
    "a window beyond 2^31-1": (frames.settings({frames.INITIAL_WINDOW_SIZE: 2**31}), ErrorCode.FLOW_CONTROL_ERROR),
    "frames of 16383": (frames.settings({frames.MAX_FRAME_SIZE: 16383}), ErrorCode.PROTOCOL_ERROR),
    "frames of 2^24": (frames.settings({frames.MAX_FRAME_SIZE: 2**24}), ErrorCode.PROTOCOL_ERROR),
    "push 2": (frames.settings({frames.ENABLE_PUSH: 2}), ErrorCode.PROTOCOL_ERROR),
    "PUSH_PROMISE": (frame(frames.PUSH_PROMISE, 4, 1, b"\0\0\0\2\x82"), ErrorCode.PROTOCOL_ERROR),
    "PING of 7 bytes": (frame(frames.PING, 0, 0, b"1234567"), ErrorCode.FRAME_SIZE_ERROR),
    "PING on a stream": (frame(frames.PING, 0, 1, b"12345678"), ErrorCode.PROTOCOL_ERROR),
    "GOAWAY of 7 bytes": (frame(frames.GOAWAY, 0, 0, b"1234567"), ErrorCode.FRAME_SIZE_ERROR),
    "WINDOW_UPDATE of 3 bytes": (frame(frames.WINDOW_UPDATE, 0, 0, b"123"), ErrorCode.FRAME_SIZE_ERROR),
    "WINDOW_UPDATE without an increment": (frames.window_update(0, 0), ErrorCode.PROTOCOL_ERROR),
    "WINDOW_UPDATE beyond 2^31-1": (frames.window_update(0, 2**31 - 1), ErrorCode.FLOW_CONTROL_ERROR),
    "WINDOW_UPDATE on an idle stream": (frames.window_update(9, 1), ErrorCode.PROTOCOL_ERROR),
    "a frame of 16385 bytes": (frame(0xFA, 0, 0, b"x" * 16385), ErrorCode.FRAME_SIZE_ERROR),
    "the head of a frame of 16385 bytes": (frame(0xFA, 0, 0, b"x" * 16385)[:9], ErrorCode.FRAME_SIZE_ERROR),
}  # fmt: skip


@pytest.mark.parametrize(("sent", "code"), CONNECTION_ERRORS.values(), ids=CONNECTION_ERRORS)
def test_a_connection_error_ends_the_connection_with_goaway(sent: bytes, code: ErrorCode) -> None:
    wire = Wire()
    wire.feed(sent)
    found = wire.goaway()

    assert found is not None
    assert found[0] == code
    assert wire.transport.ended

    before = len(wire.transport.written)
    wire.feed(wire.call())
    assert len(wire.transport.written) == before


def test_the_preface_must_be_followed_by_settings() -> None:
    wire = Wire(begun=False)
    wire.feed(frames.PREFACE + frame(frames.PING, 0, 0, b"12345678"))

    assert wire.goaway() == (ErrorCode.PROTOCOL_ERROR, "the preface was not followed by SETTINGS")


def test_headers_on_a_closed_stream_end_the_connection() -> None:
    wire = Wire()
    wire.feed(wire.call(stream=3) + wire.headers(1))
    found = wire.goaway()

    assert found is not None
    assert found[0] == ErrorCode.STREAM_CLOSED


def test_headers_on_a_half_closed_stream_end_the_connection() -> None:
    wire = Wire()
    wire.feed(wire.call(HOLD) + wire.headers(1))
    found = wire.goaway()

    assert found is not None
    assert found[0] == ErrorCode.STREAM_CLOSED


def test_data_on_a_closed_stream_resets_it() -> None:
    wire = Wire()
    wire.feed(wire.call() + payload(b"late", 1))

    assert wire.reset_of(1) == ErrorCode.STREAM_CLOSED


def test_data_on_a_half_closed_stream_resets_it_and_cancels_its_call() -> None:
    wire = Wire()
    wire.feed(wire.call(HOLD) + payload(b"late", 1))

    assert wire.reset_of(1) == ErrorCode.STREAM_CLOSED
    assert wire.cancelled == 1


def test_frames_in_flight_to_a_stream_reset_by_the_server_are_ignored() -> None:
    wire = Wire()
    wire.feed(wire.headers(1, __path="/no") + payload(b"x" * 20, 1) + frames.reset(1, ErrorCode.CANCEL))
    wire.feed(wire.call(stream=3))

    assert wire.answers() == {1: (b"", 12, "unknown method /no"), 3: (b"hello", OK, "")}


def test_a_second_header_block_that_does_not_end_the_stream_resets_it() -> None:
    wire = Wire()
    wire.feed(wire.headers() + wire.headers())

    assert wire.reset_of(1) == ErrorCode.PROTOCOL_ERROR


@pytest.mark.parametrize(
    "fields",
    [
        {"__method": None}, {"__path": None}, {"__path": ""}, {"__scheme": None}, {"__status": "200"}, {"te": "gzip"},
        {"connection": "close"}, {"UPPER": "x"}, {"x": "a\nb"}, {"transfer_encoding": "chunked"},
    ],
    ids=str,
)  # fmt: skip
def test_a_malformed_request_is_reset(fields: dict[str, Any]) -> None:
    wire = Wire()
    wire.feed(wire.headers(1, **fields))

    assert wire.reset_of(1) == ErrorCode.PROTOCOL_ERROR
    wire.feed(wire.call(stream=3))
    assert wire.answers() == {3: (b"hello", OK, "")}


def test_a_header_value_with_surrounding_spaces_is_accepted_as_in_grpc() -> None:
    wire = Wire()
    wire.feed(wire.headers(1, __path=HOLD, x=" y ") + payload(message_of(b"hello"), end=True))

    assert [call.metadata["x"] for call in wire.held] == [" y "]


@pytest.mark.parametrize(("length", "good"), [("10", True), ("9", False), ("11", False), ("x", False), ("-1", False)])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_content_length_that_does_not_match_the_body_resets_the_stream(length: str, good: bool, parts: int) -> None:
    wire = Wire()
    body = message_of(b"hello")
    cut = len(body) if parts == 1 else 7
    sent = payload(body[:cut], end=parts == 1) + (payload(body[cut:], end=True) if parts == 2 else b"")
    wire.feed(wire.headers(content_length=length) + sent)

    if good:
        assert wire.answers() == {1: (b"hello", OK, "")}
    else:
        assert wire.reset_of(1) == ErrorCode.PROTOCOL_ERROR
    assert wire.connection.streams == {}
    assert wire.shared.held_bytes == 0


def test_streams_beyond_the_concurrency_limit_are_refused() -> None:
    wire = Wire(max_streams=2)
    wire.feed(b"".join(wire.call(HOLD, stream=stream) for stream in (1, 3, 5)))
    assert wire.reset_of(5) == ErrorCode.REFUSED_STREAM

    wire.held[0].answer(b"")
    wire.feed(wire.call(stream=7))
    assert wire.answers().keys() == {1, 7}


def test_header_blocks_are_decoded_even_for_refused_streams() -> None:
    wire = Wire(max_streams=1)
    wire.feed(wire.call(HOLD, stream=1) + wire.headers(3, x="new", end=True))
    wire.held[0].answer(b"")
    wire.feed(wire.headers(5, __path=HOLD, x="new") + payload(message_of(b""), 5, end=True))

    assert wire.held[1].metadata["x"] == "new"


def test_a_too_large_header_list_ends_the_connection_while_it_is_decoded() -> None:
    wire = Wire(max_header_bytes=4096)
    wire.feed(wire.headers(x="y" * 3000))
    bomb = wire.headers(3, x="y" * 3000)[9:]
    wire.feed(frame(frames.HEADERS, 4, 3, bomb + bomb[-1:] * 10))

    assert wire.goaway() == (ErrorCode.ENHANCE_YOUR_CALM, "the header list is too large")


def test_an_endless_header_block_ends_the_connection() -> None:
    wire = Wire(max_header_bytes=20000)
    wire.feed(frame(frames.HEADERS, 0, 1, b"\x00" * 16000))
    wire.feed(frame(frames.CONTINUATION, 0, 1, b"\x00" * 16000))

    assert wire.goaway() == (ErrorCode.ENHANCE_YOUR_CALM, "the header block is too large")


@pytest.mark.parametrize(
    "one",
    [
        frames.settings({}), frames.settings({})[:4] + b"\1" + frames.settings({})[5:],
        frame(frames.DATA, 0, 1), frame(frames.PRIORITY, 0, 1, b"12345"), frame(0xFA), frames.window_update(0, 1),
        frame(frames.GOAWAY, 0, 0, b"12345678"), frames.reset(3, ErrorCode.CANCEL),
    ],
    ids=["SETTINGS", "ACK", "empty DATA", "PRIORITY", "unknown", "small WINDOW_UPDATE", "GOAWAY", "RST_STREAM"],
)  # fmt: skip
def test_a_flood_of_idle_frames_ends_the_connection(one: bytes) -> None:
    wire = Wire(max_idle_frames=50)
    wire.feed(wire.call(stream=3) + wire.headers(5, __path=BIDI))
    wire.feed(one.replace(b"\0\0\0\1", b"\0\0\0\5") * 48)
    assert not wire.transport.over
    wire.shared.sweep(1.0)
    wire.feed(one.replace(b"\0\0\0\1", b"\0\0\0\5") * 200)

    found = wire.goaway()
    assert found is not None
    assert found[0] == ErrorCode.ENHANCE_YOUR_CALM


def test_a_connection_that_fails_in_its_tick_does_not_suspend_the_limits_of_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken:
        streams = ()

        def __init__(self) -> None:
            self.transport = FakeTransport()

        def tick(self, elapsed_s: float) -> None:
            raise ZeroDivisionError("not of this time")

    shared = Wire().shared
    connections: list[Any] = [Broken(), Broken()]
    lost: list[Any] = [Broken(), Broken()]
    for connection in lost:
        connection.transport = None
    shared.connections = {*connections, *lost}
    shared.sweep(1.0)

    assert [connection.transport.aborted for connection in connections] == [True, True]
    assert len(caplog.records) == 4


def test_a_flood_of_settings_ends_the_connection_even_with_many_open_calls() -> None:
    wire = Wire()
    wire.feed(b"".join(wire.call(HOLD, stream=2 * number + 1) for number in range(1000)))
    for size in range(50):
        wire.feed(frames.settings({frames.INITIAL_WINDOW_SIZE: size}))
    wire.shared.sweep(1.0)
    for size in range(50):
        wire.feed(frames.settings({frames.INITIAL_WINDOW_SIZE: size}))
    assert not wire.transport.over
    for size in range(100):
        wire.feed(frames.settings({frames.INITIAL_WINDOW_SIZE: size}))

    assert wire.goaway() == (ErrorCode.ENHANCE_YOUR_CALM, "too many SETTINGS")


def test_opening_and_cancelling_many_calls_at_once_is_not_a_flood() -> None:
    """gRPC clients send a small window update with each call, and another when its deadline has passed."""
    wire = Wire(max_idle_frames=50)
    streams = range(1, 2001, 2)
    for stream in streams:
        wire.feed(wire.call(HOLD, stream=stream) + frames.window_update(0, 5))
    for stream in streams:
        wire.feed(frames.reset(stream, ErrorCode.CANCEL) + frames.window_update(0, 5))

    assert wire.goaway() is None
    assert wire.cancelled == len(wire.held) == len(streams)


def test_a_flood_of_empty_continuations_ends_the_connection() -> None:
    wire = Wire(max_idle_frames=50)
    wire.feed(frame(frames.HEADERS, 0, 1, b"\x82") + frame(frames.CONTINUATION, 0, 1) * 60)
    found = wire.goaway()

    assert found is not None
    assert found[0] == ErrorCode.ENHANCE_YOUR_CALM


def test_a_rapid_reset_ends_the_connection() -> None:
    wire = Wire(max_resets=20)
    for stream in range(1, 101, 2):
        wire.feed(wire.call(HOLD, stream=stream) + frames.reset(stream, ErrorCode.CANCEL))

    assert wire.goaway() == (ErrorCode.ENHANCE_YOUR_CALM, "too many calls were opened and reset")
    assert wire.cancelled == len(wire.held) == 21
    assert wire.connection.streams == {}


def test_a_client_that_cancels_half_of_its_calls_is_served() -> None:
    wire = Wire(max_resets=20)
    for stream in range(1, 401, 4):
        wire.feed(
            wire.call(HOLD, stream=stream) + frames.reset(stream, ErrorCode.CANCEL) + wire.call(stream=stream + 2)
        )

    assert len(wire.answers()) == 100


def test_a_reset_cancels_the_call_once_and_later_answers_are_not_sent() -> None:
    wire = Wire()
    wire.feed(wire.call(HOLD) + frames.reset(1, ErrorCode.CANCEL))
    wire.frames()
    wire.held[0].answer(b"late")
    wire.held[0].abort(5, "late")
    wire.loop.turn()

    assert (wire.cancelled, wire.held[0].ended, wire.frames()) == (1, True, [])


def test_a_lost_connection_cancels_its_calls() -> None:
    wire = Wire()
    wire.feed(wire.call(HOLD, stream=1) + wire.call(HOLD, stream=3))
    wire.connection.connection_lost(None)

    assert (wire.cancelled, wire.shared.connections) == (2, set())


@pytest.mark.parametrize(
    ("sent", "begins"), [(b"GET / HTTP/1.1\r\n\r\n", b"HTTP/1.1 400 "), (b"\x16\x03\x01\x02", b"")]
)
def test_a_client_of_another_protocol_is_answered_if_it_speaks_http_1_and_disconnected(
    sent: bytes, begins: bytes
) -> None:
    wire = Wire(begun=False)
    wire.feed(sent)

    assert wire.transport.written.startswith(begins)
    assert wire.transport.ended
    assert bool(begins) == bool(wire.transport.written)


def test_a_connection_over_the_limit_is_aborted() -> None:
    wire = Wire(max_connections=1)
    first = wire.transport
    wire.connect()

    assert (wire.transport.aborted, first.aborted, len(wire.shared.connections)) == (True, False, 1)


def test_a_write_error_aborts_only_its_own_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wire = Wire()
    first, other = wire.connection, wire.transport
    wire.connect()
    wire.feed(frames.PREFACE + frames.settings({}))
    broken = wire.transport
    monkeypatch.setattr(broken, "write", lambda sent: 1 / 0)
    wire.encoder = type(wire.encoder)()
    call = wire.call()
    wire.connection.data_received(call)
    before = len(other.written)
    first.data_received(call)
    wire.loop.turn()

    assert (broken.aborted, other.aborted) == (True, False)
    assert message_of(b"hello") in other.written[before:]
    assert "ZeroDivisionError" in caplog.text


def test_an_internal_error_ends_the_connection_and_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wire = Wire()
    monkeypatch.setattr(Keepalive, "process_ping", lambda *_: 1 / 0)
    wire.feed(frame(frames.PING, 0, 0, b"12345678"))

    assert wire.goaway() == (ErrorCode.INTERNAL_ERROR, "")
    assert "ZeroDivisionError" in caplog.text


def test_an_internal_error_while_a_long_message_is_received_ends_the_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wire = Wire()
    data_frame = frame(frames.DATA, 0, 1, message_of(bytes(900_000)))
    wire.feed(wire.headers(__path=BIDI) + data_frame[:300_000])
    assert wire.transport.straight
    monkeypatch.setattr(GrpcCall, "buffer_updated", lambda *_: 1 / 0)
    wire.feed(data_frame[300_000:])

    assert wire.goaway() == (ErrorCode.INTERNAL_ERROR, "")
    assert "ZeroDivisionError" in caplog.text


def test_a_batch_of_many_calls_yields_to_other_connections() -> None:
    wire = Wire()
    wire.connection.data_received(b"".join(wire.call(stream=2 * number + 1) for number in range(1000)))
    at_once = wire.connection.last_id
    assert 0 < at_once < 300
    assert not wire.transport.reading
    for _ in range(20):
        wire.loop.turn()

    answers = wire.answers()
    assert [answers[2 * number + 1][1] for number in range(1000)] == [0] * 1000
    assert wire.transport.reading


def test_a_message_in_many_tiny_frames_yields_to_other_connections() -> None:
    wire = Wire()
    crumbs = b"".join(frames.frame(frames.DATA, 0, 1, bytes([byte])) for byte in message_of(bytes(range(250)) * 20))
    wire.feed(wire.headers(1))
    wire.connection.data_received(crumbs + frames.frame(frames.DATA, frames.END_STREAM, 1, b""))
    assert 0 < wire.shared.held_bytes < 2500
    assert not wire.transport.reading
    wire.loop.turn()

    assert wire.answers()[1][:2] == (bytes(range(250)) * 20, 0)
    assert wire.transport.reading


def test_buffered_calls_of_a_closed_connection_are_not_processed() -> None:
    wire = Wire()
    wire.connection.data_received(b"".join(wire.call(stream=2 * number + 1) for number in range(1000)))
    at_once = wire.connection.last_id
    wire.transport.close()
    wire.loop.turn()

    assert wire.connection.last_id == at_once
