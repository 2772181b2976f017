"""Hardware: samples of a fake /proc and a fake NVML."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.server.gpus.device_times import Used
from penstock.server.telemetry import hardware
from penstock.server.telemetry.hardware import Hardware, HardwareSample, SamplingPlan
from penstock.server.telemetry.metrics import Metrics
from tests.fakes import no_more_threads


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class FakeNvml:
    """Two GPUs; the second, a MIG slice, has no utilization and no power readings."""

    def __init__(self) -> None:
        self.query_count = 0
        self.energy_mj = 5_000_000

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        self.query_count += 1
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index + 1

    def nvmlDeviceGetUUID(self, device: int) -> str:  # noqa: N802
        return f"GPU-{device}"

    def nvmlDeviceGetMemoryInfo(self, device: int) -> Any:  # noqa: N802
        return SimpleNamespace(total=150_754_820_096, used=85_899_345_920 * (device == 1))

    def nvmlDeviceGetUtilizationRates(self, device: int) -> Any:  # noqa: N802
        return SimpleNamespace(gpu=self._only_first(device, 37))

    def nvmlDeviceGetPowerUsage(self, device: int) -> int:  # noqa: N802
        return self._only_first(device, 123_456)

    def nvmlDeviceGetEnforcedPowerLimit(self, device: int) -> int:  # noqa: N802
        return self._only_first(device, 700_000)

    def nvmlDeviceGetTotalEnergyConsumption(self, device: int) -> int:  # noqa: N802
        return self._only_first(device, self.energy_mj)

    @staticmethod
    def _only_first(device: int, value: int) -> int:
        if device != 1:
            raise RuntimeError("not supported")
        return value


class NoModels:
    def models(self) -> list[Any]:
        return []


def _absent() -> Any:
    raise ImportError("no pynvml here")


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "statm").write_text("1000 250 30 1 0 100 0\n")
    (tmp_path / "self" / "fd").mkdir()
    for number in range(3):
        (tmp_path / "self" / "fd" / str(number)).touch()
    (tmp_path / "self" / "stat").write_text(f"7 (a ) name) S {'0 ' * 18}{250 * os.sysconf('SC_CLK_TCK')} 0 0\n")
    (tmp_path / "stat").write_text("cpu  10 0 10 70 10 0 0 0 0 0\ncpu0 1 2 3 4\nbtime 1700000000\n")
    (tmp_path / "meminfo").write_text("MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable: 600 kB\nHugePages_Total: 0\n")
    return tmp_path


def _samples(hardware: Hardware, *between: Callable[[], None]) -> list[HardwareSample]:
    async def main() -> list[HardwareSample]:
        samples = [await hardware.sample()]
        for step in between:
            step()
            samples.append(await hardware.sample())
        return samples

    return asyncio.run(main())


def test_used_memory_is_total_minus_available_memory(proc: Path) -> None:
    (sample,) = _samples(Hardware(proc, _absent))

    assert sample.machine["nv_cpu_memory_total_bytes"] == str(1000 * 1024)
    assert sample.machine["nv_cpu_memory_used_bytes"] == str(400 * 1024)


def test_utilization_is_counted_between_two_samples(proc: Path) -> None:
    clock = FakeClock()

    def busy() -> None:
        (proc / "stat").write_text("cpu  40 0 10 75 15 0 0 0 0 0\n")
        clock.now_s += 1.0

    first, second = _samples(Hardware(proc, _absent, clock), busy)

    assert (first.machine["nv_cpu_utilization"], second.machine["nv_cpu_utilization"]) == ("0.200000", "0.750000")


def test_a_machine_without_proc_still_has_its_cpu_time(tmp_path: Path) -> None:
    (sample,) = _samples(Hardware(tmp_path / "absent", _absent))

    assert set(sample.machine) == {"process_cpu_seconds_total", "process_max_fds"}


def test_a_machine_without_nvml_has_no_gpu_lines_and_nvml_is_not_retried(proc: Path) -> None:
    clock = FakeClock()
    tried = []

    def start() -> Any:
        tried.append(clock.now_s)
        raise OSError("libnvidia-ml.so.1: not found")

    def later() -> None:
        clock.now_s += 5.0

    samples = _samples(Hardware(proc, start, clock), later, later)

    assert [sample.gpus for sample in samples] == [{}, {}, {}]
    assert tried == [1000.0]


def test_the_machine_is_sampled_at_most_once_a_second(proc: Path) -> None:
    clock, nvml = FakeClock(), FakeNvml()

    def soon() -> None:
        clock.now_s += 0.4

    _samples(Hardware(proc, lambda: nvml, clock), soon, soon, soon)

    assert nvml.query_count == 2


def test_a_value_that_a_gpu_does_not_report_is_left_out(proc: Path) -> None:
    (sample,) = _samples(Hardware(proc, FakeNvml))

    reported = [name for name, lines in sample.gpus.items() if any('"GPU-2"' in line for line in lines)]
    assert reported == [
        "penstock_gpu_up",
        "nv_gpu_memory_total_bytes",
        "nv_gpu_memory_used_bytes",
        "penstock_gpu_visible",
    ]


def test_energy_counts_from_the_first_sample_and_model_use_is_read_for_every_sample(proc: Path) -> None:
    clock, nvml = FakeClock(), FakeNvml()
    thread_ids: list[int] = []

    def used() -> Used:
        thread_ids.append(threading.get_ident())
        return {}

    def spend() -> None:
        nvml.energy_mj += 2_500
        clock.now_s += 1.0

    first, second = _samples(Hardware(proc, lambda: nvml, clock, device_usage=used), spend)

    energy = [sample.gpus["nv_energy_consumption"] for sample in (first, second)]
    assert energy == [[f'nv_energy_consumption{{gpu_uuid="GPU-1"}} {value}'] for value in ("0", "2.5")]
    assert thread_ids == [threading.get_ident()] * 2


def test_perf_analyzer_reads_the_four_gpu_lines(proc: Path) -> None:
    page = asyncio.run(Metrics(NoModels(), Hardware(proc, FakeNvml)).render()).decode()

    read = {
        name: re.findall(rf'\n{name}\{{gpu_uuid="([^"]+)"\}} (\d+\.?\d*)\n', page)
        for name in (
            "nv_gpu_utilization",
            "nv_gpu_power_usage",
            "nv_gpu_memory_used_bytes",
            "nv_gpu_memory_total_bytes",
        )
    }
    assert read["nv_gpu_utilization"] == [("GPU-1", "0.37")]
    assert read["nv_gpu_power_usage"] == [("GPU-1", "123.456")]
    assert read["nv_gpu_memory_used_bytes"][0] == ("GPU-1", "85899345920")
    assert read["nv_gpu_memory_total_bytes"][0] == ("GPU-1", "150754820096")


def test_a_hanging_driver_delays_neither_the_page_nor_the_other_metrics(proc: Path) -> None:
    released = threading.Event()

    def hang() -> Any:
        released.wait(30)
        raise OSError("the driver was reset")

    try:
        (sample,) = _samples(Hardware(proc, hang))
    finally:
        released.set()

    assert sample.gpus == {}
    assert "nv_cpu_utilization" in sample.machine


def test_a_driver_that_has_hung_for_long_is_reported_as_nvml_down(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_MAX_WAIT_S", 0.0)
    clock, released = FakeClock(), threading.Event()

    def hang() -> Any:
        released.wait(30)
        raise OSError("the driver was reset")

    def pass_on() -> None:
        clock.now_s += 6.0

    try:
        samples = _samples(Hardware(proc, hang, clock), pass_on, pass_on)
    finally:
        released.set()

    assert [sample.gpus for sample in samples] == [{}, {}, {"penstock_nvml_up": ["penstock_nvml_up 0"]}]


def test_values_too_old_are_no_longer_shown(proc: Path) -> None:
    clock, nvml = FakeClock(), FakeNvml()
    hanging, released = threading.Event(), threading.Event()

    def hang() -> int:
        hanging.set()
        released.wait(30)
        return 0

    def stop_answering() -> None:
        nvml.nvmlDeviceGetCount = hang  # type: ignore[method-assign]
        clock.now_s += 5.0

    def later() -> None:
        hanging.wait(30)
        clock.now_s += 5.0

    try:
        samples = _samples(Hardware(proc, lambda: nvml, clock), stop_answering, later)
    finally:
        released.set()

    assert ["nv_gpu_utilization" in sample.gpus for sample in samples] == [True, True, False]


def test_a_sample_is_empty_when_no_thread_can_be_started(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_more_threads(monkeypatch)
    (sample,) = _samples(Hardware(proc, _absent))

    assert sample == HardwareSample({}, {})


def test_a_sample_is_complete_again_once_a_thread_can_be_started(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()

    def later() -> None:
        patch.undo()
        clock.now_s += 1.0

    with monkeypatch.context() as patch:
        no_more_threads(patch)
        without, sample = _samples(Hardware(proc, FakeNvml, clock), later)

    assert without == HardwareSample({}, {})
    assert "nv_cpu_utilization" in sample.machine
    assert "nv_gpu_utilization" in sample.gpus


# -- what is sampled -------------------------------------------------------------------------------------------


def test_disabled_machine_and_gpu_sampling_still_samples_the_process(proc: Path) -> None:
    nvml = FakeNvml()
    (sample,) = _samples(Hardware(proc, lambda: nvml, plan=SamplingPlan(machine=False, gpus=False)))

    assert (sample.gpus, nvml.query_count) == ({}, 0)
    assert set(sample.machine) == {
        "process_cpu_seconds_total", "process_max_fds", "process_open_fds", "process_resident_memory_bytes",
        "process_start_time_seconds",
    }  # fmt: skip


def test_process_metrics_are_those_of_prometheus_clients(proc: Path) -> None:
    [sample] = _samples(Hardware(proc, _absent))

    assert sample.machine["process_open_fds"] == "3"
    assert sample.machine["process_start_time_seconds"] == "1700000250.00"
    assert sample.machine["process_max_fds"] == str(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def test_gpu_values_are_cached_for_the_sampling_interval(proc: Path) -> None:
    clock, nvml = FakeClock(), FakeNvml()

    def pass_on(seconds: float) -> Callable[[], None]:
        def passing() -> None:
            clock.now_s += seconds

        return passing

    watched = Hardware(proc, lambda: nvml, clock, SamplingPlan(interval_s=30.0))
    samples = _samples(watched, pass_on(29.0), pass_on(0.5), pass_on(0.5))

    assert [bool(sample.gpus) for sample in samples] == [True] * 4
    assert nvml.query_count == 2
