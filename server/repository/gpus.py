"""Gpus: the GPUs that models may be placed on, and the default devices. Made by mirrors.py.

The driver is queried when first needed, with a time limit. Nothing here imports a runtime.
"""

from __future__ import annotations

import importlib.util
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.backends.cuda import Runtime, find_runtime, unavailable_reason

from .fields.identity import BACKEND, TENSORFLOW

logger = logging.getLogger("penstock.repository")

DRIVER_TIMEOUT_S = 20.0
"""Time limit for the driver. Initialization takes about a second per GPU if nothing keeps the driver loaded."""
_CPU = ("cpu",)
_PROVIDER = "libonnxruntime_providers_cuda.so"
_DEVICE_NODES = (("/proc/driver/nvidia/gpus", "*"), ("/dev", "nvidia[0-9]*"), ("/dev", "dxg"))
"""Where the kernel lists its NVIDIA GPUs; /dev/dxg is that of Linux on Windows."""


def has_cuda_runtime() -> bool:
    """Return whether the installed ONNX Runtime supports CUDA, without importing it, which is slow."""
    try:
        spec = importlib.util.find_spec("onnxruntime")
    except (ImportError, ValueError):
        return False
    folders = (spec.submodule_search_locations or ()) if spec is not None else ()
    return any(Path(folder, "capi", _PROVIDER).exists() for folder in folders)


def kernel_lists_gpu() -> bool:
    """Return whether the kernel lists an NVIDIA GPU. Does not query the driver."""
    return any(next(Path(folder).glob(name), None) is not None for folder, name in _DEVICE_NODES)


@dataclass(frozen=True, slots=True)
class GpuSources:
    """The sources that Gpus queries. If `find_runtime` returns None, `why_none` returns the reason."""

    find_runtime: Callable[[], Runtime | None] = find_runtime
    why_none: Callable[[], str] = unavailable_reason
    has_cuda_runtime: Callable[[], bool] = has_cuda_runtime
    kernel_lists_gpu: Callable[[], bool] = kernel_lists_gpu


@dataclass(frozen=True, slots=True)
class UsableGpus:
    """The numbers of the usable GPUs, or None if unknown, and why there are no more."""

    numbers: tuple[int, ...] | None
    reason: str = ""


class Gpus:
    """The GPUs of this process, as CUDA numbers them.

    `default`: the devices of a model that names none; if empty, it depends on the GPUs present. `min_capability`: the
    lowest compute capability that is used.
    Threads: any. Blocks once, for at most `timeout_s`.
    """

    def __init__(
        self, default: tuple[str, ...] = (), min_capability: float = 0.0, sources: GpuSources | None = None,
        timeout_s: float = DRIVER_TIMEOUT_S,
    ) -> None:  # fmt: skip
        self.min_capability = min_capability
        self._default = default
        self._sources = sources or GpuSources()
        self._timeout_s = timeout_s
        self._usable: UsableGpus | None = None
        self._defaults: dict[str, tuple[str, ...]] = {}
        self._lock = threading.RLock()

    @classmethod
    def from_numbers(cls, numbers: tuple[int, ...] | None) -> Gpus:
        """Create it from numbers that are already known, or None."""
        gpus = cls(sources=GpuSources(lambda: None, str, lambda: True, lambda: False))
        gpus._usable = UsableGpus(numbers)
        return gpus

    @property
    def is_configured(self) -> bool:
        """Whether the devices of a model that names none were configured."""
        return bool(self._default)

    @property
    def numbers(self) -> tuple[int, ...] | None:
        """The usable GPUs. None if unknown: the runtime decides then."""
        return self._usable_gpus().numbers

    @property
    def reason(self) -> str:
        """Why there are no GPUs, or no more; "" if there is no reason to report."""
        return self._usable_gpus().reason

    def default(self, backend: str) -> tuple[str, ...]:
        """Return the devices of a model that names none: every GPU that its runtime can use, or else the CPU.

        For TensorFlow it is the CPU, since finding out would require starting it: its models must request a GPU.
        """
        if self._default:
            return self._default
        with self._lock:
            if backend not in self._defaults:
                self._defaults[backend] = self._choose_default(backend)
            return self._defaults[backend]

    def _choose_default(self, backend: str) -> tuple[str, ...]:
        if backend == TENSORFLOW:
            return _CPU
        if backend == BACKEND and not self._sources.has_cuda_runtime():
            if self._sources.kernel_lists_gpu():
                logger.warning(
                    "there is a GPU, but the installed onnxruntime supports CPUs only: ONNX models run on the CPU. "
                    "To use the GPU: pip install 'penstock[gpu]'; to keep the CPU without this warning: "
                    "--default-device cpu"
                )
            return _CPU
        if not self.numbers and self.reason and backend == BACKEND:
            text = "the installed onnxruntime supports GPUs, but none can be used: %s. "
            text += "Models that do not name a GPU run on the CPU"
            logger.warning(text, self.reason)
        return tuple(f"cuda:{number}" for number in self.numbers or ()) or _CPU

    def _usable_gpus(self) -> UsableGpus:
        with self._lock:
            if self._usable is None:
                self._usable = self._query_with_timeout()
            return self._usable

    def _query_with_timeout(self) -> UsableGpus:
        """Query the driver on a thread, which may hang in it for as long as the process lives."""
        results: list[UsableGpus] = []
        thread = threading.Thread(target=lambda: results.append(self._query_driver()), name="gpus", daemon=True)
        thread.start()
        thread.join(self._timeout_s)
        found = next(iter(results), None)
        if found is None:
            reason = f"the NVIDIA driver has not responded for {self._timeout_s:g} s"
            logger.error("%s: no GPU is used until the server is restarted", reason)
            return UsableGpus((), reason)
        if found.numbers and found.reason:
            logger.warning("%s", found.reason)
        return found

    def _query_driver(self) -> UsableGpus:
        try:
            runtime = self._sources.find_runtime()
            if runtime is None:
                return UsableGpus(None if self._sources.kernel_lists_gpu() else (), self._sources.why_none())
            count = runtime.device_count()
        except Exception as error:  # noqa: BLE001 - whatever is wrong there, models that need no GPU are served
            return UsableGpus((), _error_text(error))
        unusable: dict[int, str] = {}
        for number in range(count):
            try:
                capability = runtime.capability(number)
            except Exception as error:  # noqa: BLE001 - nor does one that is broken take the others along
                unusable[number] = f"GPU {number} does not respond: {_error_text(error)}"
                continue
            if _version_key(capability) < _version_key(self.min_capability):
                text = f"GPU {number} has compute capability {capability}, below the minimum of {self.min_capability:g}"
                unusable[number] = text
        usable = tuple(number for number in range(count) if number not in unusable)
        return UsableGpus(usable, "; ".join(unusable.values()) or ("" if usable else "CUDA found no GPU"))


def _error_text(error: Exception) -> str:
    return str(error) or type(error).__name__


def _version_key(capability: float | str) -> tuple[int, ...]:
    """Make "10.0" greater than "9.0". Numbers such as 12.1 are accepted too."""
    return tuple(int(part) for part in str(capability).split("."))
