"""Alarms: when an alarm rings for a model, and what the loop reads first after it has stalled."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import uvloop

from penstock.batching import alarms
from penstock.batching.alarms import STALL_NS, Alarms
from tests.batching.loop_models import housed

SECOND_NS = 1_000_000_000


class Model:
    """Stands in for a model with sequences, or without."""

    def __init__(self, sequences: Any = None) -> None:
        self.scheduler = SimpleNamespace(sequences=sequences)
        self.name = "m"


class Clock:
    """A fake timer and `time` module: the test sets the time, and due alarms ring."""

    def __init__(self) -> None:
        self.now_ns = SECOND_NS
        self.at_ns: int | None = None
        self.times_set = 0
        self.closed = False
        self._ring: Callable[[], None] = lambda: None

    def make(self, loop: Any, ring: Callable[[], None]) -> Clock:
        self._ring = ring
        return self

    def monotonic_ns(self) -> int:
        return self.now_ns

    def set(self, at_ns: int) -> None:
        self.at_ns = at_ns
        self.times_set += 1

    def disarm(self) -> None:
        self.at_ns = None

    def close(self) -> None:
        self.disarm()
        self.closed = True

    def goes_to(self, now_ns: float) -> None:
        self.now_ns = round(now_ns)
        if self.at_ns is not None and self.at_ns <= now_ns:
            self._ring()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(alarms, "time", clock)
    return clock


def watched(clock: Clock, rung: Callable[[Any], None]) -> Alarms:
    return Alarms(cast(Any, None), rung, clock.make)


def test_an_alarm_rings_once_within_its_tolerance(clock: Clock) -> None:
    rung: list[Any] = []
    model: Any = Model(object())
    watched(clock, rung.append).set(model, 2 * SECOND_NS)
    clock.goes_to(2 * SECOND_NS - 1)
    before = list(rung)
    clock.goes_to(2 * SECOND_NS + STALL_NS / 2)

    assert (before, rung) == ([], [model])
    assert clock.at_ns is None


def test_of_several_times_set_for_a_model_the_earliest_counts(clock: Clock) -> None:
    rung: list[Any] = []
    model: Any = Model()
    both = watched(clock, rung.append)
    for due_ns in (4, 3, 5):
        both.set(model, due_ns * SECOND_NS)

    assert clock.at_ns == 3 * SECOND_NS
    assert clock.times_set == 2


def test_an_alarm_rings_for_each_model_when_due_and_once_for_models_due_together(clock: Clock) -> None:
    rung: list[Any] = []
    first, second, third = (cast(Any, Model()) for _ in range(3))
    all_of_them = watched(clock, rung.append)
    for model, due_ns in ((first, 3), (second, 2), (third, 2)):
        all_of_them.set(model, due_ns * SECOND_NS)
    clock.goes_to(2 * SECOND_NS)
    before = list(rung)
    clock.goes_to(3 * SECOND_NS)

    assert (before, rung) == ([second, third], [second, third, first])


def test_an_alarm_set_again_by_its_own_callback_rings_again(clock: Clock) -> None:
    model, other = cast(Any, Model()), cast(Any, Model())
    rung: list[int] = []

    def ring(rung_for: Any) -> None:
        rung.append(clock.now_ns)
        if len(rung) < 3:
            again.set(rung_for, clock.now_ns + SECOND_NS)

    again = watched(clock, ring)
    again.set(model, 2 * SECOND_NS)
    again.set(other, 9 * SECOND_NS)
    for second in (2, 3, 4, 5):
        clock.goes_to(second * SECOND_NS)

    assert rung == [2 * SECOND_NS, 3 * SECOND_NS, 4 * SECOND_NS]
    assert clock.at_ns == 9 * SECOND_NS


def test_a_failing_alarm_callback_does_not_prevent_other_alarms(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    rung: list[Any] = []
    first, second, later = (cast(Any, Model()) for _ in range(3))

    def ring(model: Any) -> None:
        rung.append(model)
        if model is first:
            raise ValueError("no")

    model_alarms = watched(clock, ring)
    for model, due_ns in ((first, 2), (second, 2), (later, 3)):
        model_alarms.set(model, due_ns * SECOND_NS)
    clock.goes_to(2 * SECOND_NS)

    assert rung == [first, second]
    assert clock.at_ns == 3 * SECOND_NS
    assert "a scheduled callback failed" in caplog.text


def test_after_a_stall_the_loop_reads_its_sockets_before_an_alarm_rings(clock: Clock) -> None:
    rung: list[Any] = []
    model: Any = Model(object())
    late = watched(clock, rung.append)
    late.set(model, 2 * SECOND_NS)
    clock.goes_to(9 * SECOND_NS)
    before = list(rung)
    late.set(model, 2 * SECOND_NS)  # setting it again does not postpone it further
    clock.goes_to(9 * SECOND_NS + STALL_NS)

    assert (before, rung) == ([], [model])
    assert clock.at_ns is None


def test_a_model_without_sequences_is_not_delayed_in_a_loop_that_is_always_late(clock: Clock) -> None:
    rung: list[Any] = []
    model: Any = Model()
    watched(clock, rung.append).set(model, 2 * SECOND_NS)
    clock.goes_to(9 * SECOND_NS)

    assert rung == [model]


def test_an_alarm_does_not_ring_for_a_model_canceled_before_or_during_the_ring(clock: Clock) -> None:
    rung: list[Any] = []
    first, second, third = (cast(Any, Model()) for _ in range(3))

    def ring(model: Any) -> None:
        rung.append(model)
        model_alarms.cancel(second)

    model_alarms = watched(clock, ring)
    for model in (first, second, third):
        model_alarms.set(model, 2 * SECOND_NS)
    model_alarms.cancel(third)
    clock.goes_to(2 * SECOND_NS)

    assert rung == [first]


def test_after_alarms_are_closed_none_rings_and_none_is_set(clock: Clock) -> None:
    rung: list[Any] = []
    model_alarms = watched(clock, rung.append)
    model_alarms.set(cast(Any, Model()), 2 * SECOND_NS)
    model_alarms.close()
    model_alarms.set(cast(Any, Model()), 2 * SECOND_NS)
    clock.goes_to(2 * SECOND_NS)

    assert rung == []
    assert clock.closed


def test_a_batch_held_open_for_less_than_a_millisecond_does_not_keep_the_loop_busy() -> None:
    async def case() -> int:
        async with housed() as house:
            model = await house.load(max_batch_rows=2, max_queue_delay_us=400)
            looked, dispatch = 0, model.dispatch

            def look(now_ns: int) -> Any:
                nonlocal looked
                looked += 1
                return dispatch(now_ns)

            model.dispatch = look  # type: ignore[method-assign]
            house.come(model)
            await house.sink.holds(2)
            return looked

    assert uvloop.run(case()) == 2  # on its arrival, and when it was due
