"""When a worker has to be killed, by the state of its process."""

from __future__ import annotations

import os

from penstock.server.workers.watch import (
    CHECK_INTERVAL_S,
    LimitExtension,
    ProcessState,
    WorkerWatch,
    read_process_state,
)


def judged(states: str, *, cpu_share: float = 0.0, pinged: bool = False, looks: int = 100) -> tuple[int, str] | None:
    """Check a process in these states, the last one repeated. Return the number of the check that fails it, and why."""
    watch = WorkerWatch(0)
    for number in range(looks):
        state = states[min(number, len(states) - 1)]
        wrong = watch.check(
            number * CHECK_INTERVAL_S, ProcessState(state, number * CHECK_INTERVAL_S * cpu_share), pinged=pinged
        )
        if wrong is not None:
            return number, wrong[0]
    return None


def test_a_running_or_sleeping_worker_is_kept() -> None:
    assert judged("RSD") is None


def test_a_worker_stopped_for_more_than_a_second_is_killed() -> None:
    assert judged("T") == (5, "stopped")


def test_a_worker_stopped_for_short_times_is_kept() -> None:
    assert judged("TTTTS" * 20, looks=100) is None


def test_a_worker_seen_stopped_that_uses_cpu_time_is_kept() -> None:
    assert judged("T", cpu_share=0.3) is None


def test_a_worker_stopped_by_a_debugger_is_kept() -> None:
    assert judged("t") is None


def test_a_worker_that_sleeps_through_a_ping_is_killed() -> None:
    assert judged("S", pinged=True) == (21, "silent")


def test_a_worker_that_spins_through_a_ping_is_killed() -> None:
    assert judged("R", cpu_share=1.0, pinged=True) == (21, "silent")


def test_a_pinged_worker_that_gets_no_cpu_time_is_given_time() -> None:
    assert judged("R", pinged=True) is None
    assert judged("D", pinged=True) is None
    assert judged("R", cpu_share=0.25, pinged=True, looks=1000) == (81, "silent")


def test_a_worker_is_not_killed_at_the_first_check_after_the_server_was_blocked() -> None:
    watch = WorkerWatch(0)
    watch.check(0.0, ProcessState("S", 0.0), pinged=True)

    assert watch.check(60.0, ProcessState("S", 0.0), pinged=True) is None


def test_memory_above_the_limit_is_detected_at_the_first_check() -> None:
    watch = WorkerWatch(100 << 20)

    assert watch.check(0.0, ProcessState("S", 0.0, 100 << 20), pinged=False) is None
    assert watch.check(0.0, ProcessState("S", 0.0, 101 << 20), pinged=False) == (
        "memory",
        "used 101 MiB of memory, more than its limit of 100 MiB",
    )


def test_the_state_of_this_process_can_be_read() -> None:
    state = read_process_state(os.getpid(), memory=True)

    assert state is not None
    assert state.state in "RS"
    assert state.cpu_s > 0.0
    assert state.own_bytes > 1 << 20


def test_a_process_that_has_ended_has_no_state() -> None:
    assert read_process_state(1 << 30, memory=True) is None


class TestLimitExtension:
    def test_a_call_above_its_limit_gets_the_delay_of_its_checks_once(self) -> None:
        doubt = LimitExtension()
        doubt.record_check(1, 2.0)
        doubt.record_check(1, 1.0)

        assert [doubt.extra_s(1, past_s, 60.0) for past_s in (0.5, 1.0, 3.5, 4.0)] == [3.0, 2.5, 0.0, 0.0]

    def test_the_extension_is_between_the_minimum_and_the_limit_of_the_call(self) -> None:
        doubt = LimitExtension(0.001)
        doubt.record_check(1, 20.0)

        assert (doubt.extra_s(1, 0.0, 5.0), doubt.extra_s(2, 0.0, 5.0)) == (5.0, 0.001)

    def test_delayed_checks_of_another_call_do_not_extend_a_call(self) -> None:
        doubt = LimitExtension()
        doubt.record_check(1, 20.0)
        doubt.record_check(2, -1.0)

        assert doubt.extra_s(2, 0.0, 5.0) == 0.0
