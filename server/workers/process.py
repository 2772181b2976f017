"""Process: spawns, waits for and reaps a worker's process. Used by `worker.py`."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from penstock.backends.errors import Code

from .order import Order

UNFIT_STATUS = 78
"""The exit status of a worker whose Python cannot run it; its last line of output says why. The same as in child.py."""
_CRASHED = "Extension modules: "
"""The start of the last line that faulthandler writes after a crash. The line does not state the cause."""
_PACKAGES = ("server", "batching", "backends")
_CHILD = Path(__file__).parent / "child.py"


class Process:
    """One process and its process group, managed by a thread of its own, for three reasons.

    Spawning takes a millisecond or more, too long for an event loop. The thread waits for the end, so no polling is
    needed. And the kernel kills the child when the thread that spawned it ends (child.py requests this): the thread
    ends after the child, or with this process, even if the process is killed.

    `exited` is called once, on the loop, with the exit status (negative: the signal), or with the reason why the
    process could not be spawned. By then the process is reaped and its group killed.
    Ownership: the child receives `descriptors`, and they are closed here; the last one becomes its output.
    Threads: the event loop's, except for `_live`; `_lock` prevents `kill` from signaling a reaped process.
    """

    def __init__(
        self, order: Order, descriptors: tuple[int, int, int], exited: Callable[[int | OSError], None]
    ) -> None:
        self.pid = 0
        """0 until spawned."""
        self._order = order
        self._descriptors = descriptors
        self._exited = exited
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._killed = False
        self._reaped = False
        threading.Thread(target=self._live, name="worker", daemon=True).start()

    def kill(self) -> None:
        """Kill the process and its group, now or as soon as it is spawned."""
        with self._lock:
            self._killed = True
            if self.pid and not self._reaped:
                _kill_group(self.pid)

    def _live(self) -> None:
        ended: int | OSError
        try:
            process = self._spawned()
        except OSError as error:
            ended = error
        except (ValueError, subprocess.SubprocessError) as error:  # for example a NUL byte in a path
            ended = OSError(0, str(error))
        else:
            ended = self._outlived(process)
        finally:
            for descriptor in self._descriptors:
                os.close(descriptor)
        with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits
            self._loop.call_soon_threadsafe(self._exited, ended)
        self._exited = _nobody  # the callback refers to this object

    def _outlived(self, process: subprocess.Popen[bytes]) -> int:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = ()  # type: ignore[assignment]
        with self._lock:
            self.pid = process.pid
            if self._killed:
                _kill_group(process.pid)
        # the group's number stays reserved until its first process is reaped
        with contextlib.suppress(ChildProcessError):  # where SIGCHLD is ignored, the kernel has reaped it
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            _kill_group(process.pid)
            self._reaped = True
            return process.wait()

    def _spawned(self) -> subprocess.Popen[bytes]:
        order = self._order
        sock, begun, output = self._descriptors
        mounts = {key: str(Path(folder).absolute()) for key, folder in order.mounts.items()}
        return subprocess.Popen(  # noqa: S603 - the user's own Python
            [_python(order), str(_CHILD), str(sock), str(begun), str(os.getpid()), json.dumps(mounts), *_folders()],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=(sock, begun), cwd=order.folder,
            start_new_session=True, env={**os.environ, **_programs(order), **order.environment},
        )  # fmt: skip


def _programs(order: Order) -> dict[str, str]:
    """Put the programs next to the order's interpreter first in PATH."""
    folder = os.path.dirname(order.interpreter)  # noqa: PTH120 - "" for a name without one
    return {"PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}"} if folder else {}


def _nobody(_: int | OSError) -> None:
    """Replace the callback of a process whose end has been reported."""


def ending_of(order: Order, ended: int | OSError | None, last: str | None) -> tuple[str, str, Code]:
    """Describe how a process ended by itself. `last` is its last line of output if it was not yet open, otherwise None.

    Returns: the reason as a metrics label, the message for its callers, and the error code.
    """
    if isinstance(ended, OSError):
        there = str(ended.filename) == str(order.folder)
        what = f"folder '{order.folder}'" if there else f"Python '{_python(order)}'"
        return "open", f"{order.label}: {what} cannot be used: {ended.strerror}", Code.INVALID
    if last and ended == UNFIT_STATUS:
        return "open", f"{order.label}: {last}", Code.INVALID
    status = f"exit status {ended}" if ended is None or ended >= 0 else f"signal {-ended} ({_signal_name(-ended)})"
    if last is not None:
        last = "" if last.startswith(_CRASHED) else last
        text = f"{order.label} ended while it was starting: {status}"
        return "open", f"{text}: {last}" if last else text, Code.NOT_READY
    reason = "signal" if ended is not None and ended < 0 else "exit"
    return reason, f"{order.label} ended: {status}", Code.NOT_READY


def is_taken(ended: int | OSError | None) -> bool:
    """Whether a process that this server did not kill was ended from outside, by an operator or the kernel."""
    return isinstance(ended, int) and -ended in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def _python(order: Order) -> str:
    return order.interpreter or sys.executable


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return "unnamed"


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _folders() -> list[str]:
    """Return the folders of the packages that a worker imports, in child.py's format."""
    found = []
    for name in _PACKAGES:
        module = importlib.import_module(f"penstock.{name}")
        found.append(f"{name}={Path(module.__file__ or '').parent}")
    return found
