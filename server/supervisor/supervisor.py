"""Supervisor: the process that starts and maintains the engine and the front ends. Created by `process.py`.

`fleet.py` decides what to do; this carries it out, and reports events.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.server.ipc.wire import Message
from penstock.server.listening.sockets import StartError
from penstock.server.settings import Settings

from .children import Child, told_end
from .fleet import ANSWERS, DRAINING, ENGINE, FRONT, READY, Fleet, FleetActions, Member
from .journal import Journal
from .kinds import ASKED, ATTACH, COUNTED, DRAIN, FAILED, HURRY, KEEP, KEPT, PING, PONG, PREPARE, SAID, UNLINKED
from .neighbours import Neighbours
from .ports import Ports, places
from .watch import LOOK_S, PING_S, looked_up

if TYPE_CHECKING:
    from penstock.server.faults import Faults

logger = logging.getLogger("penstock.supervisor")

ROLES = {ENGINE: f"{__package__}.roles:EngineProcess", FRONT: f"{__package__}.roles:FrontProcess"}
SPARE_AFTER_S = 1.0
SPARE_AGAIN_S = 10.0
GRACE_S = 2.0
"""How long a process may take beyond the exit timeout before it is killed."""


class Supervisor:
    """The processes of one server: `open`, `load`, and finally `drain` and `close`, as with a Server.

    Invariants: a process that ends without having been asked to is replaced. No process that it has started outlives
    `close`.
    Threads: the event loop's, on the main thread.
    """

    def __init__(self, settings: Settings, roles: dict[str, str] | None = None) -> None:
        self._settings = settings
        self._roles = roles or ROLES
        self._loop = asyncio.get_running_loop()
        self._ports = Ports()
        self._journal = Journal()
        self._neighbours = Neighbours(settings.http_workers)
        asked = FleetActions(self._start, self._pair, self._drain_one, self._kill_one, self._hurry_one)
        self.fleet = Fleet(settings.http_workers, asked)
        self._children: dict[int, Child] = {}
        self._changed = asyncio.Event()
        self._clock: asyncio.Task[None] | None = None
        self._whole = False
        self._broken_s: float | None = None
        self._failed = ""
        self._said: dict[str, Any] = {}
        self._dropped = 0
        self._spare: Child | None = None
        self._spare_due_s = 0.0
        self._faults: Faults | None = None
        self._killed: dict[int, str] = {}
        self._unbegun: set[int] = set()
        self._pairings: dict[int, int] = {}
        self._last_pairing = 0

    # -- the interface of a Server -----------------------------------------------------------------------------

    @property
    def urls(self) -> dict[str, str]:
        """The URLs at which it listens, by name."""
        return places(self._settings)

    @property
    def status_line(self) -> str:
        """What it serves, in words."""
        return str(self._said.get("serves", ""))

    async def open(self) -> None:
        """Reserve the ports, start everything, and wait until front ends answer. Raises: StartError."""
        if not hasattr(os, "pidfd_open"):
            raise StartError("--http-workers requires Linux")
        self._settings = await self._ports.hold_for(self._settings)
        self._clock = asyncio.ensure_future(self._keep_time())
        self.fleet.begin()
        await self._begun(ANSWERS)

    async def load(self) -> list[str]:
        """Wait until all is loaded. Returns: the reason for each version that is not served. Raises: StartError."""
        await self._begun(READY)
        self._whole = True
        if self._settings.chaos:
            self._make_faults()
        return list(self._said.get("reasons", ()))

    def _make_faults(self) -> None:
        from penstock.server.faults import Faults  # for tests

        def pids(role: str) -> list[int]:
            numbers = [number for number, member in self.fleet.members.items() if member.role == role]
            return [self._children[number].pid for number in numbers if number in self._children]

        self._faults = Faults(self._settings, {role: partial(pids, role) for role in (FRONT, ENGINE)}, "supervisor")
        self._faults.start()

    def handle_hangup(self) -> None:
        """Replace every process without interrupting service."""
        if not self._whole or not self.fleet.replace():
            logger.warning("SIGHUP ignored: processes are starting or ending")
            return
        logger.info("SIGHUP: replacing every process")

    async def drain(self) -> int:
        """End every process in order. Returns: how many have dropped anything."""
        if self._faults is not None:
            self._faults.stop()
        self.fleet.drain()
        for child in self._spares():
            child.kill()
        limit_s = self._settings.drain_delay_secs + 2 * self._settings.exit_timeout_secs + GRACE_S
        try:
            async with asyncio.timeout(limit_s):
                await self._until(lambda: not self._children and not self._spare)
        except TimeoutError:
            logger.critical("%d processes did not end in time and are killed", len(self._children))
            self._dropped += len(self._children)
        return self._dropped

    async def close(self) -> None:
        """End immediately, dropping everything."""
        self.force()
        if self._clock is not None:
            self._clock.cancel()
        await self._until(lambda: not self._children and not self._spare)
        self._ports.close()
        self._journal.close()
        self._neighbours.close()

    def force(self) -> None:
        """Kill every process."""
        self.fleet.draining = True
        for child in (*self._children.values(), *self._spares()):
            child.kill()

    def _spares(self) -> list[Child]:
        return [self._spare] if self._spare else []

    async def _begun(self, state: str) -> None:
        """Wait until all have first reached a state. Raises: StartError if one cannot start."""
        await self._until(lambda: bool(self._failed) or self.fleet.reached(state))
        if self._failed:
            raise StartError(self._failed)

    async def _until(self, reached: Callable[[], bool]) -> None:
        """Wait for a condition that changes with the state of a process."""
        while not reached():
            self._changed.clear()
            await self._changed.wait()

    # -- actions of the fleet ----------------------------------------------------------------------------------

    def _start(self, member: Member, early: bool) -> None:
        settings = self._settings
        if member.role == ENGINE:
            settings = replace(settings, allow_http=False, allow_grpc=False, drain_delay_secs=0.0)
        else:
            settings = replace(settings, allow_metrics=False)
        assignment = {
            "name": member.name, "role": self._roles[member.role], "settings": asdict(settings), "path": sys.path,
            "early": early or member.role == ENGINE,
        }  # fmt: skip
        number = member.number
        take, ended = partial(self._take, number), partial(self._ended, number)
        try:
            child = self._spare or Child(take, ended)
            self._spare, child.take, child.ended = None, take, ended
            self._children[number] = child
            for key, (value, descriptors) in self._journal if member.role == ENGINE else ():
                child.tell(KEPT, 0, json.dumps([key, value]).encode(), descriptors)
            if member.role == FRONT:
                self._neighbours.enter(number, child)
            child.assign(assignment)
        except OSError as error:
            logger.error("%s could not be started: %s", member.name, error)  # noqa: TRY400 - the system's reason is all
            if number in self._children:
                self._children[number].kill()  # it has no assignment
            else:
                self._loop.call_later(LOOK_S, lambda: self.fleet.ended(number, self._loop.time()))

    def _pair(self, front: Member, engine: Member) -> None:
        self._last_pairing += 1
        self._pairings[front.number] = self._last_pairing
        ends: Sequence[socket.socket] = ()
        try:
            ends = socket.socketpair()
            for member, end in zip((front, engine), ends, strict=True):
                if member.number in self._children:
                    self._children[member.number].tell(ATTACH, self._last_pairing, descriptors=[end.fileno()])
        except OSError as error:
            logger.error("%s could not be connected to the engine: %s", front.name, error)  # noqa: TRY400 - likewise
            self._loop.call_later(LOOK_S, self._unlinked, front.number, self._last_pairing)
        finally:
            for end in ends:
                end.close()

    def _unlinked(self, number: int, pairing: int) -> None:
        """Reconnect a front end, unless that has happened since: the requests in flight would fail."""
        if self._pairings.get(number) == pairing:
            self.fleet.unlinked(number)

    def _drain_one(self, member: Member) -> None:
        if member.number in self._children:
            self._children[member.number].tell(DRAIN, int(self.fleet.draining))

    def _hurry_one(self, member: Member) -> None:
        if member.number in self._children:
            self._children[member.number].tell(HURRY)

    def _kill_one(self, member: Member) -> None:
        self._unbegun.add(member.number)
        if member.number in self._children:
            self._children[member.number].kill()

    # -- events ------------------------------------------------------------------------------------------------

    def _take(self, number: int, messages: list[Message]) -> None:
        for kind, _, body, _, descriptors in messages:
            child = self._children.get(number)
            if kind == PONG and child is not None:
                child.watch.answered()
            elif kind == KEEP:
                self._keep(number, body, descriptors)
            elif kind == SAID:
                self._hear(number, json.loads(body))

    def _keep(self, number: int, body: bytes, descriptors: list[int]) -> None:
        """Keep what an engine sends, and pass it to its replacement, if any: old front ends still make changes."""
        key, value = json.loads(body)
        fleet, generation = self.fleet, self.fleet.members[number].generation
        if generation > fleet.generation:
            return  # this is state it has restored; clients may have changed the serving engine since
        newer = fleet.following if generation == fleet.generation else fleet.generation
        for engine in fleet.of(newer, ENGINE) if newer is not None else ():
            if engine.number in self._children:
                self._children[engine.number].tell(KEPT, 0, body, descriptors)
        self._journal.keep(key, value, descriptors)
        descriptors.clear()

    def _hear(self, number: int, said: dict[str, Any]) -> None:
        state, member = said["state"], self.fleet.members[number]
        if state == FAILED:
            if self._whole:
                logger.error("%s failed to start: %s", member.name, said["why"])
            else:
                self._failed = said["why"]
        elif state == UNLINKED:
            self._unlinked(number, said["pairing"])
        elif state == ASKED:
            self.fleet.asked_to_end(number, self._loop.time())
        else:
            if member.role == ENGINE and state == READY:
                self._said = said
            generation = self.fleet.generation
            self.fleet.said(number, state, self._loop.time())
            if self.fleet.generation != generation:
                logger.info("every process has been replaced: the old ones finish their requests")
            if state == READY:
                self._tell_counts()
            if self._broken_s is not None and self.fleet.reached(READY):
                logger.info("whole again after %.2f s", self._loop.time() - self._broken_s)
                self._broken_s = None
        self._changed.set()

    def _ended(self, number: int, status: int) -> None:
        child, member = self._children.pop(number), self.fleet.members[number]
        self._neighbours.leave(number)
        self._pairings.pop(number, None)
        good = status == 0 or number in self._unbegun
        self._unbegun.discard(number)
        self._say_ended(child, member, self._killed.pop(number, "") or told_end(status), good=good)
        if not self._whole and status > 0:
            self._failed = self._failed or f"{member.name} ended: {told_end(status)}"
            self.fleet.draining = True
        following = self.fleet.following
        self.fleet.ended(number, self._loop.time())
        if following is not None and self.fleet.following is None and member.role == ENGINE:
            logger.error("processes are not replaced: the new engine ended, and the old processes continue")
        self._tell_counts()
        self._changed.set()

    def _say_ended(self, child: Child, member: Member, why: str, *, good: bool) -> None:
        if member.state == DRAINING and good:
            logger.debug("%s (process %d) has finished", member.name, child.pid)
        elif member.state == DRAINING:
            self._dropped += 1
            logger.error("%s (process %d) ended and lost unfinished requests: %s", member.name, child.pid, why)
        elif not self.fleet.draining and not self._failed:
            logger.error("%s (process %d) has ended: %s", member.name, child.pid, why)
            self._broken_s = self._broken_s or self._loop.time()

    async def _keep_time(self) -> None:
        turn = 0
        while True:
            await asyncio.sleep(LOOK_S)
            turn += 1
            now = self._loop.time()
            self.fleet.tick(now)
            self._keep_spare(now)
            for number, child in list(self._children.items()):
                if turn % round(PING_S / LOOK_S) == 0:
                    child.tell(PING, turn)
                why = child.watch.look(*looked_up(child.pid), now)
                if why and number not in self._killed:
                    self._killed[number] = f"killed, because {why}"
                    child.kill()

    def _keep_spare(self, now_s: float) -> None:
        """Keep a spare process that has imported everything, once nothing else is left to do."""
        if not self._whole or self.fleet.draining or self.fleet.following is not None or not self.fleet.reached(READY):
            self._spare_due_s = now_s + SPARE_AFTER_S
        elif self._spare is None and now_s >= self._spare_due_s:
            self._spare_due_s = now_s + SPARE_AGAIN_S
            with contextlib.suppress(OSError):
                self._spare = Child(lambda _: None, self._spare_ended)
                self._spare.tell(PREPARE, 0, self._roles[ENGINE].partition(":")[0].encode())

    def _spare_ended(self, status: int) -> None:
        self._spare = None
        self._changed.set()

    def _tell_counts(self) -> None:
        members = self.fleet.members.values()
        processes = {role: sum(each.role == role for each in members) for role in (ENGINE, FRONT)}
        counts = {
            "penstock_processes": {"supervisor": 1, **processes},
            "penstock_process_restarts_total": self.fleet.restarts,
        }
        for member in members:
            if member.role == ENGINE and member.number in self._children:
                self._children[member.number].tell(COUNTED, 0, json.dumps(counts).encode())
