"""Timeouts alone: the time limits of a peer, and the maximum age of its connection."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.server.http2.frames import ErrorCode, Http2Error
from penstock.server.http2.limits import Http2Limits
from penstock.server.http2.timeouts import Timeouts

from .fakes import FakeOutbox, FakeStream


class Aging:
    """A connection as Timeouts see it: `events` records the calls that they make."""

    def __init__(self, *, begun: bool = True, **limits: Any) -> None:
        self.limits = Http2Limits(**limits)
        self.outbox = FakeOutbox()
        self.transport = self.outbox.transport
        self.preface_received = begun
        self.closed = self.draining = self.unfinished = False
        self.events: list[Any] = []
        self.streams: dict[int, FakeStream] = {}
        self.timeouts = Timeouts()
        self.reader = self.keepalive = self.drain = self

    def is_stalled(self, connection: object) -> bool:
        return self.unfinished

    def fail(self, error: Http2Error) -> None:
        self.events.append(error.code)
        self.closed = True

    def shutdown(self) -> None:
        self.events.append("shutdown")
        self.draining = True

    def tick(self, elapsed_s: float) -> None:
        """Stand in for `Keepalive.tick`."""
        self.events.append(elapsed_s)

    def pass_time(self, *seconds: float) -> None:
        connection: Any = self
        for elapsed_s in seconds:
            self.timeouts.tick(connection, elapsed_s)

    def over(self) -> bool:
        return self.transport.aborted


def test_every_tick_is_passed_to_the_streams_and_the_keepalive() -> None:
    aging = Aging()
    for stream_id in (1, 3):
        aging.streams[stream_id] = FakeStream(stream_id, aging.events)
    aging.pass_time(1.5)

    assert aging.events == [("tick", 1, 1.5), ("tick", 3, 1.5), 1.5]


def test_a_peer_that_sends_no_preface_in_time_is_aborted() -> None:
    aging = Aging(begun=False, preface_timeout_s=3.0)
    aging.pass_time(1.0, 2.0)
    assert not aging.over()

    aging.pass_time(0.1)
    assert aging.over()
    assert aging.events == []


def test_a_peer_that_sends_its_preface_in_time_is_not_aborted() -> None:
    aging = Aging(begun=False, preface_timeout_s=3.0)
    aging.pass_time(3.0)
    aging.preface_received = True
    aging.pass_time(3.0)

    assert not aging.over()


@pytest.mark.parametrize(("set_linger_s", "linger_s"), [(None, 5.0), (1.0, 1.0)])
def test_a_peer_that_stays_after_its_connection_closed_is_aborted_after_the_linger_time(
    set_linger_s: float | None, linger_s: float
) -> None:
    aging = Aging()
    aging.pass_time(100.0)
    aging.closed = True
    if set_linger_s is not None:
        aging.timeouts.linger_s = set_linger_s
    aging.pass_time(linger_s / 2, linger_s / 2)
    assert not aging.over()

    aging.pass_time(0.1)
    assert aging.over()


def test_a_peer_that_reads_nothing_within_the_write_timeout_is_aborted() -> None:
    aging = Aging(write_timeout_s=5.0)
    aging.outbox.unsent = 10
    aging.pass_time(100.0)  # the bytes may have been written just now
    aging.pass_time(2.0, 3.0)
    assert not aging.over()

    aging.events.clear()
    aging.pass_time(0.1)
    assert aging.over()
    assert aging.events == []


def test_new_unsent_bytes_do_not_restart_the_write_timeout() -> None:
    aging = Aging(write_timeout_s=5.0)
    for _ in range(7):
        aging.outbox.unsent += 10
        aging.pass_time(1.0)

    assert aging.over()


@pytest.mark.parametrize("less", [1, 10])
def test_the_write_timeout_restarts_when_the_peer_reads_anything(less: int) -> None:
    aging = Aging(write_timeout_s=5.0)
    for _ in range(10):
        aging.outbox.unsent = 10
        aging.pass_time(2.0, 2.0)
        aging.outbox.unsent -= less
        aging.pass_time(2.0)

    assert not aging.over()


def test_an_unfinished_frame_or_block_fails_after_the_receive_timeout() -> None:
    aging = Aging(receive_timeout_s=5.0)
    aging.unfinished = True
    aging.pass_time(2.0, 3.0)
    assert aging.events == [2.0, 3.0]

    aging.pass_time(0.1)
    assert aging.events == [2.0, 3.0, ErrorCode.ENHANCE_YOUR_CALM]
    assert not aging.over()


def test_the_receive_timeout_restarts_when_a_frame_is_finished() -> None:
    aging = Aging(receive_timeout_s=5.0)
    for _ in range(5):
        aging.unfinished = True
        aging.pass_time(5.0)
        aging.unfinished = False
        aging.pass_time(4.0)

    assert ErrorCode.ENHANCE_YOUR_CALM not in aging.events


def test_an_idle_connection_is_shut_down() -> None:
    aging = Aging(idle_timeout_s=0.5)
    aging.pass_time(0.2, 0.3)
    assert "shutdown" not in aging.events

    aging.pass_time(0.1)
    assert "shutdown" in aging.events
    assert not aging.over()


def test_a_connection_with_a_call_is_not_idle() -> None:
    aging = Aging(idle_timeout_s=5.0)
    aging.pass_time(4.0)
    aging.streams[1] = FakeStream(1, [])
    aging.pass_time(4.0)
    aging.streams.clear()
    aging.pass_time(5.0)

    assert "shutdown" not in aging.events


def test_idle_timeout_and_maximum_age_of_zero_are_off() -> None:
    aging = Aging(idle_timeout_s=0.0, max_age_s=0.0, max_age_grace_s=1.0)
    aging.pass_time(1e9)
    aging.draining = True
    aging.pass_time(1e9)

    assert aging.events == [1e9, 1e9]
    assert not aging.over()


def test_a_connection_over_its_maximum_age_is_shut_down_and_aborted_after_the_grace() -> None:
    aging = Aging(max_age_s=0.5, max_age_grace_s=3.0)
    aging.streams[1] = FakeStream(1, [])
    aging.pass_time(0.5)
    assert "shutdown" not in aging.events
    aging.pass_time(5.0)  # however late the tick is
    assert aging.events.count("shutdown") == 1

    aging.pass_time(2.9)
    assert not aging.over()
    aging.pass_time(0.1)
    assert aging.over()
    assert aging.events.count("shutdown") == 1


def test_an_age_grace_of_zero_never_ends() -> None:
    aging = Aging(max_age_s=10.0, max_age_grace_s=0.0)
    aging.pass_time(11.0, 1e9)

    assert not aging.over()


def test_a_draining_connection_is_not_aborted_before_its_maximum_age_and_grace() -> None:
    aging = Aging(max_age_s=10.0, max_age_grace_s=3.0)
    aging.draining = True
    aging.pass_time(10.0)
    assert not aging.over()

    aging.pass_time(2.0)
    assert not aging.over()
    aging.pass_time(1.0)
    assert aging.over()
