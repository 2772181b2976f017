"""Dispatcher: the earliest time a request may have arrived, and how much a model runs in one turn of the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise
from typing import Any, cast

import pytest

from penstock.batching import dispatcher
from penstock.batching.dispatcher import TURN_BUDGET_NS, Dispatcher
from tests.batching.loop_models import housed, right

HOUR_NS = 3_600_000_000_000


class Clock:
    """A fake `time` module."""

    def __init__(self) -> None:
        self.now_ns = 0

    def monotonic_ns(self) -> int:
        return self.now_ns


class Loop:
    """A fake event loop that remembers the callbacks for the end of its turn."""

    def __init__(self) -> None:
        self.soon: list[Callable[[], None]] = []

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.soon.append(callback)

    def end_turn(self) -> None:
        soon, self.soon = self.soon, []
        for callback in soon:
            callback()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(dispatcher, "time", clock)
    return clock


def turn(watched: Dispatcher, clock: Clock, at_ns: int) -> None:
    """Let a turn of the loop end."""
    clock.now_ns = at_ns
    watched._run_turn()


def test_a_request_that_wakes_an_idle_loop_has_just_arrived(clock: Clock) -> None:
    loop = Loop()
    watched = Dispatcher(cast(Any, loop), lambda *_: None)
    for clock.now_ns in range(10_000_000, 30_000_000, 1_000_000):
        assert watched.earliest_arrival_ns(clock.now_ns) == clock.now_ns
        assert watched.earliest_arrival_ns(clock.now_ns + 1000) == clock.now_ns
        loop.end_turn()
        loop.end_turn()


def test_a_loop_with_more_callbacks_to_run_is_not_idle(clock: Clock) -> None:
    loop = Loop()
    watched = Dispatcher(cast(Any, loop), lambda *_: None)
    watched.earliest_arrival_ns(10_000_000)
    for clock.now_ns in range(10_000_000, 15_000_000, 1_000_000):
        loop.end_turn()
        watched._schedule_turn()

    assert watched.earliest_arrival_ns(15_000_000) == 13_000_000


def test_a_request_read_by_a_busy_loop_may_have_arrived_since_the_previous_turn(clock: Clock) -> None:
    watched = Dispatcher(cast(Any, Loop()), lambda *_: None)
    for now_ns in range(10_000_000, 16_000_000, 1_000_000):
        watched.earliest_arrival_ns(now_ns)
    turn(watched, clock, 16_000_000)
    assert watched.earliest_arrival_ns(17_000_000) == 10_000_000

    turn(watched, clock, 18_000_000)
    assert watched.earliest_arrival_ns(19_000_000) == 16_000_000
    assert watched.earliest_arrival_ns(20_000_000) == 16_000_000


def test_a_turn_in_which_every_request_is_rejected_is_still_counted(clock: Clock) -> None:
    loop = Loop()
    watched = Dispatcher(cast(Any, loop), lambda *_: None)
    for clock.now_ns in range(10_000_000, 30_000_000, 1_000_000):
        watched.earliest_arrival_ns(clock.now_ns)
        watched.earliest_arrival_ns(clock.now_ns)
        loop.end_turn()

    assert watched.earliest_arrival_ns(30_000_000) == 28_000_000
    assert loop.soon.count(watched._run_turn) == 1


def test_a_run_that_ends_after_the_loop_is_closed_raises_nothing() -> None:
    loop = asyncio.new_event_loop()
    loop.close()

    Dispatcher(loop, lambda *_: None).deliver_from_thread(cast(Any, None), [])


def test_a_turn_delivers_large_answers_within_its_time_budget_and_the_next_turn_continues(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop()
    watched = Dispatcher(cast(Any, loop), lambda *_: None)
    delivered: list[Any] = []

    def deliver(_model: Any, ran: Any) -> None:
        delivered.append(ran)
        clock.now_ns += TURN_BUDGET_NS + 1

    monkeypatch.setattr(watched, "deliver", deliver)
    for batch in range(3):
        watched.deliver_soon(cast(Any, None), [cast(Any, batch)])
    after = []
    while loop.soon:
        loop.end_turn()
        after.append(len(delivered))

    assert after == [1, 2, 3]
    assert delivered == [[0], [1], [2]]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("rows", "goes_on_ns", "most"), [(1, HOUR_NS, 20), (1, -1, 1), (2, HOUR_NS, 2)], ids=["one", "a long turn", "two"]
)
async def test_a_model_that_runs_one_row_at_a_time_continues_within_the_turns_time_budget(
    rows: int, goes_on_ns: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "TURN_BUDGET_NS", goes_on_ns)
    async with housed() as house:
        model = await house.load(max_batch_rows=rows, cap_rows=rows)
        came = [house.come(model) for _ in range(20)]
        finished = [0]
        while finished[-1] < len(came):
            await asyncio.sleep(0)
            finished.append(sum(request.outputs is not None for request in came))

        assert max(after - before for before, after in pairwise(finished)) == most
        assert all(right(request, value) for value, request in enumerate(came, 2))
        assert house.rows_run == [rows] * (20 // rows)


class Ticking:
    """A fake `time` module: each reading takes a twentieth of a turn's time budget."""

    def __init__(self) -> None:
        self.now_ns = 1

    def monotonic_ns(self) -> int:
        self.now_ns += TURN_BUDGET_NS // 20
        return self.now_ns


@pytest.mark.anyio
async def test_models_that_run_one_row_at_a_time_share_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    async with housed() as house:
        models = [await house.load(name, max_batch_rows=1, cap_rows=1) for name in "ab"]
        came = [[house.come(model) for _ in range(40)] for model in models]
        monkeypatch.setattr(dispatcher, "time", Ticking())
        finished = [0, 0]
        while min(finished) < 40:
            await asyncio.sleep(0)
            finished = [sum(request.outputs is not None for request in each) for each in came]
            assert abs(finished[0] - finished[1]) <= 2
