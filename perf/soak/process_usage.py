"""Census: the processes of a server from /proc: their roles and resources. Used by `command.py`."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from penstock.perf import processes
from penstock.perf.processes import PROC, ZOMBIE, Stat


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """One process and its resources. `role`: server or supervisor, engine, front, spare, worker, other."""

    pid: int
    started: int
    role: str
    state: str
    rss_mib: float
    descriptors: int
    threads: int


def process_usages(root: int) -> list[ProcessUsage]:
    """Return a process and all its descendants."""
    stats_by_pid = processes.stats()
    usages = []
    for pid in processes.descended([root], stats_by_pid):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            usages.append(_usage(pid, stats_by_pid[pid], is_root=pid == root))
    if any(each.role in {"engine", "front", "spare"} for each in usages):
        return [_as_supervisor(each) if each.pid == root else each for each in usages]
    return usages


def _usage(pid: int, stat: Stat, *, is_root: bool) -> ProcessUsage:
    folder = PROC / str(pid)
    command = (folder / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    descriptors = sum(1 for _ in (folder / "fd").iterdir())
    rss_mib = processes.rss_bytes(pid) / (1 << 20)
    role = "server" if is_root else _role(command, (folder / "comm").read_text("utf-8", "replace"))
    return ProcessUsage(pid, stat.started, role, stat.state, rss_mib, descriptors, stat.threads)


def _role(command: list[str], name: str) -> str:
    if "penstock.server.supervisor.child" in command:
        return next((role for role in ("engine", "front") if role in name), "spare")
    return "worker" if any(argument.endswith("workers/child.py") for argument in command) else "other"


def _as_supervisor(usage: ProcessUsage) -> ProcessUsage:
    return ProcessUsage(
        usage.pid, usage.started, "supervisor", usage.state, usage.rss_mib, usage.descriptors, usage.threads
    )


def is_alive(usage: ProcessUsage) -> bool:
    """Return whether the process still exists, as opposed to another with its pid."""
    try:
        stat = processes.stat(usage.pid)
    except OSError:
        return False
    return stat.started == usage.started and stat.state != ZOMBIE
