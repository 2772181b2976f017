"""/proc is read by its documented places: each figure of a made-up one is another."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.perf import processes
from penstock.perf.processes import Stat

TICKS = os.sysconf("SC_CLK_TCK")


def test_every_figure_of_a_process_is_parsed_whatever_its_name() -> None:
    places = [f"{3 + number}" for number in range(30)]  # as proc(5) counts them: the state is 3
    stats = Stat(f"77 (a) b) (c) R {' '.join(places[1:])}")

    assert (stats.name, stats.state, stats.parent) == ("a) b) (c", "R", 4)
    assert (stats.faults, stats.threads, stats.started) == (10, 20, 22)
    assert (stats.cpu_s * TICKS, stats.children_cpu_s * TICKS) == pytest.approx((14 + 15, 16 + 17))


def test_a_machine_is_busy_except_when_idle_or_waiting_for_disks(tmp_path: Path) -> None:
    words = [10**place * TICKS for place in range(10)]  # user nice system idle iowait irq softirq steal
    (tmp_path / "stat").write_text(f"cpu  {' '.join(map(str, words))}\ncpu0 9 9 9 9 9 9 9 9 9 9\n", "ascii")

    assert processes.machine_s(tmp_path) == (11_100_111, 11_111_111)
    assert processes.stolen_s(tmp_path) == 10_000_000


def test_cpu_time_is_that_of_all_threads_or_of_the_first_alone(tmp_path: Path) -> None:
    for thread, spent_ns in ((7, 1_000), (8, 20)):
        (tmp_path / "7" / "task" / str(thread)).mkdir(parents=True)
        (tmp_path / "7" / "task" / str(thread) / "schedstat").write_text(f"{spent_ns} 5 3\n", "ascii")

    assert (processes.cpu_ns(7, tmp_path), processes.loop_ns(7, tmp_path)) == (1_020, 1_000)
    assert processes.cpu_ns(0, tmp_path) == 0


def test_descendants_follow_their_ancestors_without_duplicates() -> None:
    def child(parent: int) -> Stat:
        return Stat(f"1 (a) S {parent} 0")

    stats = {5: child(1), 3: child(5), 4: child(3), 9: child(1), 1: child(0)}

    assert processes.descended([5, 3], stats) == [5, 3, 4]
    assert processes.descended([8], stats) == [8]
