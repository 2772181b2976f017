"""Processes from Linux's /proc: their descendants, CPU time and memory, and the machine's CPU time.

Used by everything that measures a server. A process may end at any moment: reading it then raises OSError. `proc` is
the folder, which tests replace. Source: proc(5), `/proc/pid/stat`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

PROC = Path("/proc")
ZOMBIE = "Z"
"""The state of a process that has ended but has not been waited for."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_STATE, _PARENT, _FAULTS, _TIME, _TIME_OF_CHILDREN, _THREADS, _STARTED = 0, 1, 7, 11, 13, 17, 19


class Stat:
    """One process at one moment. Units: `started` in ticks of the machine; with the pid it identifies a process."""

    __slots__ = ("_words", "name")

    def __init__(self, text: str) -> None:
        before, _, after = text.rpartition(")")  # the name may hold spaces and brackets
        self.name = before.partition("(")[2]
        self._words = after.split()

    @property
    def state(self) -> str:
        """Its state, one letter."""
        return self._words[_STATE]

    @property
    def parent(self) -> int:
        """The process that started it, or has adopted it."""
        return int(self._words[_PARENT])

    @property
    def faults(self) -> int:
        """Its page faults that needed no disk read."""
        return int(self._words[_FAULTS])

    @property
    def threads(self) -> int:
        """The number of its threads."""
        return int(self._words[_THREADS])

    @property
    def started(self) -> int:
        """When it was started."""
        return int(self._words[_STARTED])

    @property
    def cpu_s(self) -> float:
        """CPU time of all its threads, user and system."""
        return self._seconds(_TIME)

    @property
    def children_cpu_s(self) -> float:
        """CPU time of the children that it has waited for."""
        return self._seconds(_TIME_OF_CHILDREN)

    def _seconds(self, index: int) -> float:
        return (int(self._words[index]) + int(self._words[index + 1])) / _TICKS_PER_S


def stat(pid: int, proc: Path = PROC) -> Stat:
    """Read one process. Raises: OSError if it does not exist."""
    return Stat((proc / str(pid) / "stat").read_text("utf-8", "replace"))


def stats(proc: Path = PROC) -> dict[int, Stat]:
    """Read all processes, by pid, including those that have ended but have not been waited for."""
    stats_by_pid = {}
    for folder in proc.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            stats_by_pid[int(folder.name)] = stat(int(folder.name), proc)
    return stats_by_pid


def living(proc: Path = PROC) -> dict[int, Stat]:
    """Read the processes that have not ended."""
    return {pid: each for pid, each in stats(proc).items() if each.state != ZOMBIE}


def descended(roots: Iterable[int], stats_by_pid: Mapping[int, Stat]) -> list[int]:
    """Return processes and all their descendants, the given ones first, without duplicates."""
    pids = list(dict.fromkeys(roots))
    for pid in pids:
        pids += [child for child, each in stats_by_pid.items() if each.parent == pid and child not in pids]
    return pids


def cpu_s(pids: Iterable[int], proc: Path = PROC, *, waited: bool = False) -> float:
    """Return the CPU time of those that still exist. `waited`: also of the children that they have waited for."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):
            each = stat(pid, proc)
            total += each.cpu_s + (each.children_cpu_s if waited else 0.0)
    return total


def cpu_ns(pid: int, proc: Path = PROC) -> int:
    """Return the CPU time of a process's current threads, finer than `cpu_s`; 0 if it does not exist."""
    return sum(map(_scheduled_ns, (proc / str(pid) / "task").glob("*/schedstat")))


def loop_ns(pid: int, proc: Path = PROC) -> int:
    """Return the CPU time of a server's first thread, which runs the event loop. Raises: OSError."""
    return _scheduled_ns(proc / str(pid) / "task" / str(pid) / "schedstat")


def _scheduled_ns(file: Path) -> int:
    return int(file.read_text("ascii").split()[0])


def rss_bytes(pid: int, proc: Path = PROC) -> int:
    """Return a process's resident memory, including shared pages. Raises: OSError."""
    return int((proc / str(pid) / "statm").read_text("ascii").split()[1]) * _PAGE_BYTES


def machine_s(proc: Path = PROC) -> tuple[float, float]:
    """Return the CPU time of all the machine's cores together: busy, and in total. Raises: OSError."""
    ticks = _ticks(proc)
    idle = sum(ticks[3:5])  # idle, and waiting for disks
    return (sum(ticks) - idle) / _TICKS_PER_S, sum(ticks) / _TICKS_PER_S


def stolen_s(proc: Path = PROC) -> float:
    """Return the CPU time, over all cores, that this virtual machine wanted but another had. Raises: OSError."""
    return _ticks(proc)[7] / _TICKS_PER_S


def _ticks(proc: Path) -> list[int]:
    with (proc / "stat").open(encoding="ascii") as file:
        return [int(field) for field in file.readline().split()[1:9]]
