"""The probes that load libraries that may hang or crash, each in a separate process.

    python -m penstock.server.doctor.child WORD

Each writes one JSON object, from which `reading` makes Facts.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from .packages import DRIVER

_MAJOR, _MINOR = 75, 76  # CUdevice_attribute of cuda.h
_NAME_BYTES = 256


class _CudaError(Exception):
    """The driver's error for a call."""


def driver() -> Mapping[str, Any]:
    """Load CUDA's driver, start it and count its devices. Source: CUDA driver API."""
    try:
        cuda = ctypes.CDLL(DRIVER)
    except OSError as error:
        return {"error": str(error)}
    answer: dict[str, Any] = {"loaded": True}
    try:
        version, count = ctypes.c_int(), ctypes.c_int()
        _call(cuda, "cuDriverGetVersion", ctypes.byref(version))
        answer["cuda"] = version.value // 1000, version.value % 1000 // 10
        _call(cuda, "cuInit", 0)
        _call(cuda, "cuDeviceGetCount", ctypes.byref(count))
        answer["devices"] = [_device(cuda, number) for number in range(count.value)]
    except (_CudaError, AttributeError) as error:
        answer["error"] = str(error)
    return answer


def _device(cuda: Any, number: int) -> Mapping[str, Any]:
    handle, size, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(_NAME_BYTES)
    major, minor = ctypes.c_int(), ctypes.c_int()
    _call(cuda, "cuDeviceGet", ctypes.byref(handle), number)
    _call(cuda, "cuDeviceGetName", name, _NAME_BYTES, handle)
    _call(cuda, "cuDeviceTotalMem_v2", ctypes.byref(size), handle)
    _call(cuda, "cuDeviceGetAttribute", ctypes.byref(major), _MAJOR, handle)
    _call(cuda, "cuDeviceGetAttribute", ctypes.byref(minor), _MINOR, handle)
    text = name.value.decode("utf-8", "replace")
    return {"name": text, "capability": (major.value, minor.value), "memory_bytes": size.value}


def _call(cuda: Any, name: str, *arguments: Any) -> None:
    status = getattr(cuda, name)(*arguments)
    if status:
        text = ctypes.c_char_p()
        with suppress(AttributeError):
            cuda.cuGetErrorString(status, ctypes.byref(text))
        raise _CudaError(f"{name}: error {status}{f', {text.value.decode()}' if text.value else ''}")


def nvml() -> Mapping[str, Any]:
    """Query NVML for the driver's version and its GPUs."""
    from penstock.server.gpus.nvml import Nvml

    nvml_reader = Nvml()
    try:
        gpus = nvml_reader.read()
        version = nvml_reader.driver()
    except Exception as error:  # noqa: BLE001 - an NVMLError has a subclass for each reason
        return {"error": f"{type(error).__name__}: {error}"}
    found = [
        {
            "name": gpu.name or gpu.uuid, "memory_bytes": gpu.memory_total_bytes, "used_bytes": gpu.memory_used_bytes,
            "mig": None if gpu.mig is None else len(gpu.mig), "present": gpu.present,
        }
        for gpu in gpus
    ]  # fmt: skip
    return {"version": version, "gpus": found}


def runtime() -> Mapping[str, Any]:
    """Import ONNX Runtime, and load the library of its CUDA provider, as a session with that provider would."""
    try:
        import onnxruntime
    except Exception as error:  # noqa: BLE001 - an incompatible library may raise anything
        return {"error": f"{type(error).__name__}: {error}"}
    folder = Path(onnxruntime.__file__).parent / "capi"
    answer = {
        "version": getattr(onnxruntime, "__version__", ""), "path": str(folder.parent),
        "providers": list(getattr(onnxruntime, "get_available_providers", list)()),
    }  # fmt: skip
    if (folder / "libonnxruntime_providers_cuda.so").is_file():
        with suppress(Exception):  # older versions lack it; the next line reports what does not load
            onnxruntime.preload_dlls()
        answer["provider_error"] = _load_error(folder)
    return answer


def _load_error(folder: Path) -> str:
    """Return why the CUDA provider's library does not load; "" if it does."""
    try:
        ctypes.CDLL(str(folder / "libonnxruntime_providers_shared.so"), ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(folder / "libonnxruntime_providers_cuda.so"))
    except OSError as error:
        return str(error)
    return ""


def models() -> Mapping[str, Any]:
    """Check the PATHs of the Settings on the standard input, as `penstock check` does."""
    from penstock.server.dialects import Dialect, dialect_of

    settings = pickle.loads(sys.stdin.buffer.read())  # noqa: S301 - the doctor's own
    dialect = dialect_of(settings)
    if type(dialect) is not Dialect:
        text, status = dialect.check(invariance=False)
        last = text.strip().splitlines()[-1:]
        return {"mistakes": last if status else [], "warnings": []}
    from penstock.backends.loading import LOADERS
    from penstock.server.environments.environments import Environments
    from penstock.server.isolated.loader import with_isolated
    from penstock.server.repository.check import check_entries
    from penstock.server.repository.mirrors import Mirrors, make_defaults
    from penstock.server.repository.remote import RemoteError
    from penstock.server.repository.scan import scan

    mirrors = Mirrors.from_paths(settings.model_repository)
    try:
        mirrors.open()
        mirrors.refresh_all()
        entries, findings = scan(mirrors.paths, make_defaults(settings))
        report = check_entries(
            entries, findings, with_isolated(LOADERS, Environments.from_settings(settings).interpreter)
        )
        models_by_device: dict[str, set[str]] = {}
        completed = {(spec.name, spec.version): spec for spec in report.specs}
        for spec in (completed.get((spec.name, spec.version), spec) for entry in entries for spec in entry.specs):
            for device in (device for group in spec.instances for device in group.devices):
                models_by_device.setdefault(device, set()).add(spec.name)
        return {
            "versions": len(report.specs),
            "mistakes": [mirrors.with_urls(str(finding)) for finding in report.findings if finding.is_mistake],
            "warnings": [
                mirrors.with_urls(str(replace(finding, is_mistake=True)))
                for finding in report.findings
                if not finding.is_mistake
            ],
            "devices": {device: sorted(names) for device, names in sorted(models_by_device.items())},
        }
    except RemoteError as error:
        return {"mistakes": [str(error)]}
    finally:
        mirrors.close()


PROBES: Mapping[str, Callable[[], Mapping[str, Any]]] = {
    "driver": driver, "nvml": nvml, "runtime": runtime, "models": models,
}  # fmt: skip


def main(name: str) -> None:
    """Run a probe. Anything a library prints goes to standard error."""
    output = os.dup(1)
    os.dup2(2, 1)
    answer = PROBES[name]()
    with os.fdopen(output, "w", encoding="utf-8") as file:
        json.dump(answer, file)


if __name__ == "__main__":
    main(sys.argv[1])
