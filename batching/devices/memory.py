"""Memory: what this process holds and may hold, what is free, and giving back what is kept of a model that was opened.

Called where models are loaded, and by what tells of the machine: doctor and metrics page.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

from penstock.backends.cpus import CGROUP_ROOT, lineage

_VERSION_2 = "memory.max", "memory.current", "inactive_file"
_VERSION_1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
"""What is limited, what is used, and in memory.stat what of that is files that were read and can be read again.

Source: cgroup-v2.rst and memory.rst (v1) of the Linux documentation.
"""
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
    """Tell how much memory there is for this process and its like: the machine's or container's; 0: nobody says."""
    found = limit_bytes(cgroup, _text(proc / "self" / "cgroup")), meminfo("MemTotal", proc)
    return min(filter(None, found), default=0)


def meminfo(name: str, proc: Path = Path("/proc")) -> int | None:
    """Give one of the figures of proc_meminfo(5) in bytes; None: nobody says."""
    for line in _text(proc / "meminfo").splitlines():
        said, _, after = line.partition(":")
        kib = after.split()[:1]
        if said == name and kib and kib[0].isdecimal():
            return int(kib[0]) * 1024
    return None


def limit_bytes(cgroup: Path, membership: str) -> int | None:
    """Give the tightest limit on memory of the cgroups that this process is in; None: there is none.

    `membership` is the text of /proc/self/cgroup.
    """
    return min((limit for limit, _ in _limits(cgroup, membership)), default=None)


def free_bytes(proc: Path = Path("/proc"), cgroup: Path = CGROUP_ROOT) -> int | None:
    """Tell how much memory can still be had: of the machine's, and of what its cgroups may use; None: nobody says."""
    available = meminfo("MemAvailable", proc)
    free = [] if available is None else [available]
    membership = _text(proc / "self" / "cgroup") or "0::/\n1:memory:/"
    free += [limit - used for limit, used in _limits(cgroup, membership)]
    return max(min(free), 0) if free else None


def _limits(cgroup: Path, membership: str) -> Iterator[tuple[int, int]]:
    """Give what each cgroup that this process is in may have, if that is limited, and what it has."""
    for line in membership.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        top, (limit, used, files) = (cgroup / "memory", _VERSION_1) if controllers else (cgroup, _VERSION_2)
        for folder in lineage(top, path):
            said, has = _text(folder / limit).strip(), _text(folder / used).strip()
            if said.isdecimal() and int(said) < _NO_LIMIT:
                yield int(said), (int(has) if has.isdecimal() else 0) - _of_files(folder, files)


def _of_files(folder: Path, name: str) -> int:
    lines = map(str.split, _text(folder / "memory.stat").splitlines())
    return next((int(words[1]) for words in lines if words[0] == name and words[1].isdecimal()), 0)


def _text(path: Path) -> str:
    try:
        return path.read_text("ascii", "replace")
    except OSError:
        return ""
