"""Stay: which models stay on the event loop, and for how long the others are away."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.batching.running.stay import (
    AWAY_NS,
    DOUBTED_NS,
    FOREVER_NS,
    HELD_NS,
    LONG_NS,
    MOST_AWAY_NS,
    OWED_NS,
    WATCHED_NS,
    Stay,
)

MS = 1_000_000
S = 1_000 * MS
NOW = 1_000 * S


def batch(stay: Stay, now_ns: int, ns: int, cpu_ns: int) -> str:
    """What a batch says that ends now, as Model.dispatch has it: only a long one is told, and watched after another."""
    if ns <= LONG_NS:
        return ""
    watched = now_ns - ns < stay.watched_until_ns
    return stay.held(ns, cpu_ns if watched else None, now_ns)


class TestStay:
    def test_several_long_batches_send_a_model_to_threads_for_a_while(self) -> None:
        stay = Stay()

        said = [batch(stay, NOW + i * 200 * MS, 25 * MS, 25 * MS) for i in range(4)]

        text = "held the event loop with long batches, for 55 ms: it runs on threads for 5 s"
        assert said == ["", "", "", text]
        assert stay.away_until_ns == NOW + 600 * MS + AWAY_NS

    def test_what_waited_for_the_cpu_is_not_held_against_it(self) -> None:
        stay = Stay()

        said = [batch(stay, NOW + i * 200 * MS, 100 * MS, 40_000) for i in range(1000)]

        assert not any(said)
        assert not stay.away_until_ns

    def test_a_long_batch_now_and_then_is_forgiven(self) -> None:
        stay = Stay()

        # 25 ms of CPU time, twice, are paid back in a second
        said = [batch(stay, NOW + i * S, 25 * MS, 25 * MS) for i in range(1000)]

        assert not any(said)
        assert not stay.away_until_ns

    def test_who_does_it_again_is_away_for_twice_as_long(self) -> None:
        stay, now_ns, away = Stay(), NOW, []
        for _ in range(9):
            while not batch(stay, now_ns, 25 * MS, 25 * MS):
                now_ns += 50 * MS
            away.append((stay.away_until_ns - now_ns) // S)
            now_ns = stay.away_until_ns

        assert away == [5, 10, 20, 40, 80, 160, 320, MOST_AWAY_NS // S, MOST_AWAY_NS // S]

    def test_who_has_behaved_for_as_long_begins_again(self) -> None:
        stay, now_ns, away = Stay(), NOW, []
        for _ in range(3):
            while not batch(stay, now_ns, 25 * MS, 25 * MS):
                now_ns += 50 * MS
            away.append((stay.away_until_ns - now_ns) // S)
            now_ns = stay.away_until_ns + 60 * S

        assert away == [5, 5, 5]

    def test_very_long_batches_send_it_away_for_a_while_and_then_for_long_and_then_for_good(self) -> None:
        stay = Stay()

        said = batch(stay, NOW, HELD_NS + 1, HELD_NS + 1)
        assert said == "held the event loop for 250 ms: it runs on threads for 5 s"
        assert stay.away_until_ns == NOW + AWAY_NS
        said = batch(stay, NOW + DOUBTED_NS, HELD_NS + 1, HELD_NS + 1)
        assert said == "held the event loop for 250 ms: it runs on threads for 600 s"
        said = batch(stay, stay.away_until_ns + WATCHED_NS, HELD_NS + 1, HELD_NS + 1)
        assert said == "held the event loop for 250 ms: it runs on threads from now on"
        assert stay.away_until_ns == FOREVER_NS

    def test_a_machine_that_stands_still_again_and_again_sends_nobody_away_but_once(self) -> None:
        stay = Stay()

        said = [batch(stay, NOW + i * 60 * S, 4 * HELD_NS, 40_000) for i in range(9)]

        assert said == ["held the event loop for 1000 ms: it runs on threads for 5 s", *[""] * 8]
        assert stay.away_until_ns == NOW + AWAY_NS

    def test_a_clock_of_cpu_time_that_jumps_now_and_then_sends_nobody_away_for_good(self) -> None:
        stay, now_ns, away = Stay(), NOW, []
        for _ in range(9):
            batch(stay, now_ns, 2 * LONG_NS, 0)
            batch(stay, now_ns + S, 20 * S, 20 * S)
            away.append((stay.away_until_ns - now_ns - S) // S)
            now_ns = stay.away_until_ns + MOST_AWAY_NS

        assert away == [MOST_AWAY_NS // S] * 9

    @given(st.lists(st.tuples(st.integers(0, 500), st.integers(6, 250)), min_size=1, max_size=200))
    def test_the_loop_is_held_by_long_batches_for_little_of_the_time(self, batches: list[tuple[int, int]]) -> None:
        stay, now_ns, held_ns = Stay(), NOW, 0
        for pause_ms, ms in batches:
            now_ns = max(now_ns + pause_ms * MS, stay.away_until_ns) + ms * MS
            held_ns += ms * MS
            batch(stay, now_ns, ms * MS, ms * MS)
            # besides the twentieth that is paid back: what is owed, and a batch that was not watched or was the last
            # before it goes away, of which there is one in the time that it is away or has been good
            most_ns = OWED_NS + 2 * HELD_NS + (now_ns - NOW) // 20
            rare_ns = ((now_ns - NOW) // WATCHED_NS + (now_ns - NOW) // AWAY_NS) * (OWED_NS + HELD_NS)
            assert held_ns <= most_ns + rare_ns
