"""Facts: what was read about a machine, before it is judged. None and "" stand for what could not be read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

LIBRARY_PROBES = ("driver", "nvml", "runtime")
"""Readings that load libraries that may hang or crash."""
AT_LOAD, CUDNN, LATER, TENSORRT = "at load", "cuDNN", "later", "TensorRT"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A limit of `ulimit`; None is unlimited."""

    soft: int | None
    hard: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine and the part of it this process may use. `cgroup` is its version, 0 if there is none.

    Units: CPUs, bytes. `quota_cpus` and `memory_limit_bytes` are the tightest of its cgroups, None if there are none.
    `slow_python`: it was compiled by hand, or by pyenv, without the options that make CPython's interpreter fast.
    """

    python: str = ""
    slow_python: bool = False
    kernel: str = ""
    cpus: int | None = None
    affinity_cpus: int | None = None
    quota_cpus: float | None = None
    usable_cpus: int | None = None
    cgroup: int = 0
    memory_bytes: int | None = None
    memory_limit_bytes: int | None = None
    free_bytes: int | None = None
    shm_bytes: int | None = None
    shm_free_bytes: int | None = None
    limits: Mapping[str, Limit] = field(default_factory=dict)
    somaxconn: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """A shared library by the name under which it is loaded. `found_by` is "loader", "pip" or "" if not found.

    `needed_when`: AT_LOAD, the CUDA provider does not load without it; CUDNN and LATER, it is opened when first needed,
    and Penstock verifies cuDNN before it loads a model; TENSORRT, the TensorRT provider does not load without it.
    """

    name: str
    path: str = ""
    found_by: str = ""
    needed_when: str = AT_LOAD


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxRuntime:
    """ONNX Runtime as imported. `error`: why it cannot be imported.

    `provider_error` is the loader's message about the CUDA provider's library, "" if it loads, None if there is none.
    """

    version: str = ""
    path: str = ""
    providers: tuple[str, ...] = ()
    provider_error: str | None = None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaDevice:
    """A GPU as numbered by CUDA's driver. Units: bytes."""

    name: str = ""
    capability: tuple[int, int] | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """CUDA's driver library. `error`: why it cannot be loaded or started. `cuda` is the newest CUDA it runs."""

    cuda: tuple[int, int] | None = None
    devices: tuple[CudaDevice, ...] = ()
    error: str = ""
    loaded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlGpu:
    """A GPU as reported by NVML. `mig`: its number of MIG devices, None if it is not in MIG mode. Units: bytes."""

    name: str = ""
    memory_bytes: int | None = None
    used_bytes: int | None = None
    mig: int | None = None
    present: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlFacts:
    """What NVML reports. `version` is the driver's."""

    version: str = ""
    gpus: tuple[NvmlGpu, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedPort:
    """A port that `serve` with the same arguments would listen on; `bind_error`: why it could not.

    `shared`: other processes listen on it and share it, as these arguments do.
    """

    name: str
    address: str
    port: int
    bind_error: str = ""
    shared: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedModels:
    """The result of `penstock check` for the PATHs. `devices`: those requested, and by which models.

    `mistakes` and `warnings` are lines of text.
    """

    versions: int = 0
    mistakes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    devices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All facts. `failures`: which readings failed, by name, and why. `packages`: versions by distribution.

    `device_files`: /dev/nvidia*. `cuda_major` is the CUDA version that the installed ONNX Runtime was built for, 0 if
    none. None: not read, or not requested (`models`).
    """

    machine: Machine = field(default_factory=Machine)
    packages: Mapping[str, str] = field(default_factory=dict)
    libraries: tuple[Library, ...] = ()
    cuda_major: int = 0
    device_files: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    runtime: OnnxRuntime | None = None
    driver: Driver | None = None
    nvml: NvmlFacts | None = None
    ports: tuple[CheckedPort, ...] = ()
    models: CheckedModels | None = None
    failures: Mapping[str, str] = field(default_factory=dict)
