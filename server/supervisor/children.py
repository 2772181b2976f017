"""Child: one process that the supervisor has started, as the supervisor sees it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from penstock.server.ipc.link import Link
from penstock.server.ipc.wire import Message

from .kinds import START
from .watch import ProcessWatch

CHILD = "penstock.server.supervisor.child"


class Child:
    """One process, from its start to its end. It does nothing before it is given its START.

    `take` is called with what it says, and `ended` once, when it has ended, with how: an exit status, or a signal's
    number below 0; both may be replaced. It is in a session of its own: what a terminal sends reaches it through the
    supervisor only.
    Invariant: it never outlives the supervisor, unless it is finishing what it has accepted.
    Threads: the event loop's, on the main thread (it would be told to end with another one).
    """

    def __init__(self, take: Callable[[list[Message]], None], ended: Callable[[int], None]) -> None:
        self.watch = ProcessWatch()
        self.take = take
        self.ended = ended
        self._loop = asyncio.get_running_loop()
        here, there = socket.socketpair()
        try:
            # -P: the folder it is started in is not for imports, as for the command `penstock`
            words = [sys.executable, "-P", "-m", CHILD, str(there.fileno()), str(os.getpid())]
            self._process = subprocess.Popen(  # noqa: S603 - this very Python
                words, stdin=subprocess.DEVNULL, pass_fds=(there.fileno(),), start_new_session=True
            )
        except BaseException:
            here.close()
            raise
        finally:
            there.close()
        self._ends = os.pidfd_open(self._process.pid)
        self._loop.add_reader(self._ends, self._reap)
        self._link = Link(here, self._taken, lambda _: None)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def gone(self) -> bool:
        """Whether it has ended."""
        return self._process.returncode is not None

    def assign(self, assignment: dict[str, Any]) -> None:
        """Give it what it is to be."""
        self.tell(START, 0, json.dumps(assignment).encode())

    def tell(self, kind: int, number: int = 0, body: bytes = b"", descriptors: Sequence[int] = ()) -> None:
        """Send it a message, and descriptors with it, which the caller still has to close."""
        self._link.send(kind, number, body, descriptors=descriptors)

    def kill(self) -> None:
        """End it here and now; what it has started ends with it."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        if not self.gone:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def _taken(self, messages: list[Message]) -> None:
        self.take(messages)

    def _reap(self) -> None:
        self._loop.remove_reader(self._ends)
        os.close(self._ends)
        # what a hook has forked holds the sockets that it listened on: connections would go there, and hang.
        # A group has its number for as long as its first process is not reaped
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        status = self._process.wait()
        self._link.read_rest()
        self._link.close()
        self.ended(status)


def told_end(status: int) -> str:
    """Say how a process has ended."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"
