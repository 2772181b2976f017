"""When a worker has to be killed, by what the system says of it."""

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
    """Look at a process that is in these states, the last one for ever. Returns: when it is judged, and why."""
    watch = WorkerWatch(0)
    for number in range(looks):
        state = states[min(number, len(states) - 1)]
        wrong = watch.check(
            number * CHECK_INTERVAL_S, ProcessState(state, number * CHECK_INTERVAL_S * cpu_share), pinged=pinged
        )
        if wrong is not None:
            return number, wrong[0]
    return None


def test_one_that_works_or_sleeps_is_left_alone() -> None:
    assert judged("RSD") is None


def test_one_that_is_stopped_for_more_than_a_second_is_judged() -> None:
    assert judged("T") == (5, "stopped")


def test_one_that_is_stopped_now_and_then_is_not() -> None:
    assert judged("TTTTS" * 20, looks=100) is None


def test_one_that_is_stopped_and_goes_on_again_and_again_is_not() -> None:
    assert judged("T", cpu_share=0.3) is None


def test_one_that_a_debugger_has_stopped_is_not() -> None:
    assert judged("t") is None


def test_one_that_sleeps_through_a_ping_is_judged() -> None:
    assert judged("S", pinged=True) == (21, "silent")


def test_one_that_spins_through_a_ping_is_judged() -> None:
    assert judged("R", cpu_share=1.0, pinged=True) == (21, "silent")


def test_one_that_gets_no_processor_is_given_time() -> None:
    assert judged("R", pinged=True) is None
    assert judged("D", pinged=True) is None
    assert judged("R", cpu_share=0.25, pinged=True, looks=1000) == (81, "silent")


def test_a_server_that_was_held_up_itself_does_not_judge_at_once() -> None:
    watch = WorkerWatch(0)
    watch.check(0.0, ProcessState("S", 0.0), pinged=True)

    assert watch.check(60.0, ProcessState("S", 0.0), pinged=True) is None


def test_memory_is_judged_at_the_first_look() -> None:
    watch = WorkerWatch(100 << 20)

    assert watch.check(0.0, ProcessState("S", 0.0, 100 << 20), pinged=False) is None
    assert watch.check(0.0, ProcessState("S", 0.0, 101 << 20), pinged=False) == (
        "memory",
        "used 101 MiB of memory, more than its limit of 100 MiB",
    )


def test_what_is_seen_of_this_process() -> None:
    seen = read_process_state(os.getpid(), memory=True)

    assert seen is not None
    assert seen.state in "RS"
    assert seen.cpu_s > 0.0
    assert seen.own_bytes > 1 << 20


def test_a_process_that_is_gone_is_not_seen() -> None:
    assert read_process_state(1 << 30, memory=True) is None


class TestDoubt:
    def test_a_call_past_its_limit_gets_as_much_more_as_looks_at_it_were_late_once(self) -> None:
        doubt = LimitExtension()
        doubt.record_check(1, 2.0)
        doubt.record_check(1, 1.0)

        assert [doubt.extra_s(1, past_s, 60.0) for past_s in (0.5, 1.0, 3.5, 4.0)] == [3.0, 2.5, 0.0, 0.0]

    def test_it_gets_no_more_than_its_limit_and_no_less_than_the_least(self) -> None:
        doubt = LimitExtension(0.001)
        doubt.record_check(1, 20.0)

        assert (doubt.extra_s(1, 0.0, 5.0), doubt.extra_s(2, 0.0, 5.0)) == (5.0, 0.001)

    def test_a_look_at_another_call_says_nothing_of_it(self) -> None:
        doubt = LimitExtension()
        doubt.record_check(1, 20.0)
        doubt.record_check(2, -1.0)

        assert doubt.extra_s(2, 0.0, 5.0) == 0.0
