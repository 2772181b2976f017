"""Calm: how much of the machine others use during a measurement, and repeating it if they used too much."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import TypeVar

from . import processes
from .server_process import Process

MAX_BACKGROUND_CORES = 0.08
"""The most that others may use for a measurement to count."""
SAMPLE_INTERVAL_S = 0.5
_T = TypeVar("_T")


class BackgroundLoad:
    """The cores that others use from its creation on: everything on the machine except the server and this process.

    Processes started by this one in between count as its own once they have ended. The kernel's work counts as others'.
    """

    def __init__(self, server: Process) -> None:
        self._server = server
        self._start = time.monotonic()
        self._before_s = self._background_cpu_s()

    def _background_cpu_s(self) -> float:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        ours_s = self._server.cpu_s() + time.process_time() + children.ru_utime + children.ru_stime
        return processes.machine_s()[0] - ours_s

    def cores(self) -> float:
        """Return the mean so far."""
        return max(self._background_cpu_s() - self._before_s, 0.0) / (time.monotonic() - self._start)


def measure_when_idle(server: Process, measure: Callable[[], _T], end: float) -> tuple[_T, float]:
    """Wait until others leave the machine idle, and measure; repeat until `end` if they came back meanwhile.

    Units: `end` is of the monotonic clock. Returns: the last measurement, and the cores that others used during it.
    """
    while True:
        while time.monotonic() < end:
            background = BackgroundLoad(server)
            time.sleep(SAMPLE_INTERVAL_S)
            if background.cores() <= MAX_BACKGROUND_CORES:
                break
        background = BackgroundLoad(server)
        result = measure()
        cores = background.cores()
        if cores <= MAX_BACKGROUND_CORES or time.monotonic() >= end:
            return result, cores
