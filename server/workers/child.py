"""The program of a worker process, run by path on any Python. It first makes the penstock packages importable.

Started by `process.py`: child.py SOCKET BEGUN PARENT MOUNTS NAME=FOLDER... The first two are descriptors, PARENT is the
server's pid, and MOUNTS is a JSON object that maps paths to the folders to mount there.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import importlib.util
import json
import mmap
import os
import signal
import socket
import sys
import threading
import traceback
import types
from collections.abc import Callable
from typing import NoReturn

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_MIN_VERSION = (3, 10)
"""The oldest version for Python models; the server itself requires a newer one where other services need it."""
_UNSUITABLE_STATUS = 78
_CLONE_NEWNS, _CLONE_NEWUSER = 0x20000, 0x10000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_MAX_ENTRIES = 64
"""The maximum number of entries in a folder that gets one more: each entry is mounted again."""
_EXIT_LIMIT_S = 2.0
"""The limit for `atexit` functions of user code: one may wait for a child that never ends, and block the server."""


def make_importable(folders: list[str]) -> None:
    """Make penstock's packages importable from the server's folders, whatever this Python has installed."""
    parent = sys.modules["penstock"] = types.ModuleType("penstock")
    parent.__path__ = []
    for assignment in folders:
        name, _, folder = assignment.partition("=")
        spec = importlib.util.spec_from_file_location(
            f"penstock.{name}", f"{folder}/__init__.py", submodule_search_locations=[folder]
        )
        if spec is None or spec.loader is None:
            raise ImportError(f"{folder} is no package")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        setattr(parent, name, module)
        spec.loader.exec_module(module)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, even if user code never returns."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def can_mount(mounts: dict[str, str]) -> bool:
    """Return whether the system allows the mounts. A child tries, because they cannot be undone."""
    child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(OSError):
            mount(mounts)
            status = 0
        os._exit(status)
    return os.waitpid(child, 0)[1] == 0


def mount(mounts: dict[str, str]) -> None:
    """Mount folders at other paths, for this process and its children only. Raises: OSError, after a partial change.

    Uses a mount namespace, and a user namespace if that is required. A process can enter one only before it has
    threads.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def mount_at(source: str | None, target: str, kind: str | None, flags: int) -> None:
        arguments = [argument and os.fsencode(argument) for argument in (source, target, kind)]
        if libc.mount(*arguments, ctypes.c_ulong(flags), None):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), target)

    user, group = os.geteuid(), os.getegid()
    if libc.unshare(_CLONE_NEWNS):
        if libc.unshare(_CLONE_NEWNS | _CLONE_NEWUSER):
            raise OSError(ctypes.get_errno(), "no namespace")
        for name, text in (
            ("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1"),
        ):  # fmt: skip
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:  # noqa: PTH123 - before all imports
                file.write(text)
    mount_at(None, "/", None, _MS_REC | _MS_PRIVATE)
    for path, folder in mounts.items():
        if not os.path.isdir(path):  # noqa: PTH112 - likewise
            make_mount_point(path, mount_at)
        mount_at(folder, path, None, _MS_BIND | _MS_REC)


def make_mount_point(path: str, mount_at: Callable[[str | None, str, str | None, int], None]) -> None:
    """Make a missing folder without changing the disk: remount the nearest existing parent, with the folder added."""
    existing_parent = os.path.dirname(path)  # noqa: PTH120
    while not os.path.isdir(existing_parent):  # noqa: PTH112
        existing_parent = os.path.dirname(existing_parent)  # noqa: PTH120
    entries = list(os.scandir(existing_parent))
    if existing_parent == "/" or len(entries) > _MAX_ENTRIES:
        raise OSError(0, "not made again", existing_parent)
    parent_fd = os.open(existing_parent, os.O_PATH | os.O_DIRECTORY)
    mount_at("tmpfs", existing_parent, "tmpfs", 0)
    for entry in entries:
        entry_path = f"{existing_parent}/{entry.name}"
        if entry.is_symlink():
            os.symlink(os.readlink(entry.name, dir_fd=parent_fd), entry_path)  # noqa: PTH211
            continue
        if entry.is_dir():
            os.mkdir(entry_path)  # noqa: PTH102
        else:
            os.close(os.open(entry_path, os.O_CREAT | os.O_CLOEXEC, 0o600))
        mount_at(f"/proc/self/fd/{parent_fd}/{entry.name}", entry_path, None, _MS_BIND | _MS_REC)
    os.close(parent_fd)
    os.makedirs(path)  # noqa: PTH103


def exit_unsuitable(reason: str) -> None:
    """Exit, with the reason why this Python is unsuitable as the last line of output."""
    sys.stderr.write(f"Python '{sys.executable}' {reason}\n")
    sys.stderr.flush()
    os._exit(_UNSUITABLE_STATUS)


def prepare_output() -> None:
    """Flush output line by line, and enable tracebacks for crashes."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    faulthandler.enable()


def _end_pools() -> None:
    """End thread and process pools, as Python does before `atexit`, where waiting for them could block.

    A pool that raises does not stop the others from ending; the error is written, as `atexit` does.
    """
    for end in reversed(getattr(threading, "_threading_atexits", ())):
        try:
            end()
        except BaseException:  # noqa: BLE001 - user code may exit here as well
            traceback.print_exc()


def exit_process() -> NoReturn:
    """Exit as a Python program does, so temporary folders are removed, but do not wait for threads: some never end."""
    with contextlib.suppress(Exception):  # no thread is available
        deadline = threading.Timer(_EXIT_LIMIT_S, os._exit, (0,))
        deadline.daemon = True
        deadline.start()
        pools = threading.Thread(target=_end_pools, daemon=True)
        pools.start()
        pools.join(_EXIT_LIMIT_S / 2)  # one of the pool's threads may never end
        atexit._run_exitfuncs()  # noqa: SLF001 - what Python itself calls; it writes exceptions
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(0)


def main(arguments: list[str]) -> None:
    """Serve until told to end."""
    socket_fd, begun_fd, parent, mounts, *folders = arguments
    ctypes.CDLL(None).prctl(_PR_SET_NAME, b"worker", 0, 0, 0)  # for ps
    die_with_parent(int(parent))
    if sys.version_info < _MIN_VERSION:
        exit_unsuitable(f"is {sys.version_info[0]}.{sys.version_info[1]}, but workers require 3.10 or later")
    if (requested_mounts := json.loads(mounts)) and can_mount(requested_mounts):
        mount(requested_mounts)
        die_with_parent(int(parent))  # a change of credentials may have reset it
    prepare_output()
    if not getattr(sys.flags, "safe_path", False):  # PYTHONSAFEPATH; not before Python 3.11
        del sys.path[0]  # this file's folder
    sys.argv[1:] = []
    memory = mmap.mmap(int(begun_fd), mmap.PAGESIZE)
    os.close(int(begun_fd))
    os.set_inheritable(int(socket_fd), False)
    make_importable(folders)
    try:
        from penstock.server.ipc.channel import Channel
        from penstock.server.workers.service import CallQueue
        from penstock.server.workers.submodules import import_submodules_on_use
    except ModuleNotFoundError as error:
        exit_unsuitable(f"has no module '{error.name}', which workers require")
    import_submodules_on_use()
    try:
        CallQueue(Channel(socket.socket(fileno=int(socket_fd))), memory).serve()
    except ConnectionError:
        os._exit(1)  # the server has gone
    except BaseException as error:  # noqa: BLE001 - nothing else is served, whatever other threads do
        with contextlib.suppress(Exception):
            traceback.print_exception(error)
        os._exit(1)
    exit_process()


if __name__ == "__main__":
    main(sys.argv[1:])
