"""Calm: what others use of the machine while something is measured, and measuring again when it was too much."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import TypeVar

from . import processes
from .load import Process

CALM_CORES = 0.08
"""What others may use for a measurement to count."""
LOOK_S = 0.5
_T = TypeVar("_T")


class Others:
    """The cores that others use from its making on: all that the machine does, but for the server and this process.

    What this process starts in between counts as its own once it has ended; the kernel's work counts as the others'.
    """

    def __init__(self, server: Process) -> None:
        self._server = server
        self._start = time.monotonic()
        self._before_s = self._theirs_s()

    def _theirs_s(self) -> float:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        ours_s = self._server.cpu_s() + time.process_time() + children.ru_utime + children.ru_stime
        return processes.machine_s()[0] - ours_s

    def cores(self) -> float:
        """Give the mean so far."""
        return max(self._theirs_s() - self._before_s, 0.0) / (time.monotonic() - self._start)


def in_calm(server: Process, measure: Callable[[], _T], end: float) -> tuple[_T, float]:
    """Wait until others leave the machine alone, and measure; again, if they came back meanwhile, until `end`.

    Units: `end` is of the monotonic clock. Returns: what was measured last, and the cores that others used meanwhile.
    """
    while True:
        while time.monotonic() < end:
            others = Others(server)
            time.sleep(LOOK_S)
            if others.cores() <= CALM_CORES:
                break
        others = Others(server)
        measured = measure()
        cores = others.cores()
        if cores <= CALM_CORES or time.monotonic() >= end:
            return measured, cores
