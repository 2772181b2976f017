"""Hardware: samples of the machine, the process and its GPUs for the metrics page.

Taken on a dedicated daemon thread, at most once per interval and only while the page is scraped, so a hanging driver
blocks neither the event loop nor the exit: its lines are missing from the page until it responds.
"""

from __future__ import annotations

import asyncio
import math
import os
import resource
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from penstock.batching.devices.memory import meminfo, resident_bytes
from penstock.server.gpus.device_times import Used
from penstock.server.gpus.lines import Lines
from penstock.server.gpus.nvml import Nvml
from penstock.server.gpus.reader import GpuReader

_STALE_S = 10.0
_MAX_WAIT_S = 0.25

_HUNG_LINES: Lines = {"penstock_nvml_up": ["penstock_nvml_up 0"]}

Values = Mapping[str, str]
_Read = Callable[[], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class HardwareSample:
    """Values by metric name, as text; for GPUs, whole lines. Unavailable values are omitted."""

    machine: Values = field(default_factory=dict)
    gpus: Lines = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """What is sampled, and the minimum interval."""

    interval_s: float = 1.0
    machine: bool = True
    gpus: bool = True


class Hardware:
    """Keeps the latest HardwareSample, read from `proc` and from the NVML module that `nvml` imports and starts.

    `device_usage` returns the models' device usage since its last call. Values of the process itself are always
    included.
    Threads: `sample` is called on the event loop, and calls `device_usage` there.
    """

    def __init__(
        self,
        proc: Path = Path("/proc"),
        nvml: Callable[[], Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
        plan: SamplingPlan = SamplingPlan(),
        device_usage: Callable[[], Used] = dict,
    ) -> None:
        cpu = _CpuTime(proc)

        def machine() -> Values:
            return {**cpu.read(), **_memory(proc), **_process(proc)} if plan.machine else _process(proc)

        gpus = GpuReader(Nvml(nvml), clock, proc)

        def gpu_lines() -> _Read:
            return partial(gpus.read, device_usage()) if plan.gpus else dict

        self._machine = _CachedReader(lambda: machine, clock, plan.interval_s)
        self._gpus = _CachedReader(gpu_lines, clock, plan.interval_s, _HUNG_LINES)

    async def sample(self) -> HardwareSample:
        """Return values not older than the interval or, if reading takes too long, the previous ones."""
        machine, gpus = await asyncio.gather(self._machine.latest(), self._gpus.latest())
        return HardwareSample(machine, gpus)


class _CachedReader:
    """The latest result of a reader that runs on a daemon thread, one at a time.

    `start_read`, called on the loop, returns the function that reads.
    A result that is too old is replaced by nothing, or by `hung_value` if the current read has taken that long.
    """

    def __init__(
        self,
        start_read: Callable[[], _Read],
        clock: Callable[[], float],
        interval_s: float,
        hung_value: Mapping[str, Any] = {},
    ) -> None:
        self._interval_s = interval_s
        self._stale_s = max(_STALE_S, 2 * interval_s)
        self._start_read = start_read
        self._clock = clock
        self._hung_value = hung_value
        self._values: Mapping[str, Any] = {}
        self._read_s = -math.inf
        self._started_s = math.inf
        self._pending: asyncio.Future[None] | None = None

    async def latest(self) -> Mapping[str, Any]:
        if self._clock() - self._read_s >= self._interval_s:
            pending = self._start() if self._pending is None else self._pending
            await asyncio.wait((pending,), timeout=_MAX_WAIT_S)
        now_s = self._clock()
        if now_s - self._read_s < self._stale_s:
            return self._values
        return self._hung_value if self._pending is not None and now_s - self._started_s >= self._stale_s else {}

    def _start(self) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        pending: asyncio.Future[None] = loop.create_future()
        self._started_s = self._clock()
        read = self._start_read()
        self._pending = pending

        def finish(values: Mapping[str, Any]) -> None:
            self._values, self._read_s, self._pending = values, self._clock(), None
            pending.set_result(None)

        def run() -> None:
            try:
                values = read()
            except Exception:  # noqa: BLE001 - whatever a driver raises, the page is served
                values = {}
            with suppress(RuntimeError):  # the loop is closed because the server has stopped
                loop.call_soon_threadsafe(finish, values)

        try:
            threading.Thread(target=run, name="hardware", daemon=True).start()
        except RuntimeError:  # no thread is available now: the values are omitted
            finish({})
        return pending


class _CpuTime:
    """CPU utilization between two readings; the first covers the time since boot."""

    def __init__(self, proc: Path) -> None:
        self._path = proc / "stat"
        self._idle = 0
        self._total = 0

    def read(self) -> Values:
        try:
            with self._path.open(encoding="ascii") as file:
                ticks = [int(word) for word in file.readline().split()[1:9]]
        except (OSError, ValueError):
            return {}
        # user nice system idle iowait irq softirq steal; guest time is already in user
        idle, total = sum(ticks[3:5]), sum(ticks)
        elapsed, idle_elapsed = total - self._total, idle - self._idle
        self._idle, self._total = idle, total
        rate = 1 - idle_elapsed / elapsed if elapsed > 0 else 0.0
        return {"nv_cpu_utilization": f"{min(max(rate, 0.0), 1.0):.6f}"}


def _memory(proc: Path) -> Values:
    total, available = meminfo("MemTotal", proc), meminfo("MemAvailable", proc)
    if total is None or available is None:
        return {}
    return {"nv_cpu_memory_total_bytes": str(total), "nv_cpu_memory_used_bytes": str(total - available)}


def _process(proc: Path) -> Values:
    """Return values about this process, under the names that Prometheus' own clients use."""
    values = {
        "process_cpu_seconds_total": f"{time.process_time():.6f}",
        "process_max_fds": str(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
    }
    folder = proc / "self"
    if resident := resident_bytes(proc):
        values["process_resident_memory_bytes"] = str(resident)
    with suppress(OSError):
        values["process_open_fds"] = str(sum(1 for _ in (folder / "fd").iterdir()))
    with suppress(OSError, ValueError, IndexError, StopIteration):
        booted = next(line for line in (proc / "stat").read_text("ascii").splitlines() if line.startswith("btime "))
        # proc(5): the 22nd field; the second, a name in parentheses, may contain anything
        ticks = int((folder / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()[19])
        values["process_start_time_seconds"] = f"{int(booted.split()[1]) + ticks / os.sysconf('SC_CLK_TCK'):.2f}"
    return values
