"""Memory: what this process holds, what is free, and giving back what is kept of a model opened or closed.

Called by opening.py and counting.py.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_CGROUPS = ("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")


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


def free_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
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
