"""ConcurrencyEstimate: how many calls of hooks that wait should run at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.server.hooks.concurrency import MIN_LONG_WAITS, MIN_WAIT_NS, WINDOW, ConcurrencyEstimate

MS = 1_000_000


def record_calls(waits: ConcurrencyEstimate, duration_ns: int, cpu_ns: int, count: int) -> ConcurrencyEstimate:
    for _ in range(count):
        waits.record_call(duration_ns, cpu_ns)
    return waits


def test_cpu_time_is_measured_after_a_long_call() -> None:
    waits = ConcurrencyEstimate(32)
    assert not record_calls(waits, MIN_WAIT_NS, 0, 100).measures_cpu
    assert record_calls(waits, MIN_WAIT_NS + 1, 0, 1).measures_cpu
    assert not record_calls(waits, MIN_WAIT_NS, MS, WINDOW).measures_cpu


def test_a_few_calls_that_mostly_wait_raise_the_target_to_the_limit() -> None:
    waits = ConcurrencyEstimate(32)
    assert record_calls(waits, 100 * MS, MS // 5, MIN_LONG_WAITS - 1).target == 1
    assert waits.record_call(100 * MS, MS // 5)
    assert waits.target == 32
    assert waits.measures_cpu


def test_the_target_follows_from_the_ratio_of_duration_to_cpu_time() -> None:
    assert record_calls(ConcurrencyEstimate(32), 11 * MS, MS, MIN_LONG_WAITS).target == 9
    assert record_calls(ConcurrencyEstimate(32), 15 * MS, 5 * MS, MIN_LONG_WAITS).target == 2


def test_the_target_is_one_for_hooks_that_mostly_compute() -> None:
    assert record_calls(ConcurrencyEstimate(32), 20 * MS, 19 * MS, 10 * WINDOW).target == 1


def test_fewer_long_waits_than_the_minimum_leave_the_target_at_one() -> None:
    waits = ConcurrencyEstimate(32)
    for _ in range(20):
        record_calls(waits, 300 * MS, MS // 50, MIN_LONG_WAITS - 1)
        record_calls(waits, MS // 50, MS // 50, WINDOW - MIN_LONG_WAITS + 1)
        assert waits.target == 1


def test_the_target_returns_to_one_when_hooks_stop_waiting() -> None:
    waits = record_calls(ConcurrencyEstimate(32), 100 * MS, MS, MIN_LONG_WAITS)
    assert record_calls(waits, MS // 50, MS // 50, WINDOW).target == 1
    assert not waits.measures_cpu


def test_the_target_falls_to_one_when_calls_wait_for_each_other() -> None:
    waits = record_calls(ConcurrencyEstimate(32), 100 * MS, MS, MIN_LONG_WAITS)
    for _ in range(32):
        record_calls(waits, waits.target * 5 * MS, 5 * MS, WINDOW)
    assert waits.target == 1


@given(st.lists(st.tuples(st.integers(0, 10**10), st.integers(0, 10**10))), st.integers(0, 40))
def test_the_target_is_at_least_one_and_at_most_the_limit(calls: list[tuple[int, int]], limit: int) -> None:
    waits = ConcurrencyEstimate(limit)
    for duration_ns, cpu_ns in calls:
        before = waits.target
        assert waits.record_call(duration_ns, cpu_ns) == (waits.target != before)
        assert 1 <= waits.target <= max(limit, 1)
        assert waits.measures_cpu or waits.target == 1
