"""NVML: reads what NVIDIA's driver reports about its GPUs. For the metrics page, and for perf/ during a load.

CUDA 13 has new calls that replace those of older drivers: the new one is tried first. A value that a GPU does not
report is None: many are unavailable in MIG mode, on some kinds of GPU, or without permission.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

# numbers from nvml.h, so that no module is needed for them
_GPU_SENSOR = 0
_CLOCKS = {"sm": 1, "memory": 2}
_MIG_MODE = 1
_UNINITIALIZED, _DRIVER_NOT_LOADED, _LIBRARY_NOT_FOUND, _GPU_IS_LOST, _RESET_REQUIRED, _MISMATCH = 1, 9, 12, 15, 16, 18
_DOWN = frozenset((_UNINITIALIZED, _DRIVER_NOT_LOADED, _MISMATCH))
_LOST = frozenset((_GPU_IS_LOST, _RESET_REQUIRED))


@dataclass(frozen=True, slots=True)
class Gpu:
    """The state of one GPU at one moment; None for values it does not report. `present`: not lost.

    `mig` are its MIG devices, which report their names, memory and processes; None: it is not in MIG mode. `reasons` is
    NVML's mask of reasons for reduced clocks. `processes` are pids, as NVML knows them, with their memory.
    Units: `utilization` and `memory_activity` are fractions of time; energy is since the driver was loaded.
    """

    uuid: str
    present: bool = True
    name: str | None = None
    bus_id: str | None = None
    mig: tuple[Gpu, ...] | None = None
    utilization: float | None = None
    memory_activity: float | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    power_mw: int | None = None
    power_limit_mw: int | None = None
    energy_mj: int | None = None
    temperature_c: int | None = None
    clocks_mhz: Mapping[str, int] = field(default_factory=dict)
    clock_limits_mhz: Mapping[str, int] = field(default_factory=dict)
    reasons: int | None = None
    processes: tuple[tuple[int, int | None], ...] = ()


class Nvml:
    """NVIDIA GPUs through NVML, which `start` imports and initializes. The first `read` starts it.

    Threads: one at a time. A call may hang with its driver.
    """

    def __init__(self, start: Callable[[], Any] | None = None) -> None:
        self._start_nvml = start or _start_nvml
        self._nvml: Any = None
        self._known_uuids: set[str] = set()

    @property
    def started(self) -> bool:
        """Whether NVML is initialized."""
        return self._nvml is not None

    def read(self) -> tuple[Gpu, ...]:
        """Read all GPUs, including those that were seen earlier and are lost.

        Raises: NVML's error if it does not answer; the next call then restarts it. `is_absent` returns whether there is
        no NVML at all.
        """
        if self._nvml is None:
            self._nvml = self._start_nvml()
        try:
            count = self._nvml.nvmlDeviceGetCount()
            gpus = [gpu for index in range(count) if (gpu := self._gpu(index)) is not None]
        except Exception:
            self.close()
            raise
        self._known_uuids |= (seen := {gpu.uuid for gpu in gpus})
        return (*gpus, *(Gpu(uuid, present=False) for uuid in sorted(self._known_uuids - seen)))

    def driver(self) -> str:
        """Return the driver's version. Raises: as `read`, which must have succeeded before."""
        return _text(self._nvml.nvmlSystemGetDriverVersion())

    def close(self) -> None:
        """Shut NVML down: only a new start detects GPUs that were lost or added."""
        nvml, self._nvml = self._nvml, None
        if nvml is not None:
            with suppress(Exception):  # it may be what is broken
                nvml.nvmlShutdown()

    def _gpu(self, index: int) -> Gpu | None:
        """Read one GPU; None if it is lost, or not accessible to this process."""
        try:
            device = self._nvml.nvmlDeviceGetHandleByIndex(index)
            return self._read_gpu(device, _text(self._nvml.nvmlDeviceGetUUID(device)))
        except Exception as error:  # an NVMLError has a subclass for each reason
            if _code(error) in _DOWN:
                raise
            return None

    def _read_gpu(self, device: Any, uuid: str) -> Gpu:
        rates = self._query("nvmlDeviceGetUtilizationRates", device)
        event_reasons = self._query("nvmlDeviceGetCurrentClocksEventReasons", device)
        temperature_c = self._query("nvmlDeviceGetTemperatureV", device, _GPU_SENSOR)
        return Gpu(
            uuid,
            bus_id=self._bus_id(device),
            mig=self._mig(device),
            utilization=None if rates is None else rates.gpu / 100,
            memory_activity=_share(rates, "memory"),
            power_mw=self._query("nvmlDeviceGetPowerUsage", device),
            power_limit_mw=self._query("nvmlDeviceGetEnforcedPowerLimit", device),
            energy_mj=self._query("nvmlDeviceGetTotalEnergyConsumption", device),
            temperature_c=self._query("nvmlDeviceGetTemperature", device, _GPU_SENSOR)
            if temperature_c is None
            else temperature_c,
            clocks_mhz=self._clocks("nvmlDeviceGetClockInfo", device),
            clock_limits_mhz=self._clocks("nvmlDeviceGetMaxClockInfo", device),
            reasons=self._query("nvmlDeviceGetCurrentClocksThrottleReasons", device)
            if event_reasons is None
            else event_reasons,
            **self._memory_and_processes(device),
        )

    def _memory_and_processes(self, device: Any) -> dict[str, Any]:
        """Return what MIG devices report as well: name, memory and processes."""
        name = self._query("nvmlDeviceGetName", device)
        # without its version, the call counts the driver's own memory as used; nvidia-smi does not
        memory = self._query("nvmlDeviceGetMemoryInfo", device, getattr(self._nvml, "nvmlMemory_v2", None))
        memory = self._query("nvmlDeviceGetMemoryInfo", device) if memory is None else memory
        processes = self._query("nvmlDeviceGetComputeRunningProcesses", device) or ()
        return {
            "name": None if name is None else _text(name),
            "memory_total_bytes": None if memory is None else int(memory.total),
            "memory_used_bytes": None if memory is None else int(memory.used),
            "processes": tuple((int(each.pid), getattr(each, "usedGpuMemory", None)) for each in processes),
        }

    def _mig(self, device: Any) -> tuple[Gpu, ...] | None:
        modes = self._query("nvmlDeviceGetMigMode", device)
        if modes is None or modes[0] != _MIG_MODE:
            return None
        found = []
        for index in range(self._query("nvmlDeviceGetMaxMigDeviceCount", device) or 0):
            slice_ = self._query("nvmlDeviceGetMigDeviceHandleByIndex", device, index)
            uuid = None if slice_ is None else self._query("nvmlDeviceGetUUID", slice_)
            if uuid is not None:
                found.append(Gpu(_text(uuid), **self._memory_and_processes(slice_)))
        return tuple(found)

    def _bus_id(self, device: Any) -> str | None:
        pci_info = self._query("nvmlDeviceGetPciInfo", device)
        return None if pci_info is None else _text(pci_info.busId)

    def _clocks(self, function: str, device: Any) -> dict[str, int]:
        found = {name: self._query(function, device, number) for name, number in _CLOCKS.items()}
        return {name: mhz for name, mhz in found.items() if mhz is not None}

    def _query(self, function: str, *arguments: Any) -> Any:
        """Query one value; None if it is unknown. Raises: errors that mean the GPU is lost, or the driver gone."""
        try:
            return getattr(self._nvml, function)(*arguments)
        except Exception as error:
            if _code(error) in _LOST | _DOWN:
                raise
            return None


def is_absent(error: Exception) -> bool:
    """Return whether an error of `read` means that there is no NVML on this machine."""
    return isinstance(error, (ImportError, OSError)) or _code(error) == _LIBRARY_NOT_FOUND


def _share(rates: Any, name: str) -> float | None:
    percent = getattr(rates, name, None)
    return None if percent is None else percent / 100


def _code(error: Exception) -> Any:
    return getattr(error, "value", None)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _start_nvml() -> Any:
    nvml = importlib.import_module("pynvml")
    nvml.nvmlInit()
    return nvml
