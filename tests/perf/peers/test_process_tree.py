"""A server's processes are found by descent and by their mark, and their time and memory is added up."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

from penstock.perf.peers.process_tree import MARK, Memory, ProcessTree

TICKS = os.sysconf("SC_CLK_TCK")


def process(
    proc: Path, pid: int, parent: int, environ: str = "", state: str = "S", ticks: tuple[int, ...] = ()
) -> None:
    folder = proc / str(pid)
    folder.mkdir()
    times = [*ticks, 0, 0, 0, 0][:4]
    rest = " ".join(["0"] * 9 + [str(each) for each in times])
    (folder / "stat").write_text(f"{pid} (a (strange) name) {state} {parent} {rest} 20 0 1 0 9 9 9")
    (folder / "environ").write_bytes(environ.replace(" ", "\0").encode() + b"\0")
    (folder / "smaps_rollup").write_text(f"0-1 ---p 0 00:00 0 [rollup]\nRss: {pid * 1024} kB\nPss: 1024 kB\n")


def test_a_tree_includes_children_and_their_children(tmp_path: Path) -> None:
    process(tmp_path, 10, 1)
    process(tmp_path, 11, 10)
    process(tmp_path, 9, 11)
    process(tmp_path, 12, 1)

    assert sorted(ProcessTree(10, 0, "m", tmp_path).pids()) == [9, 10, 11]


def test_a_detached_daemon_is_recognized_by_its_mark(tmp_path: Path) -> None:
    process(tmp_path, 10, 1)
    process(tmp_path, 20, 1, f"HOME=/ {MARK}=m")
    process(tmp_path, 21, 20)
    process(tmp_path, 30, 1, f"{MARK}=another")
    process(tmp_path, 31, 1, f"X={MARK}=m")

    assert sorted(ProcessTree(10, 0, "m", tmp_path).pids()) == [10, 20, 21]


def test_a_tree_is_alive_while_its_first_process_lives(tmp_path: Path) -> None:
    process(tmp_path, 10, 1)
    process(tmp_path, 20, 1, f"{MARK}=m")

    assert ProcessTree(10, 0, "m", tmp_path).is_alive()
    assert not ProcessTree(11, 0, "m", tmp_path).is_alive()


def test_ended_processes_no_longer_count(tmp_path: Path) -> None:
    process(tmp_path, 10, 1, state="Z")
    (tmp_path / "77").mkdir()  # gone while it was looked at

    tree = ProcessTree(10, 0, "m", tmp_path)

    assert (tree.pids(), tree.cpu_s(), tree.memory()) == ([], 0, Memory(0, 0))


def test_cpu_time_includes_children_that_were_waited_for(tmp_path: Path) -> None:
    process(tmp_path, 10, 1, ticks=(TICKS, 2 * TICKS, 3 * TICKS, 4 * TICKS))
    process(tmp_path, 11, 10, ticks=(5 * TICKS, 0, 0, 0))

    assert ProcessTree(10, 0, "m", tmp_path).cpu_s() == 15


def test_memory_is_the_total_of_all_processes(tmp_path: Path) -> None:
    process(tmp_path, 10, 1)
    process(tmp_path, 11, 10)

    assert ProcessTree(10, 0, "m", tmp_path).memory() == Memory(rss=21, pss=2)


def test_a_real_daemon_is_found_and_ended() -> None:
    program = (
        "import subprocess, sys\n"
        "child = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        "print(child.pid, flush=True)"
    )
    with subprocess.Popen(
        [sys.executable, "-S", "-c", program], env={MARK: "of-this-test"}, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        daemon = int(child.stdout.readline())
    tree = ProcessTree(child.pid, 0, "of-this-test")

    assert tree.pids() == [daemon]
    pidfd = os.pidfd_open(daemon)
    tree.end()

    assert select.select([pidfd], [], [], 10)[0]
    os.close(pidfd)
    assert tree.pids() == []
