"""The environment: the machine of a run, the versions of the software, and a fingerprint of the configuration.

Unknown values are left out.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from penstock.backends import cpus
from penstock.batching.devices.memory import limit_bytes, meminfo

from . import energy
from .sampling_readers import read_within

_GPU_TIMEOUT_S = 5.0
_PACKAGES = ("penstock", "numpy", "uvloop")
_DIGITS = 16


def machine(
    proc: Path = Path("/proc"),
    cgroup: Path = cpus.CGROUP_ROOT,
    gpus: Callable[[], tuple[list[dict[str, Any]], str]] = energy.installed,
) -> dict[str, Any]:
    """Describe this machine.

    Names: cpu, cores, usable_cores, memory_bytes, kernel, gpus (name, uuid, memory_bytes of each), gpu_driver,
    cgroup_cpus, cgroup_memory_bytes.
    """
    membership = _read(proc / "self" / "cgroup")
    description = {
        "cpu": _field(_read(proc / "cpuinfo"), "model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": cpus.affinity(),
        "memory_bytes": meminfo("MemTotal", proc),
        "kernel": f"{platform.system()} {platform.release()}",
        "cgroup_cpus": cpus.cgroup_cpus(cgroup, membership),
        "cgroup_memory_bytes": limit_bytes(cgroup, membership),
    }
    gpus_read = read_within(_GPU_TIMEOUT_S, gpus)
    if gpus_read is not None:
        description["gpus"], description["gpu_driver"] = gpus_read
    return {name: value for name, value in description.items() if value not in (None, "")}


def versions(server: Mapping[str, Any]) -> dict[str, str]:
    """Return the versions of this program and its dependencies, and the server's name and version from its metadata."""
    versions_by_name = {"python": f"{platform.python_implementation()} {platform.python_version()}"}
    for name in _PACKAGES:
        try:
            versions_by_name[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    server_words = [str(server[name]) for name in ("name", "version") if server.get(name)]
    return versions_by_name | ({"server": " ".join(server_words)} if server_words else {})


def fingerprint(config: Mapping[str, Any]) -> str:
    """Return 16 hexadecimal digits that are equal if and only if two configurations are equal."""
    canonical = json.dumps(config, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()[:_DIGITS]


def sharing(client: AbstractSet[int], server: AbstractSet[int]) -> str:
    """Say how many cores both may run on."""
    count = len(client & server)
    if not count:
        return "client and server have cores of their own"
    return f"client and server share {count} core{'s' if count > 1 else ''}"


def _field(text: str, name: str) -> str:
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""
