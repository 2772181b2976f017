"""Energy: made-up GPUs, and the joules that are made of what they tell."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.perf.profiling.energy import Nvml, installed, joules
from penstock.perf.profiling.sampling_series import Reading


class FakeNvml:
    """Two GPUs; the second, a MIG slice, knows nothing but its memory."""

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index + 1

    def nvmlDeviceGetUUID(self, device: int) -> str | bytes:  # noqa: N802
        return b"GPU-1" if device == 1 else "GPU-2"

    def nvmlDeviceGetName(self, device: int) -> bytes:  # noqa: N802
        return b"NVIDIA H200"

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "580.1"

    def nvmlDeviceGetMemoryInfo(self, device: int) -> Any:  # noqa: N802
        return SimpleNamespace(total=100, used=40)

    def nvmlDeviceGetUtilizationRates(self, device: int) -> Any:  # noqa: N802
        return SimpleNamespace(gpu=_only_first(device, 37))

    def nvmlDeviceGetPowerUsage(self, device: int) -> int:  # noqa: N802
        return _only_first(device, 123_456)

    def nvmlDeviceGetTotalEnergyConsumption(self, device: int) -> int:  # noqa: N802
        return _only_first(device, 5_000_500)

    def nvmlDeviceGetComputeRunningProcesses(self, device: int) -> list[Any]:  # noqa: N802
        return [SimpleNamespace(pid=_only_first(device, 70))]


def _only_first(device: int, value: int) -> int:
    if device != 1:
        raise RuntimeError("not supported")
    return value


def test_every_gpu_reports_its_known_values_in_the_units_of_the_document() -> None:
    assert Nvml(list, FakeNvml).read() == {
        "gpu.GPU-1.utilization": 0.37,
        "gpu.GPU-1.memory_bytes": 40,
        "gpu.GPU-1.memory_total_bytes": 100,
        "gpu.GPU-1.power_w": 123.456,
        "gpu.GPU-1.energy_total_j": 5000.5,
        "gpu.GPU-2.memory_bytes": 40,
        "gpu.GPU-2.memory_total_bytes": 100,
    }


@pytest.mark.parametrize(("pids", "used"), [([1, 70], {"GPU-1"}), ([1], set()), ([], set())])
def test_the_gpus_in_use_are_those_on_which_the_server_runs(pids: list[int], used: set[str]) -> None:
    nvml = Nvml(lambda: pids, FakeNvml)
    nvml.read()

    assert nvml.used == used


def test_gpus_are_described_by_name_and_driver() -> None:
    gpus, driver = installed(FakeNvml)

    assert gpus[0] == {"name": "NVIDIA H200", "uuid": "GPU-1", "memory_bytes": 100}
    assert driver == "580.1"


def at(second: float, **values: float) -> Reading:
    """Write a reading of GPU a: `energy_total_j`, `energy_j`, `power_w`; `b_...` is GPU b's."""
    return Reading(
        second,
        {f"gpu.{'b' if name[:2] == 'b_' else 'a'}.{name.removeprefix('b_')}": each for name, each in values.items()},
    )


@pytest.mark.parametrize(
    ("readings", "spent"),
    [
        ([at(0, energy_total_j=100, power_w=9), at(4, energy_total_j=130, power_w=9)], 30),
        ([at(0, energy_j=5), at(4, energy_j=6)], 1),
        ([at(0, energy_j=5), at(4, energy_total_j=5000)], None),
        ([at(0, power_w=10), at(2, power_w=20), at(4, power_w=30)], 80),
        ([at(0, energy_j=9, power_w=10), at(4, energy_j=1, power_w=10)], 40),
        ([at(0, energy_j=1, b_power_w=10), at(4, energy_j=2, b_power_w=10)], 41),
        ([at(0, memory_bytes=1), at(4)], None),
        ([at(0), at(4)], None),
    ],
    ids=["counter", "page", "two counters", "power", "began anew", "two GPUs", "untold", "none"],
)
def test_energy_is_the_growth_of_the_counter_or_else_mean_power_times_time(
    readings: list[Reading], spent: float | None
) -> None:
    assert joules(readings, set()) == (None if spent is None else pytest.approx(spent))


def test_gpus_not_used_by_the_server_are_excluded_if_its_gpus_are_known() -> None:
    readings = [at(0, energy_j=1, b_energy_j=1), at(4, energy_j=2, b_energy_j=100)]

    assert joules(readings, {"a"}) == 1


values = st.dictionaries(
    st.sampled_from(["gpu.a.energy_j", "gpu.a.energy_total_j", "gpu.a.power_w", "gpu.b.power_w"]), st.floats(0, 1e9)
)


@given(st.lists(values, min_size=2, max_size=5))
def test_energy_is_never_negative(rows: list[dict[str, float]]) -> None:
    spent = joules([Reading(float(second), row) for second, row in enumerate(rows)], set())

    assert spent is None or spent >= 0
