"""FrameBudget alone: what one connection may request in a second."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.http2.budget import FrameBudget
from penstock.server.http2.frames import ErrorCode, Http2Error
from penstock.server.http2.limits import Http2Limits

from .fakes import FakeOutbox

FRAMES, RESETS, SETTINGS = 10, 5, 100
EARNED = 8


def budget() -> tuple[FrameBudget, FakeOutbox]:
    outbox: Any = FakeOutbox()
    return FrameBudget(Http2Limits(max_idle_frames=FRAMES, max_resets=RESETS), outbox), outbox


def charged(frame_budget: FrameBudget) -> int:
    """Return how many idle frames the budget accepts."""
    return _count_allowed(partial(frame_budget.charge, "PING"), "too many frames that request nothing, such as PING")


def reset(frame_budget: FrameBudget) -> int:
    """Return how many calls may be opened and reset."""
    return _count_allowed(frame_budget.charge_reset, "too many calls were opened and reset")


def _count_allowed(charge: Callable[[], None], refusal: str) -> int:
    for count in itertools.count():
        try:
            charge()
        except Http2Error as error:
            if (error.code, error.text) == (ErrorCode.ENHANCE_YOUR_CALM, refusal):
                return count
            raise
    raise AssertionError


def test_each_second_allows_as_many_idle_frames_as_the_limit() -> None:
    frame_budget, _ = budget()

    assert charged(frame_budget) == FRAMES
    frame_budget.renew()
    assert charged(frame_budget) == FRAMES


def test_frames_sent_in_a_second_allow_more_idle_frames_in_that_second() -> None:
    frame_budget, outbox = budget()
    outbox.sent_frames += 3

    assert charged(frame_budget) == FRAMES + 3 * EARNED
    frame_budget.renew()
    assert charged(frame_budget) == FRAMES


def test_open_calls_allow_more_idle_frames_while_they_are_open() -> None:
    frame_budget, outbox = budget()
    outbox.streams = {1: None, 3: None}

    assert charged(frame_budget) == FRAMES + 2 * EARNED
    frame_budget.renew()
    assert charged(frame_budget) == FRAMES + 2 * EARNED


def test_reset_calls_allow_more_idle_frames_in_the_same_second() -> None:
    frame_budget, _ = budget()
    for _ in range(RESETS):
        frame_budget.charge_reset()

    assert charged(frame_budget) == FRAMES + RESETS * EARNED
    frame_budget.renew()
    assert charged(frame_budget) == FRAMES


def test_each_second_allows_as_many_resets_as_the_limit_plus_one_per_answer() -> None:
    frame_budget, outbox = budget()
    assert reset(frame_budget) == RESETS

    frame_budget.renew()
    outbox.answer_count += 7
    assert reset(frame_budget) == RESETS + 7

    frame_budget.renew()
    assert reset(frame_budget) == RESETS


def test_frames_and_answers_sent_before_the_budget_began_do_not_raise_it() -> None:
    outbox: Any = FakeOutbox()
    outbox.sent_frames = outbox.answer_count = 1000
    frame_budget = FrameBudget(Http2Limits(max_idle_frames=FRAMES, max_resets=RESETS), outbox)

    assert charged(frame_budget) == FRAMES
    frame_budget.renew()
    assert reset(frame_budget) == RESETS


def test_each_second_allows_a_hundred_settings_frames_regardless_of_traffic() -> None:
    frame_budget, outbox = budget()
    outbox.sent_frames, outbox.answer_count, outbox.streams = 1000, 1000, dict.fromkeys(range(1000))
    for _ in range(2):
        for _ in range(SETTINGS):
            frame_budget.charge_settings()
        with pytest.raises(Http2Error) as error:
            frame_budget.charge_settings()
        assert error.value.code == ErrorCode.ENHANCE_YOUR_CALM
        frame_budget.renew()


KINDS = st.sampled_from(["charge", "charge_reset", "send", "answer", "open", "renew"])


@given(st.lists(KINDS, max_size=200))
def test_the_budget_rejects_exactly_the_frames_beyond_the_allowance_of_the_second(steps: list[str]) -> None:
    frame_budget, outbox = budget()
    spent = dict.fromkeys(["charge", "charge_reset", "send", "answer"], 0)
    for step in steps:
        if step == "renew":
            frame_budget.renew()
            spent = dict.fromkeys(spent, 0)
            continue
        if step == "open":
            outbox.streams[len(outbox.streams)] = None
            continue
        spent[step] += 1
        outbox.sent_frames += step == "send"
        outbox.answer_count += step == "answer"
        frames = FRAMES + EARNED * (spent["send"] + len(outbox.streams) + spent["charge_reset"])
        most = {"charge": frames, "charge_reset": RESETS + spent["answer"]}.get(step)
        if most is None:
            continue
        ask = frame_budget.charge_reset if step == "charge_reset" else partial(frame_budget.charge, "PING")
        if spent[step] <= most:
            ask()
        else:
            with pytest.raises(Http2Error):
                ask()
