"""Drain alone: how a connection is ended gracefully."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.server.http2.drain import DRAIN_PING, Drain
from penstock.server.http2.frames import MAX_WINDOW, PING, ErrorCode, frame, goaway

from .fakes import FakeOutbox
from .wire import FakeLoop

DRAIN_LINGER_S, GOODBYE_S = 0.5, 1.0
FIRST = goaway(MAX_WINDOW, ErrorCode.NO_ERROR) + frame(PING, 0, 0, DRAIN_PING)


class Leaving:
    """A connection as its Drain sees it. `closed_after` records the arguments of `close`."""

    def __init__(self, *, begun: bool = True, last_id: int = 0) -> None:
        self.loop = FakeLoop()
        self.outbox = FakeOutbox()
        self.transport = self.outbox.transport
        self.preface_received, self.last_id = begun, last_id
        self.max_streams = 100
        self.streams: dict[int, Any] = {}
        self.closed_after: list[float] = []
        loop: Any = self.loop
        self.drain = Drain(loop)

    @property
    def closed(self) -> bool:
        return bool(self.closed_after)

    def close(self, linger_s: float) -> None:
        self.closed_after.append(linger_s)

    def shutdown(self) -> None:
        connection: Any = self
        self.drain.begin(connection)

    def acknowledge(self) -> None:
        connection: Any = self
        self.drain.acknowledged(connection)

    def come_late(self) -> None:
        connection: Any = self
        self.drain.schedule_late_close(connection)

    def announce(self) -> None:
        connection: Any = self
        self.drain.announce(connection)


def final_goaway(last_id: int) -> bytes:
    return goaway(last_id, ErrorCode.NO_ERROR)


def test_a_drain_sends_goaway_and_a_ping_and_the_final_goaway_after_the_ping_ack() -> None:
    leaving = Leaving(last_id=5)
    leaving.shutdown()
    assert leaving.outbox.written == [FIRST]
    assert (leaving.drain.draining, leaving.drain.final_goaway_sent, leaving.max_streams) == (True, False, 100)

    leaving.last_id = 7
    leaving.acknowledge()
    assert leaving.outbox.written == [FIRST, final_goaway(7)]
    assert (leaving.drain.final_goaway_sent, leaving.max_streams) == (True, 0)


def test_a_draining_connection_closes_after_its_last_answer() -> None:
    leaving = Leaving(last_id=1)
    leaving.streams[1] = None
    leaving.shutdown()
    leaving.acknowledge()
    leaving.outbox.on_flush()
    assert not leaving.closed

    leaving.streams.clear()
    leaving.outbox.on_flush()
    assert leaving.closed_after == [GOODBYE_S]


def test_the_final_goaway_is_sent_after_the_linger_time_without_a_ping_ack() -> None:
    leaving = Leaving(last_id=3)
    leaving.shutdown()
    leaving.loop.pass_time(DRAIN_LINGER_S - 0.01)
    assert leaving.outbox.written == [FIRST]

    leaving.loop.pass_time(0.01)
    assert leaving.outbox.written == [FIRST, final_goaway(3)]


def test_each_step_of_a_drain_happens_once() -> None:
    leaving = Leaving(last_id=3)
    leaving.shutdown()
    leaving.shutdown()
    leaving.acknowledge()
    leaving.acknowledge()
    leaving.loop.pass_time(DRAIN_LINGER_S)

    assert leaving.outbox.written == [FIRST, final_goaway(3)]


def test_an_unsolicited_ping_ack_is_ignored() -> None:
    leaving = Leaving(last_id=3)
    leaving.acknowledge()

    assert leaving.outbox.written == []
    assert not leaving.drain.final_goaway_sent


def test_a_connection_closed_during_the_drain_is_sent_no_final_goaway() -> None:
    leaving = Leaving(last_id=3)
    leaving.shutdown()
    leaving.closed_after.append(0.0)
    leaving.loop.pass_time(DRAIN_LINGER_S)

    assert leaving.outbox.written == [FIRST]


@pytest.mark.parametrize("begins", [True, False])
def test_a_connection_without_a_preface_has_the_linger_time_to_send_it(begins: bool) -> None:
    leaving = Leaving(begun=False)
    leaving.shutdown()
    assert (leaving.drain.draining, leaving.outbox.written) == (True, [])
    if begins:
        leaving.preface_received = True
        leaving.announce()
    leaving.loop.pass_time(DRAIN_LINGER_S)

    assert leaving.transport.closed is not begins
    assert leaving.outbox.written == ([FIRST, final_goaway(0)] if begins else [])


def test_a_connection_rejected_before_its_preface_is_not_closed_by_the_drain() -> None:
    leaving = Leaving(begun=False)
    leaving.shutdown()
    leaving.closed_after.append(0.0)
    leaving.loop.pass_time(DRAIN_LINGER_S)

    assert not leaving.transport.closed


# -- connections accepted while draining -----------------------------------------------------------------------


def test_a_late_connection_with_a_call_is_sent_goaway_after_the_linger_time() -> None:
    leaving = Leaving()
    leaving.come_late()
    leaving.last_id = 1
    leaving.loop.pass_time(DRAIN_LINGER_S - 0.01)
    assert (leaving.drain.accepted_in_drain, leaving.outbox.written) == (True, [])

    leaving.loop.pass_time(0.01)
    assert leaving.outbox.written == [FIRST]


def test_a_late_connection_without_a_call_is_closed_without_goaway() -> None:
    leaving = Leaving()
    leaving.come_late()
    leaving.loop.pass_time(DRAIN_LINGER_S)

    assert leaving.transport.closed
    assert leaving.outbox.written == []


def test_a_late_connection_that_is_already_closed_is_not_closed_again() -> None:
    leaving = Leaving()
    leaving.come_late()
    leaving.closed_after.append(0.0)
    leaving.loop.pass_time(DRAIN_LINGER_S)

    assert not leaving.transport.closed


def test_a_late_connection_is_sent_goaway_after_its_first_call_when_its_port_closes() -> None:
    leaving = Leaving()
    leaving.come_late()
    leaving.shutdown()
    assert (leaving.drain.expedited, leaving.drain.draining, leaving.outbox.written) == (True, False, [])

    leaving.last_id = 1
    leaving.shutdown()
    assert (leaving.drain.draining, leaving.outbox.written) == (True, [FIRST])


def test_an_earlier_connection_is_sent_goaway_even_without_a_call() -> None:
    leaving = Leaving()
    leaving.shutdown()

    assert leaving.outbox.written == [FIRST]
    assert not leaving.drain.expedited
