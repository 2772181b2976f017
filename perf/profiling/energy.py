"""Energy: NVML's readings of this machine's GPUs, and the joules used over part of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from penstock.server.gpus import nvml

from .sampling_series import GPU, Reading, counter_growth, devices, known


class Nvml:
    """NVIDIA GPUs through NVML. Threads: one at a time. A call may hang with its driver.

    `used`: the UUIDs of the GPUs on which one of the processes returned by `pids` runs, as far as NVML reports; in a
    container it may know processes by other pids.
    """

    def __init__(self, pids: Callable[[], Sequence[int]], start: Callable[[], Any] | None = None) -> None:
        self._pids = pids
        self._nvml = nvml.Nvml(start)
        self.used: set[str] = set()

    def read(self) -> dict[str, float]:
        """Read all GPUs. Raises: what NVML raises if there is no driver; ImportError if NVML is not installed."""
        values: dict[str, float] = {}
        pids = set(self._pids())
        for gpu in self._nvml.read():
            values |= {f"{GPU}{gpu.uuid}.{name}": value for name, value in _values(gpu).items() if value is not None}
            if pids & {pid for pid, _ in gpu.processes}:
                self.used.add(gpu.uuid)
        return values


def _values(gpu: nvml.Gpu) -> dict[str, float | None]:
    return {
        "utilization": gpu.utilization,
        "memory_bytes": gpu.memory_used_bytes,
        "memory_total_bytes": gpu.memory_total_bytes,
        "power_w": None if gpu.power_mw is None else gpu.power_mw / 1000,
        "energy_total_j": None if gpu.energy_mj is None else gpu.energy_mj / 1000,
    }


def installed(start: Callable[[], Any] | None = None) -> tuple[list[dict[str, Any]], str]:
    """Return the GPUs' names, UUIDs and memory, and the driver's version. Raises: as Nvml.read."""
    reader = nvml.Nvml(start)
    gpus = [{"name": gpu.name, "uuid": gpu.uuid, "memory_bytes": gpu.memory_total_bytes} for gpu in reader.read()]
    return gpus, reader.driver()


def joules(readings: Sequence[Reading], used: set[str]) -> float | None:
    """Return the energy that GPUs used between the first and last reading: those `used`, or all if that is empty.

    A GPU without an energy counter is estimated from its mean power. None if neither is available. Idle power is
    included.
    """
    total: float | None = None
    for uuid in devices(readings):
        if used and uuid not in used:
            continue
        used_j = counter_growth(readings[0], readings[-1], f"{GPU}{uuid}.energy_total_j")
        if used_j is None:
            used_j = counter_growth(readings[0], readings[-1], f"{GPU}{uuid}.energy_j")
        if used_j is None and (watts := known(readings, f"{GPU}{uuid}.power_w")):
            used_j = fmean(watts) * (readings[-1].at_s - readings[0].at_s)
        if used_j is not None:
            total = (total or 0.0) + used_j
    return total
