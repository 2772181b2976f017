"""The machine: CPUs, memory, limits and kernel parameters, read from the kernel's files. Loads no library."""

from __future__ import annotations

import os
import platform
import resource
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path

from penstock.backends.cpus import affinity, cgroup_cpus, decide
from penstock.batching.devices.memory import free_bytes, limit_bytes, meminfo

from .facts import Limit, Machine

_LIMITS = {"open files": "RLIMIT_NOFILE", "locked memory": "RLIMIT_MEMLOCK", "core file": "RLIMIT_CORE"}
_SHM = Path("/dev/shm")  # noqa: S108 - the mount point itself; nothing is written there


def read_machine(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup"), shm: Path = _SHM) -> Machine:
    """Read the machine's properties; unreadable ones are left out.

    Source: cgroups(7), the kernel's cgroup-v2.rst and memory.rst.
    """
    membership = _read_text(proc / "self" / "cgroup")
    quota, cpus = cgroup_cpus(cgroup, membership), affinity()
    shm_bytes, shm_free_bytes = _shm_sizes(shm)
    return Machine(
        python=f"{platform.python_version()} ({platform.machine()})", slow_python=_is_slow(),
        kernel=f"{platform.system()} {_read_text(proc / 'sys/kernel/osrelease').strip()}",
        cpus=os.cpu_count(), affinity_cpus=cpus, quota_cpus=quota, usable_cpus=decide(cpus, quota),
        cgroup=_cgroup_version(cgroup, membership), memory_bytes=meminfo("MemTotal", proc),
        memory_limit_bytes=limit_bytes(cgroup, membership), free_bytes=free_bytes(proc, cgroup),
        shm_bytes=shm_bytes, shm_free_bytes=shm_free_bytes, limits=_read_limits(),
        somaxconn=_parse_number(_read_text(proc / "sys/net/core/somaxconn")),
    )  # fmt: skip


def _is_slow() -> bool:
    """Return whether this Python looks unoptimized. Distributions optimize theirs, but not all record it."""
    options = sysconfig.get_config_var("CONFIG_ARGS") or ""
    return bool(options) and "--enable-optimizations" not in options and sys.base_prefix != "/usr"


def _read_text(path: Path) -> str:
    try:
        return path.read_text("ascii", "replace")
    except OSError:
        return ""


def _parse_number(text: str) -> int | None:
    words = text.split()
    return int(words[0]) if words and words[0].isascii() and words[0].isdigit() else None


def _cgroup_version(cgroup: Path, membership: str) -> int:
    if (cgroup / "cgroup.controllers").exists():
        return 2
    return 1 if any(not line.startswith("0::") for line in membership.splitlines()) else 0


def _shm_sizes(shm: Path) -> tuple[int | None, int | None]:
    try:
        stat = os.statvfs(shm)
    except OSError:
        return None, None
    return stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize


def _read_limits() -> Mapping[str, Limit]:
    def read() -> Iterator[tuple[str, Limit]]:
        for name, constant in _LIMITS.items():
            if hasattr(resource, constant):
                soft, hard = resource.getrlimit(getattr(resource, constant))
                yield name, Limit(soft=_finite(soft), hard=_finite(hard))

    return dict(read())


def _finite(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value
