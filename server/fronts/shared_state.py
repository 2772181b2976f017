"""Shared state: what is the same in the engine and in every front end: shared memory regions, and log settings.

It is changed in the engine, which has the only control plane (`control_service.py`), and copied to the front ends,
where inference reads and writes regions. Wired by `engine_server.py` and `front.py`:

    # in the engine, once `logging.apply` is set
    state = SharedState(server.shared_memory, server.observability.logging)
    state.attach(link)                  # before anything else is sent to a new front end: sends all state, in order
    state.receive(link, number, body)   # a STATE_APPLIED
    state.detach(link)

    # in a front end
    copy = StateCopy(shared_memory, logs.apply)
    copy.receive(link, number, body, descriptors)  # a STATE

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

from .message_kinds import STATE, STATE_APPLIED

if TYPE_CHECKING:
    from penstock.server.ipc.link import Link
    from penstock.server.v2.logging_settings import LogSettings
    from penstock.server.v2.shared_memory import SharedMemory

APPLIED_WITHIN_S = 2.0
"""How long a client waits for front ends that do not answer before its change is reported as made."""

logger = logging.getLogger("penstock.fronts")


class StateChange:
    """One change in progress. `pending` are the Links that have not confirmed it."""

    def __init__(self, pending: set[Link], undo: Callable[[], None] | None) -> None:
        self.pending = pending
        self.undo = undo
        self.error = ""
        self.done = asyncio.Event()


_collected: ContextVar[list[StateChange] | None] = ContextVar("collected", default=None)


class SharedState:
    """The engine's side. Threads: the event loop's.

    Invariant: a front end is sent every change once, in order, after the state at the time it joined.
    """

    def __init__(self, memory: SharedMemory, logs: LogSettings, timeout_s: float = APPLIED_WITHIN_S) -> None:
        self._regions = memory.regions
        self._timeout_s = timeout_s
        self._links: list[Link] = []
        self._changes: dict[int, StateChange] = {}
        self._last_number = 0
        self._levels: LogLevels | None = None
        self._apply_log_levels = logs.apply
        memory.regions.on_add, memory.regions.on_drop = self._on_region_added, self._on_regions_dropped
        logs.apply = self._on_log_levels

    @staticmethod
    def collect_changes() -> list[StateChange]:
        """Return a list that collects all further changes made by this task and the tasks it starts."""
        changes: list[StateChange] = []
        _collected.set(changes)
        return changes

    async def wait_applied(self, changes: Sequence[StateChange]) -> None:
        """Wait until changes are in place in every front end that answers in time.

        Raises: InferError (INVALID) if one of them failed there; it is then undone everywhere.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                for change in changes:
                    await change.done.wait()
        except TimeoutError:
            late_count = len({link for change in changes for link in change.pending})
            logger.warning("%d front ends did not respond to a change within %g s", late_count, self._timeout_s)
        for change in changes:
            if change.error:
                raise InferError(Code.INVALID, change.error)

    def attach(self, link: Link) -> None:
        """Send a new front end all state, before anything else."""
        self._links.append(link)
        self._send_change([link], {"new": True})
        if self._levels is not None:
            self._send_change([link], _write_log_levels(self._levels))
        for region in self._regions:
            self._send_region([link], region)

    def detach(self, link: Link) -> None:
        """Stop waiting for a front end that has gone."""
        if link in self._links:
            self._links.remove(link)
        for number in list(self._changes):
            self._confirm(link, number)

    def receive(self, link: Link, number: int, body: bytes) -> None:
        """Handle a STATE_APPLIED of a front end."""
        change = self._changes.get(number)
        if change is None:
            return
        if body and not change.error:
            change.error = body.decode("utf-8", "replace")
            logger.error("a front end rejected a change, which is rolled back: %s", change.error)
            if change.undo is not None:
                change.undo()
        self._confirm(link, number)

    def _confirm(self, link: Link, number: int) -> None:
        change = self._changes[number]
        change.pending.discard(link)
        if not change.pending:
            del self._changes[number]
            change.done.set()

    def _send_change(
        self,
        links: Sequence[Link],
        change_body: Any,
        descriptors: Sequence[int] = (),
        undo: Callable[[], None] | None = None,
    ) -> None:
        collected = _collected.get()
        if not links:
            return
        self._last_number += 1
        change = self._changes[self._last_number] = StateChange(set(links), undo)
        if collected is not None:
            collected.append(change)
        for link in links:
            link.send(STATE, self._last_number, orjson.dumps(change_body), None, descriptors)

    def _send_region(self, links: Sequence[Link], region: Region) -> None:
        fields, descriptors = region.export()
        self._send_change(
            links, {"region": fields, "kind": region.kind}, descriptors, partial(self._undo_region, region)
        )

    def _undo_region(self, region: Region) -> None:
        if region in self._regions:
            self._regions.drop(region.kind, region.name)

    def _on_region_added(self, region: Region) -> None:
        self._send_region(self._links, region)

    def _on_regions_dropped(self, kind: str, name: str) -> None:
        self._send_change(self._links, {"drop": [kind, name]})

    def _on_log_levels(self, levels: LogLevels) -> None:
        self._apply_log_levels(levels)
        self._levels = levels
        self._send_change(self._links, _write_log_levels(levels))


def _write_log_levels(levels: LogLevels) -> dict[str, Any]:
    return {"log": asdict(levels)}


class StateCopy:
    """A front end's side. `memory` is what its inference uses; `apply_log_levels` sets what its process logs."""

    def __init__(self, memory: SharedMemory, apply_log_levels: Callable[[LogLevels], None]) -> None:
        self._memory = memory
        self._apply_log_levels = apply_log_levels

    def receive(self, link: Link, number: int, body: bytes, descriptors: list[int]) -> None:
        """Handle a STATE of the engine, and confirm it, or report the failure."""
        try:
            self._apply_change(orjson.loads(body), descriptors)
            error_text = ""
        except InferError as error:
            error_text = error.message
        link.send(STATE_APPLIED, number, error_text.encode("utf-8", "replace"))

    def _apply_change(self, change: dict[str, Any], descriptors: list[int]) -> None:
        """Make a change; descriptors that are kept are removed from the list. Raises: InferError."""
        regions = self._memory.regions
        if "new" in change:
            for kind in (SYSTEM, CUDA) if len(regions) else ():
                regions.drop(kind)
        elif "log" in change:
            self._apply_log_levels(LogLevels(**change["log"]))
        elif "drop" in change:
            regions.drop(*change["drop"])
        else:
            self._memory.adopt(change["kind"], change["region"], descriptors)
