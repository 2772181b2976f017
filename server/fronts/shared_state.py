"""Shared state: what is the same in the engine and in every front end: shared memory regions, and log settings.

It is changed in the engine, which has the only control plane (`front_calls.py`), and copied to the front ends, where
inference reads and writes regions. Wired by `engine_server.py` and `front.py`:

    state = SharedState(server.shared_memory, server.observability.logging)  # engine; after `logging.apply` has been
    set state.joined(link)                  # before anything else is sent to a new front end: sends all state, in order
    state.take(link, number, body)      # an IN_PLACE
    state.lost(link)

    copy = StateCopy(shared_memory, logs.apply)                          # front end
    copy.take(link, number, body, descriptors)  # a STATE

A system region is sent as the engine's own descriptor: all front ends, later ones included, read the same memory,
whatever its key names by then. A CUDA region is mapped by each front end, which may fail: the region is then registered
nowhere.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson

from penstock.backends.errors import Code, InferError
from penstock.server.telemetry.logs import LogLevels
from penstock.server.v2.regions import CUDA, SYSTEM, Region

from .kinds import IN_PLACE, STATE

if TYPE_CHECKING:
    from penstock.server.ipc.link import Link
    from penstock.server.v2.logging_settings import LogSettings
    from penstock.server.v2.shared_memory import SharedMemory

PATIENCE_S = 2.0
"""How long a client waits for front ends that do not answer before its change is reported as made."""

logger = logging.getLogger("penstock.fronts")


class StateChange:
    """One change in progress. `pending` are the Links that have not confirmed it."""

    def __init__(self, pending: set[Link], undo: Callable[[], None] | None) -> None:
        self.pending = pending
        self.undo = undo
        self.failed = ""
        self.settled = asyncio.Event()


_watching: ContextVar[list[StateChange] | None] = ContextVar("watching", default=None)


class SharedState:
    """The engine's side. Threads: the event loop's.

    Invariant: a front end is sent every change once, in order, after the state at the time it joined.
    """

    def __init__(self, memory: SharedMemory, logs: LogSettings, patience_s: float = PATIENCE_S) -> None:
        self._regions = memory.regions
        self._patience_s = patience_s
        self._links: list[Link] = []
        self._changes: dict[int, StateChange] = {}
        self._last = 0
        self._levels: LogLevels | None = None
        self._apply = logs.apply
        memory.regions.added, memory.regions.dropped = self._added, self._dropped
        logs.apply = self._logged

    @staticmethod
    def watch() -> list[StateChange]:
        """Return a list that collects all further changes made by this task and the tasks it starts."""
        changes: list[StateChange] = []
        _watching.set(changes)
        return changes

    async def settled(self, changes: Sequence[StateChange]) -> None:
        """Wait until changes are in place in every front end that answers in time.

        Raises: InferError (INVALID) if one of them failed there; it is then undone everywhere.
        """
        try:
            async with asyncio.timeout(self._patience_s):
                for change in changes:
                    await change.settled.wait()
        except TimeoutError:
            late = len({link for change in changes for link in change.pending})
            logger.warning("%d front ends did not respond to a change within %g s", late, self._patience_s)
        for change in changes:
            if change.failed:
                raise InferError(Code.INVALID, change.failed)

    def joined(self, link: Link) -> None:
        """Send a new front end all state, before anything else."""
        self._links.append(link)
        self._tell([link], {"new": True})
        if self._levels is not None:
            self._tell([link], _log(self._levels))
        for region in self._regions:
            self._share([link], region)

    def lost(self, link: Link) -> None:
        """Stop waiting for a front end that has gone."""
        if link in self._links:
            self._links.remove(link)
        for number in list(self._changes):
            self._answered(link, number)

    def take(self, link: Link, number: int, body: bytes) -> None:
        """Handle an IN_PLACE of a front end."""
        change = self._changes.get(number)
        if change is None:
            return
        if body and not change.failed:
            change.failed = body.decode("utf-8", "replace")
            logger.error("a front end rejected a change, which is rolled back: %s", change.failed)
            if change.undo is not None:
                change.undo()
        self._answered(link, number)

    def _answered(self, link: Link, number: int) -> None:
        change = self._changes[number]
        change.pending.discard(link)
        if not change.pending:
            del self._changes[number]
            change.settled.set()

    def _tell(
        self, links: Sequence[Link], said: Any, descriptors: Sequence[int] = (), undo: Callable[[], None] | None = None
    ) -> None:
        watching = _watching.get()
        if not links:
            return
        self._last += 1
        change = self._changes[self._last] = StateChange(set(links), undo)
        if watching is not None:
            watching.append(change)
        for link in links:
            link.send(STATE, self._last, orjson.dumps(said), None, descriptors)

    def _share(self, links: Sequence[Link], region: Region) -> None:
        said, descriptors = region.shared()
        self._tell(links, {"region": said, "kind": region.kind}, descriptors, partial(self._undo, region))

    def _undo(self, region: Region) -> None:
        if region in self._regions:
            self._regions.drop(region.kind, region.name)

    def _added(self, region: Region) -> None:
        self._share(self._links, region)

    def _dropped(self, kind: str, name: str) -> None:
        self._tell(self._links, {"drop": [kind, name]})

    def _logged(self, levels: LogLevels) -> None:
        self._apply(levels)
        self._levels = levels
        self._tell(self._links, _log(levels))


def _log(levels: LogLevels) -> dict[str, Any]:
    return {"log": asdict(levels)}


class StateCopy:
    """A front end's side: `memory` is what its inference reads and writes, `apply` sets what its process logs."""

    def __init__(self, memory: SharedMemory, apply: Callable[[LogLevels], None]) -> None:
        self._memory = memory
        self._apply = apply

    def take(self, link: Link, number: int, body: bytes, descriptors: list[int]) -> None:
        """Handle a STATE of the engine, and confirm it, or report the failure."""
        try:
            self._make(orjson.loads(body), descriptors)
            failed = ""
        except InferError as error:
            failed = error.message
        link.send(IN_PLACE, number, failed.encode("utf-8", "replace"))

    def _make(self, said: dict[str, Any], descriptors: list[int]) -> None:
        """Make a change; descriptors that are kept are removed from the list. Raises: InferError."""
        regions = self._memory.regions
        if "new" in said:
            for kind in (SYSTEM, CUDA) if len(regions) else ():
                regions.drop(kind)
        elif "log" in said:
            self._apply(LogLevels(**said["log"]))
        elif "drop" in said:
            regions.drop(*said["drop"])
        elif said["kind"] == SYSTEM:
            self._memory.system.adopt(**said["region"], descriptor=descriptors.pop())
        else:
            region = said["region"]
            handle = bytes.fromhex(region["raw_handle"])
            self._memory.cuda.register(region["name"], handle, region["device_id"], region["byte_size"])
