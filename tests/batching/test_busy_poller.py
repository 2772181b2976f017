"""BusyPoller: when the loop polls for the next request before it sleeps, and for how long."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, cast

import pytest

from penstock.batching import busy_poller
from penstock.batching.busy_poller import MAX_SKIPPED, MIN_SINGLES, POLL_NS, BusyPoller
from penstock.batching.dispatcher import Dispatcher
from penstock.batching.running.batch import Batch


class Loop:
    """A fake event loop and clock: each turn takes 10 us."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.soon: list[Callable[[], None]] = []

    def monotonic_ns(self) -> int:
        return self.now_ns

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.soon.append(callback)

    def turn(self) -> None:
        self.now_ns += 10_000
        soon, self.soon = self.soon, []
        for callback in soon:
            callback()

    def turns_until_it_sleeps(self) -> int:
        turns = 0
        while self.soon:
            self.turn()
            turns += 1
        return turns


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    loop = Loop()
    monkeypatch.setattr(busy_poller, "time", loop)
    monkeypatch.setattr(busy_poller, "usable_cpus", lambda: 2)
    return loop


def looks_in_vain(one: BusyPoller, loop: Loop, requests: int) -> list[int]:
    """Answer requests that no other follows. Returns: after which of them the loop polled."""
    looked = []
    for number in range(requests):
        one.start()
        if one.polling:
            looked.append(number)
        loop.turns_until_it_sleeps()
    return looked


def test_the_loop_polls_for_a_moment_and_then_sleeps(loop: Loop) -> None:
    one = BusyPoller(cast(Any, loop))
    one.start()

    assert one.polling
    assert loop.turns_until_it_sleeps() == POLL_NS // 10_000
    assert not one.polling


def test_after_each_unsuccessful_poll_the_loop_polls_half_as_often_down_to_a_minimum(loop: Loop) -> None:
    looked = looks_in_vain(BusyPoller(cast(Any, loop)), loop, 400)

    pauses = [after - before - 1 for before, after in pairwise(looked)]
    assert pauses[:6] == [1, 2, 4, 8, 16, 32]
    assert set(pauses[6:]) == {MAX_SKIPPED}


def test_after_a_request_arrives_in_time_the_loop_polls_after_every_request_again(loop: Loop) -> None:
    one = BusyPoller(cast(Any, loop))
    looks_in_vain(one, loop, 4)  # it polls after the first and the third, and skips the next two
    one.start()
    one.start()
    assert one.polling
    one.on_arrival()
    assert loop.turns_until_it_sleeps() == 1

    for _ in range(3):
        one.start()
        assert one.polling
        one.on_arrival()
        loop.turns_until_it_sleeps()


def test_consecutive_polls_do_not_start_a_second_chain_of_callbacks(loop: Loop) -> None:
    one = BusyPoller(cast(Any, loop))
    for _ in range(5):
        one.start()
        loop.turn()
        one.on_arrival()

        assert len(loop.soon) <= 1
    assert not one.polling or loop.soon


def test_the_loop_never_polls_on_a_single_cpu(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy_poller, "usable_cpus", lambda: 1)

    assert looks_in_vain(BusyPoller(cast(Any, loop)), loop, 10) == []


class Served:
    """A fake Model whose next batches have these numbers of requests."""

    def __init__(self, *batches: int) -> None:
        self.batches = list(batches)
        self.scheduled = self.ran_on_loop = self.collects_arrivals = self.held = False
        self.admits_singly = self.intercepts = self.closing = False
        self.scheduler = cast(Any, type("None", (), {"expired": (), "live": 0}))

    def dispatch(self, _now_ns: int) -> tuple[list[Batch], bool]:
        count = self.batches.pop(0)
        return [Batch([cast(Any, None)] * count, count, (), 0)], False


@pytest.mark.parametrize(
    ("batches", "looks"),
    [([1] * MIN_SINGLES, True), ([1] * (MIN_SINGLES - 1), False), ([1, 1, 1, 2, 1, 1, 1, 1, 1, 1, 1], False)],
    ids=["one by one", "too few to tell", "two together"],
)
def test_polling_begins_after_enough_requests_have_arrived_one_by_one(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, batches: list[int], looks: bool
) -> None:
    turns, model = Dispatcher(cast(Any, loop), lambda *_: None), cast(Any, Served(*batches))
    monkeypatch.setattr(Dispatcher, "deliver", lambda *_: None)
    for _ in batches:
        assert not turns._busy_poller.polling
        turns.schedule(model)
        loop.turn()

    assert turns._busy_poller.polling is looks
