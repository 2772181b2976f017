"""The program of a process that the supervisor has started: it takes the role it is assigned until told to end.

    python -m penstock.server.supervisor.child SOCKET PARENT

SOCKET is the descriptor of the control Link; PARENT the supervisor's process id. `ps -o comm` shows the role. It drains
when told to, on SIGTERM, and when the supervisor has gone.
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

from .fleet import ANSWERS, READY
from .kinds import (
    ASKED,
    ATTACH,
    BOARD,
    COUNTED,
    DRAIN,
    FAILED,
    HURRY,
    KEEP,
    KEPT,
    NEIGHBOUR,
    PING,
    PONG,
    PREPARE,
    SAID,
    START,
    UNLINKED,
)

if TYPE_CHECKING:
    from penstock.server.ipc.wire import Message
    from penstock.server.telemetry.logs import Logs

    from .journal import Kept
    from .roles import Role

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class SupervisorLink:
    """A role's connection to the supervisor, with what it received before its start.

    `kept` is the journal of the previous engine; `board` a front end's place among front ends, with the descriptors
    that came with it. Calling `end` has the process drain and end, and be replaced. `told_to_end` is set when the
    supervisor, which knows the state of the other processes, orders a drain; a signal does not set it.
    """

    def __init__(
        self, link: Link, logs: Logs, kept: dict[str, Kept], board: tuple[dict[str, list[int]], list[int]] | None,
        end: Callable[[], None],
    ) -> None:  # fmt: skip
        self._link = link
        self.end = end
        self.told_to_end = asyncio.Event()
        self.board = board
        self.logs = logs
        self.pairing = 0
        self.kept = kept

    def said(self, state: str, **more: Any) -> None:
        """Report the state of the process."""
        self._link.send(SAID, 0, json.dumps({"state": state, **more}).encode())

    def unlinked(self) -> None:
        """Report the loss of a front end's engine, with the pairing: another engine may be attached already."""
        self.said(UNLINKED, pairing=self.pairing)

    def keep(self, key: str, value: Any, descriptors: Sequence[int] = ()) -> None:
        """Have a value kept for the next engine; None removes the key."""
        self._link.send(KEEP, 0, json.dumps([key, value]).encode(), None, descriptors)


class _Process:
    """The life of the process, on its loop."""

    def __init__(self, sock: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._asked = asyncio.Event()
        self._last = True
        self._assigned: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._role: Role | None = None
        self._told: SupervisorLink | None = None
        self._kept: dict[str, Kept] = {}
        self._board: tuple[dict[str, list[int]], list[int]] | None = None
        self._early: list[tuple[int, int, socket.socket]] = []
        self._link = Link(sock, self._take, self._lost)
        for number in _STOP_SIGNALS:
            on_signal(number, lambda _: self._loop.call_soon_threadsafe(self._signalled))

    def _signalled(self) -> None:
        if not self._asked.is_set():
            self._link.send(SAID, 0, json.dumps({"state": ASKED}).encode())
        self._asked.set()

    def _end(self, *, last: bool) -> None:
        self._last = last
        self._asked.set()
        if self._told is not None:
            self._told.told_to_end.set()

    def _lost(self, why: str) -> None:
        self._asked.set()
        if not self._assigned.done():
            self._assigned.cancel()

    def _take(self, messages: list[Message]) -> None:
        for kind, number, body, _, descriptors in messages:
            if kind == START:
                self._assigned.set_result(json.loads(body))
            elif kind in {KEPT, BOARD}:
                self._keep(kind, json.loads(body), descriptors)
            elif kind == PREPARE:
                importlib.import_module(body.decode()).prepare()
                _name("spare")
            elif kind == PING:
                self._link.send(PONG, number)
            elif kind == DRAIN:
                self._end(last=bool(number))
            elif kind in {ATTACH, NEIGHBOUR}:
                self._attach(kind, number, socket.socket(fileno=descriptors.pop()))
            elif kind == HURRY and self._role is not None:
                self._role.hurry()
            elif kind == COUNTED and self._role is not None:
                self._role.counted(json.loads(body))

    def _keep(self, kind: int, said: Any, descriptors: list[int]) -> None:
        taken = descriptors[:]
        descriptors.clear()
        if kind == BOARD:
            self._board = said, taken
            return
        key, value = said
        self._kept[key] = value, taken
        if self._role is not None:
            self._role.kept(key)

    def _attach(self, kind: int, number: int, sock: socket.socket) -> None:
        if self._role is None or self._told is None:
            self._early.append((kind, number, sock))
        elif kind == ATTACH:
            self._told.pairing = number
            self._role.attach(sock)
        else:
            self._role.meet(number, sock)

    async def run(self, logs: list[Logs]) -> int:
        try:
            assigned = await self._assigned
        except asyncio.CancelledError:
            return 1  # the supervisor has gone
        from penstock.server import process
        from penstock.server.settings import Settings
        from penstock.server.telemetry.logs import Logs

        _name(assigned["name"])
        sys.path[:] = assigned["path"]
        settings = Settings(**{name: _frozen(value) for name, value in assigned["settings"].items()})
        logs.append(Logs(settings, sys.stderr, assigned["name"]))
        logs[0].start()
        process.prepare()
        told = self._told = SupervisorLink(self._link, logs[0], self._kept, self._board, self._asked.set)
        module, _, name = assigned["role"].partition(":")
        try:
            self._role = getattr(importlib.import_module(module), name)(settings, told, assigned)
            return await self._serve(self._role, told, early=assigned["early"])
        except StartError as error:
            told.said(FAILED, why=str(error))
            return 1
        finally:
            self._link.close()

    async def _serve(self, role: Role, told: SupervisorLink, *, early: bool) -> int:
        from penstock.server import process

        for each in self._early:
            self._attach(*each)
        self._early.clear()
        try:
            if early:
                await role.answer()
                told.said(ANSWERS)
            loading = asyncio.ensure_future(role.load())
            if await process.finished_first(loading, self._asked.wait()):
                if not early:
                    # reported, and sent, before anything can connect: a process that has not reported this is killed,
                    # not drained
                    told.said(ANSWERS)
                    await asyncio.sleep(0)
                    await role.answer()
                process.collect_and_freeze()
                told.said(READY, **loading.result())
                await self._asked.wait()
            dropped = await role.drain(last=self._last)
        finally:
            await role.close()
        return 1 if dropped else 0


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _name(name: str) -> None:
    """Set the name that `ps` and `top` show."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def main(words: list[str]) -> int:
    """Run the assigned role."""
    sock, parent = words
    for number in (*_STOP_SIGNALS, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    _name("starting")
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
