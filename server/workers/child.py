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
_OLDEST = (3, 10)
"""The oldest version for Python models; the server itself requires a newer one where other services need it."""
_UNFIT_STATUS = 78
_CLONE_NEWNS, _CLONE_NEWUSER = 0x20000, 0x10000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_MOST_ENTRIES = 64
"""The maximum number of entries in a folder that gets one more: each entry is mounted again."""
_LEAVE_S = 2.0
"""The limit for `atexit` functions of user code: one may wait for a child that never ends, and block the server."""


def make_importable(folders: list[str]) -> None:
    """Make penstock's packages importable from the server's folders, whatever this Python has installed."""
    parent = sys.modules["penstock"] = types.ModuleType("penstock")
    parent.__path__ = []
    for word in folders:
        name, _, folder = word.partition("=")
        spec = importlib.util.spec_from_file_location(
            f"penstock.{name}", f"{folder}/__init__.py", submodule_search_locations=[folder]
        )
        if spec is None or spec.loader is None:
            raise ImportError(f"{folder} is no package")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        setattr(parent, name, module)
        spec.loader.exec_module(module)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, even if user code never returns."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def may_mount(mounts: dict[str, str]) -> bool:
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

    def on(source: str | None, target: str, kind: str | None, flags: int) -> None:
        words = [word and os.fsencode(word) for word in (source, target, kind)]
        if libc.mount(*words, ctypes.c_ulong(flags), None):
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
    on(None, "/", None, _MS_REC | _MS_PRIVATE)
    for path, folder in mounts.items():
        if not os.path.isdir(path):  # noqa: PTH112 - likewise
            make_place(path, on)
        on(folder, path, None, _MS_BIND | _MS_REC)


def make_place(path: str, on: Callable[[str | None, str, str | None, int], None]) -> None:
    """Make a missing folder without changing the disk: remount the nearest existing parent, with the folder added."""
    above = os.path.dirname(path)  # noqa: PTH120
    while not os.path.isdir(above):  # noqa: PTH112
        above = os.path.dirname(above)  # noqa: PTH120
    entries = list(os.scandir(above))
    if above == "/" or len(entries) > _MOST_ENTRIES:
        raise OSError(0, "not made again", above)
    before = os.open(above, os.O_PATH | os.O_DIRECTORY)
    on("tmpfs", above, "tmpfs", 0)
    for entry in entries:
        place = f"{above}/{entry.name}"
        if entry.is_symlink():
            os.symlink(os.readlink(entry.name, dir_fd=before), place)  # noqa: PTH211
            continue
        if entry.is_dir():
            os.mkdir(place)  # noqa: PTH102
        else:
            os.close(os.open(place, os.O_CREAT | os.O_CLOEXEC, 0o600))
        on(f"/proc/self/fd/{before}/{entry.name}", place, None, _MS_BIND | _MS_REC)
    os.close(before)
    os.makedirs(path)  # noqa: PTH103


def unfit(why: str) -> None:
    """Exit, with the reason why this Python is unsuitable as the last line of output."""
    sys.stderr.write(f"Python '{sys.executable}' {why}\n")
    sys.stderr.flush()
    os._exit(_UNFIT_STATUS)


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


def leave() -> NoReturn:
    """Exit as a Python program does, so temporary folders are removed, but do not wait for threads: some never end."""
    with contextlib.suppress(Exception):  # no thread is available
        late = threading.Timer(_LEAVE_S, os._exit, (0,))
        late.daemon = True
        late.start()
        pools = threading.Thread(target=_end_pools, daemon=True)
        pools.start()
        pools.join(_LEAVE_S / 2)  # one of the pool's threads may never end
        atexit._run_exitfuncs()  # noqa: SLF001 - what Python itself calls; it writes exceptions
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(0)


def main(words: list[str]) -> None:
    """Serve until told to end."""
    sock, begun, parent, mounts, *folders = words
    ctypes.CDLL(None).prctl(_PR_SET_NAME, b"worker", 0, 0, 0)  # for ps
    die_with(int(parent))
    if sys.version_info < _OLDEST:
        unfit(f"is {sys.version_info[0]}.{sys.version_info[1]}, but workers require 3.10 or later")
    if (asked := json.loads(mounts)) and may_mount(asked):
        mount(asked)
        die_with(int(parent))  # a change of credentials may have reset it
    prepare_output()
    if not getattr(sys.flags, "safe_path", False):  # PYTHONSAFEPATH; not before Python 3.11
        del sys.path[0]  # this file's folder
    sys.argv[1:] = []
    memory = mmap.mmap(int(begun), mmap.PAGESIZE)
    os.close(int(begun))
    os.set_inheritable(int(sock), False)
    make_importable(folders)
    try:
        from penstock.server.ipc.channel import Channel
        from penstock.server.workers.service import CallQueue
    except ModuleNotFoundError as error:
        unfit(f"has no module '{error.name}', which workers require")
    try:
        CallQueue(Channel(socket.socket(fileno=int(sock))), memory).serve()
    except ConnectionError:
        os._exit(1)  # the server has gone
    except BaseException as error:  # noqa: BLE001 - nothing else is served, whatever other threads do
        with contextlib.suppress(Exception):
            traceback.print_exception(error)
        os._exit(1)
    leave()


if __name__ == "__main__":
    main(sys.argv[1:])
