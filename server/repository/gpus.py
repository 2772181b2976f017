"""Gpus: which GPUs models may be placed on, and where one is placed that does not say. Made by mirrors.py.

The driver is asked when somebody first needs to know, and only so long. Nothing here imports a runtime.
"""

from __future__ import annotations

import importlib.util
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.backends.cuda import Runtime, find_runtime, why_none

from .fields.identity import BACKEND, TENSORFLOW

logger = logging.getLogger("penstock.repository")

PATIENCE_S = 20.0
"""How long the driver may take. To begin takes a second or so for each GPU where nothing keeps it loaded."""
_CPU = ("cpu",)
_PROVIDER = "libonnxruntime_providers_cuda.so"
_NODES = (("/proc/driver/nvidia/gpus", "*"), ("/dev", "nvidia[0-9]*"), ("/dev", "dxg"))
"""Where the kernel shows its NVIDIA GPUs, and Windows those of a Linux within it."""


def installed_for_cuda() -> bool:
    """Tell whether the ONNX Runtime installed is one with CUDA, without importing it, which takes long."""
    try:
        found = importlib.util.find_spec("onnxruntime")
    except (ImportError, ValueError):
        return False
    folders = (found.submodule_search_locations or ()) if found is not None else ()
    return any(Path(folder, "capi", _PROVIDER).exists() for folder in folders)


def shown_by_kernel() -> bool:
    """Tell whether the kernel shows an NVIDIA GPU. Asks no driver."""
    return any(next(Path(folder).glob(name), None) is not None for folder, name in _NODES)


@dataclass(frozen=True, slots=True)
class GpuMachine:
    """Whom Gpus asks. `runtime` gives None where there is none, and `why_none` then says why."""

    runtime: Callable[[], Runtime | None] = find_runtime
    why_none: Callable[[], str] = why_none
    with_cuda: Callable[[], bool] = installed_for_cuda
    shown: Callable[[], bool] = shown_by_kernel


@dataclass(frozen=True, slots=True)
class UsableGpus:
    """The numbers of the GPUs that may be used, None where that cannot be told; and why there are no more."""

    numbers: tuple[int, ...] | None
    why: str = ""


class Gpus:
    """The GPUs of this process, as CUDA numbers them.

    `default`: the devices of a model that names none; none: as there are. `least`: the lowest compute capability of one
    that is used.
    Threads: any. It blocks, `patience_s` at most, and once.
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
        """Make those that somebody else has counted, or could not."""
        gpus = cls(machine=GpuMachine(lambda: None, str, lambda: True, lambda: False))
        gpus._found = UsableGpus(numbers)
        return gpus

    @property
    def are_said(self) -> bool:
        """Whether somebody has said where a model runs that names no device."""
        return bool(self._default)

    @property
    def numbers(self) -> tuple[int, ...] | None:
        """Those that may be used; None where that cannot be told, and the runtime will be the judge."""
        return self._look().numbers

    @property
    def why(self) -> str:
        """Why there are none, or no more; "" if there is nothing to say."""
        return self._look().why

    def default(self, backend: str) -> tuple[str, ...]:
        """Give the devices of a model that names none: every GPU that its runtime can use, else the CPU.

        TensorFlow would have to be started to know what it can use: its models say so where they want a GPU.
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
                    "To use the GPU: pip install penstock[gpu]; to keep the CPU without this warning: "
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
        """Ask the driver, on a thread that may hang in it for as long as the process lives."""
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
            count = runtime.count()
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
    """Make "10.0" more than "9.0". As a number, 12.1 is a version too."""
    return tuple(int(part) for part in str(capability).split("."))
