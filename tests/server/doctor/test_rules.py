from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.server.doctor.command import judge
from penstock.server.doctor.facts import (
    CUDNN,
    LATER,
    CheckedModels,
    CheckedPort,
    CudaDevice,
    Driver,
    Facts,
    Library,
    Limit,
    Machine,
    NvmlFacts,
    NvmlGpu,
    OnnxRuntime,
)
from penstock.server.doctor.report import ERROR, NOTE, OK, WARNING

GIB = 1 << 30
H200 = CudaDevice(name="NVIDIA H200", capability=(9, 0), memory_bytes=140 * GIB)
RUNTIME = OnnxRuntime(
    version="1.31.1", path="/site/onnxruntime", providers=("CUDAExecutionProvider",), provider_error=""
)
ROOM: dict[str, Any] = {"shm_bytes": GIB, "shm_free_bytes": GIB}
GPU: dict[str, Any] = {
    "packages": {"penstock": "0.1.0", "onnxruntime-gpu": "1.31.1"},
    "cuda_major": 13,
    "runtime": RUNTIME,
    "device_files": ("/dev/nvidia0",),
    "driver": Driver(cuda=(13, 0), devices=(H200,), loaded=True),
    "nvml": NvmlFacts(version="580.95", gpus=(NvmlGpu(name="NVIDIA H200", memory_bytes=140 * GIB, used_bytes=0),)),
    "libraries": (Library(name="libcuda.so.1", path="/lib/libcuda.so.1", found_by="loader"),),
    "machine": Machine(**ROOM, somaxconn=4096),
}
CPU: dict[str, Any] = {
    **GPU, "packages": {"onnxruntime": "1.32.0"}, "cuda_major": 0, "nvml": NvmlFacts(error="none"), "libraries": (),
    "driver": Driver(error="libcuda.so.1: cannot open"), "device_files": (),
    "runtime": OnnxRuntime(version="1.32.0", providers=("CPUExecutionProvider",)),
}  # fmt: skip
BOTH = (
    "onnxruntime 1.32.0 and onnxruntime-gpu 1.31.1 are both installed: they share a folder and "
    "overwrite each other's files"
)
WITHOUT_CUDNN = "without it only ONNX models with enable_cudnn = false load on a GPU"
CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "a wheel for GPUs without a driver": (
        GPU | {"driver": Driver(error="libcuda.so.1: cannot open"), "device_files": ()}, ERROR,
        "driver: none: libcuda.so.1: cannot open; there is no /dev/nvidia*",
    ),
    "a driver without a GPU": (
        GPU | {"driver": Driver(loaded=True, cuda=(13, 0), error="cuInit: error 100")}, ERROR,
        "driver: 580.95 does not start: cuInit: error 100; /dev/nvidia0 is there",
    ),
    "a driver older than the wheel's CUDA": (
        GPU | {"driver": Driver(loaded=True, cuda=(12, 4))}, ERROR,
        "driver: 580.95 runs CUDA up to 12.4, and ONNX Runtime was built for CUDA 13",
    ),
    "a GPU older than the wheel's CUDA": (
        GPU | {"driver": Driver(loaded=True, cuda=(13, 0), devices=(CudaDevice(name="V100", capability=(7, 0)),))},
        ERROR, "GPUs: cuda:0 is older than CUDA 13 runs on (7.5 at least)",
    ),
    "both wheels": (
        GPU | {"packages": {"onnxruntime": "1.32.0", "onnxruntime-gpu": "1.31.1"}}, ERROR,
        "ONNX Runtime: " + BOTH,
    ),
    "libraries that are not there": (
        GPU | {"libraries": (Library(name="libcublas.so.13"), Library(name="libcudnn.so.9", needed_when=CUDNN))}, ERROR,
        "CUDA: missing: libcublas.so.13; without them the CUDA provider does not load",
    ),
    "no cuDNN": (
        GPU | {"libraries": (Library(name="libcudnn.so.9", needed_when=CUDNN),)}, ERROR,
        f"CUDA: missing: libcudnn.so.9; {WITHOUT_CUDNN}",
    ),
    "no cuFFT": (
        GPU | {"libraries": (Library(name="libcufft.so.12", needed_when=LATER),)}, WARNING,
        "CUDA: missing: libcufft.so.12; without it models that need it (Fourier transforms) fail",
    ),
    "a provider that does not load": (
        GPU | {"runtime": OnnxRuntime(version="1.31.1", provider_error="libcublas.so.13: cannot open")}, ERROR,
        "CUDA provider: does not load: libcublas.so.13: cannot open",
    ),
    "MIG without devices": (
        GPU | {"nvml": NvmlFacts(version="580.95", gpus=(NvmlGpu(name="H200", mig=0),))}, ERROR,
        "GPUs: H200 is in MIG mode and has no MIG device",
    ),
    "no runtime at all": (
        CPU | {"packages": {}, "runtime": None}, ERROR,
        "software: neither ONNX Runtime nor TensorFlow is installed: no model loads",
    ),
    "a model that asks for more than there is": (
        GPU | {"models": CheckedModels(versions=1, devices={"cuda:1": ("cnn",), "cpu": ("iris",)})}, ERROR,
        "models: cnn: requests cuda:1, but the last one here is cuda:0",
    ),
    "a model that asks for a GPU of a runtime without": (
        CPU | {"models": CheckedModels(devices={"cuda:0": ("cnn",)})}, ERROR,
        "ONNX Runtime: has no CUDA provider: nothing runs on a GPU",
    ),
    "a Python that pyenv has compiled": (
        CPU | {"machine": Machine(python="3.11.7", slow_python=True, **ROOM)}, NOTE,
        "software: this Python was compiled without optimizations: requests take at least 10% more CPU",
    ),
    "a mistake in a model": (
        CPU | {"models": CheckedModels(mistakes=("m/config.pbtxt:3: x",))}, ERROR, "models: m/config.pbtxt:3: x",
    ),
    "half a CPU": (
        CPU | {"machine": Machine(affinity_cpus=8, usable_cpus=1, quota_cpus=0.5, **ROOM)},
        WARNING, "CPUs: the quota of 0.5 CPUs stops every thread most of the time",
    ),
    "Docker's shared memory": (
        CPU | {"machine": Machine(shm_bytes=64 << 20, shm_free_bytes=64 << 20)}, WARNING,
        "/dev/shm: 64 MiB, 64 MiB free: workers and large tensors may need more",
    ),
    "few open files": (
        CPU | {"machine": Machine(limits={"open files": Limit(soft=512, hard=1024)}, **ROOM)},
        WARNING, "limits: 1024 open files, which many connections exhaust",
    ),
    "a port that is taken": (
        CPU | {"ports": (CheckedPort(name="HTTP", address="0.0.0.0", port=8000, bind_error="Address already in use"),)},
        WARNING, "ports: HTTP port 0.0.0.0:8000 cannot be used: Address already in use",
    ),
    "shared memory that others have filled": (
        CPU | {"machine": Machine(shm_bytes=GIB, shm_free_bytes=32 << 20)}, WARNING,
        "/dev/shm: 1 GiB, 32 MiB free: workers and large tensors may need more",
    ),
    "a GPU that others use": (
        GPU | {"nvml": NvmlFacts(gpus=(NvmlGpu(name="H200", memory_bytes=8 * GIB, used_bytes=5 * GIB),))}, NOTE,
        "GPUs: H200: 5 GiB of 8 GiB is in use",
    ),
    "a runtime for GPUs that no package brought": (
        GPU | {"packages": {}, "driver": Driver(error="libcuda.so.1: cannot open"), "device_files": ()}, ERROR,
        "driver: none: libcuda.so.1: cannot open; there is no /dev/nvidia*",
    ),
    "a wheel that cannot be imported": (
        CPU | {"runtime": OnnxRuntime(error="ImportError: GLIBC_2.38 not found")}, ERROR,
        "ONNX Runtime: cannot be imported: ImportError: GLIBC_2.38 not found",
    ),
    "a driver that hangs": (
        GPU | {"driver": None, "failures": {"driver": "no answer within 20 s"}}, ERROR,
        "driver: could not be examined: no answer within 20 s",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_every_problem_is_reported_with_a_remedy(case: str) -> None:
    facts, level, text = CASES[case]
    report = judge(Facts(**facts))

    found = [each for each in report.diagnoses if f"{each.part}: {each.text}" == text]
    assert [each.level for each in found] == [level], str(report)
    assert found[0].remedy
    assert report.status == (level == ERROR)


JUST_ENOUGH = Machine(
    affinity_cpus=8, usable_cpus=1, quota_cpus=1.0, shm_bytes=256 << 20, shm_free_bytes=256 << 20, somaxconn=1024,
    limits={"open files": Limit(soft=4096, hard=4096)},
)  # fmt: skip


@pytest.mark.parametrize(
    "facts", [CPU, GPU, CPU | {"machine": JUST_ENOUGH}], ids=["CPUs", "GPUs", "no more than is needed"]
)
def test_a_complete_machine_has_no_errors_or_warnings(facts: dict[str, Any]) -> None:
    report = judge(Facts(**facts))

    assert [each for each in report.diagnoses if each.level in {ERROR, WARNING}] == []


def test_a_shared_port_is_reported_as_shared() -> None:
    shared = CheckedPort(name="gRPC", address="0.0.0.0", port=8001, shared=True)
    (text,) = [each.text for each in judge(Facts(**CPU | {"ports": (shared,)})).diagnoses if each.part == "ports"]

    assert text == "gRPC port 0.0.0.0:8001 is shared with other servers"


def test_the_oldest_gpu_that_the_wheels_cuda_supports_is_accepted() -> None:
    turing = Driver(loaded=True, cuda=(13, 0), devices=(CudaDevice(name="T4", capability=(7, 5), memory_bytes=GIB),))

    assert judge(Facts(**GPU | {"driver": turing})).status == 0


@pytest.mark.parametrize(("facts", "begins"), [(CPU, "only to use a GPU: install"), (GPU, "install NVIDIA's driver")])
def test_installing_a_driver_is_optional_without_a_gpu_wheel(facts: dict[str, Any], begins: str) -> None:
    without = Facts(**facts | {"driver": Driver(error="libcuda.so.1: cannot open"), "device_files": ()})
    (remedy,) = [each.remedy for each in judge(without).diagnoses if each.part == "driver"]

    assert remedy.startswith(begins)


def test_a_provider_that_lacks_only_the_driver_refers_to_the_driver_finding() -> None:
    lacking = OnnxRuntime(version="1.31.1", provider_error="libcuda.so.1: cannot open shared object file")
    found = [each.remedy for each in judge(Facts(**GPU | {"runtime": lacking})).diagnoses]

    assert "see the finding about the driver" in found


def test_the_pip_command_names_the_version_and_the_packages_it_installs() -> None:
    missing = Library(name="libcublasLt.so.13"), Library(name="libcudnn.so.9", needed_when=CUDNN)
    remedies = [each.remedy for each in judge(Facts(**GPU | {"libraries": missing})).diagnoses if each.part == "CUDA"]

    line = "pip install 'onnxruntime-gpu[cuda,cudnn]==1.31.1', which brings"
    assert remedies == [f"{line} nvidia-cublas", f"{line} nvidia-cudnn-cu13"]


@given(st.from_type(Facts))
@settings(max_examples=30, deadline=None)
def test_any_facts_can_be_judged_and_printed(facts: Facts) -> None:
    report = judge(facts)

    assert all(each.level in {OK, NOTE, WARNING, ERROR} for each in report.diagnoses)
    assert all(each.remedy for each in report.diagnoses if each.level in {ERROR, WARNING})
    assert json.loads(report.json())["status"] == report.status
    assert str(report).splitlines()[-1].endswith(("warnings", "1 warning"))


def test_a_report_is_aligned_and_without_color_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    lines = str(judge(Facts(**CPU))).splitlines()

    starts = {line.index(word) for line in lines for word in ("  ok ", "  note ") if word in line}
    assert len(starts) == 1
    assert max(map(len, lines)) <= 100
    assert "\x1b" not in "".join(lines)
