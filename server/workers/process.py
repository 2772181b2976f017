"""Process: the system's side of a worker, spawned, waited for and reaped. Made by `worker.py`."""

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
"""What a worker exits with when its Python cannot run it; its last line says why. As in child.py."""
_CRASHED = "Extension modules: "
"""How the last line begins that faulthandler writes of a crash: it does not say why."""
_PACKAGES = ("server", "batching", "backends")
_CHILD = Path(__file__).parent / "child.py"


class Process:
    """One process and all that it starts, which is its process group. On a thread of its own, for three reasons.

    Spawning takes a millisecond or more, which no loop has. The thread waits for the end, so that nobody polls. And
    the system kills the child when the very thread that spawned it ends (child.py asks for that): this one ends when
    the child has, or with this whole process, even if that is killed.

    `exited` is called once, on the loop: with the exit status (below 0: the signal), or with why it could not be
    spawned. By then the process is reaped and its group is killed.
    Ownership: `descriptors`, which the child gets, are closed here; the last one becomes its output.
    Threads: the event loop's, but for `_live`; `_lock` keeps `kill` from a process that is reaped.
    """

    def __init__(
        self, order: Order, descriptors: tuple[int, int, int], exited: Callable[[int | OSError], None]
    ) -> None:
        self.pid = 0
        """0 until it is spawned."""
        self._order = order
        self._descriptors = descriptors
        self._exited = exited
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._killed = False
        self._reaped = False
        threading.Thread(target=self._live, name="worker", daemon=True).start()

    def kill(self) -> None:
        """Kill the process and what it has started, now or as soon as it is there."""
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
        except (ValueError, subprocess.SubprocessError) as error:  # a NUL in a path, say
            ended = OSError(0, str(error))
        else:
            ended = self._outlived(process)
        finally:
            for descriptor in self._descriptors:
                os.close(descriptor)
        with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits
            self._loop.call_soon_threadsafe(self._exited, ended)
        self._exited = _nobody  # who is called holds this

    def _outlived(self, process: subprocess.Popen[bytes]) -> int:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = ()  # type: ignore[assignment]
        with self._lock:
            self.pid = process.pid
            if self._killed:
                _kill_group(process.pid)
        # a group has its number for as long as its first process is not reaped
        with contextlib.suppress(ChildProcessError):  # where SIGCHLD is ignored, the system has reaped it
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
    """Have programs that come with a Python of its own found first."""
    folder = os.path.dirname(order.interpreter)  # noqa: PTH120 - "" for a name without one
    return {"PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}"} if folder else {}


def _nobody(_: int | OSError) -> None:
    """Be called of a process that has ended before."""


def ending_of(order: Order, ended: int | OSError | None, last: str | None) -> tuple[str, str, Code]:
    """Say how a process has ended by itself. `last` is the last line of its output, for one that was not open yet.

    Returns: the reason as metrics have it, and what its callers are told.
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
    """Whether a process that nobody here has killed was ended from outside: by an operator, or by the kernel."""
    return isinstance(ended, int) and -ended in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def _python(order: Order) -> str:
    return order.interpreter or sys.executable


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time one
        return "unnamed"


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _folders() -> list[str]:
    """Give where the packages are that a worker imports, as child.py takes them."""
    found = []
    for name in _PACKAGES:
        module = importlib.import_module(f"penstock.{name}")
        found.append(f"{name}={Path(module.__file__ or '').parent}")
    return found
