"""Keepalive alone: whom it asks, whom it drops, and whose own PINGs come too often."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.http2.budget import FrameBudget
from penstock.server.http2.frames import ACK, PING, ErrorCode, Http2Error, frame
from penstock.server.http2.keepalive import Keepalive

from .parts import FakeOutbox, make_shared
from .wire import FakeLoop

ASKED = frame(PING, 0, 0, b"are you?")
LEAST_S, TWO_HOURS_S = 0.1, 7200.0


class Watched:
    """A Keepalive, what it writes, and a clock; a call is under way unless told otherwise."""

    def __init__(self, *, calls: bool = True, **limits: Any) -> None:
        shared = make_shared(**limits)
        outbox: Any = FakeOutbox()
        self.loop: FakeLoop = shared.loop  # type: ignore[assignment]
        self.outbox: FakeOutbox = outbox
        outbox.streams = {1: None} if calls else {}
        self.keepalive = Keepalive(shared, outbox, FrameBudget(shared.limits, outbox))
        self.keepalive.begin()

    def asked(self) -> int:
        """Tell how often it has asked since this was last looked at."""
        written, self.outbox.written = self.outbox.written, []
        return written.count(ASKED)

    def dropped(self) -> bool:
        return self.outbox.transport.aborted

    def answer(self) -> None:
        self.keepalive.received()
        self.keepalive.process_ping(ACK, b"are you?")

    def ping(self) -> None:
        self.keepalive.process_ping(0, b"12345678")


# -- by the sweep ----------------------------------------------------------------------------------------------


def by_sweep(**limits: Any) -> Watched:
    watched = Watched(**{"keepalive_s": 60.0, "keepalive_timeout_s": 20.0, **limits})
    watched.keepalive.tick(1.0)
    return watched


def test_a_client_is_asked_once_it_has_been_silent_for_longer_than_the_limit() -> None:
    watched = by_sweep()
    watched.keepalive.tick(60.0)
    assert watched.asked() == 0

    watched.keepalive.tick(0.5)
    assert watched.asked() == 1


def test_what_comes_makes_its_silence_begin_anew() -> None:
    watched = by_sweep()
    watched.keepalive.tick(59.0)
    watched.keepalive.received()
    watched.keepalive.tick(59.0)
    watched.keepalive.tick(59.0)
    assert watched.asked() == 0

    watched.keepalive.tick(2.0)
    assert watched.asked() == 1


def test_who_does_not_answer_in_time_is_dropped() -> None:
    watched = by_sweep()
    watched.keepalive.tick(61.0)
    watched.keepalive.tick(20.0)
    assert not watched.dropped()

    watched.keepalive.tick(0.5)
    assert watched.dropped()
    assert watched.asked() == 1


@pytest.mark.parametrize("answer", ["ping", "anything"])
def test_who_answers_is_not_and_may_be_asked_again(answer: str) -> None:
    watched = by_sweep()
    watched.keepalive.tick(61.0)
    watched.answer() if answer == "ping" else watched.keepalive.received()
    watched.keepalive.tick(21.0)
    watched.keepalive.tick(21.0)
    assert not watched.dropped()

    watched.keepalive.tick(41.0)
    assert watched.asked() == 2


@pytest.mark.parametrize(
    ("limits", "asked"),
    [
        ({"keepalive_s": 0.0}, 0),
        ({"calls": False}, 0),
        ({"calls": False, "keepalive_without_calls": True}, 1),
    ],
)
def test_nobody_is_asked_where_that_is_off_nor_without_calls_unless_permitted(
    limits: dict[str, Any], asked: int
) -> None:
    watched = by_sweep(**limits)
    watched.keepalive.tick(1000.0)

    assert watched.asked() == asked


@pytest.mark.parametrize(("most", "asked"), [(2, 2), (1, 1), (0, 5)])
def test_who_is_sent_nothing_in_between_is_asked_only_so_often(most: int, asked: int) -> None:
    watched = by_sweep(max_pings_without_data=most)
    for _ in range(5):
        watched.keepalive.tick(61.0)
        watched.answer()
        watched.keepalive.tick(1.0)
    assert watched.asked() == asked

    watched.outbox.sent_frames += 1
    watched.keepalive.tick(61.0)
    assert watched.asked() == 1


# -- to the millisecond ----------------------------------------------------------------------------------------


def exactly(**limits: Any) -> Watched:
    watched = Watched(**{"keepalive_s": 10.0, "keepalive_timeout_s": 2.0, **limits})
    watched.keepalive.received()
    return watched


def test_under_a_minute_it_is_asked_at_that_moment_and_dropped_at_the_next() -> None:
    watched = exactly()
    watched.loop.pass_time(3.0)
    watched.keepalive.received()
    watched.loop.pass_time(7.0)
    watched.loop.pass_time(2.999)
    assert watched.asked() == 0
    watched.loop.pass_time(0.001)
    assert watched.asked() == 1

    watched.loop.pass_time(1.999)
    assert not watched.dropped()
    watched.loop.pass_time(0.001)
    assert watched.dropped()


def test_one_that_has_said_nothing_at_all_is_asked_as_soon() -> None:
    watched = Watched(keepalive_s=10.0)
    watched.loop.pass_time(10.0)

    assert watched.asked() == 1


@pytest.mark.parametrize(("limit_s", "timers"), [(59.9, 1), (60.0, 0), (0.0, 0)])
def test_only_then_there_is_a_timer_and_its_end_takes_it_away(limit_s: float, timers: int) -> None:
    watched = exactly(keepalive_s=limit_s)
    assert len(watched.loop.timers) == timers

    watched.keepalive.end()
    watched.keepalive.end()
    assert [timer for timer in watched.loop.timers if not timer.cancelled] == []


def test_the_sweep_asks_nobody_then() -> None:
    watched = exactly()
    watched.keepalive.tick(100.0)
    watched.keepalive.tick(100.0)

    assert watched.asked() == 0


@pytest.mark.parametrize("answer", ["ping", "anything"])
def test_who_answers_at_the_last_moment_lives(answer: str) -> None:
    watched = exactly()
    watched.loop.pass_time(10.0)
    watched.loop.pass_time(1.999)
    watched.answer() if answer == "ping" else watched.keepalive.received()
    watched.loop.pass_time(0.001)
    assert not watched.dropped()

    watched.loop.pass_time(9.998)
    assert watched.asked() == 1
    watched.loop.pass_time(0.001)
    assert watched.asked() == 1


def test_a_timer_that_is_late_looks_once_more_and_no_more_than_once() -> None:
    watched = exactly()
    watched.loop.pass_time(10.0)
    watched.loop.pass_time(2.1)
    assert not watched.dropped()

    watched.loop.pass_time(0.1)
    assert watched.dropped()


@pytest.mark.parametrize("late_s", [0.0, 0.049])
def test_one_that_is_hardly_late_drops_at_once(late_s: float) -> None:
    watched = exactly()
    watched.loop.pass_time(10.0)
    watched.loop.pass_time(2.0 + late_s)

    assert watched.dropped()


def test_one_that_is_late_by_more_than_a_second_gives_all_the_time_anew() -> None:
    watched = exactly()
    watched.loop.pass_time(10.0)
    watched.loop.pass_time(2.0 + 1.01)
    watched.loop.pass_time(1.999)
    assert not watched.dropped()

    watched.loop.pass_time(0.001)
    assert watched.dropped()


def test_a_late_look_is_forgotten_with_the_question_it_was_for() -> None:
    watched = exactly()
    for _ in range(2):
        watched.loop.pass_time(10.0)
        watched.loop.pass_time(2.1)
        assert not watched.dropped()
        watched.answer()
        watched.loop.pass_time(0.001)
        watched.outbox.sent_frames += 1

    assert watched.asked() == 2


def test_who_has_no_calls_is_looked_at_ten_times_a_second_at_most() -> None:
    watched = exactly(keepalive_s=0.001, calls=False)
    looks = 0
    for _ in range(1000):
        due = min(timer.when for timer in watched.loop.timers)
        watched.loop.pass_time(max(0.0, due - watched.loop.now))
        looks += 1
        if watched.loop.now >= 1001.0:
            break

    assert looks == pytest.approx(1 / LEAST_S, abs=1)
    assert watched.asked() == 0


def test_one_that_answers_soon_may_be_found_silent_before_its_time_to_answer_is_over() -> None:
    watched = exactly(keepalive_s=1.0, keepalive_timeout_s=20.0)
    watched.loop.pass_time(1.0)
    watched.answer()
    watched.loop.pass_time(1.0)

    assert watched.asked() == 2


# -- the peer's own --------------------------------------------------------------------------------------------


def test_a_ping_is_answered_with_what_it_says() -> None:
    watched = Watched()
    watched.keepalive.process_ping(0, b"12345678")
    watched.keepalive.process_ping(ACK, b"are you?")

    assert watched.outbox.written == [frame(PING, ACK, 0, b"12345678")]


@pytest.mark.parametrize("flags", [0, ACK])
@pytest.mark.parametrize("size", [7, 9])
def test_it_has_eight_bytes(flags: int, size: int) -> None:
    with pytest.raises(Http2Error) as error:
        Watched().keepalive.process_ping(flags, bytes(size))

    assert error.value.code == ErrorCode.FRAME_SIZE_ERROR


def test_it_is_a_frame_that_asks_for_nothing() -> None:
    watched = Watched(calls=False, max_idle_frames=1, max_ping_strikes=0)
    watched.ping()
    with pytest.raises(Http2Error, match="request nothing"):
        watched.ping()


def strikes(watched: Watched, apart_s: float) -> int | None:
    """Tell which PING is one too many, of some so far apart; None: none of ten."""
    for number in range(10):
        try:
            watched.ping()
        except Http2Error as error:
            if (error.code, error.text) == (ErrorCode.ENHANCE_YOUR_CALM, "too_many_pings"):
                return number
            raise
        watched.loop.pass_time(apart_s)
    return None


@pytest.mark.parametrize(
    ("limits", "apart_s", "which"),
    [
        ({}, 299.9, 3),
        ({}, 300.0, None),
        ({"max_ping_strikes": 1}, 1.0, 2),
        ({"max_ping_strikes": 0}, 1.0, None),
        ({"min_ping_interval_s": 5.0}, 5.0, None),
        ({"min_ping_interval_s": 5.0}, 4.9, 3),
        ({"calls": False}, TWO_HOURS_S - 1, 3),
        ({"calls": False}, TWO_HOURS_S, None),
        ({"calls": False, "keepalive_without_calls": True}, 300.0, None),
    ],
)
def test_those_that_come_too_soon_are_strikes_and_one_more_than_allowed_ends_it(
    limits: dict[str, Any], apart_s: float, which: int | None
) -> None:
    assert strikes(Watched(**limits), apart_s) == which


def test_the_first_after_something_was_sent_takes_all_strikes_away_and_is_none() -> None:
    watched = Watched()
    for _ in range(10):
        for _ in range(3):
            watched.ping()
        watched.outbox.sent_frames += 1
    watched.ping()
    assert strikes(watched, 0.0) == 2


def test_strikes_stay_though_pings_between_them_are_far_apart() -> None:
    watched = Watched()
    for _ in range(3):
        watched.ping()
    watched.loop.pass_time(300.0)
    watched.ping()

    assert strikes(watched, 0.0) == 0


@given(st.lists(st.one_of(st.just("sent"), st.integers(0, 600)), max_size=60), st.integers(1, 4))
def test_who_is_ended_has_struck_more_often_than_allowed_since_something_was_sent(
    steps: list[str | int], most: int
) -> None:
    watched = Watched(max_ping_strikes=most, max_idle_frames=1000)
    struck, last, sent = 0, -1e9, False
    for step in steps:
        if step == "sent":
            watched.outbox.sent_frames += 1
            sent = True
            continue
        watched.loop.pass_time(float(step))
        struck = 0 if sent else struck + (watched.loop.now - last < 300.0)
        last, sent = watched.loop.now, False
        if struck <= most:
            watched.ping()
            continue
        with pytest.raises(Http2Error, match="too_many_pings"):
            watched.ping()
        break
