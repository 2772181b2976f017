"""When a process is killed for hanging, decided from the state that the system reports."""

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
    """Check a process that is in one state for this many seconds. Returns: why it is killed, or nothing."""
    start = judged_for.now_s  # type: ignore[attr-defined]
    turns = round(seconds / step_s)
    why = ""
    for turn in range(turns + 1):
        judged_for.now_s = start + turn * step_s  # type: ignore[attr-defined]
        why = why or watch.check(state, turn if computes else 0, judged_for.now_s)  # type: ignore[attr-defined]
    return why


judged_for.now_s = 0.0  # type: ignore[attr-defined]


def test_a_stopped_process_is_killed_after_half_a_second() -> None:
    assert judged_for(ProcessWatch(), STOPPED_S - CHECK_S, "T") == ""
    assert judged_for(ProcessWatch(), STOPPED_S + CHECK_S, "T") == "it was stopped"


def test_a_process_stopped_repeatedly_that_responds_between_stops_is_not_killed() -> None:
    watch, verdicts = ProcessWatch(), set()
    for look in range(1000):
        watch.on_pong()
        verdicts.add(watch.check("T", look // 3, look * CHECK_S))

    assert verdicts == {""}


def test_a_process_stopped_by_a_debugger_is_not_killed() -> None:
    assert judged_for(ProcessWatch(), HANG_S, "t") == ""


def test_a_sleeping_process_that_does_not_respond_is_killed() -> None:
    assert "does not respond" in judged_for(ProcessWatch(), HANG_S + 1, "S")


def test_a_sleeping_process_that_responds_is_never_killed() -> None:
    watch = ProcessWatch()
    for _ in range(10):
        assert judged_for(watch, HANG_S / 2, "S") == ""
        watch.on_pong()


def test_a_process_waiting_for_cpu_or_disk_is_not_killed() -> None:
    assert judged_for(ProcessWatch(), BLOCKED_S - 1, "R") == ""
    assert judged_for(ProcessWatch(), BLOCKED_S - 1, "D") == ""


def test_a_process_that_computes_for_a_minute_without_responding_is_killed() -> None:
    assert judged_for(ProcessWatch(), BLOCKED_S - 1, "S", computes=True) == ""
    assert "blocked" in judged_for(ProcessWatch(), BLOCKED_S + 1, "R", computes=True)


def test_time_during_which_the_supervisor_did_not_run_does_not_count() -> None:
    assert judged_for(ProcessWatch(), 10 * HANG_S, "S", step_s=HANG_S) == ""


def test_read_main_thread_returns_the_state_and_cpu_ticks_of_a_process() -> None:
    state, ticks = read_main_thread(os.getpid())

    assert state == "R"
    assert ticks >= 0
    assert read_main_thread(2**22 + 1) == ("", 0)
