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

from .message_kinds import START
from .process_watch import ProcessWatch

CHILD_MODULE = "penstock.server.supervisor.child"


class Child:
    """One process, from its start to its end. It is idle until it receives its START.

    `on_messages` is called with its messages, and `on_exit` once, when it has ended, with the exit status, or the
    negated number of a signal; both may be replaced. It runs in a session of its own: signals from a terminal reach it
    only through the supervisor.
    Invariant: it never outlives the supervisor, except to finish accepted requests.
    Threads: the event loop's, on the main thread (the child is signaled when the thread that started it ends).
    """

    def __init__(self, on_messages: Callable[[list[Message]], None], on_exit: Callable[[int], None]) -> None:
        self.watch = ProcessWatch()
        self.on_messages = on_messages
        self.on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        try:
            # -P: as with the command `penstock`, the working directory is not on the import path
            command = [sys.executable, "-P", "-m", CHILD_MODULE, str(theirs.fileno()), str(os.getpid())]
            self._process = subprocess.Popen(  # noqa: S603 - this very Python
                command, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),), start_new_session=True
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._pidfd = os.pidfd_open(self._process.pid)
        self._loop.add_reader(self._pidfd, self._reap)
        self._link = Link(ours, self._receive, lambda _: None)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def exited(self) -> bool:
        """Whether it has ended."""
        return self._process.returncode is not None

    def assign(self, assignment: dict[str, Any]) -> None:
        """Send its assignment."""
        self.send(START, 0, json.dumps(assignment).encode())

    def send(self, kind: int, number: int = 0, body: bytes = b"", descriptors: Sequence[int] = ()) -> None:
        """Send a message, and descriptors with it, which the caller must still close."""
        self._link.send(kind, number, body, descriptors=descriptors)

    def kill(self) -> None:
        """Kill it at once; its own child processes are killed when it is reaped."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        if not self.exited:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def _receive(self, messages: list[Message]) -> None:
        self.on_messages(messages)

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        # a child forked by a hook holds the listening sockets: connections would reach it, and hang. The group's number
        # stays reserved until its first process is reaped
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        status = self._process.wait()
        self._link.read_remaining()
        self._link.close()
        self.on_exit(status)


def describe_exit(status: int) -> str:
    """Describe how a process has ended."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"
