"""The bare server's connections: what they answer to bytes, however these are cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.perf import stub_server
from penstock.perf.generator_accuracy.server import message, payloads
from penstock.perf.stub_server import Http1, Http2, ImmediateAnswers
from penstock.server.http2 import frames
from penstock.server.protobuf import service_pb2

REQUEST = next(payloads("HTTP").stream(0))
START = frames.PREFACE + frames.settings({})


class Wire:
    """Takes what is written, and which protocol takes over."""

    def __init__(self) -> None:
        self.written = b""
        self.protocol: object = None

    def write(self, written: bytes) -> None:
        self.written += written

    def set_protocol(self, protocol: object) -> None:
        self.protocol = protocol


class Later:
    """A desk that answers nothing by itself."""

    def __init__(self) -> None:
        self.keys: list[int] = []

    def on_request(self, connection: object, key: int) -> None:
        self.keys.append(key)


def frames_of(written: bytes) -> list[tuple[int, int, int, bytes]]:
    """Cut what was written: kind, flags, stream and payload of each frame."""
    frame_list, at = [], 0
    while at < len(written):
        word, flags, stream = frames.FRAME_HEADER.unpack_from(written, at)
        end = at + frames.FRAME_HEADER_BYTES + (word >> 8)
        frame_list.append((word & 0xFF, flags, stream, written[at + frames.FRAME_HEADER_BYTES : end]))
        at = end
    return frame_list


def call(stream: int, *messages: bytes, ended: bool = True) -> bytes:
    """Write a stream's head and its messages, the last of which ends it."""
    flags = [0] * (len(messages) - 1) + [frames.END_STREAM if ended else 0]
    parts = [frames.frame(frames.DATA, flag, stream, each) for flag, each in zip(flags, messages, strict=True)]
    return frames.frame(frames.HEADERS, frames.END_HEADERS, stream, b"\x83") + b"".join(parts)


def spoken(answering: stub_server.Answering) -> tuple[Http2, Wire]:
    """Begin a connection of gRPC, and forget what it began with."""
    wire, connection = Wire(), Http2(answering)
    connection.connection_made(wire)  # type: ignore[arg-type]
    connection.data_received(START)
    wire.written = b""
    return connection, wire


@given(st.lists(st.integers(1, len(REQUEST) - 1), max_size=3, unique=True))
def test_each_request_is_answered_once_wherever_it_is_split(cuts: list[int]) -> None:
    wire, connection = Wire(), Http1(ImmediateAnswers())
    connection.connection_made(wire)  # type: ignore[arg-type]
    for _ in range(2):
        for begin, end in zip([0, *sorted(cuts)], [*sorted(cuts), None], strict=True):
            connection.data_received(REQUEST[begin:end])
    head, body, rest = wire.written.partition(stub_server.BODY)

    assert wire.written.count(b"HTTP/1.1 200 OK\r\n") == 2
    assert f"Content-Length: {len(body)}\r\n\r\n".encode() in head
    assert rest.endswith(stub_server.BODY)
    assert json.loads(stub_server.BODY)["outputs"]


def test_a_request_without_a_body_is_answered() -> None:
    wire, connection = Wire(), Http1(ImmediateAnswers())
    connection.connection_made(wire)  # type: ignore[arg-type]
    connection.data_received(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")

    assert wire.written.endswith(stub_server.BODY)


def test_http2_is_recognized_by_its_preface() -> None:
    wire, connection = Wire(), Http1(ImmediateAnswers())
    connection.connection_made(wire)  # type: ignore[arg-type]
    connection.data_received(START + call(1, message()))

    assert isinstance(wire.protocol, Http2)
    assert [kind for kind, *_ in frames_of(wire.written)] == [
        frames.SETTINGS, frames.WINDOW_UPDATE, frames.SETTINGS, frames.HEADERS, frames.DATA, frames.HEADERS,
    ]  # fmt: skip


@given(st.integers(1, len(START + call(1, message()) + call(3, message())) - 1))
def test_each_call_has_one_answer_with_trailers_wherever_it_is_split(cut: int) -> None:
    wire, connection = Wire(), Http2(ImmediateAnswers())
    connection.connection_made(wire)  # type: ignore[arg-type]
    sent = START + call(1, message()) + call(3, message())
    connection.data_received(sent[:cut])
    connection.data_received(sent[cut:])
    answers = [(kind, flags, stream) for kind, flags, stream, _ in frames_of(wire.written) if stream]
    end = frames.END_HEADERS | frames.END_STREAM

    assert answers == [
        each
        for stream in (1, 3)
        for each in ((frames.HEADERS, 4, stream), (frames.DATA, 0, stream), (frames.HEADERS, end, stream))
    ]


def test_the_answer_is_valid_for_both_methods() -> None:
    connection, wire = spoken(ImmediateAnswers())
    connection.data_received(call(1, message()))
    (payload,) = (payload for kind, _, _, payload in frames_of(wire.written) if kind == frames.DATA)

    assert payload[:5] == b"\0" + len(payload[5:]).to_bytes(4, "big")
    assert service_pb2().ModelInferResponse.FromString(payload[5:]).outputs[0].shape == [1, 3]
    assert service_pb2().ModelStreamInferResponse.FromString(payload[5:]).error_message == ""


def test_every_message_of_a_stream_is_answered_before_its_trailers() -> None:
    connection, wire = spoken(ImmediateAnswers())
    connection.data_received(call(1, message(), message()[:3], message()[3:], ended=False))
    connection.data_received(frames.frame(frames.DATA, frames.END_STREAM, 1))
    kinds = [kind for kind, *_ in frames_of(wire.written)]

    assert kinds == [frames.HEADERS, frames.DATA, frames.DATA, frames.HEADERS]


def test_a_delayed_answer_ends_a_stream_that_the_client_has_ended() -> None:
    answering = Later()
    connection, wire = spoken(answering)
    connection.data_received(call(1, message()) + call(3, message()))
    assert (answering.keys, wire.written) == ([1, 3], b"")
    connection.answer(1)
    connection.flush()

    assert [(kind, stream) for kind, _, stream, _ in frames_of(wire.written)] == [
        (frames.HEADERS, 1), (frames.DATA, 1), (frames.HEADERS, 1),
    ]  # fmt: skip


def test_a_ping_is_answered_with_its_own_payload() -> None:
    connection, wire = spoken(ImmediateAnswers())
    connection.data_received(frames.frame(frames.PING, 0, 0, b"12345678"))

    assert frames_of(wire.written) == [(frames.PING, frames.ACK, 0, b"12345678")]


@pytest.mark.parametrize("kind", [Http1, Http2])
def test_an_answer_to_a_disconnected_client_is_dropped(kind: type[Http1 | Http2]) -> None:
    connection, wire = kind(Later()), Wire()
    connection.connection_made(wire)  # type: ignore[arg-type]
    connection.data_received(REQUEST if kind is Http1 else START + call(1, message()))
    connection.connection_lost(None)
    before = wire.written
    connection.answer(0 if kind is Http1 else 1)
    connection.flush()

    assert wire.written == before
