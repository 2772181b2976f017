"""The program that a worker process runs, by its path, on whichever Python: it makes this package importable first.

Called by `worker.py`: child.py SOCKET BEGUN PARENT NAME=FOLDER..., the first two descriptors, PARENT the server's pid.
"""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import os
import signal
import socket
import sys
import types
from collections.abc import Iterable

_PR_SET_PDEATHSIG = 1


def make_importable(folders: Iterable[str]) -> None:
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


def main(words: list[str]) -> None:
    """Serve until told to end."""
    sock, begun, parent, *folders = words
    die_with(int(parent))
    del sys.path[0]  # this file's folder
    make_importable(folders)
    from penstock.server.ipc.channel import Channel
    from penstock.server.workers.service import Calls

    memory = mmap.mmap(int(begun), mmap.PAGESIZE)
    Calls(Channel(socket.socket(fileno=int(sock))), memory).serve()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # user code may have left threads that never end


if __name__ == "__main__":
    main(sys.argv[1:])
