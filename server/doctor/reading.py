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

from . import asking, packages
from .asking import AskError, ProbeProcess
from .facts import (
    LOADED,
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

if TYPE_CHECKING:
    from penstock.server.settings import Settings

_T = TypeVar("_T")
_LIMITS_S = {"driver": 20.0, "nvml": 10.0, "runtime": 20.0, "models": 300.0, "ldconfig": 5.0}
"""Starting a driver takes seconds if nothing keeps it loaded; the limit of `models` includes loading them."""
_NAMES = ("CUDA_VISIBLE_DEVICES",)


def read_facts(settings: Settings) -> Facts:
    """Read all facts."""
    failures: dict[str, str] = {}

    def tried(name: str, read: Callable[[], _T], otherwise: _T) -> _T:
        try:
            return read()
        except AskError as error:
            failures[name] = str(error)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with a machine, the rest is reported
            failures[name] = f"{type(error).__name__}: {error}"
        return otherwise

    asked = {word: asking.child(word, _LIMITS_S[word]) for word in LOADED}
    if settings.model_repository:
        asked["models"] = asking.child("models", _LIMITS_S["models"], pickle.dumps(settings))
    return Facts(
        machine=tried("machine", read_machine, Machine()),
        packages=tried("packages", packages.read_packages, {}),
        libraries=tried("libraries", _libraries, ()),
        cuda_major=tried("libraries", _cuda_major, 0),
        device_files=tried("device files", lambda: tuple(sorted(map(str, Path("/dev").glob("nvidia*")))), ()),
        environment={name: os.environ[name] for name in _NAMES if os.environ.get(name)},
        ports=tried("ports", lambda: read_ports(settings), ()),
        driver=tried("driver", lambda: driver_of(asking.answer(asked["driver"])), None),
        nvml=tried("nvml", lambda: nvml_of(asking.answer(asked["nvml"])), None),
        runtime=tried("runtime", lambda: _made(OnnxRuntime, asking.answer(asked["runtime"])), None),
        models=tried("models", lambda: models_of(asking.answer(asked["models"])), None) if "models" in asked else None,
        failures=failures,
    )


def driver_of(answer: Mapping[str, Any]) -> Driver:
    """Make a Driver from the child's answer."""
    return _made(Driver, {**answer, "devices": tuple(_made(CudaDevice, each) for each in answer.get("devices", ()))})


def nvml_of(answer: Mapping[str, Any]) -> NvmlFacts:
    """Make NvmlFacts from the child's answer."""
    return _made(NvmlFacts, {**answer, "gpus": tuple(_made(NvmlGpu, each) for each in answer.get("gpus", ()))})


def models_of(answer: Mapping[str, Any]) -> CheckedModels:
    """Make CheckedModels from the child's answer."""
    return _made(
        CheckedModels, {**answer, "devices": {name: tuple(of) for name, of in answer.get("devices", {}).items()}}
    )


def read_ports(settings: Settings) -> tuple[CheckedPort, ...]:
    """Try the ports that a server with these settings would listen on."""
    wanted = [
        ("HTTP", settings.allow_http, settings.http_address, settings.http_port, settings.reuse_http_port),
        ("gRPC", settings.allow_grpc, settings.grpc_address, settings.grpc_port, settings.reuse_grpc_port),
        (
            "metrics", settings.allow_metrics, settings.metrics_address or settings.http_address,
            settings.metrics_port, False,
        ),
    ]  # fmt: skip
    return tuple(
        _port(name, address, port, shares) for name, allowed, address, port, shares in wanted if allowed and port
    )


def _port(name: str, address: str, port: int, shares: bool) -> CheckedPort:
    taken = _taken(address, port)
    shared = bool(taken) and shares and not _taken(address, port, shares=True)
    return CheckedPort(name=name, address=address, port=port, taken="" if shared else taken, shared=shared)


def _taken(address: str, port: int, *, shares: bool = False) -> str:
    """Return why a port cannot be bound, "" if it can; `shares`: together with others that share it."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(address or None, port, type=socket.SOCK_STREAM, flags=1)[0]
        with socket.socket(family, kind) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shares:
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            tried.bind(place)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _cuda_major() -> int:
    folder = packages.runtime_folder()
    return 0 if folder is None else packages.cuda_major(folder)


def _libraries() -> tuple[Library, ...]:
    """Locate the driver's library, and those that the GPU providers need."""
    folder = packages.runtime_folder()
    wanted = [] if folder is None else packages.wanted(folder)
    wanted = [Library(name=packages.DRIVER)] + [each for each in wanted if each.name != packages.DRIVER]
    loader = _cache() | packages.on_path(each.name for each in wanted)
    folders = packages.pip_folders()
    return tuple(packages.found(each, loader, folders) for each in wanted)


def _cache() -> dict[str, str]:
    """Read the loader's cache; if that fails, libraries are searched for only elsewhere."""
    command = shutil.which("ldconfig") or "/sbin/ldconfig"
    try:
        return packages.parse_cache(ProbeProcess([command, "-p"], _LIMITS_S["ldconfig"]).text())
    except AskError:
        return {}


def _made(kind: type[_T], answer: Mapping[str, Any]) -> _T:
    """Make one of the Facts from a child's answer; unknown names are dropped."""
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    plain = {name: tuple(value) if isinstance(value, list) else value for name, value in answer.items()}
    return kind(**{name: value for name, value in plain.items() if name in known})
