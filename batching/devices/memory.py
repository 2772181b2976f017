"""Memory: what this process holds and may hold, what is free, and giving back what is kept of a model that was opened.

Called by opening.py, counting.py and model.py.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from penstock.backends.cpus import CGROUP_ROOT, lineage

_CGROUPS = ("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")
_NO_LIMIT = 1 << 60
"""Version 1 of cgroups says "no limit" by a number next to 2^63."""


def give_back() -> None:
    """Give free pages back, where the C library can; it takes some milliseconds.

    glibc keeps what a model's weights were read into, and the weights themselves when it is closed: of a model of
    32 MB, 68 MB stayed for good, and nothing with this (docs/repository.md tells users that memory is given back).
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return
    trim(0)


def resident_bytes(proc: Path = Path("/proc")) -> int:
    """Tell how much memory this process holds; 0 where the system does not say."""
    try:
        pages = int((proc / "self" / "statm").read_text("ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def usable_bytes(proc: Path = Path("/proc"), cgroup: Path = CGROUP_ROOT) -> int:
    """Tell how much memory there is for this process and its like: the machine's, or its container's; 0: nobody says.

    Source: MemTotal of proc_meminfo(5).
    """
    found = [limit_bytes(cgroup, _text(proc / "self" / "cgroup")) or 0]
    for line in _text(proc / "meminfo").splitlines():
        name, _, kib = line.removesuffix("kB").partition(":")
        if name == "MemTotal" and kib.strip().isdecimal():
            found.append(int(kib) * 1024)
    return min(filter(None, found), default=0)


def limit_bytes(cgroup: Path, membership: str) -> int | None:
    """Give the tightest limit on memory of the cgroups that this process is in; None: there is none.

    `membership` is the text of /proc/self/cgroup. Source: memory.max of cgroup-v2.rst; memory.rst (v1).
    """
    found = []
    for line in membership.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        top, name = (cgroup, "memory.max") if not controllers else (cgroup / "memory", "memory.limit_in_bytes")
        if controllers and "memory" not in controllers.split(","):
            continue
        for folder in lineage(top, path):
            text = _text(folder / name).strip()
            if text.isdecimal() and int(text) < _NO_LIMIT:
                found.append(int(text))
    return min(found, default=None)


def _text(path: Path) -> str:
    try:
        return path.read_text("ascii", "replace")
    except OSError:
        return ""


def free_bytes(proc: Path = Path("/proc"), cgroup: Path = CGROUP_ROOT) -> int | None:
    """Tell how much memory can still be had: of the machine's, and of what a container may use; None: nobody says.

    Source: MemAvailable of proc_meminfo(5); cgroup-v2.rst and memory.rst (v1) of the Linux documentation.
    """
    free = []
    try:
        lines = (proc / "meminfo").read_text("ascii").splitlines()
        free += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    except (OSError, ValueError, IndexError):
        pass
    for limit, used in _CGROUPS:
        try:
            free.append(int((cgroup / limit).read_text("ascii")) - int((cgroup / used).read_text("ascii")))
        except (OSError, ValueError):  # there is no such file, or it says "max"
            continue
    return max(min(free), 0) if free else None
