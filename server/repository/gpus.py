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

PATIENCE_S = 20.0
"""Time limit for the driver. Initialization takes about a second per GPU if nothing keeps the driver loaded."""
_CPU = ("cpu",)
_PROVIDER = "libonnxruntime_providers_cuda.so"
_NODES = (("/proc/driver/nvidia/gpus", "*"), ("/dev", "nvidia[0-9]*"), ("/dev", "dxg"))
"""Where the kernel lists its NVIDIA GPUs; /dev/dxg is that of Linux on Windows."""


def installed_for_cuda() -> bool:
    """Return whether the installed ONNX Runtime supports CUDA, without importing it, which is slow."""
    try:
        found = importlib.util.find_spec("onnxruntime")
    except (ImportError, ValueError):
        return False
    folders = (found.submodule_search_locations or ()) if found is not None else ()
    return any(Path(folder, "capi", _PROVIDER).exists() for folder in folders)


def shown_by_kernel() -> bool:
    """Return whether the kernel lists an NVIDIA GPU. Does not query the driver."""
    return any(next(Path(folder).glob(name), None) is not None for folder, name in _NODES)


@dataclass(frozen=True, slots=True)
class GpuMachine:
    """The sources that Gpus queries. If `runtime` returns None, `why_none` returns the reason."""

    runtime: Callable[[], Runtime | None] = find_runtime
    why_none: Callable[[], str] = unavailable_reason
    with_cuda: Callable[[], bool] = installed_for_cuda
    shown: Callable[[], bool] = shown_by_kernel


@dataclass(frozen=True, slots=True)
class UsableGpus:
    """The numbers of the usable GPUs, or None if unknown, and why there are no more."""

    numbers: tuple[int, ...] | None
    why: str = ""


class Gpus:
    """The GPUs of this process, as CUDA numbers them.

    `default`: the devices of a model that names none; if empty, it depends on the GPUs present. `least`: the lowest
    compute capability that is used.
    Threads: any. Blocks once, for at most `patience_s`.
    """

    def __init__(
        self, default: tuple[str, ...] = (), least: float = 0.0, machine: GpuMachine | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:  # fmt: skip
        self.least = least
        self._default = default
        self._machine = machine or GpuMachine()
        self._patience_s = patience_s
        self._found: UsableGpus | None = None
        self._defaults: dict[str, tuple[str, ...]] = {}
        self._lock = threading.RLock()

    @classmethod
    def told(cls, numbers: tuple[int, ...] | None) -> Gpus:
        """Create it from numbers that are already known, or None."""
        gpus = cls(machine=GpuMachine(lambda: None, str, lambda: True, lambda: False))
        gpus._found = UsableGpus(numbers)
        return gpus

    @property
    def are_said(self) -> bool:
        """Whether the devices of a model that names none were configured."""
        return bool(self._default)

    @property
    def numbers(self) -> tuple[int, ...] | None:
        """The usable GPUs. None if unknown: the runtime decides then."""
        return self._look().numbers

    @property
    def why(self) -> str:
        """Why there are no GPUs, or no more; "" if there is no reason to report."""
        return self._look().why

    def default(self, backend: str) -> tuple[str, ...]:
        """Return the devices of a model that names none: every GPU that its runtime can use, or else the CPU.

        For TensorFlow it is the CPU, since finding out would require starting it: its models must request a GPU.
        """
        if self._default:
            return self._default
        with self._lock:
            if backend not in self._defaults:
                self._defaults[backend] = self._found_default(backend)
            return self._defaults[backend]

    def _found_default(self, backend: str) -> tuple[str, ...]:
        if backend == TENSORFLOW:
            return _CPU
        if backend == BACKEND and not self._machine.with_cuda():
            if self._machine.shown():
                logger.warning(
                    "there is a GPU, but the installed onnxruntime supports CPUs only: ONNX models run on the CPU. "
                    "To use the GPU: pip install 'penstock[gpu]'; to keep the CPU without this warning: "
                    "--default-device cpu"
                )
            return _CPU
        if not self.numbers and self.why and backend == BACKEND:
            text = "the installed onnxruntime supports GPUs, but none can be used: %s. "
            text += "Models that do not name a GPU run on the CPU"
            logger.warning(text, self.why)
        return tuple(f"cuda:{number}" for number in self.numbers or ()) or _CPU

    def _look(self) -> UsableGpus:
        with self._lock:
            if self._found is None:
                self._found = self._asked()
            return self._found

    def _asked(self) -> UsableGpus:
        """Query the driver on a thread, which may hang in it for as long as the process lives."""
        answers: list[UsableGpus] = []
        asking = threading.Thread(target=lambda: answers.append(self._ask()), name="gpus", daemon=True)
        asking.start()
        asking.join(self._patience_s)
        found = next(iter(answers), None)
        if found is None:
            why = f"the NVIDIA driver has not responded for {self._patience_s:g} s"
            logger.error("%s: no GPU is used until the server is restarted", why)
            return UsableGpus((), why)
        if found.numbers and found.why:
            logger.warning("%s", found.why)
        return found

    def _ask(self) -> UsableGpus:
        try:
            runtime = self._machine.runtime()
            if runtime is None:
                return UsableGpus(None if self._machine.shown() else (), self._machine.why_none())
            count = runtime.device_count()
        except Exception as error:  # noqa: BLE001 - whatever is wrong there, models that need no GPU are served
            return UsableGpus((), _text(error))
        unfit: dict[int, str] = {}
        for number in range(count):
            try:
                capability = runtime.capability(number)
            except Exception as error:  # noqa: BLE001 - nor does one that is broken take the others along
                unfit[number] = f"GPU {number} does not respond: {_text(error)}"
                continue
            if _version(capability) < _version(self.least):
                text = f"GPU {number} has compute capability {capability}, below the minimum of {self.least:g}"
                unfit[number] = text
        found = tuple(number for number in range(count) if number not in unfit)
        return UsableGpus(found, "; ".join(unfit.values()) or ("" if found else "CUDA found no GPU"))


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__


def _version(capability: float | str) -> tuple[int, ...]:
    """Make "10.0" greater than "9.0". Numbers such as 12.1 are accepted too."""
    return tuple(int(part) for part in str(capability).split("."))
