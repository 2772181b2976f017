"""What a process has, as the system tells it: children, open files; and whether it lives.

Threads and files come and go while they are listed, those of tests that ran before in this process too. So nothing here
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
    """Give the children of a process, this one's unless told otherwise; zombies too, none of one that is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return {child.pid for child in psutil.Process(pid).children()}
    return set()


def descriptors(pid: int | None = None) -> int:
    """Count the files that a process has open, this one's unless told otherwise."""
    return sum(1 for _ in Path(f"/proc/{pid or os.getpid()}/fd").iterdir())  # this folder is one of them, each time


def lives(pid: int) -> bool:
    """Whether a process runs: one that has ended and was not reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def ends(pid: int) -> bool:
    """Wait until a process runs no more: who was killed with its group ends a moment after the call. In time?"""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], PATIENCE_S)[0])
    finally:
        os.close(handle)
