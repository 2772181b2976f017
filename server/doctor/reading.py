"""Reading: collects the Facts of a machine. Nothing here raises, and no reading waits longer than its limit."""

from __future__ import annotations

import os
import pickle
import shutil
import socket
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from . import packages, probes
from .facts import (
    LIBRARY_PROBES,
    CheckedModels,
    CheckedPort,
    CudaDevice,
    Driver,
    Facts,
    Library,
    Machine,
    NvmlFacts,
    NvmlGpu,
    OnnxRuntime,
)
from .machine import read_machine
from .probes import ProbeError, ProbeProcess

if TYPE_CHECKING:
    from penstock.server.settings import Settings

_T = TypeVar("_T")
_LIMITS_S = {"driver": 20.0, "nvml": 10.0, "runtime": 20.0, "models": 300.0, "ldconfig": 5.0}
"""Starting a driver takes seconds if nothing keeps it loaded; the limit of `models` includes loading them."""
_NAMES = ("CUDA_VISIBLE_DEVICES",)


def read_facts(settings: Settings) -> Facts:
    """Read all facts."""
    failures: dict[str, str] = {}

    def attempt(name: str, read: Callable[[], _T], default: _T) -> _T:
        try:
            return read()
        except ProbeError as error:
            failures[name] = str(error)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with a machine, the rest is reported
            failures[name] = f"{type(error).__name__}: {error}"
        return default

    processes = {name: probes.start(name, _LIMITS_S[name]) for name in LIBRARY_PROBES}
    if with_models := bool(settings.model_repository):
        processes["models"] = probes.start("models", _LIMITS_S["models"], pickle.dumps(settings))
    return Facts(
        machine=attempt("machine", read_machine, Machine()),
        packages=attempt("packages", packages.read_packages, {}),
        libraries=attempt("libraries", _read_libraries, ()),
        cuda_major=attempt("libraries", _read_cuda_major, 0),
        device_files=attempt("device files", lambda: tuple(sorted(map(str, Path("/dev").glob("nvidia*")))), ()),
        environment={name: os.environ[name] for name in _NAMES if os.environ.get(name)},
        ports=attempt("ports", lambda: read_ports(settings), ()),
        driver=attempt("driver", lambda: driver_of(probes.read_answer(processes["driver"])), None),
        nvml=attempt("nvml", lambda: nvml_of(probes.read_answer(processes["nvml"])), None),
        runtime=attempt("runtime", lambda: _from_answer(OnnxRuntime, probes.read_answer(processes["runtime"])), None),
        models=attempt("models", lambda: models_of(probes.read_answer(processes["models"])), None)
        if with_models
        else None,
        failures=failures,
    )


def driver_of(answer: Mapping[str, Any]) -> Driver:
    """Make a Driver from the child's answer."""
    return _from_answer(
        Driver, {**answer, "devices": tuple(_from_answer(CudaDevice, each) for each in answer.get("devices", ()))}
    )


def nvml_of(answer: Mapping[str, Any]) -> NvmlFacts:
    """Make NvmlFacts from the child's answer."""
    return _from_answer(
        NvmlFacts, {**answer, "gpus": tuple(_from_answer(NvmlGpu, each) for each in answer.get("gpus", ()))}
    )


def models_of(answer: Mapping[str, Any]) -> CheckedModels:
    """Make CheckedModels from the child's answer."""
    return _from_answer(
        CheckedModels, {**answer, "devices": {name: tuple(of) for name, of in answer.get("devices", {}).items()}}
    )


def read_ports(settings: Settings) -> tuple[CheckedPort, ...]:
    """Try the ports that a server with these settings would listen on."""
    ports = [
        ("HTTP", settings.allow_http, settings.http_address, settings.http_port, settings.reuse_http_port),
        ("gRPC", settings.allow_grpc, settings.grpc_address, settings.grpc_port, settings.reuse_grpc_port),
        (
            "metrics", settings.allow_metrics, settings.metrics_address or settings.http_address,
            settings.metrics_port, False,
        ),
    ]  # fmt: skip
    return tuple(
        _check_port(name, address, port, shares) for name, allowed, address, port, shares in ports if allowed and port
    )


def _check_port(name: str, address: str, port: int, shares: bool) -> CheckedPort:
    error = _bind_error(address, port)
    shared = bool(error) and shares and not _bind_error(address, port, shares=True)
    return CheckedPort(name=name, address=address, port=port, bind_error="" if shared else error, shared=shared)


def _bind_error(address: str, port: int, *, shares: bool = False) -> str:
    """Return why a port cannot be bound, "" if it can; `shares`: together with others that share it."""
    try:
        family, kind, _, _, socket_address = socket.getaddrinfo(
            address or None, port, type=socket.SOCK_STREAM, flags=1
        )[0]
        with socket.socket(family, kind) as probe_socket:
            probe_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shares:
                probe_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            probe_socket.bind(socket_address)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _read_cuda_major() -> int:
    folder = packages.runtime_folder()
    return 0 if folder is None else packages.cuda_major(folder)


def _read_libraries() -> tuple[Library, ...]:
    """Locate the driver's library, and those that the GPU providers need."""
    folder = packages.runtime_folder()
    libraries = [] if folder is None else packages.find_needed(folder)
    libraries = [Library(name=packages.DRIVER)] + [library for library in libraries if library.name != packages.DRIVER]
    loader = _read_loader_cache() | packages.search_library_path(library.name for library in libraries)
    folders = packages.pip_folders()
    return tuple(packages.locate(library, loader, folders) for library in libraries)


def _read_loader_cache() -> dict[str, str]:
    """Read the loader's cache; if that fails, libraries are searched for only elsewhere."""
    command = shutil.which("ldconfig") or "/sbin/ldconfig"
    try:
        return packages.parse_cache(ProbeProcess([command, "-p"], _LIMITS_S["ldconfig"]).wait_output())
    except ProbeError:
        return {}


def _from_answer(fact_type: type[_T], answer: Mapping[str, Any]) -> _T:
    """Make one of the Facts from a child's answer; unknown names are dropped."""
    field_names = {field.name for field in fields(fact_type)}  # type: ignore[arg-type]
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in answer.items()}
    return fact_type(**{name: value for name, value in values.items() if name in field_names})
