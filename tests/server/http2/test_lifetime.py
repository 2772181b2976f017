"""The lifetime of a connection: drain, age, idleness, keepalive, PINGs."""

from __future__ import annotations

import select
import socket
import weakref
from contextlib import suppress
from typing import Any

import pytest
from hpack import Encoder

from penstock.server.grpc.connection import GrpcConnection
from penstock.server.grpc.method import Status
from penstock.server.grpc.request import SHUTTING_DOWN
from penstock.server.http2 import frames
from penstock.server.http2.frames import ACK, GOAWAY, MAX_WINDOW, PING, ErrorCode

from .wire import BIDI, ECHO, HOLD, OK, REFUSE, FakeTransport, Frame, Wire, message_of, payload

UNAVAILABLE = int(Status.UNAVAILABLE)


def pings(wire: Wire) -> list[Frame]:
    return [frame for frame in wire.frames() if frame.kind == PING]


def last_ids(found: list[Frame]) -> list[int]:
    return [int.from_bytes(frame.payload[:4], "big") for frame in found if frame.kind == GOAWAY]


def test_a_drain_answers_calls_sent_before_the_ping_ack_and_then_closes() -> None:
    wire = Wire()
    wire.feed(wire.call(HOLD, stream=1))
    wire.connection.shutdown()
    wire.loop.turn()
    found = wire.frames()
    pings = [frame.payload for frame in found if frame.kind == PING]
    assert last_ids(found) == [MAX_WINDOW]

    wire.feed(wire.call(HOLD, stream=3) + frames.frame(PING, ACK, 0, pings[0]))
    assert last_ids(wire.frames()) == [3]
    wire.feed(wire.headers(5) + payload(message_of(b"x"), 5, end=True) + frames.window_update(5, 10))
    wire.held[0].answer(b"a")
    wire.loop.turn()
    assert not wire.transport.over
    wire.held[1].answer(b"b")
    wire.loop.turn()

    assert wire.answers() == {1: (b"a", OK, ""), 3: (b"b", OK, "")}
    assert wire.transport.ended


def test_timing_out_many_idle_streams_is_spread_over_several_turns_of_the_loop() -> None:
    wire = Wire(begun=False, receive_timeout_s=5.0)
    connections = [wire.connection]
    for _ in range(10):
        wire.connect()
        wire.encoder = Encoder()
        wire.feed(frames.PREFACE + frames.settings({}) + b"".join(map(wire.headers, range(1, 1001, 2))))
        connections.append(wire.connection)
    wire.shared.sweep(6.0)
    stream_count = sum(map(len, (each.streams for each in connections)))
    wire.loop.turn()

    assert 2000 < stream_count < 5000
    assert not any(each.streams for each in connections)


def test_a_drain_does_not_wait_for_a_peer_that_does_not_answer_its_ping() -> None:
    wire = Wire()
    wire.connection.shutdown()
    wire.loop.turn()
    assert not wire.transport.over
    wire.loop.pass_time(0.6)
    assert wire.transport.ended
    wire.shared.sweep(1.5)

    assert wire.transport.aborted


def test_a_connection_whose_preface_arrives_while_draining_is_served() -> None:
    wire = Wire(begun=False)
    wire.connection.shutdown()
    wire.feed(frames.PREFACE + frames.settings({}) + wire.call())
    assert wire.answers() == {1: (b"hello", OK, "")}
    wire.loop.pass_time(0.6)

    assert wire.transport.ended


def late_wire() -> Wire:
    """A connection accepted while its port drains, with ECHO as a read-only method."""
    wire = Wire(begun=False)
    wire.shared.draining = True
    wire.shared.read_only_paths = {ECHO}
    wire.connect()
    wire.feed(frames.PREFACE + frames.settings({}))
    wire.frames()
    return wire


def test_calls_on_a_connection_accepted_while_draining_are_unavailable_until_goaway() -> None:
    wire = late_wire()
    for stream in (1, 3):
        wire.feed(wire.call(HOLD, stream=stream))
    assert wire.answers() == dict.fromkeys((1, 3), (b"", UNAVAILABLE, SHUTTING_DOWN))
    assert (wire.held, last_ids(wire.frames())) == ([], [])
    wire.loop.pass_time(0.6)
    assert last_ids(wire.frames()) == [MAX_WINDOW]
    wire.loop.pass_time(0.6)

    assert wire.transport.ended


@pytest.mark.parametrize("path", [BIDI, REFUSE])
def test_streams_and_calls_with_a_deadline_on_a_late_connection_are_unavailable(path: str) -> None:
    wire = late_wire()
    wire.feed(wire.headers(1, __path=path, grpc_timeout="1S"))

    assert wire.answers() == {1: (b"", UNAVAILABLE, SHUTTING_DOWN)}


def test_a_late_connection_is_sent_goaway_after_its_first_call_when_its_port_closes() -> None:
    wire = late_wire()
    wire.connection.shutdown()
    wire.loop.turn()
    assert (wire.frames(), wire.transport.over) == ([], False)
    wire.feed(wire.call(HOLD))
    found = wire.frames()
    assert [frame.stream for frame in found if frame.kind == frames.HEADERS] == [1]
    assert last_ids(found) == [MAX_WINDOW]
    wire.feed(frames.frame(PING, ACK, 0, next(frame.payload for frame in found if frame.kind == PING)))

    assert wire.transport.ended


def test_a_late_connection_without_a_call_is_closed_without_goaway() -> None:
    wire = late_wire()
    wire.loop.pass_time(0.6)

    assert (wire.frames(), wire.transport.closed) == ([], True)


def test_read_only_calls_on_a_late_connection_are_answered_and_unknown_methods_rejected() -> None:
    wire = late_wire()
    wire.feed(wire.call(ECHO, stream=1) + wire.call("/t.T/None", stream=3))

    answers = wire.answers()
    assert answers[1] == (b"hello", OK, "")
    assert answers[3][2] == "unknown method /t.T/None"


def test_a_silent_connection_is_closed_while_draining() -> None:
    wire = Wire(begun=False)
    wire.connection.shutdown()
    wire.loop.pass_time(0.6)

    assert wire.transport.closed


def test_a_peer_that_never_sends_its_preface_is_aborted() -> None:
    wire = Wire(begun=False, preface_timeout_s=3.0)
    for _ in range(4):
        assert not wire.transport.over
        wire.shared.sweep(1.0)

    assert wire.transport.aborted


def test_a_peer_that_stays_connected_after_goaway_is_aborted() -> None:
    wire = Wire()
    wire.feed(frames.frame(frames.DATA, 0, 0))
    for _ in range(6):
        assert not wire.transport.aborted
        wire.shared.sweep(1.0)

    assert wire.transport.aborted


def test_a_connection_over_its_maximum_age_is_sent_goaway_and_aborted_after_the_grace() -> None:
    wire = Wire(max_age_s=10.0, max_age_grace_s=5.0)
    wire.feed(wire.call(HOLD))
    wire.frames()
    wire.shared.sweep(10.5)
    wire.loop.turn()
    assert last_ids(wire.frames()) == [MAX_WINDOW]
    assert not wire.transport.aborted
    wire.shared.sweep(5.0)

    assert wire.transport.aborted


def test_the_age_grace_begins_when_goaway_is_sent_even_if_the_sweep_is_late() -> None:
    wire = Wire(max_age_s=10.0, max_age_grace_s=0.2)
    wire.feed(wire.call(HOLD))
    wire.frames()
    wire.shared.sweep(11.0)
    wire.loop.turn()

    assert (wire.transport.aborted, last_ids(wire.frames())) == (False, [MAX_WINDOW])


def test_an_idle_connection_is_sent_goaway() -> None:
    wire = Wire(idle_timeout_s=10.0)
    wire.feed(wire.call(HOLD))
    wire.shared.sweep(11.0)
    wire.held[0].answer(b"")
    wire.loop.turn()
    assert last_ids(wire.frames()) == []
    wire.shared.sweep(11.0)
    wire.loop.turn()

    assert last_ids(wire.frames()) == [MAX_WINDOW]


def test_idle_connections_are_kept_open_by_default() -> None:
    wire = Wire()
    wire.shared.sweep(10**6)
    wire.shared.sweep(10**6)
    wire.loop.turn()

    assert (wire.transport.over, last_ids(wire.frames())) == (False, [])


def test_a_silent_peer_with_a_call_is_pinged_and_aborted_without_an_answer() -> None:
    wire = Wire(keepalive_s=60.0, keepalive_timeout_s=3.0)
    wire.feed(wire.call(HOLD))
    wire.shared.sweep(1.0)
    wire.shared.sweep(61.0)
    wire.loop.turn()
    assert len(pings(wire)) == 1
    wire.shared.sweep(2.0)
    assert not wire.transport.aborted
    wire.shared.sweep(2.0)

    assert wire.transport.aborted


def test_a_peer_that_answers_pings_is_kept_and_pinged_no_more_often_than_allowed() -> None:
    wire = Wire(keepalive_s=60.0, keepalive_timeout_s=3.0)
    wire.feed(wire.call(HOLD))
    ping_count = 0
    for _ in range(200):
        wire.shared.sweep(2.0)
        wire.loop.turn()
        for frame in pings(wire):
            ping_count += 1
            wire.feed(frames.frame(PING, ACK, 0, frame.payload))

    assert (ping_count, wire.transport.over) == (2, False)


@pytest.mark.parametrize(("permitted", "ping_count"), [(False, 0), (True, 1)])
def test_a_peer_without_calls_is_pinged_only_if_permitted(permitted: bool, ping_count: int) -> None:
    wire = Wire(keepalive_s=60.0, keepalive_without_calls=permitted)
    wire.shared.sweep(1.0)
    wire.shared.sweep(61.0)
    wire.loop.turn()

    assert len(pings(wire)) == ping_count


def test_a_keepalive_time_under_a_minute_pings_and_aborts_to_the_millisecond() -> None:
    wire = Wire(keepalive_s=0.5, keepalive_timeout_s=0.25)
    wire.loop.pass_time(0.2)
    wire.feed(wire.call(HOLD))
    for _ in range(2):
        wire.loop.pass_time(0.3)
        wire.loop.pass_time(0.199)
        assert pings(wire) == []
        wire.loop.pass_time(0.001)
        (frame,) = pings(wire)
        wire.loop.pass_time(0.1)
        wire.feed(frames.frame(PING, ACK, 0, frame.payload))
        wire.loop.pass_time(0.15)
        wire.feed(frames.settings({}))
        wire.frames()
    wire.feed(wire.call(stream=3))
    wire.loop.pass_time(0.5)
    assert len(pings(wire)) == 1
    wire.loop.pass_time(0.249)
    assert not wire.transport.aborted
    wire.loop.pass_time(0.001)

    assert wire.transport.aborted


@pytest.mark.parametrize(("permitted", "ping_count"), [(False, 0), (True, 2)])
def test_a_keepalive_time_under_a_minute_pings_without_calls_only_if_permitted(
    permitted: bool, ping_count: int
) -> None:
    wire = Wire(keepalive_s=0.5, keepalive_without_calls=permitted)
    found = 0
    for _ in range(1000):
        wire.loop.pass_time(0.01)
        for frame in pings(wire):
            found += 1
            wire.feed(frames.frame(PING, ACK, 0, frame.payload))

    assert (found, wire.transport.over) == (ping_count, False)


def test_no_peer_is_aborted_because_the_process_stood_still() -> None:
    wire = Wire(keepalive_s=0.5, keepalive_timeout_s=0.25)
    wire.feed(wire.call(HOLD))
    wire.loop.pass_time(0.5)
    wire.loop.pass_time(30.0)
    assert not wire.transport.aborted
    wire.loop.pass_time(0.25)

    assert wire.transport.aborted


@pytest.mark.parametrize("answers", [True, False])
def test_a_busy_loop_reads_a_possible_ping_answer_before_it_aborts_the_peer(answers: bool) -> None:
    wire = Wire(keepalive_s=0.5, keepalive_timeout_s=0.25)
    wire.feed(wire.call(HOLD))
    wire.loop.pass_time(0.5)
    (frame,) = pings(wire)
    wire.loop.pass_time(0.75)
    assert not wire.transport.aborted
    if answers:
        wire.feed(frames.frame(PING, ACK, 0, frame.payload))
    wire.loop.pass_time(0.075)

    assert wire.transport.aborted is not answers


def test_the_keepalive_timer_of_a_lost_connection_is_cancelled() -> None:
    wire = Wire(keepalive_s=30.0)
    (timer,) = wire.loop.timers
    wire.connection.connection_lost(None)

    assert timer.cancelled


def ping(wire: Wire) -> None:
    wire.feed(frames.frame(PING, 0, 0, b"12345678"))


def test_too_frequent_pings_end_the_connection_with_too_many_pings() -> None:
    wire = Wire()
    wire.feed(wire.call(HOLD))
    for _ in range(3):
        ping(wire)
    assert not wire.transport.over
    ping(wire)

    assert wire.goaway() == (ErrorCode.ENHANCE_YOUR_CALM, "too_many_pings")


def test_pings_between_answers_are_not_strikes() -> None:
    wire = Wire()
    for stream in range(1, 41, 2):
        wire.feed(wire.call(stream=stream))
        ping(wire)

    assert not wire.transport.over


def test_pings_that_are_far_enough_apart_are_not_strikes() -> None:
    wire = Wire(min_ping_interval_s=10.0)
    wire.feed(wire.call(HOLD))
    for _ in range(20):
        ping(wire)
        wire.loop.pass_time(10.5)

    assert not wire.transport.over


def test_without_calls_pings_must_be_two_hours_apart_unless_permitted() -> None:
    for permitted in (False, True):
        wire = Wire(min_ping_interval_s=10.0, keepalive_without_calls=permitted)
        for _ in range(5):
            ping(wire)
            wire.loop.pass_time(10.5)

        assert wire.transport.over is not permitted


def test_a_strike_limit_of_zero_allows_any_number_of_pings() -> None:
    wire = Wire(max_ping_strikes=0)
    for _ in range(100):
        ping(wire)

    assert not wire.transport.over


@pytest.mark.parametrize("begin", [b"\0\0\5", frames.frame(frames.HEADERS, 0, 1, b"\x82")], ids=["frame", "block"])
def test_an_unfinished_frame_or_header_block_ends_the_connection(begin: bytes) -> None:
    wire = Wire(receive_timeout_s=5.0)
    wire.feed(begin)
    for _ in range(7):
        wire.shared.sweep(1.0)
    found = wire.goaway()

    assert found is not None
    assert found[0] == ErrorCode.ENHANCE_YOUR_CALM


def test_a_peer_that_reads_nothing_is_aborted() -> None:
    wire = Wire(write_timeout_s=5.0)
    wire.transport.stuck = 1000
    for _ in range(8):
        wire.shared.sweep(1.0)

    assert wire.transport.aborted


def test_a_slow_reader_is_not_aborted() -> None:
    wire = Wire(write_timeout_s=5.0)
    for stuck in range(1000, 900, -1):
        wire.transport.stuck = stuck
        wire.shared.sweep(1.0)

    assert not wire.transport.over


class OverTls(FakeTransport):
    """Over a real socket, which is full until `reader` reads. Nothing reports the bytes that TLS has passed to it."""

    def __init__(self, protocol: Any = None) -> None:
        super().__init__(protocol)
        self.socket, self.reader = socket.socketpair()
        self.socket.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                self.socket.send(bytes(1024))

    def get_extra_info(self, name: str) -> Any:
        return {"sslcontext": True, "socket": self.socket}[name]

    def end(self) -> None:
        self.socket.close()
        self.reader.close()


def over_tls() -> tuple[Wire, OverTls]:
    wire = Wire(write_timeout_s=5.0)
    transport = OverTls(wire.connection)
    wire.connection.transport = wire.connection.outbox.transport = transport
    wire.connection.outbox.over_tls = True
    return wire, transport


def test_a_peer_over_tls_that_reads_nothing_is_aborted() -> None:
    wire, transport = over_tls()
    for _ in range(8):
        wire.shared.sweep(1.0)
    transport.end()
    wire.shared.sweep(1.0)

    assert transport.aborted


def test_a_slow_reader_over_tls_is_not_aborted() -> None:
    wire, transport = over_tls()
    for _ in range(10):
        for _ in range(4):
            wire.shared.sweep(1.0)
        assert transport.reader.recv(1024)
    transport.end()

    assert not transport.over


def test_bytes_already_in_the_socket_below_tls_do_not_time_out() -> None:
    wire, transport = over_tls()
    while not select.select([], [transport.socket], [], 0)[1]:
        assert transport.reader.recv(1024)
    for _ in range(8):
        wire.shared.sweep(1.0)
    transport.end()

    assert not transport.over


def test_a_half_closed_connection_is_closed() -> None:
    assert Wire().connection.eof_received() is False


class Weak(GrpcConnection):
    """A connection that allows weak references."""


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("drained", [False, True])
def test_a_connection_lost_within_a_long_message_is_freed_without_the_garbage_collector(drained: bool) -> None:
    wire = Wire(begun=False)
    wire.connection = Weak(wire.shared)
    wire.transport = FakeTransport(wire.connection)
    wire.connection.connection_made(wire.transport)  # type: ignore[arg-type]
    wire.feed(frames.PREFACE + frames.settings({}) + wire.headers(__path=BIDI))
    wire.feed(frames.frame(frames.DATA, 0, 1, message_of(bytes(900_000)))[:300_000])
    assert wire.transport.straight
    if drained:
        wire.connection.shutdown()
        wire.loop.pass_time(1.0)
        assert last_ids(wire.frames()) == [MAX_WINDOW, 1]
    wire.connection.connection_lost(None)
    wire.transport.protocol = None
    lost = weakref.ref(wire.connection)
    wire.connect()

    assert lost() is None
