"""ProcessWatch: detects faults in a process from its pings and the state of its main thread in the system. Pure.

A stopped process makes no progress, and one that sleeps and does not answer hangs. One that waits for a CPU or a disk
is merely slow: killing it would make that worse.
"""

from __future__ import annotations

from pathlib import Path

CHECK_S = 0.1
"""The interval between checks."""
PING_S = 1.0
STOPPED_S = 0.5
HANG_S = 10.0
BLOCKED_S = 60.0
"""How long a computation may block a loop."""


class ProcessWatch:
    """The state of one process. Units: seconds of any clock, CPU time in the system's ticks.

    Time without a check does not count, since this process itself lacked a CPU then.
    """

    def __init__(self) -> None:
        self._last_checked_s: float | None = None
        self._stopped_s = 0.0
        self._silent_s = 0.0
        self._idle_s = 0.0
        self._ticks = -1

    def on_pong(self) -> None:
        """Record the answer to a ping."""
        self._silent_s = self._idle_s = 0.0

    def check(self, state: str, ticks: int, now_s: float) -> str:
        """Add an observation, and return why the process must be killed, or ""."""
        elapsed_s = 0.0 if self._last_checked_s is None else min(now_s - self._last_checked_s, 2 * CHECK_S)
        self._last_checked_s = now_s
        # a process that used CPU time since was not stopped throughout: limiters such as cpulimit stop and continue it
        self._stopped_s = self._stopped_s + elapsed_s if state == "T" and ticks == self._ticks else 0.0
        self._silent_s += elapsed_s
        self._idle_s = self._idle_s + elapsed_s if state == "S" and ticks == self._ticks else 0.0
        self._ticks = ticks
        if self._stopped_s >= STOPPED_S:
            return "it was stopped"
        if min(self._silent_s, self._idle_s) >= HANG_S:
            return f"it has been idle for {HANG_S:g} s and does not respond"
        if self._silent_s >= BLOCKED_S:
            return f"its event loop has been blocked for {BLOCKED_S:g} s"
        return ""


def read_main_thread(pid: int) -> tuple[str, int]:
    """Return the state of a process's main thread, a letter, and its CPU time in ticks; "" if it is gone."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/stat").read_text("latin-1")
    except OSError:
        return "", 0
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[11]) + int(fields[12])
