"""The program of a process that the supervisor has started: it takes the role it is assigned until ordered to end.

    python -m penstock.server.supervisor.child SOCKET PARENT

SOCKET is the descriptor of the control Link; PARENT the supervisor's process id. `ps -o comm` shows the role. It drains
when ordered to, on SIGTERM, and when the supervisor has gone.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from penstock.server.ipc.link import Link
from penstock.server.listening.sockets import StartError
from penstock.server.signals import on_signal
from penstock.server.threads import new_loop

from .fleet import LISTENING, READY
from .message_kinds import (
    ATTACH,
    BOARD,
    COUNTS,
    DISCONNECTED,
    DRAIN,
    FAILED,
    FLUSH,
    NEW_NEIGHBOR,
    PING,
    PONG,
    PREPARE,
    RESTORE,
    SAVE,
    SIGNALED,
    START,
    STATE,
)

if TYPE_CHECKING:
    from penstock.server.ipc.wire import Message
    from penstock.server.telemetry.logs import Logs

    from .journal import JournalEntry
    from .roles import Role

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class SupervisorLink:
    """A role's connection to the supervisor, with what it received before its start.

    `saved` is the journal of the previous engine; `board` a front end's slot among front ends, with the descriptors
    that came with it. Calling `request_end` has the process drain and end, and be replaced. `drain_ordered` is set when
    the supervisor, which knows the state of the other processes, orders a drain; a signal does not set it.
    """

    def __init__(
        self, link: Link, logs: Logs, saved: dict[str, JournalEntry],
        board: tuple[dict[str, list[int]], list[int]] | None, request_end: Callable[[], None],
    ) -> None:  # fmt: skip
        self._link = link
        self.request_end = request_end
        self.drain_ordered = asyncio.Event()
        self.board = board
        self.logs = logs
        self.pairing = 0
        self.saved = saved

    def report_state(self, state: str, **details: Any) -> None:
        """Report the state of the process."""
        self._link.send(STATE, 0, json.dumps({"state": state, **details}).encode())

    def report_disconnect(self) -> None:
        """Report the loss of a front end's engine, with the pairing: another engine may be attached already."""
        self.report_state(DISCONNECTED, pairing=self.pairing)

    def save(self, key: str, value: Any, descriptors: Sequence[int] = ()) -> None:
        """Have a value saved for the next engine; None removes the key."""
        self._link.send(SAVE, 0, json.dumps([key, value]).encode(), None, descriptors)


class _Process:
    """The life of the process, on its loop."""

    def __init__(self, sock: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._ending = asyncio.Event()
        self._all_end = True
        self._assignment: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._role: Role | None = None
        self._supervisor: SupervisorLink | None = None
        self._saved: dict[str, JournalEntry] = {}
        self._board: tuple[dict[str, list[int]], list[int]] | None = None
        self._early_sockets: list[tuple[int, int, socket.socket]] = []
        self._link = Link(sock, self._receive, self._on_disconnect)
        for number in _STOP_SIGNALS:
            on_signal(number, lambda _: self._loop.call_soon_threadsafe(self._on_signal))

    def _on_signal(self) -> None:
        if not self._ending.is_set():
            self._link.send(STATE, 0, json.dumps({"state": SIGNALED}).encode())
        self._ending.set()

    def _end(self, *, last: bool) -> None:
        self._all_end = last
        self._ending.set()
        if self._supervisor is not None:
            self._supervisor.drain_ordered.set()

    def _on_disconnect(self, reason: str) -> None:
        self._ending.set()
        if not self._assignment.done():
            self._assignment.cancel()

    def _receive(self, messages: list[Message]) -> None:
        for kind, number, body, _, descriptors in messages:
            if kind == START:
                self._assignment.set_result(json.loads(body))
            elif kind in {RESTORE, BOARD}:
                self._store(kind, json.loads(body), descriptors)
            elif kind == PREPARE:
                importlib.import_module(body.decode()).prepare()
                _set_process_name("spare")
            elif kind == PING:
                self._link.send(PONG, number)
            elif kind == DRAIN:
                self._end(last=bool(number))
            elif kind in {ATTACH, NEW_NEIGHBOR}:
                self._attach(kind, number, socket.socket(fileno=descriptors.pop()))
            elif kind == FLUSH and self._role is not None:
                self._role.flush()
            elif kind == COUNTS and self._role is not None:
                self._role.update_counts(json.loads(body))

    def _store(self, kind: int, body: Any, descriptors: list[int]) -> None:
        owned = descriptors[:]
        descriptors.clear()
        if kind == BOARD:
            self._board = body, owned
            return
        key, value = body
        self._saved[key] = value, owned
        if self._role is not None:
            self._role.on_saved_change(key)

    def _attach(self, kind: int, number: int, sock: socket.socket) -> None:
        if self._role is None or self._supervisor is None:
            self._early_sockets.append((kind, number, sock))
        elif kind == ATTACH:
            self._supervisor.pairing = number
            self._role.attach(sock)
        else:
            self._role.add_neighbor(number, sock)

    async def run(self, logs: list[Logs]) -> int:
        try:
            assignment = await self._assignment
        except asyncio.CancelledError:
            return 1  # the supervisor has gone
        from penstock.server import process
        from penstock.server.settings import Settings
        from penstock.server.telemetry.logs import Logs

        _set_process_name(assignment["name"])
        sys.path[:] = assignment["path"]
        settings = Settings(**{name: _as_hashable(value) for name, value in assignment["settings"].items()})
        logs.append(Logs(settings, sys.stderr, assignment["name"]))
        logs[0].start()
        process.prepare()
        supervisor = self._supervisor = SupervisorLink(self._link, logs[0], self._saved, self._board, self._ending.set)
        module, _, name = assignment["role"].partition(":")
        try:
            self._role = getattr(importlib.import_module(module), name)(settings, supervisor, assignment)
            return await self._serve(self._role, supervisor, early=assignment["early"])
        except StartError as error:
            supervisor.report_state(FAILED, reason=str(error))
            return 1
        finally:
            self._link.close()

    async def _serve(self, role: Role, supervisor: SupervisorLink, *, early: bool) -> int:
        from penstock.server import process

        for each in self._early_sockets:
            self._attach(*each)
        self._early_sockets.clear()
        try:
            if early:
                await role.listen()
                supervisor.report_state(LISTENING)
            loading = asyncio.ensure_future(role.load())
            if await process.finished_first(loading, self._ending.wait()):
                if not early:
                    # reported, and sent, before anything can connect: a process that has not reported this is killed,
                    # not drained
                    supervisor.report_state(LISTENING)
                    await asyncio.sleep(0)
                    await role.listen()
                process.collect_and_freeze()
                supervisor.report_state(READY, **loading.result())
                await self._ending.wait()
            dropped = await role.drain(last=self._all_end)
        finally:
            await role.close()
        return 1 if dropped else 0


def _as_hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _set_process_name(name: str) -> None:
    """Set the name that `ps` and `top` show."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def main(arguments: list[str]) -> int:
    """Run the assigned role."""
    sock, parent = arguments
    for number in (*_STOP_SIGNALS, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    _set_process_name("starting")
    if os.getppid() != int(parent):
        return 1
    loop = new_loop()
    logs: list[Logs] = []

    async def run() -> int:
        return await _Process(socket.socket(fileno=int(sock))).run(logs)

    try:
        return loop.run_until_complete(run())
    finally:
        for number in _STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        loop.close()
        for each in logs:
            each.stop()


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(status)  # a load or a hook that hangs in native code would block a normal exit
