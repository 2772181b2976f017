"""The GPU lines of the metrics page, read through the real pynvml with a stub of its library."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from typing import Any

import pytest

from penstock.server.gpus.lines import Lines
from penstock.server.gpus.nvml import Nvml
from penstock.server.gpus.reader import RETRY_S, GpuReader
from penstock.server.telemetry.families import FAMILIES
from tests.server.gpus.stub import DRIVER_NOT_LOADED, H200, L4, LOST, MISMATCH, SLICES, Stub

A, B = 'model="a",version="1"', 'model="b",version="1"'


class FakeClock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def reader(clock: FakeClock, environ: Mapping[str, str] | None = None, bus_ids: tuple[str, ...] = ()) -> GpuReader:
    def bus_id(number: int) -> str | None:
        return bus_ids[number] if number < len(bus_ids) else None

    return GpuReader(Nvml(), clock, environ=environ or {}, bus_id=bus_id)


def values(lines: Lines, family: str) -> dict[str, str]:
    pairs = (line.removeprefix(family).rsplit(" ", 1) for line in lines.get(family, ()))
    return dict(sorted((labels.strip("{}"), value) for labels, value in pairs))


def of(uuid: str) -> str:
    return f'gpu_uuid="{uuid}"'


def test_a_gpu_has_a_line_for_each_fact_it_supports(stub: Stub, clock: FakeClock) -> None:
    stub.remove(L4)
    lines = reader(clock).read({})

    assert {name: values(lines, name).get(of(H200)) for name in lines if values(lines, name).keys() == {of(H200)}} == {
        "nv_gpu_utilization": "0.37",
        "nv_gpu_memory_total_bytes": "150000000000",
        "nv_gpu_memory_used_bytes": "84500000000",
        "nv_gpu_power_usage": "123.456",
        "nv_gpu_power_limit": "700",
        "nv_energy_consumption": "0",
        "penstock_energy_rest_joules_total": "0",
        "penstock_gpu_memory_activity": "0.12",
        "penstock_gpu_temperature_celsius": "41",
        "penstock_gpu_process_memory_bytes": "1000",
        "penstock_gpu_up": "1",
        "penstock_gpu_visible": "1",
    }
    assert values(lines, "penstock_gpu_clock_hertz") == {
        f'{of(H200)},clock="memory"': "3201000000",
        f'{of(H200)},clock="sm"': "1980000000",
    }
    held = values(lines, "penstock_gpu_clocks_held")
    assert [labels for labels, value in held.items() if value == "1"] == [
        f'{of(H200)},reason="hardware_thermal"',
        f'{of(H200)},reason="software_power_cap"',
    ]
    assert values(lines, "penstock_nvml_up") == {"": "1"}
    assert set(lines) <= {family.name for family in FAMILIES}


def test_process_memory_covers_the_server_and_its_child_processes(stub: Stub, clock: FakeClock) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        stub.say(H200, "processes", f"self 1000 {child.pid} 200 {os.getppid()} 50 999999999 7")
        lines = reader(clock).read({})

    assert values(lines, "penstock_gpu_process_memory_bytes") == {of(H200): "1200"}


def test_the_visible_gpus_are_reported_when_they_are_known(stub: Stub, clock: FakeClock) -> None:
    pages = {each: values(reader(clock, {"CUDA_VISIBLE_DEVICES": each}).read({}), "penstock_gpu_visible")
            for each in (L4, "", "0")}  # fmt: skip

    assert pages == {L4: {of(H200): "0", of(L4): "1"}, "": {of(H200): "0", of(L4): "0"}, "0": {}}


def spend(stub: Stub, clock: FakeClock, joules: int, seconds: float = 10.0) -> None:
    stub.say(H200, "energy", str(5_000_000 + joules * 1000))
    clock.now_s += seconds


def test_energy_is_attributed_to_models_by_cudas_bus_ids(stub: Stub, clock: FakeClock) -> None:
    page = reader(clock, bus_ids=("0000:65:00.0", "0000:17:00.0"))
    page.read({"cuda:0": {A: 7}})
    spend(stub, clock, 100)
    lines = page.read({"cuda:0": {A: 2_000_000_000, B: 3_000_000_000}, "cuda:1": {B: 5_000_000_000}, "cpu": {A: 1}})

    assert values(lines, "nv_energy_consumption") == {of(H200): "100"}
    assert values(lines, "penstock_energy_joules_total") == {f"{A},{of(H200)}": "20", f"{B},{of(H200)}": "30"}
    assert values(lines, "penstock_energy_rest_joules_total") == {of(H200): "50"}


@pytest.mark.parametrize(
    ("environ", "joules"),
    [
        ({"CUDA_VISIBLE_DEVICES": H200}, "20"),
        ({"CUDA_VISIBLE_DEVICES": f"{L4},{H200}"}, None),
        ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, None),
        ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "1"}, "20"),
        ({}, None),
    ],
)
def test_without_bus_ids_energy_is_attributed_by_the_environment(
    environ: dict[str, str], joules: str | None, stub: Stub, clock: FakeClock
) -> None:
    page = reader(clock, environ)
    page.read({})
    spend(stub, clock, 100)
    lines = page.read({"cuda:0": {A: 2_000_000_000}})

    assert values(lines, "penstock_energy_joules_total").get(f"{A},{of(H200)}") == joules


def test_the_energy_of_a_gpu_in_mig_mode_is_not_attributed(stub: Stub, clock: FakeClock) -> None:
    stub.slice()
    page = reader(clock, bus_ids=("0000:65:00.0",))
    page.read({})
    spend(stub, clock, 100)
    lines = page.read({"cuda:0": {A: 2_000_000_000}})

    assert values(lines, "nv_energy_consumption") == {of(H200): "100"}
    assert not {"penstock_energy_joules_total", "penstock_energy_rest_joules_total"} & lines.keys()
    assert values(lines, "nv_gpu_memory_used_bytes") == {
        of(H200): "84500000000", of(L4): "0", of(SLICES[0]): "1000", of(SLICES[1]): "2000",
    }  # fmt: skip
    assert values(lines, "penstock_gpu_visible") == {of(H200): "1", of(L4): "0", of(SLICES[0]): "1", of(SLICES[1]): "0"}


def test_a_lost_gpu_is_down_and_its_energy_continues_when_it_returns(stub: Stub, clock: FakeClock) -> None:
    page = reader(clock, bus_ids=("0000:65:00.0",))
    page.read({})
    stub.fail("every", LOST, H200)
    lost = page.read({"cuda:0": {A: 1_000_000_000}})
    stub.heal()
    spend(stub, clock, 100)
    back = page.read({"cuda:0": {A: 1_000_000_000}})

    assert values(lost, "penstock_gpu_up") == {of(H200): "0", of(L4): "1"}
    assert "nv_energy_consumption" not in lost
    assert values(back, "penstock_gpu_up") == {of(H200): "1", of(L4): "1"}
    assert values(back, "penstock_energy_joules_total") == {f"{A},{of(H200)}": "20"}


def started(stub: Stub) -> int:
    return stub.calls()["nvmlInitWithFlags"]


def test_nvml_is_restarted_periodically_while_a_gpu_is_lost(stub: Stub, clock: FakeClock) -> None:
    page = reader(clock)
    page.read({})
    stub.fail("every", LOST, H200)
    counted = []
    for _ in range(4):
        page.read({})
        counted.append(started(stub))
        clock.now_s += RETRY_S / 2

    assert counted == [1, 1, 2, 2]


@pytest.mark.parametrize("code", [MISMATCH, DRIVER_NOT_LOADED])
def test_nvml_that_does_not_start_is_reported_down_and_retried_later(code: int, stub: Stub, clock: FakeClock) -> None:
    page = reader(clock, bus_ids=("0000:65:00.0",))
    stub.fail("nvmlInitWithFlags", code)
    pages = [page.read({}), page.read({})]
    stub.heal()
    pages.append(page.read({}))
    clock.now_s += RETRY_S

    assert pages == [{"penstock_nvml_up": ["penstock_nvml_up 0"]}] * 3
    assert started(stub) == 1
    assert values(page.read({}), "penstock_gpu_up") == {of(H200): "1", of(L4): "1"}


def test_without_nvml_there_are_no_lines_and_no_retries(clock: FakeClock) -> None:
    tried = []

    def start() -> Any:
        tried.append(1)
        raise ImportError("no pynvml")

    page = GpuReader(Nvml(start), clock)
    pages = [page.read({})]
    clock.now_s += 10 * RETRY_S

    assert [*pages, page.read({})] == [{}, {}]
    assert len(tried) == 1
