"""How a connection lives: drain, age, idleness, keepalive, pings."""

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


def test_a_drain_answers_what_was_sent_before_the_peer_knew_then_closes() -> None:
    wire = Wire()
    wire.feed(wire.call(HOLD, stream=1))
    wire.connection.shutdown()
    wire.loop.turn()
    found = wire.frames()
    asked = [frame.payload for frame in found if frame.kind == PING]
    assert last_ids(found) == [MAX_WINDOW]

    wire.feed(wire.call(HOLD, stream=3) + frames.frame(PING, ACK, 0, asked[0]))
    assert last_ids(wire.frames()) == [3]
    wire.feed(wire.headers(5) + payload(message_of(b"x"), 5, end=True) + frames.window_update(5, 10))
    wire.held[0].answer(b"a")
    wire.loop.turn()
    assert not wire.transport.over
    wire.held[1].answer(b"b")
    wire.loop.turn()

    assert wire.answers() == {1: (b"a", OK, ""), 3: (b"b", OK, "")}
    assert wire.transport.ended


def test_many_streams_that_do_nothing_let_others_have_their_turn() -> None:
    wire = Wire(begun=False, receive_timeout_s=5.0)
    connections = [wire.connection]
    for _ in range(10):
        wire.connect()
        wire.encoder = Encoder()
        wire.feed(frames.PREFACE + frames.settings({}) + b"".join(map(wire.headers, range(1, 1001, 2))))
        connections.append(wire.connection)
    wire.shared.sweep(6.0)
    left = sum(map(len, (each.streams for each in connections)))
    wire.loop.turn()

    assert 2000 < left < 5000
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


def test_a_connection_that_begins_while_draining_is_served() -> None:
    wire = Wire(begun=False)
    wire.connection.shutdown()
    wire.feed(frames.PREFACE + frames.settings({}) + wire.call())
    assert wire.answers() == {1: (b"hello", OK, "")}
    wire.loop.pass_time(0.6)

    assert wire.transport.ended


def late_wire() -> Wire:
    """A connection that came while its port was drained, where ECHO only asks."""
    wire = Wire(begun=False)
    wire.shared.draining = True
    wire.shared.read_only_paths = {ECHO}
    wire.connect()
    wire.feed(frames.PREFACE + frames.settings({}))
    wire.frames()
    return wire


def test_calls_on_a_connection_that_came_while_draining_are_refused_until_it_is_told_to_go() -> None:
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
def test_so_are_streams_and_calls_with_a_deadline(path: str) -> None:
    wire = late_wire()
    wire.feed(wire.headers(1, __path=path, grpc_timeout="1S"))

    assert wire.answers() == {1: (b"", UNAVAILABLE, SHUTTING_DOWN)}


def test_where_its_port_is_closed_it_is_told_to_go_once_it_has_asked_and_not_before() -> None:
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


def test_one_that_has_asked_nothing_is_closed_after_a_moment_without_a_word() -> None:
    wire = late_wire()
    wire.loop.pass_time(0.6)

    assert (wire.frames(), wire.transport.closed) == ([], True)


def test_what_only_asks_is_answered_there_and_what_is_wrong_is_told() -> None:
    wire = late_wire()
    wire.feed(wire.call(ECHO, stream=1) + wire.call("/t.T/None", stream=3))

    answers = wire.answers()
    assert answers[1] == (b"hello", OK, "")
    assert answers[3][2] == "unknown method /t.T/None"


def test_a_connection_that_says_nothing_while_draining_is_closed() -> None:
    wire = Wire(begun=False)
    wire.connection.shutdown()
    wire.loop.pass_time(0.6)

    assert wire.transport.closed


def test_a_peer_that_never_says_its_preface_is_dropped() -> None:
    wire = Wire(begun=False, preface_timeout_s=3.0)
    for _ in range(4):
        assert not wire.transport.over
        wire.shared.sweep(1.0)

    assert wire.transport.aborted


def test_a_peer_that_was_sent_away_and_stays_is_dropped() -> None:
    wire = Wire()
    wire.feed(frames.frame(frames.DATA, 0, 0))
    for _ in range(6):
        assert not wire.transport.aborted
        wire.shared.sweep(1.0)

    assert wire.transport.aborted


def test_a_connection_of_some_age_takes_no_more_calls_and_ends_after_its_grace() -> None:
    wire = Wire(max_age_s=10.0, max_age_grace_s=5.0)
    wire.feed(wire.call(HOLD))
    wire.frames()
    wire.shared.sweep(10.5)
    wire.loop.turn()
    assert last_ids(wire.frames()) == [MAX_WINDOW]
    assert not wire.transport.aborted
    wire.shared.sweep(5.0)

    assert wire.transport.aborted


def test_its_grace_begins_when_it_is_told_however_late_that_is() -> None:
    wire = Wire(max_age_s=10.0, max_age_grace_s=0.2)
    wire.feed(wire.call(HOLD))
    wire.frames()
    wire.shared.sweep(11.0)
    wire.loop.turn()

    assert (wire.transport.aborted, last_ids(wire.frames())) == (False, [MAX_WINDOW])


def test_an_idle_connection_is_told_to_go() -> None:
    wire = Wire(idle_timeout_s=10.0)
    wire.feed(wire.call(HOLD))
    wire.shared.sweep(11.0)
    wire.held[0].answer(b"")
    wire.loop.turn()
    assert last_ids(wire.frames()) == []
    wire.shared.sweep(11.0)
    wire.loop.turn()

    assert last_ids(wire.frames()) == [MAX_WINDOW]


def test_no_connection_is_idle_too_long_by_default() -> None:
    wire = Wire()
    wire.shared.sweep(10**6)
    wire.shared.sweep(10**6)
    wire.loop.turn()

    assert (wire.transport.over, last_ids(wire.frames())) == (False, [])


def test_a_silent_peer_with_a_call_is_asked_whether_it_lives_and_dropped_if_not() -> None:
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


def test_a_peer_that_answers_lives_and_is_not_asked_more_often_than_allowed() -> None:
    wire = Wire(keepalive_s=60.0, keepalive_timeout_s=3.0)
    wire.feed(wire.call(HOLD))
    asked = 0
    for _ in range(200):
        wire.shared.sweep(2.0)
        wire.loop.turn()
        for frame in pings(wire):
            asked += 1
            wire.feed(frames.frame(PING, ACK, 0, frame.payload))

    assert (asked, wire.transport.over) == (2, False)


@pytest.mark.parametrize(("permitted", "asked"), [(False, 0), (True, 1)])
def test_without_calls_nobody_is_asked_unless_permitted(permitted: bool, asked: int) -> None:
    wire = Wire(keepalive_s=60.0, keepalive_without_calls=permitted)
    wire.shared.sweep(1.0)
    wire.shared.sweep(61.0)
    wire.loop.turn()

    assert len(pings(wire)) == asked


def test_with_less_than_a_minute_it_is_asked_and_dropped_to_the_millisecond() -> None:
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


@pytest.mark.parametrize(("permitted", "asked"), [(False, 0), (True, 2)])
def test_the_same_rules_hold_then(permitted: bool, asked: int) -> None:
    wire = Wire(keepalive_s=0.5, keepalive_without_calls=permitted)
    found = 0
    for _ in range(1000):
        wire.loop.pass_time(0.01)
        for frame in pings(wire):
            found += 1
            wire.feed(frames.frame(PING, ACK, 0, frame.payload))

    assert (found, wire.transport.over) == (asked, False)


def test_a_process_that_stood_still_drops_nobody_for_it() -> None:
    wire = Wire(keepalive_s=0.5, keepalive_timeout_s=0.25)
    wire.feed(wire.call(HOLD))
    wire.loop.pass_time(0.5)
    wire.loop.pass_time(30.0)
    assert not wire.transport.aborted
    wire.loop.pass_time(0.25)

    assert wire.transport.aborted


@pytest.mark.parametrize("answers", [True, False])
def test_a_loop_that_was_busy_reads_before_it_drops_who_may_have_answered(answers: bool) -> None:
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


def test_a_connection_that_is_lost_is_not_held_by_its_timer() -> None:
    wire = Wire(keepalive_s=30.0)
    (timer,) = wire.loop.timers
    wire.connection.connection_lost(None)

    assert timer.cancelled


def ping(wire: Wire) -> None:
    wire.feed(frames.frame(PING, 0, 0, b"12345678"))


def test_pings_that_come_too_often_end_the_connection_with_the_text_that_clients_know() -> None:
    wire = Wire()
    wire.feed(wire.call(HOLD))
    for _ in range(3):
        ping(wire)
    assert not wire.transport.over
    ping(wire)

    assert wire.goaway() == (ErrorCode.ENHANCE_YOUR_CALM, "too_many_pings")


def test_pings_between_answers_are_no_strikes() -> None:
    wire = Wire()
    for stream in range(1, 41, 2):
        wire.feed(wire.call(stream=stream))
        ping(wire)

    assert not wire.transport.over


def test_pings_that_are_far_enough_apart_are_no_strikes() -> None:
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


def test_no_number_of_strikes_is_too_many_where_it_is_zero() -> None:
    wire = Wire(max_ping_strikes=0)
    for _ in range(100):
        ping(wire)

    assert not wire.transport.over


@pytest.mark.parametrize("begin", [b"\0\0\5", frames.frame(frames.HEADERS, 0, 1, b"\x82")], ids=["frame", "block"])
def test_a_frame_or_a_block_that_does_not_come_to_its_end_is_refused(begin: bytes) -> None:
    wire = Wire(receive_timeout_s=5.0)
    wire.feed(begin)
    for _ in range(7):
        wire.shared.sweep(1.0)
    found = wire.goaway()

    assert found is not None
    assert found[0] == ErrorCode.ENHANCE_YOUR_CALM


def test_a_peer_that_takes_nothing_of_what_is_written_is_dropped() -> None:
    wire = Wire(write_timeout_s=5.0)
    wire.transport.stuck = 1000
    for _ in range(8):
        wire.shared.sweep(1.0)

    assert wire.transport.aborted


def test_a_slow_reader_is_not_dropped() -> None:
    wire = Wire(write_timeout_s=5.0)
    for stuck in range(1000, 900, -1):
        wire.transport.stuck = stuck
        wire.shared.sweep(1.0)

    assert not wire.transport.over


class OverTls(FakeTransport):
    """Over a real socket, which is full until `reader` reads. What TLS has given to it is told nowhere."""

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


def test_a_peer_that_takes_nothing_of_what_tls_has_passed_on_is_dropped() -> None:
    wire, transport = over_tls()
    for _ in range(8):
        wire.shared.sweep(1.0)
    transport.end()
    wire.shared.sweep(1.0)

    assert transport.aborted


def test_a_slow_reader_over_tls_is_not_dropped() -> None:
    wire, transport = over_tls()
    for _ in range(10):
        for _ in range(4):
            wire.shared.sweep(1.0)
        assert transport.reader.recv(1024)
    transport.end()

    assert not transport.over


def test_what_a_socket_below_tls_has_taken_is_the_systems_and_waits_for_its_reader() -> None:
    wire, transport = over_tls()
    while not select.select([], [transport.socket], [], 0)[1]:
        assert transport.reader.recv(1024)
    for _ in range(8):
        wire.shared.sweep(1.0)
    transport.end()

    assert not transport.over


def test_a_peer_that_half_closes_is_closed() -> None:
    assert Wire().connection.eof_received() is False


class Weak(GrpcConnection):
    """One that can be referred to weakly."""


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("drained", [False, True])
def test_one_that_is_lost_within_a_long_message_is_not_left_to_the_collector(drained: bool) -> None:
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
