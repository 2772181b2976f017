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

from . import message_kinds
from .child_process import Child, describe_exit
from .fleet import DRAINING, ENGINE, FRONT, LISTENING, READY, Fleet, FleetActions, Member
from .journal import Journal
from .neighbors import Neighbors
from .process_watch import CHECK_S, PING_S, read_main_thread
from .reserved_ports import ReservedPorts, port_urls

if TYPE_CHECKING:
    from penstock.server.faults import Faults

logger = logging.getLogger("penstock.supervisor")

ROLES = {ENGINE: f"{__package__}.roles:EngineProcess", FRONT: f"{__package__}.roles:FrontProcess"}
SPARE_AFTER_S = 1.0
SPARE_RETRY_S = 10.0
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
        self._ports = ReservedPorts()
        self._journal = Journal()
        self._neighbors = Neighbors(settings.http_workers)
        actions = FleetActions(
            start=self._start, pair=self._pair, kill=self._kill_one,
            drain=lambda member: self._send(member, message_kinds.DRAIN, int(self.fleet.draining)),
            flush=lambda member: self._send(member, message_kinds.FLUSH),
        )  # fmt: skip
        self.fleet = Fleet(settings.http_workers, actions)
        self._children: dict[int, Child] = {}
        self._state_changed = asyncio.Event()
        self._ticking: asyncio.Task[None] | None = None
        self._loaded = False
        self._degraded_since_s: float | None = None
        self._start_error = ""
        self._engine_report: dict[str, Any] = {}
        self._dropping_processes = self._last_pairing = 0
        self._spare: Child | None = None
        self._spare_due_s = 0.0
        self._faults: Faults | None = None
        self._kill_reasons: dict[int, str] = {}
        self._killed_early: set[int] = set()
        self._pairings: dict[int, int] = {}

    # -- the interface of a Server -----------------------------------------------------------------------------

    @property
    def urls(self) -> dict[str, str]:
        """The URLs at which it listens, by name."""
        return port_urls(self._settings)

    @property
    def status_line(self) -> str:
        """What it serves, in words."""
        return str(self._engine_report.get("serves", ""))

    async def open(self) -> None:
        """Reserve the ports, start everything, and wait until front ends answer. Raises: StartError."""
        if not hasattr(os, "pidfd_open"):
            raise StartError("--http-workers requires Linux")
        self._settings = await self._ports.reserve_for(self._settings)
        self._ticking = asyncio.ensure_future(self._tick_forever())
        self.fleet.begin()
        await self._wait_for_state(LISTENING)

    async def load(self) -> list[str]:
        """Wait until all is loaded. Returns: the reason for each version that is not served. Raises: StartError."""
        await self._wait_for_state(READY)
        self._loaded = True
        if self._settings.chaos:
            self._make_faults()
        return list(self._engine_report.get("reasons", ()))

    def _make_faults(self) -> None:
        from penstock.server.faults import Faults  # for tests

        def pids(role: str) -> list[int]:
            numbers = [number for number, member in self.fleet.members.items() if member.role == role]
            return [self._children[number].pid for number in numbers if number in self._children]

        self._faults = Faults(self._settings, {role: partial(pids, role) for role in (FRONT, ENGINE)}, "supervisor")
        self._faults.start()

    def handle_hangup(self) -> None:
        """Replace every process without interrupting service."""
        if self._loaded and self.fleet.replace():
            logger.info("SIGHUP: replacing every process")
        else:
            logger.warning("SIGHUP ignored: processes are starting or ending")

    async def drain(self) -> int:
        """End every process in order. Returns: how many have dropped anything."""
        if self._faults is not None:
            self._faults.stop()
        self.fleet.drain()
        if self._spare is not None:
            self._spare.kill()
        limit_s = self._settings.drain_delay_secs + 2 * self._settings.exit_timeout_secs + GRACE_S
        try:
            async with asyncio.timeout(limit_s):
                await self._wait_until(lambda: not self._children and not self._spare)
        except TimeoutError:
            logger.critical("%d processes did not end in time and are killed", len(self._children))
            self._dropping_processes += len(self._children)
        return self._dropping_processes

    async def close(self) -> None:
        """End immediately, dropping everything."""
        self.force()
        if self._ticking is not None:
            self._ticking.cancel()
        await self._wait_until(lambda: not self._children and not self._spare)
        self._ports.close()
        self._journal.close()
        self._neighbors.close()

    def force(self) -> None:
        """Kill every process."""
        self.fleet.draining = True
        for child in (*self._children.values(), *([self._spare] if self._spare else ())):
            child.kill()

    async def _wait_for_state(self, state: str) -> None:
        """Wait until all have first reached a state. Raises: StartError if one cannot start."""
        await self._wait_until(lambda: bool(self._start_error) or self.fleet.has_reached(state))
        if self._start_error:
            raise StartError(self._start_error)

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition that changes with the state of a process."""
        while not condition():
            self._state_changed.clear()
            await self._state_changed.wait()

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
        on_messages, on_exit = partial(self._receive, number), partial(self._on_exit, number)
        try:
            child = self._spare or Child(on_messages, on_exit)
            self._spare, child.on_messages, child.on_exit = None, on_messages, on_exit
            self._children[number] = child
            for key, (value, descriptors) in self._journal if member.role == ENGINE else ():
                child.send(message_kinds.RESTORE, 0, json.dumps([key, value]).encode(), descriptors)
            if member.role == FRONT:
                self._neighbors.add(number, child)
            child.assign(assignment)
        except OSError as error:
            logger.error("%s could not be started: %s", member.name, error)  # noqa: TRY400 - the system's reason is all
            if number in self._children:
                self._children[number].kill()  # it has no assignment
            else:
                self._loop.call_later(CHECK_S, lambda: self.fleet.on_exit(number, self._loop.time()))

    def _pair(self, front: Member, engine: Member) -> None:
        self._last_pairing += 1
        self._pairings[front.number] = self._last_pairing
        ends: Sequence[socket.socket] = ()
        try:
            ends = socket.socketpair()
            for member, end in zip((front, engine), ends, strict=True):
                self._send(member, message_kinds.ATTACH, self._last_pairing, descriptors=[end.fileno()])
        except OSError as error:
            logger.error("%s could not be connected to the engine: %s", front.name, error)  # noqa: TRY400 - likewise
            self._loop.call_later(CHECK_S, self._on_disconnect, front.number, self._last_pairing)
        finally:
            for end in ends:
                end.close()

    def _on_disconnect(self, number: int, pairing: int) -> None:
        """Reconnect a front end, unless that has happened since: the requests in flight would fail."""
        if self._pairings.get(number) == pairing:
            self.fleet.on_disconnect(number)

    def _kill_one(self, member: Member) -> None:
        self._killed_early.add(member.number)
        if member.number in self._children:
            self._children[member.number].kill()

    def _send(
        self, member: Member, kind: int, number: int = 0, body: bytes = b"", descriptors: Sequence[int] = ()
    ) -> None:
        """Send a message to a process, unless it could not be started."""
        if member.number in self._children:
            self._children[member.number].send(kind, number, body, descriptors)

    # -- events ------------------------------------------------------------------------------------------------

    def _receive(self, number: int, messages: list[Message]) -> None:
        for kind, _, body, _, descriptors in messages:
            child = self._children.get(number)
            if kind == message_kinds.PONG and child is not None:
                child.watch.on_pong()
            elif kind == message_kinds.SAVE:
                self._save(number, body, descriptors)
            elif kind == message_kinds.STATE:
                self._on_state(number, json.loads(body))

    def _save(self, number: int, body: bytes, descriptors: list[int]) -> None:
        """Save what an engine sends, and pass it to its replacement, if any: old front ends still make changes."""
        key, value = json.loads(body)
        fleet, generation = self.fleet, self.fleet.members[number].generation
        if generation > fleet.generation:
            return  # this is state it has restored; clients may have changed the serving engine since
        newer = fleet.next_generation if generation == fleet.generation else fleet.generation
        for engine in fleet.members_of(newer, ENGINE) if newer is not None else ():
            self._send(engine, message_kinds.RESTORE, 0, body, descriptors)
        self._journal.put(key, value, descriptors)
        descriptors.clear()

    def _on_state(self, number: int, report: dict[str, Any]) -> None:
        state, member = report["state"], self.fleet.members[number]
        if state == message_kinds.FAILED:
            if self._loaded:
                logger.error("%s failed to start: %s", member.name, report["reason"])
            else:
                self._start_error = report["reason"]
        elif state == message_kinds.DISCONNECTED:
            self._on_disconnect(number, report["pairing"])
        elif state == message_kinds.SIGNALED:
            self.fleet.on_signal(number, self._loop.time())
        else:
            if member.role == ENGINE and state == READY:
                self._engine_report = report
            generation = self.fleet.generation
            self.fleet.on_state(number, state, self._loop.time())
            if self.fleet.generation != generation:
                logger.info("every process has been replaced: the old ones finish their requests")
            if state == READY:
                self._send_counts()
            if self._degraded_since_s is not None and self.fleet.has_reached(READY):
                logger.info("every process is ready again after %.2f s", self._loop.time() - self._degraded_since_s)
                self._degraded_since_s = None
        self._state_changed.set()

    def _on_exit(self, number: int, status: int) -> None:
        child, member = self._children.pop(number), self.fleet.members[number]
        self._neighbors.remove(number)
        self._pairings.pop(number, None)
        is_clean = status == 0 or number in self._killed_early
        self._killed_early.discard(number)
        self._log_exit(child, member, self._kill_reasons.pop(number, "") or describe_exit(status), is_clean=is_clean)
        if not self._loaded and status > 0:
            self._start_error = self._start_error or f"{member.name} ended: {describe_exit(status)}"
            self.fleet.draining = True
        next_generation = self.fleet.next_generation
        self.fleet.on_exit(number, self._loop.time())
        if next_generation is not None and self.fleet.next_generation is None and member.role == ENGINE:
            logger.error("processes are not replaced: the new engine ended, and the old processes continue")
        self._send_counts()
        self._state_changed.set()

    def _log_exit(self, child: Child, member: Member, reason: str, *, is_clean: bool) -> None:
        if member.state == DRAINING and is_clean:
            logger.debug("%s (process %d) has finished", member.name, child.pid)
        elif member.state == DRAINING:
            self._dropping_processes += 1
            logger.error("%s (process %d) ended and lost unfinished requests: %s", member.name, child.pid, reason)
        elif not self.fleet.draining and not self._start_error:
            logger.error("%s (process %d) has ended: %s", member.name, child.pid, reason)
            self._degraded_since_s = self._degraded_since_s or self._loop.time()

    async def _tick_forever(self) -> None:
        ticks = 0
        while True:
            await asyncio.sleep(CHECK_S)
            ticks += 1
            now_s = self._loop.time()
            self.fleet.tick(now_s)
            self._keep_spare(now_s)
            for number, child in list(self._children.items()):
                if ticks % round(PING_S / CHECK_S) == 0:
                    child.send(message_kinds.PING, ticks)
                reason = child.watch.check(*read_main_thread(child.pid), now_s)
                if reason and number not in self._kill_reasons:
                    self._kill_reasons[number] = f"killed, because {reason}"
                    child.kill()

    def _keep_spare(self, now_s: float) -> None:
        """Keep a spare process that has imported everything, once nothing else is left to do."""
        fleet = self.fleet
        if not self._loaded or fleet.draining or fleet.next_generation is not None or not fleet.has_reached(READY):
            self._spare_due_s = now_s + SPARE_AFTER_S
        elif self._spare is None and now_s >= self._spare_due_s:
            self._spare_due_s = now_s + SPARE_RETRY_S
            with contextlib.suppress(OSError):
                self._spare = Child(lambda _: None, self._on_spare_exit)
                self._spare.send(message_kinds.PREPARE, 0, self._roles[ENGINE].partition(":")[0].encode())

    def _on_spare_exit(self, status: int) -> None:
        self._spare = None
        self._state_changed.set()

    def _send_counts(self) -> None:
        members = self.fleet.members.values()
        processes = {role: sum(each.role == role for each in members) for role in (ENGINE, FRONT)}
        counts = {
            "penstock_processes": {"supervisor": 1, **processes},
            "penstock_process_restarts_total": self.fleet.restarts,
        }
        for member in members:
            if member.role == ENGINE:
                self._send(member, message_kinds.COUNTS, 0, json.dumps(counts).encode())
