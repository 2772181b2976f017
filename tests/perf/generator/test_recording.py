from __future__ import annotations

from penstock.perf.generator.orders import Window
from penstock.perf.generator.recording import Recorder


def test_results_are_taken_only_once() -> None:
    recorder = Recorder()
    assert (recorder.take().waited_for_connection, recorder.ended) == (0, 0)
    recorder.starts.append(1)
    recorder.ends.append(5)
    recorder.fail("503: busy")
    recorder.waited_for_connection = 3
    assert recorder.ended == 2

    first, second = recorder.take(7, 9), recorder.take()

    assert (first.latencies_ns.tolist(), first.errors, first.waited_for_connection) == ([4], {"503: busy": 1}, 3)
    assert (first.in_flight, first.behind_ns) == (7, 9)
    assert (second.latencies_ns.tolist(), second.errors, second.waited_for_connection, recorder.ended) == ([], {}, 0, 0)
    assert first.end_ns == second.begin_ns


def test_responses_are_recorded_request_by_request() -> None:
    recorder = Recorder()
    recorder.on_responses([3, 4], 2)
    recorder.on_responses([], 1)

    first, second = recorder.take(), recorder.take()

    assert (first.responses, first.earlier_counts.tolist(), first.earlier_ns.tolist()) == (3, [2, 0], [3, 4])
    assert (second.responses, len(second.earlier_counts), len(second.earlier_ns)) == (0, 0, 0)
    both = first.merge(first)
    assert (both.responses, both.earlier_counts.tolist(), both.earlier_ns.tolist()) == (6, [2, 0, 2, 0], [3, 4, 3, 4])


def test_errors_with_ever_new_texts_take_no_more_memory() -> None:
    recorder = Recorder()
    for number in range(300):
        recorder.fail(f"500: request {number}")
        recorder.fail("500: request 0")

    errors = recorder.take().errors

    assert (len(errors), errors["500: request 0"], errors["other errors"]) == (101, 301, 200)


def test_only_the_first_failure_of_a_load_counts_until_another_begins() -> None:
    failures: list[str] = []
    recorder = Recorder(failures.append)

    recorder.abort("refused")
    recorder.abort("refused again")
    first = recorder.take()
    recorder.reset()

    assert (failures, first.failure, first.failed_ns > 0) == (["refused"], "refused", True)
    assert (recorder.take().failure, recorder.take().failed_ns) == ("", 0)


def test_windows_of_several_processes_merge_into_one() -> None:
    one = Window(10, 20, failure="refused", failed_ns=18, waited_for_connection=1, behind_ns=5, in_flight=2, cpu_s=1.0)
    other = Window(12, 22, failure="reset", failed_ns=15, waited_for_connection=2, behind_ns=3, in_flight=1, cpu_s=0.5)

    both = one.merge(other)

    assert (both.begin_ns, both.end_ns, both.failure, both.failed_ns) == (10, 22, "refused", 15)
    assert (both.waited_for_connection, both.behind_ns, both.in_flight, both.cpu_s) == (3, 5, 3, 1.5)
    assert one.merge(Window(12, 22)).failed_ns == 18
