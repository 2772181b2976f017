"""Census: the processes of a server as the system sees them: who they are, and what they hold. Read by `soak.py`."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

_PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / (1 << 20)


@dataclass(frozen=True, slots=True)
class Seen:
    """One process and what it holds. `role`: server or supervisor, engine, front, spare (to be one), worker, other."""

    pid: int
    started: int
    role: str
    state: str
    rss_mib: float
    descriptors: int
    threads: int


def census(root: int) -> list[Seen]:
    """Give a process and all that descend from it."""
    parents: dict[int, list[int]] = {}
    fields: dict[int, list[str]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                words = (folder / "stat").read_text("latin-1").rpartition(")")[2].split()
                fields[int(folder.name)] = words
                parents.setdefault(int(words[1]), []).append(int(folder.name))
    found, todo = [], [root]
    while todo:
        pid = todo.pop()
        todo += parents.get(pid, ())
        with contextlib.suppress(OSError):
            found.append(_seen(pid, fields[pid], is_root=pid == root))
    if any(each.role in {"engine", "front", "spare"} for each in found):
        return [_as_supervisor(each) if each.pid == root else each for each in found]
    return found


def _seen(pid: int, words: list[str], *, is_root: bool) -> Seen:
    folder = Path(f"/proc/{pid}")
    command = (folder / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    descriptors = sum(1 for _ in (folder / "fd").iterdir())
    rss_mib = int((folder / "statm").read_text("ascii").split()[1]) * _PAGE_MIB
    role = "server" if is_root else _role(command, (folder / "comm").read_text("utf-8", "replace"))
    return Seen(pid, int(words[19]), role, words[0], rss_mib, descriptors, int(words[17]))


def _role(command: list[str], name: str) -> str:
    if "penstock.server.supervisor.child" in command:
        return next((role for role in ("engine", "front") if role in name), "spare")
    return "worker" if any(word.endswith("workers/child.py") for word in command) else "other"


def _as_supervisor(seen: Seen) -> Seen:
    return Seen(seen.pid, seen.started, "supervisor", seen.state, seen.rss_mib, seen.descriptors, seen.threads)


def is_there(seen: Seen) -> bool:
    """Tell whether a process that was seen is still there, and no other one with its number."""
    try:
        words = Path(f"/proc/{seen.pid}/stat").read_text("latin-1").rpartition(")")[2].split()
    except OSError:
        return False
    return int(words[19]) == seen.started and words[0] != "Z"
