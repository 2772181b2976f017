"""Ends a thread that spins in user code. Called for a replica that has been abandoned."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path


class InterruptedHookError(SystemExit):
    """Raised in the middle of an abandoned hook."""


def interrupt(ident: int, folder: Path, *roots: Path) -> bool:
    """Raise an exception in a thread if it is executing a file in `folder` or below a root; return whether it was.

    Anywhere else the exception might strike between taking a lock and the `try` that releases it: in an import, in
    logging, in a library. A thread that waits inside a C function called from such a file gets it when that returns.
    Threads: the caller must ensure that the thread does not end meanwhile, since another may then have its id.
    """
    frame = sys._current_frames().get(ident)  # noqa: SLF001 - documented, though specific to CPython
    if frame is None or not _is_own(Path(frame.f_code.co_filename), folder, roots):
        return False
    raised = ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(InterruptedHookError))
    return bool(raised)


def _is_own(file: Path, folder: Path, roots: tuple[Path, ...]) -> bool:
    if file.parent == folder:
        return True
    # a project may contain its environment
    return "site-packages" not in file.parts and any(root in file.parents for root in roots)
