"""Timeouts alone: what a peer may take its time with, and how old its connection becomes."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.server.http2.frames import ErrorCode, Http2Error
from penstock.server.http2.limits import Http2Limits
from penstock.server.http2.timeouts import Timeouts

from .parts import FakeOutbox, FakeStream


class Aging:
    """A connection as Timeouts see it: `told` is what they have it do."""

    def __init__(self, *, begun: bool = True, **limits: Any) -> None:
        self.limits = Http2Limits(**limits)
        self.outbox = FakeOutbox()
        self.transport = self.outbox.transport
        self.preface_received = begun
        self.closed = self.draining = self.unfinished = False
        self.told: list[Any] = []
        self.streams: dict[int, FakeStream] = {}
        self.timeouts = Timeouts()
        self.reader = self.keepalive = self.drain = self

    def is_stalled(self, connection: object) -> bool:
        return self.unfinished

    def fail(self, error: Http2Error) -> None:
        self.told.append(error.code)
        self.closed = True

    def shutdown(self) -> None:
        self.told.append("shutdown")
        self.draining = True

    def tick(self, elapsed_s: float) -> None:
        """Stand in for the Keepalive's."""
        self.told.append(elapsed_s)

    def pass_time(self, *seconds: float) -> None:
        connection: Any = self
        for elapsed_s in seconds:
            self.timeouts.tick(connection, elapsed_s)

    def over(self) -> bool:
        return self.transport.aborted


def test_streams_and_keepalive_are_told_of_the_time() -> None:
    aging = Aging()
    for stream_id in (1, 3):
        aging.streams[stream_id] = FakeStream(stream_id, aging.told)
    aging.pass_time(1.5)

    assert aging.told == [("tick", 1, 1.5), ("tick", 3, 1.5), 1.5]


def test_a_peer_that_does_not_begin_is_dropped() -> None:
    aging = Aging(begun=False, preface_timeout_s=3.0)
    aging.pass_time(1.0, 2.0)
    assert not aging.over()

    aging.pass_time(0.1)
    assert aging.over()
    assert aging.told == []


def test_one_that_begins_in_time_is_not() -> None:
    aging = Aging(begun=False, preface_timeout_s=3.0)
    aging.pass_time(3.0)
    aging.preface_received = True
    aging.pass_time(3.0)

    assert not aging.over()


@pytest.mark.parametrize(("said_s", "linger_s"), [(None, 5.0), (1.0, 1.0)])
def test_one_that_was_sent_away_and_stays_is_dropped(said_s: float | None, linger_s: float) -> None:
    aging = Aging()
    aging.pass_time(100.0)
    aging.closed = True
    if said_s is not None:
        aging.timeouts.linger_s = said_s
    aging.pass_time(linger_s / 2, linger_s / 2)
    assert not aging.over()

    aging.pass_time(0.1)
    assert aging.over()


def test_who_takes_nothing_of_what_waits_is_dropped() -> None:
    aging = Aging(write_timeout_s=5.0)
    aging.outbox.unsent = 10
    aging.pass_time(100.0)  # it may have come just now
    aging.pass_time(2.0, 3.0)
    assert not aging.over()

    aging.told.clear()
    aging.pass_time(0.1)
    assert aging.over()
    assert aging.told == []


def test_nor_does_it_help_that_more_comes() -> None:
    aging = Aging(write_timeout_s=5.0)
    for _ in range(7):
        aging.outbox.unsent += 10
        aging.pass_time(1.0)

    assert aging.over()


@pytest.mark.parametrize("less", [1, 10])
def test_who_takes_any_of_it_has_all_the_time_anew(less: int) -> None:
    aging = Aging(write_timeout_s=5.0)
    for _ in range(10):
        aging.outbox.unsent = 10
        aging.pass_time(2.0, 2.0)
        aging.outbox.unsent -= less
        aging.pass_time(2.0)

    assert not aging.over()


def test_a_frame_or_block_that_is_not_finished_in_time_is_refused() -> None:
    aging = Aging(receive_timeout_s=5.0)
    aging.unfinished = True
    aging.pass_time(2.0, 3.0)
    assert aging.told == [2.0, 3.0]

    aging.pass_time(0.1)
    assert aging.told == [2.0, 3.0, ErrorCode.ENHANCE_YOUR_CALM]
    assert not aging.over()


def test_one_that_goes_on_has_all_the_time_anew() -> None:
    aging = Aging(receive_timeout_s=5.0)
    for _ in range(5):
        aging.unfinished = True
        aging.pass_time(5.0)
        aging.unfinished = False
        aging.pass_time(4.0)

    assert ErrorCode.ENHANCE_YOUR_CALM not in aging.told


def test_an_idle_connection_is_told_to_go() -> None:
    aging = Aging(idle_timeout_s=0.5)
    aging.pass_time(0.2, 0.3)
    assert "shutdown" not in aging.told

    aging.pass_time(0.1)
    assert "shutdown" in aging.told
    assert not aging.over()


def test_one_with_a_call_is_not_idle() -> None:
    aging = Aging(idle_timeout_s=5.0)
    aging.pass_time(4.0)
    aging.streams[1] = FakeStream(1, [])
    aging.pass_time(4.0)
    aging.streams.clear()
    aging.pass_time(5.0)

    assert "shutdown" not in aging.told


def test_no_connection_is_idle_or_old_where_that_is_off() -> None:
    aging = Aging(idle_timeout_s=0.0, max_age_s=0.0, max_age_grace_s=1.0)
    aging.pass_time(1e9)
    aging.draining = True
    aging.pass_time(1e9)

    assert aging.told == [1e9, 1e9]
    assert not aging.over()


def test_an_old_one_is_told_to_go_and_dropped_after_its_grace() -> None:
    aging = Aging(max_age_s=0.5, max_age_grace_s=3.0)
    aging.streams[1] = FakeStream(1, [])
    aging.pass_time(0.5)
    assert "shutdown" not in aging.told
    aging.pass_time(5.0)  # however late that is
    assert aging.told.count("shutdown") == 1

    aging.pass_time(2.9)
    assert not aging.over()
    aging.pass_time(0.1)
    assert aging.over()
    assert aging.told.count("shutdown") == 1


def test_its_grace_has_no_end_where_that_is_off() -> None:
    aging = Aging(max_age_s=10.0, max_age_grace_s=0.0)
    aging.pass_time(11.0, 1e9)

    assert not aging.over()


def test_one_that_goes_already_is_not_dropped_before_it_is_old() -> None:
    aging = Aging(max_age_s=10.0, max_age_grace_s=3.0)
    aging.draining = True
    aging.pass_time(10.0)
    assert not aging.over()

    aging.pass_time(2.0)
    assert not aging.over()
    aging.pass_time(1.0)
    assert aging.over()
