"""WorkerWatch: what is wrong with a worker's process, by what the system says of it. Used by `worker.py`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

LOOK_S = 0.25
"""Between two looks at a worker that has calls."""
STOPPED_S = 1.0
SILENT_S = 5.0
"""For how long a ping may go unanswered."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class ProcessState:
    """What the system says of a process: its state, a letter as in `ps`, and the processor time that it has had.

    `own_bytes` is the memory that is resident and its own: no files, and nothing that it shares with the server.
    """

    state: str
    cpu_s: float
    own_bytes: int = 0


def see(pid: int, *, memory: bool) -> ProcessState | None:
    """Look at a process; None when it is gone. `memory`: whether to look at that as well, which costs as much again.

    Source: proc(5).
    """
    try:
        # after the name, which is in brackets and may hold anything
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace").rpartition(")")[2].split()
        own_bytes = 0
        if memory:
            _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text("ascii").split()
            own_bytes = (int(resident) - int(shared)) * _PAGE_BYTES
        return ProcessState(fields[0], (int(fields[11]) + int(fields[12])) / _TICKS_PER_S, own_bytes)
    except (OSError, IndexError, ValueError):
        return None


class WorkerWatch:
    """Says whether a worker has to be killed. Told the time, and what is seen.

    A worker that does not answer is given SILENT_S of time that it could have used: on a machine that gives it no
    processor, or whose disk it waits for, only the time that it has had counts.
    Units: `memory_bytes` of own memory, 0 for no limit.
    """

    def __init__(self, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self._looked_s = 0.0
        self._cpu_s = 0.0
        self._stopped_s = -1.0
        self._silent_s = -1.0

    def look(self, now_s: float, seen: ProcessState, *, pinged: bool) -> tuple[str, str] | None:
        """Judge. `pinged`: it has been asked for a sign of life, and has not answered.

        Returns: the reason as metrics have it, and in words; None when nothing is wrong.
        """
        # this process may have been held up itself, with the answer waiting to be read
        passed_s = min(now_s - self._looked_s, 2 * LOOK_S)
        had_s = min(seen.cpu_s - self._cpu_s, passed_s) if seen.state in "RD" else passed_s
        # one that has worked since was not stopped all the time: so are processes slowed down (cpulimit)
        stopped = seen.state == "T" and (seen.cpu_s == self._cpu_s or self._stopped_s < 0.0)
        self._looked_s, self._cpu_s = now_s, seen.cpu_s
        self._stopped_s = _longer(self._stopped_s, passed_s, so=stopped)
        self._silent_s = _longer(self._silent_s, had_s, so=pinged)
        if self._memory_bytes and seen.own_bytes > self._memory_bytes:
            limit, own = self._memory_bytes >> 20, seen.own_bytes >> 20
            return "memory", f"used {own} MiB of memory, more than its limit of {limit} MiB"
        if self._stopped_s > STOPPED_S:
            return "stopped", f"was stopped for more than {STOPPED_S:g} s"
        if self._silent_s > SILENT_S:
            return "silent", f"did not respond for {SILENT_S:g} s"
        return None


class Doubt:
    """How much longer a call past its limit may take, once: as much as looks at it were late, and `least_s` at least.

    For the loop may have been held up, with the answer there to be read; or the machine stood still, and who runs the
    call with it. Never longer than the limit: a call may itself be why the looks are late. Told which call is looked
    at, by a number: when it began, for each step of a generator has the limit.
    """

    def __init__(self, least_s: float = 0.0) -> None:
        self._least_s = least_s
        self._call = -1
        self._late_s = 0.0
        self._until_s: float | None = None

    def looked(self, call: int, late_s: float) -> None:
        """Note that a look at a call was so late."""
        if call != self._call:
            self._call, self._late_s, self._until_s = call, 0.0, None
        self._late_s += max(late_s, 0.0)

    def more_s(self, call: int, past_s: float, limit_s: float) -> float:
        """Give how much longer a call may take that is past its limit by `past_s`; 0: no longer."""
        self.looked(call, 0.0)
        if self._until_s is None:
            self._until_s = past_s + max(min(self._late_s, limit_s), self._least_s)
        return max(self._until_s - past_s, 0.0)


def _longer(for_s: float, more_s: float, *, so: bool) -> float:
    """Give for how long something has been so: 0 when that is first seen, below 0 when it is not."""
    if not so:
        return -1.0
    return for_s + more_s if for_s >= 0.0 else 0.0
