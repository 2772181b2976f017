from __future__ import annotations

import subprocess

import pytest

from penstock.perf.soak.command import Fault, Soak
from penstock.perf.soak.process_usage import ProcessUsage, is_alive, process_usages
from penstock.perf.soak.request_log import BROKEN, REFUSED, RIGHT, TIMED_OUT, WRONG, RequestLog

TURNS = (("kill", "worker"),)


def soak(*ends: tuple[str, str, float, float], faults: tuple[Fault, ...] = ()) -> Soak:
    """A run without a server, in which requests ended so: kind, end, begun, ended."""
    run = Soak(None, TURNS)  # type: ignore[arg-type]
    for number, (kind, end, begun_s, ended_s) in enumerate(ends):
        run.request_log.begin(str(number), kind, begun_s)
        run.request_log.end(str(number), end, ended_s)
    run.faults += faults
    run.samples = [(0.0, [usage()]), (1.0, [usage()])]
    return run


def usage(pid: int = 1, rss_mib: float = 100.0, descriptors: int = 20) -> ProcessUsage:
    return ProcessUsage(pid, 0, "server", "S", rss_mib, descriptors, 10)


KILL_WORKER, KILL_ENGINE = Fault(10.0, "kill", "worker"), Fault(10.0, "kill", "engine")


def test_each_request_has_one_end() -> None:
    request_log = RequestLog()
    request_log.begin("a", "json", 0.0)
    request_log.begin("b", "json", 0.0)
    request_log.end("a", RIGHT, 1.0)
    request_log.end("a", RIGHT, 1.0)

    assert (request_log.pending_count, request_log.ended_twice) == (1, 1)
    assert request_log.counts()["json"][RIGHT] == 1


@pytest.mark.parametrize(("end", "fault", "holds"), [
    (("hooked", REFUSED, 9.9, 10.0), KILL_WORKER, True),
    (("json", REFUSED, 9.9, 10.0), KILL_WORKER, False),
    (("hooked", REFUSED, 9.0, 9.9), KILL_WORKER, False),
    (("hooked", WRONG, 9.9, 10.0), KILL_WORKER, False),
    (("hooked", TIMED_OUT, 9.9, 10.0), KILL_WORKER, False),
    (("json", BROKEN, 11.0, 11.1), KILL_ENGINE, True),
    (("json", REFUSED, 13.0, 13.1), KILL_ENGINE, False),
])  # fmt: skip
def test_a_request_may_fail_only_where_and_while_a_fault_explains_it(
    end: tuple[str, str, float, float], fault: Fault, holds: bool
) -> None:
    assert (soak(end, faults=(fault,)).all_problems() == []) is holds


def test_recovery_ends_with_the_first_answer_after_the_last_consecutive_failure() -> None:
    run = soak(
        ("json", RIGHT, 9.9, 10.05), ("json", REFUSED, 10.1, 10.2), ("json", RIGHT, 10.15, 10.7),
        ("json", RIGHT, 10.8, 10.81), ("json", RIGHT, 15.0, 16.0),
    )  # fmt: skip

    assert run.request_log.recovery_s("json", 10.0) == pytest.approx(0.7)
    assert run.request_log.recovery_s("grpc", 10.0) is None


def test_growth_and_missing_processes_are_reported() -> None:
    run = soak()
    run.samples = [(float(at), [usage(rss_mib=100 + 10 * at), usage(2)][: 1 if at > 5 else 2]) for at in range(10)]

    assert [problem.split(" went")[0] for problem in run.all_problems()] == [
        "server: processes", "all: processes",
    ]  # fmt: skip
    run.samples = [(float(at), [usage(rss_mib=100 + 10 * at)]) for at in range(10)]
    assert [problem.split(" went")[0] for problem in run.all_problems()] == ["server: rss_mib", "all: rss_mib"]


def test_a_census_finds_all_descendants_of_a_process() -> None:
    with subprocess.Popen(["sh", "-c", "sleep 1000 & echo; wait"], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        usages = process_usages(parent.pid)
        for each in usages:
            subprocess.run(["kill", "-9", str(each.pid)], check=True)
        parent.wait()

    assert [each.role for each in usages] == ["server", "other"]
    assert not is_alive(usages[0])
