"""SavedState: saves what clients have changed in an engine, and restores it in the engine that replaces it.

It saves regions, log and trace settings, and which models were loaded and unloaded. Created by `roles.py`, in the
engine's process. What is on disk is not saved, since a new engine reads it, nor are the counts, which start over.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from penstock.backends.errors import InferError
from penstock.server.v2.regions import CUDA

if TYPE_CHECKING:
    from penstock.server.serve import Server
    from penstock.server.telemetry.logs import LogLevels
    from penstock.server.v2.regions import Region

    from .child import SupervisorLink
    from .journal import JournalEntry

logger = logging.getLogger("penstock.supervisor")

_LOGS, _REGION, _MODEL, _TRACE = "logs", "region ", "model ", "trace "


class SavedState:
    """The saved state of one engine, to be used once `watch` has been called. `saved` is that of the previous engine.

    Invariant: state that `restore` has restored is saved for the next engine too: the supervisor still has it.
    """

    def __init__(self, supervisor: SupervisorLink, saved: Mapping[str, JournalEntry]) -> None:
        self._supervisor = supervisor
        self._server: Server
        self._saved = saved
        self._restored: dict[str, JournalEntry] = {}
        self._restoring: set[str] = set()
        self._regions: set[str] = set()
        self._traces: dict[str, dict[str, Any]] = {}

    def watch(self, server: Server) -> None:
        """Save changes of an engine's Server from now on; what is restored is restored there."""
        self._server = server
        regions, traces = server.shared_memory.regions, server.observability.traces
        added, dropped = regions.on_add, regions.on_drop

        def add(region: Region) -> None:
            added(region)
            self._save_region(region)

        def drop(kind: str, name: str) -> None:
            dropped(kind, name)
            self._remove_regions({region.name for region in regions})

        regions.on_add, regions.on_drop = add, drop
        traces.on_change = self._save_trace
        server.control.on_request = self._save_model

    def saving_logs(self, apply: Callable[[LogLevels], None]) -> Callable[[LogLevels], None]:
        """Return a function that applies log settings, and saves them."""

        def apply_and_save(levels: LogLevels) -> None:
            apply(levels)
            names = {"log_verbose_level": levels.verbose, "log_format": levels.format}
            names |= {f"log_{name}": getattr(levels, name) for name in ("info", "warning", "error")}
            self._supervisor.save(_LOGS, names)

        return apply_and_save

    # -- changes -----------------------------------------------------------------------------------------------

    def _save_region(self, region: Region) -> None:
        region_fields, descriptors = region.export()
        self._regions.add(region.name)
        self._supervisor.save(_REGION + region.name, {"kind": region.kind, "region": region_fields}, descriptors)

    def _remove_regions(self, remaining: set[str]) -> None:
        for name in self._regions - remaining:
            self._supervisor.save(_REGION + name, None)
        self._regions &= remaining

    def _save_model(self, name: str, change: Mapping[str, Any]) -> None:
        key = _MODEL + name
        if key in self._saved and key not in self._restoring:
            self._restored[key] = self._saved[key]  # a client has changed it since
        self._supervisor.save(key, change)

    def _save_trace(self, model: str, changes: Mapping[str, Any]) -> None:
        settings = self._traces.setdefault(model, {})
        settings.update(changes)
        self._supervisor.save(_TRACE + model, settings)

    # -- restoring ---------------------------------------------------------------------------------------------

    async def restore_settings(self) -> None:
        """Restore what needs no model, before clients can connect and refer to regions, or change settings."""
        await self._restore_all(lambda key: key == _TRACE or not key.startswith((_MODEL, _TRACE)))

    async def restore(self) -> None:
        """Load and unload the models that clients had loaded and unloaded, and restore their trace settings."""
        await self._restore_all(lambda _: True)

    async def _restore_all(self, is_due: Callable[[str], bool]) -> None:
        # more may arrive while models load
        while due := [
            key for key, entry in self._saved.items() if is_due(key) and self._restored.get(key) is not entry
        ]:
            for key in sorted(due, key=lambda key: key.startswith(_TRACE)):
                if self._restored.get(key) is not self._saved[key]:
                    self._restored[key] = self._saved[key]
                    await self.restore_key(key)

    async def restore_key(self, key: str) -> None:
        """Restore one key."""
        value, descriptors = self._saved[key]
        self._restoring.add(key)
        try:
            if key.startswith(_MODEL):
                await self._restore_model(key.removeprefix(_MODEL), value)
            elif key.startswith(_TRACE):
                model = key.removeprefix(_TRACE)
                self._traces[model] = dict(value)
                self._server.observability.traces.update(model, value)
            elif key == _LOGS:
                self._server.observability.logging.update(value)
            else:
                self._restore_region(key.removeprefix(_REGION), value, descriptors)
        except (InferError, OSError) as error:
            logger.error("%s could not be restored: %s", key, error)  # noqa: TRY400 - the reason is all
        finally:
            self._restoring.discard(key)

    async def _restore_model(self, name: str, change: Mapping[str, Any]) -> None:
        if "unload" in change:
            await self._server.control.unload(name, dependents=change["unload"])
        elif change["files"]:
            logger.error("model %s was loaded from files in a request and must be loaded again by a request", name)
        else:
            await self._server.control.load(name, change["config"])

    def _restore_region(self, name: str, value: Any, descriptors: list[int]) -> None:
        memory = self._server.shared_memory
        for old in memory.regions:
            if old.name == name:
                memory.regions.drop(old.kind, name)
        if value is None:
            return
        if descriptors or value["kind"] == CUDA:
            memory.adopt(value["kind"], value["region"], descriptors)
