"""LoopGuard: which models stay on the event loop, and for how long other models run on threads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.batching.running.loop_guard import (
    FOREVER_NS,
    LONG_BATCH_NS,
    MAX_DEBT_NS,
    MAX_HOLD_NS,
    MAX_OFF_LOOP_NS,
    MIN_OFF_LOOP_NS,
    SAMPLE_INTERVAL_NS,
    WATCH_NS,
    LoopGuard,
)

MS = 1_000_000
S = 1_000 * MS
NOW = 1_000 * S


class Loop:
    """The event loop, and the clock of its thread's CPU time."""

    def __init__(self) -> None:
        self.guard = LoopGuard()
        self.used_ns = 7 * S

    def batch(self, now_ns: int, ns: int, cpu_ns: int) -> str:
        """Report a batch that ends now, as Model.dispatch does: only long ones are recorded."""
        if now_ns - ns >= self.guard.next_sample_ns:
            self.guard.sample_cpu(self.used_ns, now_ns - ns)
        self.used_ns += cpu_ns
        return self.guard.record_long_batch(ns, self.used_ns, now_ns) if ns > LONG_BATCH_NS else ""


class TestLoopGuard:
    def test_several_long_batches_move_a_model_to_threads_for_a_while(self) -> None:
        loop = Loop()

        messages = [loop.batch(NOW + i * 200 * MS, 25 * MS, 25 * MS) for i in range(3)]

        text = "held the event loop with long batches for 55 ms: it runs on a thread for 5 s"
        assert messages == ["", "", text]
        assert loop.guard.off_loop_until_ns == NOW + 400 * MS + MIN_OFF_LOOP_NS

    def test_time_spent_waiting_for_the_cpu_does_not_count_as_holding_the_loop(self) -> None:
        loop = Loop()

        messages = [loop.batch(NOW + i * 200 * MS, 100 * MS, 40_000) for i in range(1000)]

        assert not any(messages)
        assert not loop.guard.off_loop_until_ns

    def test_an_occasional_long_batch_does_not_move_a_model_to_threads(self) -> None:
        loop = Loop()

        # 25 ms of CPU time, twice, are paid back in a second
        messages = [loop.batch(NOW + i * S, 25 * MS, 25 * MS) for i in range(1000)]

        assert not any(messages)
        assert not loop.guard.off_loop_until_ns

    def test_each_repeated_offense_doubles_the_time_on_threads(self) -> None:
        loop, now_ns, away = Loop(), NOW, []
        for _ in range(9):
            while not loop.batch(now_ns, 25 * MS, 25 * MS):
                now_ns += 50 * MS
            away.append((loop.guard.off_loop_until_ns - now_ns) // S)
            now_ns = loop.guard.off_loop_until_ns

        assert away == [5, 10, 20, 40, 80, 160, 320, MAX_OFF_LOOP_NS // S, MAX_OFF_LOOP_NS // S]

    def test_the_time_on_threads_starts_over_after_an_equally_long_time_without_offense(self) -> None:
        loop, now_ns, away = Loop(), NOW, []
        for _ in range(3):
            while not loop.batch(now_ns, 25 * MS, 25 * MS):
                now_ns += 50 * MS
            away.append((loop.guard.off_loop_until_ns - now_ns) // S)
            now_ns = loop.guard.off_loop_until_ns + 60 * S

        assert away == [5, 5, 5]

    def test_a_second_very_long_batch_moves_a_model_to_threads_for_good(self) -> None:
        loop = Loop()

        message = loop.batch(NOW, MAX_HOLD_NS + 1, MAX_HOLD_NS + 1)
        assert message == "held the event loop for 250 ms: it runs on a thread for 600 s"
        assert loop.guard.off_loop_until_ns == NOW + MAX_OFF_LOOP_NS
        message = loop.batch(loop.guard.off_loop_until_ns + S, MAX_HOLD_NS + 1, MAX_HOLD_NS + 1)
        assert message == "held the event loop for 250 ms: it runs on a thread from now on"
        assert loop.guard.off_loop_until_ns == FOREVER_NS

    @pytest.mark.parametrize(("used_ns", "away_ns"), [(40_000, 0), (2 * MAX_HOLD_NS, MAX_OFF_LOOP_NS)])
    def test_a_machine_stall_is_told_from_a_long_batch_even_without_a_recent_cpu_sample(
        self, used_ns: int, away_ns: int
    ) -> None:
        loop = Loop()
        loop.batch(NOW, 40_000, 40_000)
        loop.used_ns += SAMPLE_INTERVAL_NS - MS  # the loop has been busy since then
        ends_ns = NOW + SAMPLE_INTERVAL_NS - MS + 2 * MAX_HOLD_NS
        loop.batch(ends_ns, 2 * MAX_HOLD_NS, used_ns)

        assert loop.guard.off_loop_until_ns == (ends_ns + away_ns if away_ns else 0)

    def test_a_machine_that_stalls_repeatedly_moves_no_model_to_threads(self) -> None:
        loop = Loop()

        messages = [loop.batch(NOW + i * 60 * S, 4 * MAX_HOLD_NS, 40_000) for i in range(9)]

        assert not any(messages)
        assert not loop.guard.off_loop_until_ns

    def test_a_cpu_clock_that_jumps_occasionally_moves_no_model_to_threads_for_good(self) -> None:
        loop, now_ns, away = Loop(), NOW, []
        for _ in range(9):
            loop.batch(now_ns, 2 * LONG_BATCH_NS, 0)
            loop.batch(now_ns + S, 20 * S, 20 * S)
            away.append((loop.guard.off_loop_until_ns - now_ns - S) // S)
            now_ns = loop.guard.off_loop_until_ns + MAX_OFF_LOOP_NS

        assert away == [MAX_OFF_LOOP_NS // S] * 9

    @given(st.lists(st.tuples(st.integers(0, 500), st.integers(6, 250)), min_size=1, max_size=200))
    def test_long_batches_hold_the_loop_for_a_small_share_of_the_time(self, batches: list[tuple[int, int]]) -> None:
        loop, now_ns, held_ns = Loop(), NOW, 0
        for pause_ms, ms in batches:
            now_ns = max(now_ns + pause_ms * MS, loop.guard.off_loop_until_ns) + ms * MS
            held_ns += ms * MS
            loop.batch(now_ns, ms * MS, ms * MS)
            # besides the twentieth that is paid back: what is owed, and a batch that was not watched or was the last
            # before it goes away, of which there is one in the time that it is away or has been good
            most_ns = MAX_DEBT_NS + 2 * MAX_HOLD_NS + (now_ns - NOW) // 20
            rare_ns = ((now_ns - NOW) // WATCH_NS + (now_ns - NOW) // MIN_OFF_LOOP_NS) * (MAX_DEBT_NS + MAX_HOLD_NS)
            assert held_ns <= most_ns + rare_ns
