from __future__ import annotations

import ctypes
import io
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.backends import loading
from penstock.backends.errors import Code, InferError
from penstock.server.doctor import child
from penstock.server.doctor.facts import CudaDevice, Driver
from penstock.server.doctor.reading import driver_of, models_of, nvml_of
from penstock.server.repository import mirrors
from penstock.server.repository.gpus import Gpus
from penstock.server.settings import Settings
from tests.backends.onnx_models import contract_model


class Cuda:
    """The CUDA driver of a machine with one H200. The call named `failing` returns `status`."""

    def __init__(self, failing: str = "", status: int = 0) -> None:
        self._failing, self._status = failing, status

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name == "cuGetErrorString":
            return self._error
        if name == self._failing:
            return lambda *_: self._status
        return lambda *arguments: self._answered(name, *arguments)

    @staticmethod
    def _error(_: int, text: Any) -> int:
        text._obj.value = b"no CUDA-capable device is detected"
        return 0

    @staticmethod
    def _answered(name: str, *arguments: Any) -> int:
        values = {"cuDriverGetVersion": 13010, "cuDeviceGetCount": 1, "cuDeviceTotalMem_v2": 143 << 30}
        if name in values:
            arguments[0]._obj.value = values[name]
        elif name == "cuDeviceGetName":
            arguments[0].value = b"NVIDIA H200"
        elif name == "cuDeviceGetAttribute":
            arguments[0]._obj.value = {75: 9, 76: 0}[arguments[1]]
        return 0


def test_the_driver_reports_its_version_and_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Cuda())

    assert driver_of(child.driver()) == Driver(
        cuda=(13, 1), loaded=True,
        devices=(CudaDevice(name="NVIDIA H200", capability=(9, 0), memory_bytes=143 << 30),),
    )  # fmt: skip


def test_a_driver_that_does_not_start_reports_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Cuda("cuInit", 100))

    found = driver_of(child.driver())

    assert (found.loaded, found.cuda) == (True, (13, 1))
    assert found.error == "cuInit: error 100, no CUDA-capable device is detected"


def test_a_missing_driver_is_reported_with_the_error_of_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "DRIVER", "libcuda-of-nobody.so.1")

    assert "libcuda-of-nobody.so.1" in driver_of(child.driver()).error


def test_nvml_reports_its_gpus_or_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.server.gpus import nvml

    gpu = SimpleNamespace(name=None, uuid="GPU-1", memory_total_bytes=8, memory_used_bytes=4, mig=(1, 2), present=True)
    monkeypatch.setattr(nvml.Nvml, "read", lambda _: (gpu,))
    monkeypatch.setattr(nvml.Nvml, "driver", lambda _: "580.95")
    found = nvml_of(child.nvml())
    monkeypatch.setattr(nvml.Nvml, "read", lambda _: 1 / 0)

    assert (found.version, found.gpus[0].name, found.gpus[0].mig) == ("580.95", "GPU-1", 2)
    assert nvml_of(child.nvml()).error == "ZeroDivisionError: division by zero"


def test_unknown_and_missing_fields_of_an_answer_are_ignored() -> None:
    assert models_of({"versions": 2, "devices": {"cpu": ["a"]}, "new": 1}).devices == {"cpu": ("a",)}
    assert driver_of({}) == Driver()


def models(monkeypatch: pytest.MonkeyPatch, *paths: str) -> Any:
    """Have the child examine models, as the doctor does."""
    settings = Settings(model_repository=paths)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(pickle.dumps(settings))))
    return models_of(child.models())


def test_a_model_is_reported_on_the_device_of_its_fallback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_gpu(path: Path, device: str, options: Any) -> Any:
        if device != "cpu":
            raise InferError(Code.UNSUPPORTED, "there is no cuDNN")
        return onnx(path, device, options)

    onnx = loading.LOADERS["onnxruntime"]
    monkeypatch.setattr(loading, "LOADERS", {"onnxruntime": no_gpu})
    monkeypatch.setattr(mirrors, "Gpus", lambda *_: Gpus.from_numbers((0,)))
    contract_model("rows", tmp_path / "m.onnx")

    found = models(monkeypatch, str(tmp_path / "m.onnx"))

    assert found.devices == {"cpu": ("m",)}
    assert found.mistakes == ()
    assert "is served on the CPU: there is no cuDNN" in found.warnings[0]


def test_an_unreachable_repository_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    found = models(monkeypatch, "nowhere://bucket")

    assert [line.partition(":")[0] for line in found.mistakes] == ["nowhere"]
