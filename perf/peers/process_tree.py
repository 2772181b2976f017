"""Trees: all processes of a server, including daemons.

Some servers start daemons in their own sessions, which nothing ties to the first process once those in between have
ended. Every server is therefore started with a mark in its environment, which all its descendants inherit.
"""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from penstock.perf import processes
from penstock.perf.processes import PROC
from penstock.perf.server_process import Process

MARK = "PEER_MARK"


@dataclass(frozen=True, slots=True)
class Memory:
    """Units: MiB. `rss` counts shared memory in each process, `pss` once."""

    rss: float
    pss: float


class ProcessTree(Process):
    """A server and its descendants, recognized by parentage and by the mark."""

    def __init__(self, pid: int, port: int, mark: str, proc: Path = PROC) -> None:
        super().__init__(pid, port)
        self._mark = f"{MARK}={mark}".encode()
        self._proc = proc
        self._left = False

    def pids(self) -> list[int]:
        """Return the live processes."""
        living = processes.living(self._proc)
        return processes.descended((pid for pid in living if pid == self.pid or self._has_mark(pid)), living)

    def is_alive(self) -> bool:
        """Return whether the first process lives. If not, the rest may still answer, but it is no longer a server."""
        return self.pid in self.pids()

    def _has_mark(self, pid: int) -> bool:
        try:
            return self._mark in (self._proc / str(pid) / "environ").read_bytes().split(b"\0")
        except OSError:  # ended, or another user's
            return False

    def cpu_s(self) -> float:
        """CPU time so far, user and system, of all live processes and the children that they have waited for."""
        return processes.cpu_s(self.pids(), self._proc, waited=True)

    def memory(self) -> Memory:
        """Return their total memory now."""
        kib = {"Rss:": 0, "Pss:": 0}
        for pid in self.pids():
            with contextlib.suppress(OSError):
                for line in (self._proc / str(pid) / "smaps_rollup").read_text("ascii").splitlines():
                    name, *rest = line.split()
                    if name in kib:
                        kib[name] += int(rest[0])
        return Memory(kib["Rss:"] / 1024, kib["Pss:"] / 1024)

    def signal(self, number: signal.Signals) -> int:
        """Send all of them a signal. Returns: how many there were."""
        pids = self.pids()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return len(pids)

    def terminate(self) -> None:
        """Ask the first process, once, to terminate; resumes those that are suspended."""
        if not self._left:
            self._left = True
            self.signal(signal.SIGCONT)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def end(self) -> None:
        """Kill all of them."""
        self.signal(signal.SIGKILL)
