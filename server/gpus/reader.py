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
from .energy import Account
from .lines import Lines, Page
from .nvml import Gpu, Nvml, is_absent
from .visible import Visible, place, visible

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
        self._absent = False
        self._retry_s: float | None = None
        self._used: dict[str, dict[str, int]] = {}
        self._accounts: dict[str, Account] = {}
        self._uuids: dict[str, str] = {}
        self._places: dict[tuple[int, ...] | None, str] = {}

    def read(self, used: Used) -> Lines:
        """Read NVML. `used`: the models' device times since the last call."""
        if self._absent:
            return {}
        for device, models in used.items():
            waiting = self._used.setdefault(device, {})
            for model, ns in models.items():
                waiting[model] = waiting.get(model, 0) + ns
        page = Page()
        gpus = self._gpus()
        if gpus is not None:
            self._count(gpus)
            self._write(page, gpus)
        if not self._absent:
            page.up(int(gpus is not None))
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
            self._absent = is_absent(error)
            self._retry_s = now_s + RETRY_S
            return None
        if self._retry_s is None and not all(gpu.present for gpu in gpus):
            self._retry_s = now_s + RETRY_S
        return gpus

    def _count(self, gpus: Sequence[Gpu]) -> None:
        """Divide the energy used by the GPUs since the last reading."""
        self._places.update({place(gpu.bus_id): gpu.uuid for gpu in gpus})
        waiting, self._used = self._used, {}
        for device, models in waiting.items():
            uuid = self._uuid(device, gpus)
            if uuid is not None:
                for model, ns in models.items():
                    self._accounts.setdefault(uuid, Account()).use(model, ns)
        now_ns = int(self._clock() * 1e9)
        for gpu in gpus:
            if gpu.energy_mj is not None:
                self._accounts.setdefault(gpu.uuid, Account()).read(now_ns, gpu.energy_mj)

    def _uuid(self, device: str, gpus: Sequence[Gpu]) -> str | None:
        """Return the GPU that "cuda:0" refers to; None if that is unknown, or it is only part of one."""
        kind, _, number = device.partition(":")
        if device not in self._uuids and kind == "cuda" and number.isdecimal():
            found = self._found(int(number), gpus)
            if found is not None:
                self._uuids[device] = found
        return self._uuids.get(device)

    def _found(self, number: int, gpus: Sequence[Gpu]) -> str | None:
        at = place(self._bus_id(number))
        if at is not None:
            return self._places.get(at)
        shown = visible(gpus, self._environ)
        if shown is None or not shown.ordered or number >= len(shown.uuids):
            return None
        uuid = shown.uuids[number]
        return None if uuid.startswith("MIG-") else uuid

    def _write(self, page: Page, gpus: Sequence[Gpu]) -> None:
        shown = visible(gpus, self._environ)
        for gpu in gpus:
            page.gpu(gpu, self._is_ours, _is_shown(gpu, shown))
            for part in gpu.mig or ():
                page.gpu(part, self._is_ours, _is_shown(part, shown))
            if gpu.energy_mj is not None:
                page.energy(gpu.uuid, self._accounts[gpu.uuid], shared=gpu.mig is None)

    def _is_ours(self, pid: int) -> bool:
        """Return whether a process is this one, or descends from it."""
        with suppress(OSError, ValueError, IndexError):
            while pid > 1 and pid != os.getpid():
                pid = int((self._proc / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()[1])
        return pid == os.getpid()


def _is_shown(gpu: Gpu, shown: Visible | None) -> bool | None:
    if shown is None:
        return None
    return any(each.uuid in shown.uuids for each in (gpu, *(gpu.mig or ())))


def _bus_id(device: int) -> str | None:
    from penstock.backends.cuda import CudaError, find_runtime  # for GPUs only

    runtime = find_runtime()
    with suppress(CudaError):
        return None if runtime is None else runtime.pci_bus_id(device)
    return None
