"""Lasting: keeps what clients have told an engine, and restores it in the engine that replaces it.

It keeps regions, log and trace settings, and which models were loaded and unloaded. Created by `roles.py`, in the
engine's process. What is on disk is not kept, since a new engine reads it, nor are the counts, which start over.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from penstock.backends.errors import InferError
from penstock.server.v2.regions import SYSTEM

if TYPE_CHECKING:
    from penstock.server.fronts.engine_server import EngineServer
    from penstock.server.telemetry.logs import LogLevels
    from penstock.server.v2.regions import Region

    from .child import SupervisorLink
    from .journal import Kept

logger = logging.getLogger("penstock.supervisor")

_LOGS, _REGION, _MODEL, _TRACE = "logs", "region ", "model ", "trace "


class Lasting:
    """The kept state of one engine. `kept` is that of the previous engine, by key.

    Invariant: state that `put_back` has restored is kept for the next engine too: the supervisor still has it.
    """

    def __init__(self, told: SupervisorLink, kept: Mapping[str, Kept]) -> None:
        self._told = told
        self._kept = kept
        self._begun: dict[str, Kept] = {}
        self._under_way: set[str] = set()
        self._regions: set[str] = set()
        self._traces: dict[str, dict[str, Any]] = {}

    def watch(self, server: EngineServer) -> None:
        """Keep changes from now on."""
        regions, traces = server.server.shared_memory.regions, server.server.observability.traces
        added, dropped = regions.added, regions.dropped

        def add(region: Region) -> None:
            added(region)
            self._add(region)

        def drop(kind: str, name: str) -> None:
            dropped(kind, name)
            self._drop({region.name for region in regions})

        regions.added, regions.dropped = add, drop
        traces.changed = self._trace
        server.server.control.on_request = self._model

    def logs(self, apply: Callable[[LogLevels], None]) -> Callable[[LogLevels], None]:
        """Return a function that applies log settings, and keeps them."""

        def applied(levels: LogLevels) -> None:
            apply(levels)
            names = {"log_verbose_level": levels.verbose, "log_format": levels.format}
            names |= {f"log_{name}": getattr(levels, name) for name in ("info", "warning", "error")}
            self._told.keep(_LOGS, names)

        return applied

    # -- changes -----------------------------------------------------------------------------------------------

    def _add(self, region: Region) -> None:
        said, descriptors = region.shared()
        self._regions.add(region.name)
        self._told.keep(_REGION + region.name, {"kind": region.kind, "region": said}, descriptors)

    def _drop(self, left: set[str]) -> None:
        for name in self._regions - left:
            self._told.keep(_REGION + name, None)
        self._regions &= left

    def _model(self, name: str, how: Mapping[str, Any]) -> None:
        key = _MODEL + name
        if key in self._kept and key not in self._under_way:
            self._begun[key] = self._kept[key]  # a client has changed it since
        self._told.keep(key, how)

    def _trace(self, model: str, changes: Mapping[str, Any]) -> None:
        said = self._traces.setdefault(model, {})
        said.update(changes)
        self._told.keep(_TRACE + model, said)

    # -- restoring ---------------------------------------------------------------------------------------------

    async def put_back_first(self, server: EngineServer) -> None:
        """Restore what needs no model, before clients can connect and refer to regions, or change settings."""
        await self._put_back(server, lambda key: key == _TRACE or not key.startswith((_MODEL, _TRACE)))

    async def put_back(self, server: EngineServer) -> None:
        """Load and unload the models that clients had loaded and unloaded, and restore their trace settings."""
        await self._put_back(server, lambda _: True)

    async def _put_back(self, server: EngineServer, now: Callable[[str], bool]) -> None:
        # more may arrive while models load
        while left := [key for key, kept in self._kept.items() if now(key) and self._begun.get(key) is not kept]:
            for key in sorted(left, key=lambda key: key.startswith(_TRACE)):
                if self._begun.get(key) is not self._kept[key]:
                    self._begun[key] = self._kept[key]
                    await self.put_back_one(server, key)

    async def put_back_one(self, server: EngineServer, key: str) -> None:
        """Restore one key."""
        said, descriptors = self._kept[key]
        self._under_way.add(key)
        try:
            if key.startswith(_MODEL):
                await self._put_back_model(server, key.removeprefix(_MODEL), said)
            elif key.startswith(_TRACE):
                model = key.removeprefix(_TRACE)
                self._traces[model] = dict(said)
                server.server.observability.traces.update(model, said)
            elif key == _LOGS:
                server.server.observability.logging.update(said)
            else:
                self._put_back_region(server, key.removeprefix(_REGION), said, descriptors)
        except (InferError, OSError) as error:
            logger.error("%s could not be restored: %s", key, error)  # noqa: TRY400 - the reason is all
        finally:
            self._under_way.discard(key)

    async def _put_back_model(self, server: EngineServer, name: str, how: Mapping[str, Any]) -> None:
        if "unload" in how:
            await server.server.control.unload(name, dependents=how["unload"])
        elif how["files"]:
            logger.error("model %s was loaded from files in a request and must be loaded again by a request", name)
        else:
            await server.server.control.load(name, how["config"])

    def _put_back_region(self, server: EngineServer, name: str, said: Any, descriptors: list[int]) -> None:
        memory = server.server.shared_memory
        for old in memory.regions:
            if old.name == name:
                memory.regions.drop(old.kind, name)
        if said is None:
            return
        region = said["region"]
        if said["kind"] == SYSTEM:
            if descriptors:
                memory.system.adopt(**region, descriptor=descriptors.pop())
        else:
            memory.cuda.register(name, bytes.fromhex(region["raw_handle"]), region["device_id"], region["byte_size"])
