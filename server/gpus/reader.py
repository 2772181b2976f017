"""Reader: produces the GPUs' lines of the metrics page, from NVML and the models' device times. Called by hardware.py.

Which GPU a model ran on is determined by the CUDA runtime, the only authority on its own numbering. It is asked only
after a model has run on a GPU: the runtime is then in use already.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from .device_times import Used
from .energy import EnergyAccount
from .lines import Lines, Page
from .nvml import Gpu, Nvml, is_absent
from .visible import VisibleGpus, pci_location, visible_gpus

RETRY_S = 60.0
"""How long NVML, or a lost GPU, is left alone before NVML is restarted."""

BusId = Callable[[int], str | None]


class GpuReader:
    """Produces no lines if the NVML module or the driver's library is missing, and does not look for them again.

    If NVML does not answer, it is left alone for a while, and the page reports that.
    Threads: `read` is called on one at a time, and may hang with the driver.
    """

    def __init__(
        self, nvml: Nvml, clock: Callable[[], float] = time.monotonic, proc: Path = Path("/proc"),
        environ: Mapping[str, str] = os.environ, bus_id: BusId | None = None,
    ) -> None:  # fmt: skip
        self._nvml = nvml
        self._clock = clock
        self._proc = proc
        self._environ = environ
        self._bus_id = bus_id or _bus_id
        self._nvml_missing = False
        self._retry_s: float | None = None
        self._pending_ns: dict[str, dict[str, int]] = {}
        self._accounts: dict[str, EnergyAccount] = {}
        self._uuids: dict[str, str] = {}
        self._uuids_by_location: dict[tuple[int, ...] | None, str] = {}

    def read(self, used: Used) -> Lines:
        """Read NVML. `used`: the models' device times since the last call."""
        if self._nvml_missing:
            return {}
        for device, models in used.items():
            pending_ns = self._pending_ns.setdefault(device, {})
            for model, ns in models.items():
                pending_ns[model] = pending_ns.get(model, 0) + ns
        page = Page()
        gpus = self._gpus()
        if gpus is not None:
            self._attribute_energy(gpus)
            self._write(page, gpus)
        if not self._nvml_missing:
            page.add_nvml_up(int(gpus is not None))
        return page.lines

    def _gpus(self) -> Sequence[Gpu] | None:
        now_s = self._clock()
        if self._retry_s is not None and now_s >= self._retry_s:
            self._retry_s = None
            self._nvml.close()
        elif self._retry_s is not None and not self._nvml.started:
            return None
        try:
            gpus = self._nvml.read()
        except Exception as error:  # noqa: BLE001 - an NVMLError has a subclass per reason, and drivers have bugs
            self._nvml_missing = is_absent(error)
            self._retry_s = now_s + RETRY_S
            return None
        if self._retry_s is None and not all(gpu.present for gpu in gpus):
            self._retry_s = now_s + RETRY_S
        return gpus

    def _attribute_energy(self, gpus: Sequence[Gpu]) -> None:
        """Divide the energy used by the GPUs since the last reading."""
        self._uuids_by_location.update({pci_location(gpu.bus_id): gpu.uuid for gpu in gpus})
        pending_ns, self._pending_ns = self._pending_ns, {}
        for device, models in pending_ns.items():
            uuid = self._uuid(device, gpus)
            if uuid is not None:
                for model, ns in models.items():
                    self._accounts.setdefault(uuid, EnergyAccount()).add_run_time(model, ns)
        now_ns = int(self._clock() * 1e9)
        for gpu in gpus:
            if gpu.energy_mj is not None:
                self._accounts.setdefault(gpu.uuid, EnergyAccount()).add_reading(now_ns, gpu.energy_mj)

    def _uuid(self, device: str, gpus: Sequence[Gpu]) -> str | None:
        """Return the GPU that "cuda:0" refers to; None if that is unknown, or it is only part of one."""
        kind, _, number = device.partition(":")
        if device not in self._uuids and kind == "cuda" and number.isdecimal():
            found = self._resolve_uuid(int(number), gpus)
            if found is not None:
                self._uuids[device] = found
        return self._uuids.get(device)

    def _resolve_uuid(self, number: int, gpus: Sequence[Gpu]) -> str | None:
        location = pci_location(self._bus_id(number))
        if location is not None:
            return self._uuids_by_location.get(location)
        gpus_shown = visible_gpus(gpus, self._environ)
        if gpus_shown is None or not gpus_shown.ordered or number >= len(gpus_shown.uuids):
            return None
        uuid = gpus_shown.uuids[number]
        return None if uuid.startswith("MIG-") else uuid

    def _write(self, page: Page, gpus: Sequence[Gpu]) -> None:
        gpus_shown = visible_gpus(gpus, self._environ)
        for gpu in gpus:
            page.add_gpu(gpu, self._is_own_process, _is_visible(gpu, gpus_shown))
            for mig_device in gpu.mig or ():
                page.add_gpu(mig_device, self._is_own_process, _is_visible(mig_device, gpus_shown))
            if gpu.energy_mj is not None:
                page.add_energy(gpu.uuid, self._accounts[gpu.uuid], shared=gpu.mig is None)

    def _is_own_process(self, pid: int) -> bool:
        """Return whether a process is this one, or descends from it."""
        with suppress(OSError, ValueError, IndexError):
            while pid > 1 and pid != os.getpid():
                pid = int((self._proc / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()[1])
        return pid == os.getpid()


def _is_visible(gpu: Gpu, gpus_shown: VisibleGpus | None) -> bool | None:
    if gpus_shown is None:
        return None
    return any(each.uuid in gpus_shown.uuids for each in (gpu, *(gpu.mig or ())))


def _bus_id(device: int) -> str | None:
    from penstock.backends.cuda import CudaError, find_runtime  # for GPUs only

    runtime = find_runtime()
    with suppress(CudaError):
        return None if runtime is None else runtime.pci_bus_id(device)
    return None
