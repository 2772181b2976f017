"""ProcessWatch: whether a process still works, by its pings and what the system says of its main thread. Pure.

A process that is stopped does nothing any more; one that sleeps and does not answer hangs. One that waits for a
processor, or for a disk, is slow: to kill it would make that worse.
"""

from __future__ import annotations

from pathlib import Path

LOOK_S = 0.1
"""How often processes are looked at."""
PING_S = 1.0
STOPPED_S = 0.5
HANGS_S = 10.0
HOLDS_S = 60.0
"""How long a loop may be held by something that computes."""


class ProcessWatch:
    """What is known of one process. Units: seconds of any clock, processor time in the system's ticks.

    Time in which nobody looked does not count: then this process was the one that got no processor.
    """

    def __init__(self) -> None:
        self._looked_s: float | None = None
        self._stopped_s = 0.0
        self._silent_s = 0.0
        self._idle_s = 0.0
        self._ticks = -1

    def answered(self) -> None:
        """Take the answer to a ping."""
        self._silent_s = self._idle_s = 0.0

    def look(self, state: str, ticks: int, now_s: float) -> str:
        """Take what the system says, and give why the process is to be killed, or nothing."""
        passed_s = 0.0 if self._looked_s is None else min(now_s - self._looked_s, 2 * LOOK_S)
        self._looked_s = now_s
        # one that has worked since was not stopped all the time: so are processes slowed down (cpulimit)
        self._stopped_s = self._stopped_s + passed_s if state == "T" and ticks == self._ticks else 0.0
        self._silent_s += passed_s
        self._idle_s = self._idle_s + passed_s if state == "S" and ticks == self._ticks else 0.0
        self._ticks = ticks
        if self._stopped_s >= STOPPED_S:
            return "it was stopped"
        if min(self._silent_s, self._idle_s) >= HANGS_S:
            return f"it has been idle for {HANGS_S:g} s and does not respond"
        if self._silent_s >= HOLDS_S:
            return f"its event loop has been blocked for {HOLDS_S:g} s"
        return ""


def looked_up(pid: int) -> tuple[str, int]:
    """Give the state of a process's main thread, a letter, and its processor time in ticks; "" when it is gone."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/stat").read_text("latin-1")
    except OSError:
        return "", 0
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[11]) + int(fields[12])
