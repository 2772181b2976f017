"""WorkerWatch: detects faults in a worker's process from its state in the system. Used by `worker.py`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

CHECK_INTERVAL_S = 0.25
"""The interval between checks of a worker that has calls."""
STOPPED_S = 1.0
SILENT_S = 5.0
"""How long a ping may go unanswered."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class ProcessState:
    """The state of a process: its letter as in `ps`, and the CPU time used so far.

    `own_bytes` is its own resident memory, without files and memory shared with the server.
    """

    state: str
    cpu_s: float
    own_bytes: int = 0


def read_process_state(pid: int, *, memory: bool) -> ProcessState | None:
    """Read the state of a process; None if it is gone. `memory` includes its memory, which doubles the cost.

    Source: proc(5).
    """
    try:
        # the fields after the name, which is in parentheses and may contain any character
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace").rpartition(")")[2].split()
        own_bytes = 0
        if memory:
            _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text("ascii").split()
            own_bytes = (int(resident) - int(shared)) * _PAGE_BYTES
        return ProcessState(fields[0], (int(fields[11]) + int(fields[12])) / _TICKS_PER_S, own_bytes)
    except (OSError, IndexError, ValueError):
        return None


class WorkerWatch:
    """Decides whether a worker must be killed, from the current time and the process state it is passed.

    A worker that does not answer is allowed SILENT_S of time that it could have used: while it lacks a CPU or waits for
    the disk, only the CPU time it received counts.
    Units: `memory_bytes` of own memory, 0 for no limit.
    """

    def __init__(self, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self._last_check_s = 0.0
        self._cpu_s = 0.0
        self._stopped_s = -1.0
        self._silent_s = -1.0

    def check(self, now_s: float, process: ProcessState, *, pinged: bool) -> tuple[str, str] | None:
        """Check the process. `pinged`: a ping is unanswered.

        Returns: the reason as a metrics label and as text; None if nothing is wrong.
        """
        # this process may itself have been delayed, with the answer waiting to be read
        elapsed_s = min(now_s - self._last_check_s, 2 * CHECK_INTERVAL_S)
        usable_s = min(process.cpu_s - self._cpu_s, elapsed_s) if process.state in "RD" else elapsed_s
        # a process that used CPU time since was not stopped throughout: limiters such as cpulimit stop and continue it
        stopped = process.state == "T" and (process.cpu_s == self._cpu_s or self._stopped_s < 0.0)
        self._last_check_s, self._cpu_s = now_s, process.cpu_s
        self._stopped_s = _held_for_s(self._stopped_s, elapsed_s, holds=stopped)
        self._silent_s = _held_for_s(self._silent_s, usable_s, holds=pinged)
        if self._memory_bytes and process.own_bytes > self._memory_bytes:
            limit, own = self._memory_bytes >> 20, process.own_bytes >> 20
            return "memory", f"used {own} MiB of memory, more than its limit of {limit} MiB"
        if self._stopped_s > STOPPED_S:
            return "stopped", f"was stopped for more than {STOPPED_S:g} s"
        if self._silent_s > SILENT_S:
            return "silent", f"did not respond for {SILENT_S:g} s"
        return None


class LimitExtension:
    """Grants a call past its limit more time, once: as much as checks on it were late, and at least `min_s`.

    The loop may have been delayed while the answer was waiting to be read, or the whole machine may have stood still.
    The extension never exceeds the limit, since the call itself may be what delays the checks. `call` is a number that
    identifies what is being checked, such as the time at which it began: each step of a generator has the limit of its
    own.
    """

    def __init__(self, min_s: float = 0.0) -> None:
        self._min_s = min_s
        self._call = -1
        self._late_s = 0.0
        self._until_s: float | None = None

    def record_check(self, call: int, late_s: float) -> None:
        """Record that a check on a call was late by `late_s`."""
        if call != self._call:
            self._call, self._late_s, self._until_s = call, 0.0, None
        self._late_s += max(late_s, 0.0)

    def extra_s(self, call: int, past_s: float, limit_s: float) -> float:
        """Return how much longer a call may run that is past its limit by `past_s`; 0 for no longer."""
        self.record_check(call, 0.0)
        if self._until_s is None:
            self._until_s = past_s + max(min(self._late_s, limit_s), self._min_s)
        return max(self._until_s - past_s, 0.0)


def _held_for_s(held_s: float, elapsed_s: float, *, holds: bool) -> float:
    """Return how long a condition has held: 0 when first seen, negative while it does not hold."""
    if not holds:
        return -1.0
    return held_s + elapsed_s if held_s >= 0.0 else 0.0
