"""When a process is killed for not working, told what the system says of it."""

from __future__ import annotations

import os

from penstock.server.supervisor.process_watch import (
    BLOCKED_S,
    CHECK_S,
    HANG_S,
    STOPPED_S,
    ProcessWatch,
    read_main_thread,
)


def judged_for(
    watch: ProcessWatch, seconds: float, state: str, *, computes: bool = False, step_s: float = CHECK_S
) -> str:
    """Look at a process that is in one state for so long."""
    start = judged_for.now_s  # type: ignore[attr-defined]
    turns = round(seconds / step_s)
    why = ""
    for turn in range(turns + 1):
        judged_for.now_s = start + turn * step_s  # type: ignore[attr-defined]
        why = why or watch.check(state, turn if computes else 0, judged_for.now_s)  # type: ignore[attr-defined]
    return why


judged_for.now_s = 0.0  # type: ignore[attr-defined]


def test_one_that_is_stopped_is_given_half_a_second() -> None:
    assert judged_for(ProcessWatch(), STOPPED_S - CHECK_S, "T") == ""
    assert judged_for(ProcessWatch(), STOPPED_S + CHECK_S, "T") == "it was stopped"


def test_one_that_is_stopped_and_goes_on_again_and_again_is_let_be() -> None:
    watch, said = ProcessWatch(), set()
    for look in range(1000):
        watch.on_pong()
        said.add(watch.check("T", look // 3, look * CHECK_S))

    assert said == {""}


def test_one_that_a_debugger_has_stopped_is_left_alone() -> None:
    assert judged_for(ProcessWatch(), HANG_S, "t") == ""


def test_one_that_sleeps_and_does_not_answer_hangs() -> None:
    assert "does not respond" in judged_for(ProcessWatch(), HANG_S + 1, "S")


def test_one_that_answers_may_sleep_for_ever() -> None:
    watch = ProcessWatch()
    for _ in range(10):
        assert judged_for(watch, HANG_S / 2, "S") == ""
        watch.on_pong()


def test_one_that_waits_for_a_processor_or_for_a_disk_is_slow_and_not_dead() -> None:
    assert judged_for(ProcessWatch(), BLOCKED_S - 1, "R") == ""
    assert judged_for(ProcessWatch(), BLOCKED_S - 1, "D") == ""


def test_one_that_computes_for_a_minute_without_an_answer_is_ended() -> None:
    assert judged_for(ProcessWatch(), BLOCKED_S - 1, "S", computes=True) == ""
    assert "blocked" in judged_for(ProcessWatch(), BLOCKED_S + 1, "R", computes=True)


def test_time_in_which_the_supervisor_itself_got_no_processor_does_not_count() -> None:
    assert judged_for(ProcessWatch(), 10 * HANG_S, "S", step_s=HANG_S) == ""


def test_the_system_says_what_a_process_does() -> None:
    state, ticks = read_main_thread(os.getpid())

    assert state == "R"
    assert ticks >= 0
    assert read_main_thread(2**22 + 1) == ("", 0)
