"""The server's processes, if it runs on this machine: found by the port they listen on, read from /proc.

A server may have several processes: those that listen, their children, and their parents, such as a supervisor.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from penstock.perf import processes
from penstock.perf.processes import PROC

_TCP_LISTEN = "0A"
_UNIX_ACCEPTING = 1 << 16
_FORWARDERS = frozenset(
    {"docker-proxy", "rootlesskit", "rootlessport", "slirp4netns", "pasta", "ssh", "sshd", "socat", "kubectl"}
)
"""Programs that listen for a server elsewhere."""
_PARENT_PROGRAMS = re.compile(
    r"(ba|da|z|fi|k|tc|c|a)?sh|busybox|tmux.*|screen|sshd|login|su|sudo|systemd|init|tini|dumb-init|docker-init"
    r"|containerd-shim.*|conmon|runc|supervisord|cron|make|timeout|node|code"
)
"""Programs that start servers but are not part of them."""


class NotFoundError(Exception):
    """The processes cannot be determined; the text says why."""


def is_local_host(host: str) -> bool:
    """Return whether a host is this machine: only its own addresses can be bound."""
    return bool(addresses(host))


def addresses(host: str) -> set[str]:
    """Return the addresses of a host that are this machine's own. The path of a Unix socket is one."""
    if host.startswith("/"):
        return {host}
    own_addresses: set[str] = set()
    try:
        address_infos = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return own_addresses
    for family, kind, protocol, _, address in address_infos:
        with suppress(OSError), socket.socket(family, kind, protocol) as tried:
            tried.bind(address)
            own_addresses.add(str(address[0]))
    return own_addresses


class ServerProcesses:
    """The processes of the server that listens on a port of this machine. Raises: NotFoundError.

    `living`: those alive at the last reading. Threads: one at a time.
    """

    def __init__(self, port: int, own_addresses: set[str], proc: Path = PROC, own: int | None = None) -> None:
        self._proc = proc
        own = os.getpid() if own is None else own
        parents = {pid: each.parent for pid, each in processes.living(proc).items()}
        own_pids = {own, *_ancestors(own, parents)}
        holders = self._holders(port, own_addresses)
        if holders & own_pids:
            raise NotFoundError("the server runs within this very process")
        self.roots = {self._topmost(pid, parents, own_pids) for pid in holders}
        self._spent_s: dict[tuple[int, int], float] = {}
        self.living = self.pids()

    def pids(self) -> list[int]:
        """Return the live processes."""
        living = processes.living(self._proc)
        return processes.descended((pid for pid in sorted(self.roots) if pid in living), living)

    def read(self) -> dict[str, float]:
        """Return the CPU seconds of all processes, past ones included, and the current memory. Raises: NotFoundError.

        Memory is resident: pages that processes share count for each of them.
        """
        rss_bytes = 0
        self.living = pids = self.pids()
        for pid in pids:
            with suppress(OSError):  # it has ended meanwhile
                stat = processes.stat(pid, self._proc)
                self._spent_s[pid, stat.started] = stat.cpu_s
                rss_bytes += processes.rss_bytes(pid, self._proc)
        if not pids:
            raise NotFoundError("the server's processes have ended")
        return {
            "server.cpu_s": sum(self._spent_s.values()),
            "server.rss_bytes": float(rss_bytes),
        }

    def cores(self) -> set[int]:
        """Return the CPUs that they may run on."""
        cpus: set[int] = set()
        for pid in self.pids():
            with suppress(OSError):
                cpus |= os.sched_getaffinity(pid)
        return cpus

    def _holders(self, port: int, own_addresses: set[str]) -> set[int]:
        """Return the processes with a socket that listens on the port."""
        sockets = {f"socket:[{inode}]" for inode in listening(self._proc, port, own_addresses)}
        if not sockets:
            raise NotFoundError(f"nobody on this machine listens on port {port}: it may be in a container")
        pids = set()
        for folder in self._proc.glob("[0-9]*/fd"):
            with suppress(OSError):  # another user's, or it has ended meanwhile
                links = (_link(each) for each in folder.iterdir())
                if any(each in sockets for each in links):
                    pids.add(int(folder.parent.name))
        if not pids:
            raise NotFoundError(f"who listens on port {port} may not be looked at: it is another user's")
        forwarders = {self._name(pid) for pid in pids} & _FORWARDERS
        if forwarders:
            raise NotFoundError(f"{forwarders.pop()} listens on port {port}, the server is behind it")
        return pids

    def _topmost(self, pid: int, parents: dict[int, int], own_pids: set[int]) -> int:
        """Find the server's topmost process: the last ancestor that is not part of this run, a shell or a keeper."""
        for parent in _ancestors(pid, parents):
            is_foreign = parent in own_pids or _PARENT_PROGRAMS.fullmatch(self._name(parent).lstrip("-"))
            if is_foreign or (parent == 1 and self._program(parent) != self._program(pid)):
                break
            pid = parent
        return pid

    def _name(self, pid: int) -> str:
        try:
            return (self._proc / str(pid) / "comm").read_text("utf-8", "replace").strip()
        except OSError:
            return ""

    def _program(self, pid: int) -> str:
        return _link(self._proc / str(pid) / "exe") or f"unknown {pid}"


def listening(proc: Path, port: int, own_addresses: set[str]) -> set[str]:
    """Return the inodes of the sockets that listen on a port at one of the addresses, or else at any."""
    unix_inodes = {path: inodes for path, inodes in _unix(proc).items() if path in own_addresses}
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (proc / "net" / table).read_text("ascii").splitlines()[1:]:
                fields = line.split()
                if len(fields) > 9 and fields[3] == _TCP_LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                    unix_inodes.setdefault(_address(fields[1].rpartition(":")[0]), set()).add(fields[9])
    own_inodes = {inode for address in own_addresses for inode in unix_inodes.get(address, ())}
    return own_inodes or {inode for inodes in unix_inodes.values() for inode in inodes}


def _unix(proc: Path) -> dict[str, set[str]]:
    """Return the inodes of the Unix sockets that accept connections, by their paths."""
    inodes_by_path: dict[str, set[str]] = {}
    with suppress(OSError):
        for line in (proc / "net" / "unix").read_text("utf-8", "replace").splitlines()[1:]:
            fields = line.split(maxsplit=7)
            if len(fields) > 7 and int(fields[3], 16) & _UNIX_ACCEPTING:
                inodes_by_path.setdefault(fields[7], set()).add(fields[6])
    return inodes_by_path


def _address(hexadecimal: str) -> str:
    """Format an address of /proc/net/tcp, whose four-byte words are in the machine's byte order."""
    packed = bytes.fromhex(hexadecimal)
    if sys.byteorder == "little":
        packed = b"".join(packed[start : start + 4][::-1] for start in range(0, len(packed), 4))
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return ""


def _ancestors(pid: int, parents: dict[int, int]) -> Iterator[int]:
    ancestors = {pid}
    while (pid := parents.get(pid, 0)) and pid not in ancestors:
        ancestors.add(pid)
        yield pid
