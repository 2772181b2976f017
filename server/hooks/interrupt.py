"""Ending a thread that spins in the user's code. Called by replica.py for a replica it has abandoned."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path


class InterruptedHookError(SystemExit):
    """Raised in the middle of an abandoned hook."""


def interrupt(ident: int, folder: Path, *roots: Path) -> bool:
    """Raise in a thread, if what it executes right now is a file of `folder`, or below a root; tell whether it was so.

    Anywhere else the exception might strike between taking a lock and the `try` that gives it back: in an import, in
    logging, in a library. A thread that waits inside a C function called from such a file sees it when that returns.
    Threads: the caller makes sure that the thread does not end meanwhile, since another may then have its number.
    """
    frame = sys._current_frames().get(ident)  # noqa: SLF001 - documented; the name says that it is CPython's
    if frame is None or not _is_own(Path(frame.f_code.co_filename), folder, roots):
        return False
    raised = ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(InterruptedHookError))
    return bool(raised)


def _is_own(file: Path, folder: Path, roots: tuple[Path, ...]) -> bool:
    if file.parent == folder:
        return True
    # a project may have its environment in it
    return "site-packages" not in file.parts and any(root in file.parents for root in roots)
