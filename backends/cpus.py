"""How many CPUs this process may use at once, which is the default number of threads of a session.

Used by the backends. In a container, the machine's CPU count says little; the scheduler's affinity mask and the
cgroup's CPU quota are the actual limits.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

CGROUP_ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
_V1_MOUNTS = ("cpu", "cpu,cpuacct", "cpuacct,cpu")


def usable_cpus() -> int:
    """Return how many threads of this process can run at once: at least 1."""
    return decide(affinity(), cgroup_cpus(CGROUP_ROOT, _read(MEMBERSHIP) or ""))


def affinity() -> int:
    """Count the CPUs that the scheduler lets this process run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS has no affinity mask


def decide(affinity_cpus: int, quota_cpus: float | None) -> int:
    """Combine both limits.

    A fraction of a CPU is rounded down: threads that meet at a barrier would all wait while the cgroup is throttled.
    """
    if quota_cpus is None:
        return max(1, affinity_cpus)
    return max(1, min(affinity_cpus, math.floor(quota_cpus)))


def cgroup_cpus(root: Path, membership: str) -> float | None:
    """Return the tightest CPU quota on this process, in CPUs; None if there is none.

    `membership` is the text of /proc/self/cgroup. In a container its paths may be the host's, so each ancestor is
    checked, and paths that do not exist are skipped.
    Source: Linux Documentation/admin-guide/cgroup-v2.rst ("cpu.max") and scheduler/sched-bwc.rst (cgroup v1).
    """
    return min((quota for quota in _quotas(root, membership) if quota is not None), default=None)


def parse_cpu_max(text: str) -> float | None:
    """Parse cgroup v2's `cpu.max`: "max 100000", or quota and period in microseconds."""
    words = text.split()
    return _ratio(words[0], words[1] if len(words) > 1 else "100000") if words else None


def parse_cfs(quota_us: str, period_us: str) -> float | None:
    """Parse cgroup v1's `cpu.cfs_quota_us` (-1: no limit) and `cpu.cfs_period_us`."""
    return _ratio(quota_us.strip(), period_us.strip())


def _quotas(root: Path, membership: str) -> Iterator[float | None]:
    for line in membership.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not path.startswith("/"):
            continue
        if not controllers:
            for folder in lineage(root, path):
                yield parse_cpu_max(_read(folder / "cpu.max") or "")
        elif "cpu" in controllers.split(","):
            for mount in dict.fromkeys((controllers, *_V1_MOUNTS)):
                for folder in lineage(root / mount, path):
                    yield parse_cfs(_read(folder / "cpu.cfs_quota_us") or "", _read(folder / "cpu.cfs_period_us") or "")


def lineage(root: Path, path: str) -> Iterator[Path]:
    """Yield a cgroup's folder and those above it. A path that leaves the root (`/../x`) starts at the root."""
    parts = PurePosixPath(path).parts[1:]
    if ".." in parts:
        parts = ()
    for length in range(len(parts), -1, -1):
        yield root.joinpath(*parts[:length])


def _ratio(quota_us: str, period_us: str) -> float | None:
    try:
        quota, period = int(quota_us), int(period_us)
    except ValueError:
        return None
    return quota / period if quota > 0 and period > 0 else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text("ascii")
    except (OSError, UnicodeDecodeError):
        return None
