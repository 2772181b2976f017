"""The program that a worker process runs, by its path, on whichever Python: it makes this package importable first.

Called by `process.py`: child.py SOCKET BEGUN PARENT NAME=FOLDER..., the first two descriptors, PARENT the server's pid.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib.util
import mmap
import os
import signal
import socket
import sys
import traceback
import types

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_OLDEST = (3, 11)
_UNFIT_STATUS = 78


def make_importable(folders: list[str]) -> None:
    """Make penstock's packages importable from where the server has them, whatever this Python has installed."""
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
    """Have the system kill this process when the one that started it is gone, even if user code never returns."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def unfit(why: str) -> None:
    """End, with why this Python will not do as the last line that is written."""
    sys.stderr.write(f"Python '{sys.executable}' {why}\n")
    sys.stderr.flush()
    os._exit(_UNFIT_STATUS)


def prepare_output() -> None:
    """Have lines leave when they are whole, and a crash say where it was."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    faulthandler.enable()


def main(words: list[str]) -> None:
    """Serve until told to end."""
    sock, begun, parent, *folders = words
    ctypes.CDLL(None).prctl(_PR_SET_NAME, b"worker", 0, 0, 0)  # for ps
    die_with(int(parent))
    if sys.version_info < _OLDEST:
        unfit(f"is {sys.version_info[0]}.{sys.version_info[1]}, and workers need 3.11 or later")
    prepare_output()
    del sys.path[0]  # this file's folder
    sys.argv[1:] = []
    memory = mmap.mmap(int(begun), mmap.PAGESIZE)
    os.close(int(begun))
    os.set_inheritable(int(sock), False)
    make_importable(folders)
    try:
        from penstock.server.ipc.channel import Channel
        from penstock.server.workers.service import Calls
    except ModuleNotFoundError as error:
        unfit(f"has no module '{error.name}', which workers need")
    try:
        Calls(Channel(socket.socket(fileno=int(sock))), memory).serve()
    except ConnectionError:
        os._exit(1)  # the server has gone
    except BaseException as error:  # noqa: BLE001 - nobody is served any more, whatever other threads do
        with contextlib.suppress(Exception):
            traceback.print_exception(error)
        os._exit(1)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(0)  # user code may have left threads that never end


if __name__ == "__main__":
    main(sys.argv[1:])
