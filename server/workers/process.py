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

UNSUITABLE_STATUS = 78
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

    `on_exit` is called once, on the loop, with the exit status (negative: the signal), or with the reason why the
    process could not be spawned. By then the process is reaped and its group killed.
    Ownership: the child receives `descriptors`, and they are closed here; the last one becomes its output.
    Threads: the event loop's, except for `_run`; `_lock` prevents `kill` from signaling a reaped process.
    """

    def __init__(
        self, order: Order, descriptors: tuple[int, int, int], on_exit: Callable[[int | OSError], None]
    ) -> None:
        self.pid = 0
        """0 until spawned."""
        self._order = order
        self._descriptors = descriptors
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._killed = False
        self._reaped = False
        threading.Thread(target=self._run, name="worker", daemon=True).start()

    def kill(self) -> None:
        """Kill the process and its group, now or as soon as it is spawned."""
        with self._lock:
            self._killed = True
            if self.pid and not self._reaped:
                _kill_group(self.pid)

    def _run(self) -> None:
        result: int | OSError
        try:
            process = self._spawn()
        except OSError as error:
            result = error
        except (ValueError, subprocess.SubprocessError) as error:  # for example a NUL byte in a path
            result = OSError(0, str(error))
        else:
            result = self._wait(process)
        finally:
            for descriptor in self._descriptors:
                os.close(descriptor)
        with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits
            self._loop.call_soon_threadsafe(self._on_exit, result)
        self._on_exit = _ignore_exit  # the callback refers to this object

    def _wait(self, process: subprocess.Popen[bytes]) -> int:
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

    def _spawn(self) -> subprocess.Popen[bytes]:
        order = self._order
        sock, begun, output = self._descriptors
        mounts = {key: str(Path(folder).absolute()) for key, folder in order.mounts.items()}
        return subprocess.Popen(  # noqa: S603 - the user's own Python
            [_interpreter(order), str(_CHILD), str(sock), str(begun), str(os.getpid()), json.dumps(mounts),
            *_folders()], stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=(sock, begun),
            cwd=order.folder, start_new_session=True, env={**os.environ, **_path_variable(order), **order.environment},
        )  # fmt: skip


def _path_variable(order: Order) -> dict[str, str]:
    """Put the programs next to the order's interpreter first in PATH."""
    folder = os.path.dirname(order.interpreter)  # noqa: PTH120 - "" for a name without one
    return {"PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}"} if folder else {}


def _ignore_exit(_: int | OSError) -> None:
    """Replace the callback of a process whose end has been reported."""


def describe_end(order: Order, status: int | OSError | None, last_line: str | None) -> tuple[str, str, Code]:
    """Describe how a process ended by itself. `last_line` is its last output if it was not open yet, else None.

    Returns: the reason as a metrics label, the message for its callers, and the error code.
    """
    if isinstance(status, OSError):
        is_folder = str(status.filename) == str(order.folder)
        what = f"folder '{order.folder}'" if is_folder else f"Python '{_interpreter(order)}'"
        return "open", f"{order.label}: {what} cannot be used: {status.strerror}", Code.INVALID
    if last_line and status == UNSUITABLE_STATUS:
        return "open", f"{order.label}: {last_line}", Code.INVALID
    exited = status is None or status >= 0
    ending = f"exit status {status}" if exited else f"signal {-(status or 0)} ({_signal_name(-(status or 0))})"
    if last_line is not None:
        last_line = "" if last_line.startswith(_CRASHED) else last_line
        text = f"{order.label} ended while it was starting: {ending}"
        return "open", f"{text}: {last_line}" if last_line else text, Code.NOT_READY
    return "exit" if exited else "signal", f"{order.label} ended: {ending}", Code.NOT_READY


def is_external_kill(status: int | OSError | None) -> bool:
    """Whether a process that this server did not kill was ended from outside, by an operator or the kernel."""
    return isinstance(status, int) and -status in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def _interpreter(order: Order) -> str:
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
