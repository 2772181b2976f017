"""Memory: what this process holds and may hold, what is free, and returning freed memory to the system.

Used when models are loaded, and by the reports about the machine: doctor and metrics page.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

from penstock.backends.cpus import CGROUP_ROOT, lineage

_VERSION_2 = "memory.max", "memory.current", "inactive_file"
_VERSION_1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
"""The limit, the usage, and the part of the usage, in memory.stat, that is page cache and can be reclaimed. Source:
cgroup-v2.rst and memory.rst (v1) of the Linux documentation."""
_NO_LIMIT = 1 << 60
"""Version 1 of cgroups says "no limit" by a number next to 2^63."""


def trim_heap() -> None:
    """Return free pages to the system, if the C library can; takes some milliseconds.

    glibc keeps the memory that a model's weights were read into, and that of the weights themselves when it is closed:
    of a model of 32 MB, 68 MB stayed for good, and nothing with this (docs/repository.md tells users that memory is
    given back).
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return
    trim(0)


def resident_bytes(proc: Path = Path("/proc")) -> int:
    """Return how much memory this process holds; 0 if the system does not say."""
    try:
        pages = int((proc / "self" / "statm").read_text("ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def usable_bytes(proc: Path = Path("/proc"), cgroup: Path = CGROUP_ROOT) -> int:
    """Return the memory of the machine or container, whichever is smaller; 0 if unknown."""
    found = limit_bytes(cgroup, _text(proc / "self" / "cgroup")), meminfo("MemTotal", proc)
    return min(filter(None, found), default=0)


def meminfo(name: str, proc: Path = Path("/proc")) -> int | None:
    """Return one of the figures of proc_meminfo(5) in bytes; None if unknown."""
    for line in _text(proc / "meminfo").splitlines():
        key, _, after = line.partition(":")
        kib = after.split()[:1]
        if key == name and kib and kib[0].isdecimal():
            return int(kib[0]) * 1024
    return None


def limit_bytes(cgroup: Path, membership: str) -> int | None:
    """Return the tightest memory limit of the cgroups that this process is in; None if there is none.

    `membership` is the text of /proc/self/cgroup.
    """
    return min((limit for limit, _ in _limits(cgroup, membership)), default=None)


def free_bytes(proc: Path = Path("/proc"), cgroup: Path = CGROUP_ROOT) -> int | None:
    """Return how much more memory can be allocated, within the machine and its cgroups; None if unknown."""
    available = meminfo("MemAvailable", proc)
    free = [] if available is None else [available]
    membership = _text(proc / "self" / "cgroup") or "0::/\n1:memory:/"
    free += [limit - used for limit, used in _limits(cgroup, membership)]
    return max(min(free), 0) if free else None


def _limits(cgroup: Path, membership: str) -> Iterator[tuple[int, int]]:
    """Yield the limit and the usage of each cgroup of this process that has a limit."""
    for line in membership.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        top, (limit, used, files) = (cgroup / "memory", _VERSION_1) if controllers else (cgroup, _VERSION_2)
        for folder in lineage(top, path):
            limit_text, used_text = _text(folder / limit).strip(), _text(folder / used).strip()
            if limit_text.isdecimal() and int(limit_text) < _NO_LIMIT:
                yield (
                    int(limit_text),
                    (int(used_text) if used_text.isdecimal() else 0) - _file_cache_bytes(folder, files),
                )


def _file_cache_bytes(folder: Path, name: str) -> int:
    lines = map(str.split, _text(folder / "memory.stat").splitlines())
    return next((int(words[1]) for words in lines if words[0] == name and words[1].isdecimal()), 0)


def _text(path: Path) -> str:
    try:
        return path.read_text("ascii", "replace")
    except OSError:
        return ""
