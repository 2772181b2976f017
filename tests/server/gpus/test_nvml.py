"""Reading the driver through the real pynvml, with a stub of its library."""

from __future__ import annotations

import os
from collections.abc import Callable

import pynvml
import pytest

from penstock.server.gpus.nvml import Gpu, Nvml, is_absent
from tests.server.gpus.stub import (
    DRIVER_NOT_LOADED,
    FUNCTION_NOT_FOUND,
    H200,
    L4,
    LOST,
    MISMATCH,
    NOT_SUPPORTED,
    SLICES,
    UNKNOWN,
    Stub,
)


def test_all_supported_facts_of_a_gpu_are_read(stub: Stub) -> None:
    assert Nvml().read()[0] == Gpu(
        H200,
        name="NVIDIA H200",
        bus_id="00000000:65:00.0",
        utilization=0.37,
        memory_activity=0.12,
        memory_total_bytes=150_000_000_000,
        memory_used_bytes=84_500_000_000,
        power_mw=123_456,
        power_limit_mw=700_000,
        energy_mj=5_000_000,
        temperature_c=41,
        clocks_mhz={"sm": 1980, "memory": 3201},
        clock_limits_mhz={"sm": 1980, "memory": 3201},
        reasons=0x44,
        processes=((os.getpid(), 1000), (1, 99)),
    )


def test_facts_that_a_gpu_does_not_support_are_left_out(stub: Stub) -> None:
    assert Nvml().read()[1] == Gpu(
        L4, name="NVIDIA L4", bus_id="00000000:17:00.0", memory_total_bytes=24_000_000_000, memory_used_bytes=0
    )


OLD: dict[str, Callable[[Gpu], object]] = {
    "nvmlDeviceGetTemperatureV": lambda gpu: gpu.temperature_c,
    "nvmlDeviceGetCurrentClocksEventReasons": lambda gpu: gpu.reasons,
}


@pytest.mark.parametrize("call", OLD)
@pytest.mark.parametrize("code", [NOT_SUPPORTED, FUNCTION_NOT_FOUND])
def test_an_old_nvml_call_is_made_when_the_new_call_is_unsupported(call: str, code: int, stub: Stub) -> None:
    before = OLD[call](Nvml().read()[0])
    stub.fail(call, code)

    assert OLD[call](Nvml().read()[0]) == before is not None


def test_old_nvml_calls_are_not_made_when_new_calls_are_supported(stub: Stub) -> None:
    stub.remove(L4)
    Nvml().read()

    calls = stub.calls()
    old = ("nvmlDeviceGetTemperature", "nvmlDeviceGetCurrentClocksThrottleReasons", "nvmlDeviceGetMemoryInfo")
    assert [calls[call] for call in old] == [0, 0, 0]


def test_an_old_driver_counts_its_reserved_memory_as_used(stub: Stub) -> None:
    stub.fail("nvmlDeviceGetMemoryInfo_v2", FUNCTION_NOT_FOUND)

    assert Nvml().read()[0].memory_used_bytes == 85_000_000_000


def test_the_memory_of_mig_devices_is_read(stub: Stub) -> None:
    stub.slice()
    (gpu, other) = Nvml().read()

    assert (gpu.utilization, other.mig) == (None, None)
    assert gpu.mig == tuple(
        Gpu(uuid, name="NVIDIA H200 MIG 1g.18gb", memory_total_bytes=total, memory_used_bytes=used)
        for uuid, total, used in zip(SLICES, (18_000_000_000, 28_000_000_000), (1000, 2000), strict=True)
    )


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("every", LOST),
        ("nvmlDeviceGetHandleByIndex_v2", UNKNOWN),
        ("nvmlDeviceGetUUID", LOST),
        ("nvmlDeviceGetPowerUsage", LOST),
    ],
)
def test_a_lost_gpu_does_not_affect_other_gpus(call: str, code: int, stub: Stub) -> None:
    nvml = Nvml()
    nvml.read()
    stub.fail(call, code, H200)

    assert [(gpu.uuid, gpu.present) for gpu in nvml.read()] == [(L4, True), (H200, False)]


def test_a_failed_nvml_call_does_not_affect_other_facts(stub: Stub) -> None:
    stub.fail("nvmlDeviceGetPowerUsage", UNKNOWN, H200)
    gpu = Nvml().read()[0]

    assert (gpu.power_mw, gpu.power_limit_mw) == (None, 700_000)


def test_a_lost_gpu_is_still_listed_and_returns_when_it_responds(stub: Stub) -> None:
    nvml = Nvml()
    nvml.read()
    stub.fail("every", LOST, H200)
    lost = nvml.read()
    stub.heal()

    assert lost[1:] == (Gpu(H200, present=False),)
    assert [gpu.uuid for gpu in nvml.read() if gpu.present] == [H200, L4]


def test_a_removed_gpu_is_listed_as_lost(stub: Stub) -> None:
    nvml = Nvml()
    nvml.read()
    stub.remove(L4)

    assert nvml.read()[1:] == (Gpu(L4, present=False),)


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("nvmlInitWithFlags", MISMATCH),
        ("nvmlInitWithFlags", DRIVER_NOT_LOADED),
        ("nvmlDeviceGetCount_v2", UNKNOWN),
        ("nvmlDeviceGetPowerUsage", DRIVER_NOT_LOADED),
    ],
)
def test_nvml_is_restarted_by_the_next_read_after_a_failure(call: str, code: int, stub: Stub) -> None:
    nvml = Nvml()
    stub.fail(call, code)
    with pytest.raises(pynvml.NVMLError) as raised:
        nvml.read()
    stub.heal()

    assert not is_absent(raised.value)
    assert not nvml.started
    assert len(nvml.read()) == 2


def test_nvml_is_shut_down_as_often_as_it_was_started(stub: Stub) -> None:
    nvml = Nvml()
    nvml.read()
    nvml.close()
    nvml.close()

    assert (stub.calls()["nvmlInitWithFlags"], stub.calls()["nvmlShutdown"]) == (1, 1)
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        pynvml.nvmlDeviceGetCount()


def test_a_machine_without_the_library_has_no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "CDLL", missing)
    with pytest.raises(pynvml.NVMLError) as raised:
        Nvml().read()

    assert is_absent(raised.value)
    assert is_absent(ImportError("no pynvml"))


def test_the_driver_version_is_read(stub: Stub) -> None:
    nvml = Nvml()
    nvml.read()

    assert nvml.driver() == "580.95.05"
