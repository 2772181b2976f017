"""What the system says about a process: its children, its open files, and whether it is alive.

Threads and files come and go while they are listed, including those of earlier tests in this process. So nothing here
reads /proc thread by thread: a thread that ends takes its entry with it, and leaves its children to another one.
"""

from __future__ import annotations

import contextlib
import os
import select
from pathlib import Path

import psutil

from tests.fakes import PATIENCE_S


def children(pid: int | None = None) -> set[int]:
    """Return the children of a process, by default this one; with zombies, and none of a process that is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return {child.pid for child in psutil.Process(pid).children()}
    return set()


def descriptors(pid: int | None = None) -> int:
    """Count the open files of a process, by default this one."""
    return sum(1 for _ in Path(f"/proc/{pid or os.getpid()}/fd").iterdir())  # this folder itself is always one of them


def lives(pid: int) -> bool:
    """Whether a process runs: one that has ended but was not reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def ends(pid: int) -> bool:
    """Wait until a process has ended (one killed with its group ends a moment after the call); return if it did."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], PATIENCE_S)[0])
    finally:
        os.close(handle)
