"""Alarms: when models are rung for, and what goes before that where the loop stood still."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.batching import alarms
from penstock.batching.alarms import LATE_S, Alarms


class Model:
    """Stands in for a model with sequences, or without."""

    def __init__(self, sequences: Any) -> None:
        self.scheduler = SimpleNamespace(sequences=sequences)


MODEL: Any = Model(object())
PLAIN: Any = Model(None)


class Loop:
    """Stands in for the event loop and for the module `time`: it is told the time, and when to call what is due."""

    def __init__(self) -> None:
        self.now_s = 1.0
        self.due: list[tuple[float, Callable[..., None], Any]] = []

    def time(self) -> float:
        return self.now_s

    def monotonic_ns(self) -> int:
        return round(self.now_s * 1e9)

    def call_at(self, when: float, callback: Callable[..., None], model: Any) -> Any:
        self.due.append((when, callback, model))
        return self

    def call_later(self, after_s: float, callback: Callable[..., None], model: Any) -> Any:
        return self.call_at(self.now_s + after_s, callback, model)

    def cancel(self) -> None:
        self.due.pop()

    def turn(self, now_s: float) -> None:
        self.now_s = now_s
        due, self.due = self.due, []
        for when, callback, model in due:
            if when <= now_s:
                callback(model)
            else:
                self.due.append((when, callback, model))


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    loop = Loop()
    monkeypatch.setattr(alarms, "time", loop)
    return loop


def test_it_rings_in_time(loop: Loop) -> None:
    rung: list[Any] = []
    Alarms(cast(Any, loop), rung.append).set(MODEL, 2_000_000_000)
    loop.turn(1.9)
    before = list(rung)
    loop.turn(2.0 + LATE_S / 2)

    assert (before, rung) == ([], [MODEL])


def test_where_the_loop_stood_still_it_reads_what_has_come_before_it_rings(loop: Loop) -> None:
    rung: list[Any] = []
    watched = Alarms(cast(Any, loop), rung.append)
    watched.set(MODEL, 2_000_000_000)
    loop.turn(9.0)
    before = list(rung)
    watched.set(MODEL, 2_000_000_000)  # as what is read then may ask for, which puts it off no further
    loop.turn(9.0 + LATE_S)

    assert (before, rung) == ([], [MODEL])
    assert not loop.due


def test_a_model_without_sequences_waits_for_nothing_in_a_loop_that_is_always_late(loop: Loop) -> None:
    rung: list[Any] = []
    Alarms(cast(Any, loop), rung.append).set(PLAIN, 2_000_000_000)
    loop.turn(9.0)

    assert rung == [PLAIN]
