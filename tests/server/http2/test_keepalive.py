"""Keepalive alone: when it pings, when it aborts the connection, and PINGs of the peer that are too frequent."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.http2.budget import FrameBudget
from penstock.server.http2.frames import ACK, PING, ErrorCode, Http2Error, frame
from penstock.server.http2.keepalive import Keepalive

from .fakes import FakeOutbox, make_shared
from .wire import FakeLoop

PINGED = frame(PING, 0, 0, b"are you?")
LEAST_S, TWO_HOURS_S = 0.1, 7200.0


class Watched:
    """A Keepalive, what it writes, and a clock; by default a call is in progress."""

    def __init__(self, *, calls: bool = True, **limits: Any) -> None:
        shared = make_shared(**limits)
        outbox: Any = FakeOutbox()
        self.loop: FakeLoop = shared.loop  # type: ignore[assignment]
        self.outbox: FakeOutbox = outbox
        outbox.streams = {1: None} if calls else {}
        self.keepalive = Keepalive(shared, outbox, FrameBudget(shared.limits, outbox))
        self.keepalive.begin()

    def ping_count(self) -> int:
        """Return the number of PINGs sent since the last call."""
        written, self.outbox.written = self.outbox.written, []
        return written.count(PINGED)

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


def test_a_client_is_pinged_when_it_is_silent_for_longer_than_the_limit() -> None:
    watched = by_sweep()
    watched.keepalive.tick(60.0)
    assert watched.ping_count() == 0

    watched.keepalive.tick(0.5)
    assert watched.ping_count() == 1


def test_received_data_restarts_the_silence_of_a_client() -> None:
    watched = by_sweep()
    watched.keepalive.tick(59.0)
    watched.keepalive.received()
    watched.keepalive.tick(59.0)
    watched.keepalive.tick(59.0)
    assert watched.ping_count() == 0

    watched.keepalive.tick(2.0)
    assert watched.ping_count() == 1


def test_a_client_that_does_not_answer_the_ping_in_time_is_aborted() -> None:
    watched = by_sweep()
    watched.keepalive.tick(61.0)
    watched.keepalive.tick(20.0)
    assert not watched.dropped()

    watched.keepalive.tick(0.5)
    assert watched.dropped()
    assert watched.ping_count() == 1


@pytest.mark.parametrize("answer", ["ping", "anything"])
def test_a_client_that_answers_the_ping_is_kept_and_pinged_again(answer: str) -> None:
    watched = by_sweep()
    watched.keepalive.tick(61.0)
    watched.answer() if answer == "ping" else watched.keepalive.received()
    watched.keepalive.tick(21.0)
    watched.keepalive.tick(21.0)
    assert not watched.dropped()

    watched.keepalive.tick(41.0)
    assert watched.ping_count() == 2


@pytest.mark.parametrize(
    ("limits", "ping_count"),
    [
        ({"keepalive_s": 0.0}, 0),
        ({"calls": False}, 0),
        ({"calls": False, "keepalive_without_calls": True}, 1),
    ],
)
def test_no_ping_is_sent_if_keepalive_is_off_or_without_calls_unless_permitted(
    limits: dict[str, Any], ping_count: int
) -> None:
    watched = by_sweep(**limits)
    watched.keepalive.tick(1000.0)

    assert watched.ping_count() == ping_count


@pytest.mark.parametrize(("most", "ping_count"), [(2, 2), (1, 1), (0, 5)])
def test_the_number_of_pings_without_data_in_between_is_limited(most: int, ping_count: int) -> None:
    watched = by_sweep(max_pings_without_data=most)
    for sent_frames in (0, 1):
        watched.outbox.sent_frames = sent_frames
        for _ in range(5):
            watched.keepalive.tick(61.0)
            watched.answer()
            watched.keepalive.tick(1.0)

        assert watched.ping_count() == ping_count


# -- to the millisecond ----------------------------------------------------------------------------------------


def exactly(**limits: Any) -> Watched:
    watched = Watched(**{"keepalive_s": 10.0, "keepalive_timeout_s": 2.0, **limits})
    watched.keepalive.received()
    return watched


def test_a_keepalive_time_under_a_minute_pings_and_aborts_to_the_millisecond() -> None:
    watched = exactly()
    watched.loop.pass_time(3.0)
    watched.keepalive.received()
    watched.loop.pass_time(7.0)
    watched.loop.pass_time(2.999)
    assert watched.ping_count() == 0
    watched.loop.pass_time(0.001)
    assert watched.ping_count() == 1

    watched.loop.pass_time(1.999)
    assert not watched.dropped()
    watched.loop.pass_time(0.001)
    assert watched.dropped()


def test_a_client_that_never_sent_anything_is_pinged_after_the_keepalive_time() -> None:
    watched = Watched(keepalive_s=10.0)
    watched.loop.pass_time(10.0)

    assert watched.ping_count() == 1


@pytest.mark.parametrize(("limit_s", "timers"), [(59.9, 1), (60.0, 0), (0.0, 0)])
def test_only_a_keepalive_time_under_a_minute_has_a_timer_which_end_cancels(limit_s: float, timers: int) -> None:
    watched = exactly(keepalive_s=limit_s)
    assert len(watched.loop.timers) == timers

    watched.keepalive.end()
    watched.keepalive.end()
    assert [timer for timer in watched.loop.timers if not timer.cancelled] == []


def test_the_sweep_sends_no_ping_when_a_timer_does() -> None:
    watched = exactly()
    watched.keepalive.tick(100.0)
    watched.keepalive.tick(100.0)

    assert watched.ping_count() == 0


@pytest.mark.parametrize("answer", ["ping", "anything"])
def test_a_client_that_answers_at_the_last_moment_is_kept(answer: str) -> None:
    watched = exactly()
    watched.loop.pass_time(10.0)
    watched.loop.pass_time(1.999)
    watched.answer() if answer == "ping" else watched.keepalive.received()
    watched.loop.pass_time(0.001)
    assert not watched.dropped()

    watched.loop.pass_time(9.998)
    assert watched.ping_count() == 1
    watched.loop.pass_time(0.001)
    assert watched.ping_count() == 1


def test_a_late_timer_checks_exactly_once_more_before_it_aborts() -> None:
    watched = exactly()
    watched.loop.pass_time(10.0)
    watched.loop.pass_time(2.1)
    assert not watched.dropped()

    watched.loop.pass_time(0.1)
    assert watched.dropped()


@pytest.mark.parametrize("late_s", [0.0, 0.049])
def test_a_timer_that_is_barely_late_aborts_at_once(late_s: float) -> None:
    watched = exactly()
    watched.loop.pass_time(10.0)
    watched.loop.pass_time(2.0 + late_s)

    assert watched.dropped()


def test_a_timer_late_by_more_than_a_second_restarts_the_whole_timeout() -> None:
    watched = exactly()
    watched.loop.pass_time(10.0)
    watched.loop.pass_time(2.0 + 1.01)
    watched.loop.pass_time(1.999)
    assert not watched.dropped()

    watched.loop.pass_time(0.001)
    assert watched.dropped()


def test_each_ping_has_its_own_extra_check_after_a_late_timer() -> None:
    watched = exactly()
    for _ in range(2):
        watched.loop.pass_time(10.0)
        watched.loop.pass_time(2.1)
        assert not watched.dropped()
        watched.answer()
        watched.loop.pass_time(0.001)
        watched.outbox.sent_frames += 1

    assert watched.ping_count() == 2


def test_a_connection_without_calls_is_checked_at_most_ten_times_a_second() -> None:
    watched = exactly(keepalive_s=0.001, calls=False)
    looks = 0
    for _ in range(1000):
        due = min(timer.when for timer in watched.loop.timers)
        watched.loop.pass_time(max(0.0, due - watched.loop.now))
        looks += 1
        if watched.loop.now >= 1001.0:
            break

    assert looks == pytest.approx(1 / LEAST_S, abs=1)
    assert watched.ping_count() == 0


def test_a_client_that_answers_soon_is_pinged_again_before_the_ping_timeout_ends() -> None:
    watched = exactly(keepalive_s=1.0, keepalive_timeout_s=20.0)
    watched.loop.pass_time(1.0)
    watched.answer()
    watched.loop.pass_time(1.0)

    assert watched.ping_count() == 2


# -- PINGs of the peer -----------------------------------------------------------------------------------------


def test_a_ping_is_answered_with_its_own_payload() -> None:
    watched = Watched()
    watched.keepalive.process_ping(0, b"12345678")
    watched.keepalive.process_ping(ACK, b"are you?")

    assert watched.outbox.written == [frame(PING, ACK, 0, b"12345678")]


@pytest.mark.parametrize("flags", [0, ACK])
@pytest.mark.parametrize("size", [7, 9])
def test_a_ping_of_other_than_eight_bytes_is_a_frame_size_error(flags: int, size: int) -> None:
    with pytest.raises(Http2Error) as error:
        Watched().keepalive.process_ping(flags, bytes(size))

    assert error.value.code == ErrorCode.FRAME_SIZE_ERROR


def test_a_ping_counts_as_an_idle_frame() -> None:
    watched = Watched(calls=False, max_idle_frames=1, max_ping_strikes=0)
    watched.ping()
    with pytest.raises(Http2Error, match="request nothing"):
        watched.ping()


def strikes(watched: Watched, apart_s: float) -> int | None:
    """Return the number of the first rejected PING of ten at this interval; None if all are accepted."""
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
def test_too_frequent_pings_are_strikes_and_too_many_strikes_end_the_connection(
    limits: dict[str, Any], apart_s: float, which: int | None
) -> None:
    assert strikes(Watched(**limits), apart_s) == which


def test_the_first_ping_after_sent_data_clears_all_strikes() -> None:
    watched = Watched()
    for _ in range(10):
        for _ in range(3):
            watched.ping()
        watched.outbox.sent_frames += 1
    watched.ping()
    assert strikes(watched, 0.0) == 2


def test_strikes_remain_when_a_later_ping_is_far_apart() -> None:
    watched = Watched()
    for _ in range(3):
        watched.ping()
    watched.loop.pass_time(300.0)
    watched.ping()

    assert strikes(watched, 0.0) == 0


@given(st.lists(st.one_of(st.just("sent"), st.integers(0, 600)), max_size=60), st.integers(1, 4))
def test_a_ping_is_rejected_only_after_too_many_strikes_since_data_was_sent(steps: list[str | int], most: int) -> None:
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
