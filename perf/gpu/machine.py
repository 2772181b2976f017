"""The machine: its GPU and driver, what ONNX Runtime can use of it, and TensorRT. This part also writes the models."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import time
from collections.abc import Iterator
from itertools import chain

import numpy as np

from penstock.backends.cuda import CudaError, find_runtime, unavailable_reason
from penstock.perf.profiling import environment

from .context import CheckContext
from .models import FP32
from .offline import session_of
from .rows import Row, failed

_PACKAGES = ("onnxruntime-gpu", "onnxruntime", "torch", "onnx", "nvidia-cudnn-cu13", "nvidia-cublas", "tritonclient")
_TENSORRT = ("libnvinfer.so.10", "libnvinfer.so")
_GIB = 1 << 30


def report(context: CheckContext) -> Iterator[Row]:
    """Yield what the machine has. If a GPU was requested, anything that does not work is a Row that fails.

    Then no models are written, because no other part will run.
    """
    works = True
    for row in chain(_device(context), _runtime(context)):
        works = works and row.held is not False
        yield row
    yield _tensorrt()
    if not works:
        return
    began_s = time.monotonic()
    nbytes = sum(context.file(context.variant(*each)).stat().st_size for each in context.measured())
    note = f"{nbytes / _GIB:.2f} GiB in {time.monotonic() - began_s:.1f} s"
    yield Row("machine", "models written", len(context.measured()), note=note)


def describe_machine() -> dict[str, str]:
    """Yield what a reader of the table must know: the machine, and the versions of the software involved."""
    machine = environment.machine()
    gpus = ", ".join(f"{gpu['name']} ({(gpu['memory_bytes'] or 0) / _GIB:.0f} GiB)" for gpu in machine.get("gpus", ()))
    driver = f", driver {machine['gpu_driver']}" if machine.get("gpu_driver") else ""
    versions = [f"{name} {each}" for name, each in environment.versions({}).items()]
    for name in _PACKAGES:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "GPU": f"{gpus or 'none'}{driver}",
        "processor": f"{machine.get('cpu', '')}, {machine.get('usable_cores', '')} cores",
        "versions": ", ".join(versions),
    }


def _device(context: CheckContext) -> Iterator[Row]:
    runtime = find_runtime()
    if runtime is None:
        yield Row("machine", "CUDA runtime", "none", held=False if context.on_gpu else None, note=unavailable_reason())
        return
    try:
        count = runtime.device_count()
        yield Row("machine", "GPUs", count, held=count > 0 if context.on_gpu else None)
        if count:
            free, total = runtime.memory_info(0)
            note = f"{runtime.pci_bus_id(0)}, {free / _GIB:.1f} of {total / _GIB:.1f} GiB free"
            yield Row("machine", "GPU 0", runtime.device_name(0), note=note)
    except CudaError as error:
        yield failed("machine", "CUDA runtime", error)


def _runtime(context: CheckContext) -> Iterator[Row]:
    import onnxruntime

    available_providers = onnxruntime.get_available_providers()
    yield Row("machine", "ONNX Runtime", onnxruntime.__version__, note=", ".join(available_providers))
    if not context.on_gpu:
        return
    variant = context.variant("mlp", FP32)
    try:
        (output,) = session_of(context, variant).runtime.run(None, variant.inputs(1))
        yield Row("machine", "its CUDA provider runs a model", "yes", held=bool(np.isfinite(output).all()))
    except Exception as error:  # noqa: BLE001 - it is what is asked
        yield failed("machine", "its CUDA provider runs a model", error)


def _tensorrt() -> Row:
    for name in _TENSORRT:
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return Row("machine", "TensorRT", "there", note=name)
    module = importlib.util.find_spec("tensorrt") is not None
    note = "its Python package is there, its libraries are not found" if module else "so its provider is not checked"
    return Row("machine", "TensorRT", "not there", note=note)
