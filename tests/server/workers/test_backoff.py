"""When a worker is restarted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.server.workers.backoff import Backoff


def test_the_first_restart_is_immediate_and_later_delays_double_up_to_a_minute() -> None:
    backoff = Backoff()

    assert [backoff.next_delay_s(0.0) for _ in range(9)] == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert backoff.failures == 9


def test_a_worker_that_served_for_a_while_is_restarted_immediately() -> None:
    backoff = Backoff()
    backoff.next_delay_s(0.0)
    backoff.next_delay_s(0.0)
    backoff.record_serving(10.0)

    assert backoff.next_delay_s(15.0) == 0.0


def test_a_reset_makes_the_next_restart_immediate() -> None:
    backoff = Backoff()
    backoff.next_delay_s(0.0)
    backoff.next_delay_s(0.0)
    backoff.record_serving(10.0)
    backoff.reset()

    assert backoff.next_delay_s(10.1) == 0.0
    assert backoff.next_delay_s(10.2) == 1.0


def test_a_worker_that_served_briefly_counts_as_failed() -> None:
    backoff = Backoff()
    backoff.next_delay_s(0.0)
    backoff.record_serving(10.0)

    assert backoff.next_delay_s(14.9) == 1.0


def test_a_worker_that_never_served_counts_as_failed() -> None:
    backoff = Backoff()
    backoff.record_serving(0.0)
    backoff.next_delay_s(10.0)

    assert backoff.next_delay_s(500.0) == 1.0


@given(st.lists(st.tuples(st.booleans(), st.floats(0.0, 100.0))))
def test_delays_never_decrease_or_exceed_a_minute_unless_the_worker_served(
    starts: list[tuple[bool, float]],
) -> None:
    backoff, now_s, last_s = Backoff(), 0.0, 0.0
    for ready, lived_s in starts:
        begun_s = now_s
        if ready:
            backoff.record_serving(now_s)
        now_s += lived_s
        wait_s = backoff.next_delay_s(now_s)

        assert 0.0 <= wait_s <= 60.0
        if ready and now_s - begun_s >= 5.0:
            assert wait_s == 0.0
        else:
            assert wait_s >= last_s
        last_s = wait_s
