"""What perf/side_by_side.py starts, and says of what was measured."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.perf.side_by_side import Line, ProcessTree, measure, report, served
from penstock.perf.wrk import Load

THEIRS = Load(requests_per_s=100.0, p50_ms=1.0, p99_ms=2.0, cpu_us=10.0, refused=0, broken=0)
OURS = Load(requests_per_s=200.0, p50_ms=1.0, p99_ms=1.0, cpu_us=5.0, refused=0, broken=0)


@pytest.mark.parametrize(("times", "word"), [(2.0, "holds"), (2.5, "DOES NOT HOLD")])
def test_the_first_side_is_compared_with_the_second(times: float, word: str) -> None:
    lines = {("REST", "ours"): Line([OURS]), ("REST", "theirs"): Line([THEIRS])}

    line = list(report(lines, {"REST": times}))[-1]

    assert line.startswith(f"REST: 2.0 times the requests/s, at least {times:g}: {word};")
    assert line.endswith("a p99 that is lower: holds; 2.0 times less CPU (theirs)")


def test_a_third_side_is_compared_without_a_requirement() -> None:
    lines = {("REST", side): Line([load]) for side, load in (("ours", OURS), ("one", THEIRS), ("other", OURS))}

    line = list(report(lines, {"REST": 3.0}))[-1]

    assert line == "REST: 1.0 times the requests/s; a p99 that is lower: DOES NOT HOLD; 1.0 times less CPU (other)"


def test_a_single_side_is_not_compared() -> None:
    assert len(list(report({("REST", "ours"): Line([THEIRS])}, {"REST": 20}))) == 2


def test_sides_are_driven_in_turns_and_the_first_round_does_not_count() -> None:
    calls = []

    def load(family: ProcessTree, seconds: int) -> Load:
        calls.append((family.port, seconds))
        return OURS

    sides = {side: contextlib.nullcontext(ProcessTree(0, port)) for side, port in (("ours", 1), ("theirs", 2))}
    lines = measure(sides, {"REST": load}, rounds=2, seconds=5)

    assert calls == [(1, 1), (2, 1), (1, 5), (2, 5), (1, 5), (2, 5)]
    assert [len(line.loads) for line in lines.values()] == [2, 2]


def test_a_side_that_rejects_requests_is_not_measured() -> None:
    refused = Load(requests_per_s=100.0, p50_ms=1.0, p99_ms=2.0, cpu_us=10.0, refused=7, broken=0)

    with pytest.raises(RuntimeError, match="ours refused 7 of REST"):
        measure({"ours": contextlib.nullcontext(ProcessTree(0, 1))}, {"REST": lambda *_: refused}, rounds=1, seconds=1)


def test_a_server_is_ended_with_all_processes_that_it_started(tmp_path: Path) -> None:
    program = (
        "import pathlib, signal, subprocess, sys\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN) if len(sys.argv) > 1 else None\n"
        "child = None if len(sys.argv) > 1 else subprocess.Popen([sys.executable, __file__, 'child'])\n"
        "pathlib.Path('ready' if child is None else 'parent').write_text('')\n"
        "signal.pause()\n"
    )
    (tmp_path / "program.py").write_text(program)

    with served([sys.executable, "program.py"], tmp_path, 0, lambda _: (tmp_path / "ready").read_text()) as family:
        pids = family.pids()

    assert len(pids) == 2
    assert all(_has_ended(pid) for pid in pids)


def test_a_server_that_exits_does_not_become_ready(tmp_path: Path) -> None:
    def ask(_: object) -> None:
        raise OSError("nobody is there")

    command = [sys.executable, "-c", ""]
    with pytest.raises(RuntimeError, match="did not get ready: nobody is there"), served(command, tmp_path, 0, ask):
        pass


def _has_ended(pid: int) -> bool:
    """Whether a process is gone, or is only waited for by nobody."""
    line = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return line.strip()[:1] in ("", "Z")
