"""Lines: the GPUs' part of the metrics page, by metric family. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from penstock.server.telemetry.exposition import decimal, label_value

from .energy import EnergyAccount
from .nvml import Gpu

Lines = Mapping[str, list[str]]

REASONS = {
    0x001: "idle",
    0x002: "application_clocks",
    0x004: "software_power_cap",
    0x008: "hardware_slowdown",
    0x010: "sync_boost",
    0x020: "software_thermal",
    0x040: "hardware_thermal",
    0x080: "hardware_power_brake",
    0x100: "display_clocks",
    0x200: "board_limit",
    0x400: "reliability",
}
"""Reasons for reduced clocks, by bit. Source: nvml.h, nvmlClocksEventReasons."""


class Page:
    """The lines of a page under construction."""

    def __init__(self) -> None:
        self.lines: dict[str, list[str]] = {}

    def add_nvml_up(self, number: int) -> None:
        """Write whether NVML answers."""
        self._add("penstock_nvml_up", "", number)

    def add_gpu(self, gpu: Gpu, is_own_process: Callable[[int], bool], is_visible: bool | None) -> None:
        """Write the values of a GPU or a MIG device. `is_own_process`: whether a pid belongs to this server."""
        labels = f'gpu_uuid="{label_value(gpu.uuid)}"'
        self._add("penstock_gpu_up", labels, int(gpu.present))
        if not gpu.present:
            return
        for name, value in _values(gpu):
            if value is not None:
                self._add(name, labels, value)
        for family, clocks in (
            ("penstock_gpu_clock_hertz", gpu.clocks_mhz),
            ("penstock_gpu_clock_limit_hertz", gpu.clock_limits_mhz),
        ):
            for clock, mhz in clocks.items():
                self._add(family, f'{labels},clock="{clock}"', mhz * 1_000_000)
        if gpu.reasons is not None:
            for bit, reason in REASONS.items():
                self._add("penstock_gpu_clocks_held", f'{labels},reason="{reason}"', int(bool(gpu.reasons & bit)))
        memory = [used for pid, used in gpu.processes if used is not None and is_own_process(pid)]
        if memory:
            self._add("penstock_gpu_process_memory_bytes", labels, sum(memory))
        if is_visible is not None:
            self._add("penstock_gpu_visible", labels, int(is_visible))

    def add_energy(self, uuid: str, account: EnergyAccount, *, shared: bool) -> None:
        """Write the energy a GPU has used, and, if it is `shared` out, each model's part."""
        labels = f'gpu_uuid="{label_value(uuid)}"'
        self._add("nv_energy_consumption", labels, decimal(account.total_uj, 6))
        if not shared:
            return
        for model, used_uj in account.models_uj.items():
            self._add("penstock_energy_joules_total", f"{model},{labels}", decimal(used_uj, 6))
        self._add("penstock_energy_rest_joules_total", labels, decimal(account.unattributed_uj, 6))

    def _add(self, family: str, labels: str, value: str | int) -> None:
        series = f"{family}{{{labels}}}" if labels else family
        self.lines.setdefault(family, []).append(f"{series} {value}")


def _values(gpu: Gpu) -> Iterable[tuple[str, str | int | None]]:
    yield "nv_gpu_utilization", None if gpu.utilization is None else f"{gpu.utilization:.2f}"
    yield "nv_gpu_memory_total_bytes", gpu.memory_total_bytes
    yield "nv_gpu_memory_used_bytes", gpu.memory_used_bytes
    yield "nv_gpu_power_usage", None if gpu.power_mw is None else decimal(gpu.power_mw, 3)
    yield "nv_gpu_power_limit", None if gpu.power_limit_mw is None else decimal(gpu.power_limit_mw, 3)
    yield "penstock_gpu_memory_activity", None if gpu.memory_activity is None else f"{gpu.memory_activity:.2f}"
    yield "penstock_gpu_temperature_celsius", gpu.temperature_c
