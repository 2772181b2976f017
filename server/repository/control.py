"""ModelControl: loads, swaps and unloads models of a running server: at start, on request, or when files change.

Made by the composition root. Called by it and by the endpoints of both protocols. Source of codes and texts: Triton
core, model_repository_manager.cc.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from penstock.backends.errors import Code, InferError

from . import overrides
from .control_options import ControlOptions
from .dependents import Dependents, Locks
from .findings import Finding, log_findings
from .load_order import sort_by_dependency
from .poll_history import PollHistory
from .repository import Repository
from .scan import ModelEntry
from .states import ModelState
from .transitions import LoadFailedError, OpensModels, Transitions

logger = logging.getLogger("penstock.repository")

NOT_ALLOWED = "explicit model load / unload is not allowed if polling is enabled"
ALL_MODELS = "*"


class ModelControl:
    """Loads and unloads models by name.

    Invariants: loads and unloads of one model run one after another, those of different models concurrently. What is
    being served continues until its complete replacement is ready; requests it had accepted are finished. A failed load
    changes nothing that is served. A load that has begun finishes, even if its caller has disconnected.
    Threads: the event loop's; the disk is touched on other threads.
    """

    def __init__(self, repository: Repository, engine: OpensModels, choices: ControlOptions | None = None) -> None:
        self._repository = repository
        self._options = choices or ControlOptions()
        self._transitions = Transitions(engine, self._options.max_concurrent_loads, self._options.max_retries)
        self._locks: Locks = weakref.WeakValueDictionary()
        self._dependents = Dependents(repository, self._transitions, self._locks)
        self._history = PollHistory()
        self.on_request: Callable[[str, dict[str, Any]], None] = lambda _name, _how: None
        """Called after each load or unload that was requested."""

    @property
    def is_explicit(self) -> bool:
        """Whether models may be loaded and unloaded by name: --model-control-mode explicit."""
        return self._options.mode == "explicit"

    # -- at start ----------------------------------------------------------------------------------------------

    async def start(self) -> list[str]:
        """Load the models configured for start, and start polling if that is the mode.

        Returns: why each unserved version is not served, and the mistakes that concern no model, for --exit-on-error.
        """
        if self.is_explicit and ALL_MODELS not in self._options.startup_models:
            reasons = await self._start_named()
        else:
            reasons = await self._start_all()
        self._repository.startup_finished = True
        for name, record in self._repository.records.items():
            for status in record.statuses():
                if status.state is not ModelState.READY:
                    title = f"model '{name}' version {status.version}" if status.version else f"model '{name}'"
                    reasons.append(f"{title}: {status.reason}")
        if self._options.mode == "poll" and self._options.poll_interval_s:
            self._transitions.start_task(self._poll_forever())
        return reasons

    async def _start_all(self) -> list[str]:
        entries, general, fingerprints = await asyncio.to_thread(self._repository.scan)
        self._repository.record_names(entry.name for entry in entries)
        self._history.record_start(fingerprints)
        mistakes = self._report_findings(general)
        await self._load_in_order([(entry, fingerprints.get(entry.name, b"")) for entry in entries], atomic=False)
        for record in self._repository.records.values():
            record.requested = True
        return mistakes

    async def _start_named(self) -> list[str]:
        names_on_disk = await asyncio.to_thread(self._repository.names)
        self._repository.record_names(names_on_disk)
        mistakes = [] if names_on_disk else self._report_findings((await asyncio.to_thread(self._repository.scan))[1])
        names = list(dict.fromkeys(self._options.startup_models))
        requested, missing = set(names), []
        found: list[tuple[ModelEntry, bytes]] = []
        # `names` grows: models that an ensemble needs are loaded with it
        for name in names:
            entry, fingerprint = await asyncio.to_thread(self._repository.read, name)
            if entry is not None:
                found.append((entry, fingerprint))
                names += sorted(entry.dependencies.difference(names))
            elif name in requested:
                missing.append(name)
        await self._load_in_order(found, atomic=False)
        for name in requested.intersection(self._repository.records):
            self._repository.records[name].requested = True
        reasons = [str(LoadFailedError(name, {}, invalid_config=True)) for name in missing]
        for reason in reasons:
            logger.error("%s", reason)
        return mistakes + reasons

    def _report_findings(self, findings: list[Finding]) -> list[str]:
        """Log what concerns no model. Returns: the mistakes. Those of whole paths keep the server from being ready."""
        log_findings(findings)
        self._repository.path_mistakes = [finding for finding in findings if finding.unusable_path]
        return [str(finding) for finding in findings if finding.is_mistake]

    async def _load_in_order(self, entries: Iterable[tuple[ModelEntry, bytes]], *, atomic: bool) -> None:
        """Load what was read, in order of need. `atomic`: replace a serving model only if all its versions load."""
        found = {entry.name: (entry, fingerprint) for entry, fingerprint in entries}
        known = {name: record.dependencies for name, record in self._repository.records.items()}
        order, cycles = sort_by_dependency(known | {name: entry.dependencies for name, (entry, _) in found.items()})
        tasks: dict[str, asyncio.Task[None]] = {}
        for name in order:
            if name not in found:
                continue
            entry, fingerprint = found[name]
            dependencies = [] if name in cycles else [tasks[other] for other in entry.dependencies if other in tasks]
            if name in cycles:
                entry = replace(entry, specs=(), findings=(*entry.findings, Finding(entry.path, cycles[name])))
            tasks[name] = asyncio.create_task(self._load_one(entry, fingerprint, dependencies, atomic=atomic))
        await asyncio.gather(*tasks.values())

    async def _load_one(
        self, entry: ModelEntry, fingerprint: bytes, dependencies: list[asyncio.Task[None]], *, atomic: bool
    ) -> None:
        if dependencies:
            await asyncio.wait(dependencies)
        async with self._locks.setdefault(entry.name, asyncio.Lock()):
            entry, current_fingerprint = await self._reread(entry, fingerprint)
            if atomic and current_fingerprint != fingerprint:
                return  # it is being copied: wait until two polls see the same
            log_findings(entry.findings)
            record = self._repository.record(entry.name)
            record.fingerprint = current_fingerprint
            retirement = await self._transitions.try_load(record, entry, atomic=atomic and bool(record.ready_versions))
            if retirement is None and record.ready_versions and entry.dependencies:
                # the models it needs may arrive later, which is not a change of its own files
                record.fingerprint = b""
        if atomic and retirement is not None:
            await retirement

    # -- on request ----------------------------------------------------------------------------------------------

    async def load(self, name: str, config: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        """Load a model from disk, or as given in the request. An unchanged model is not reloaded.

        `config` is the JSON of a ModelConfig for this load only. `files` are keyed by what follows `file:`
        (`1/model.onnx`); if given, they and `config` are the whole model.
        Returns: once the model serves and what it replaced is gone.
        Raises: InferError (NOT_READY: not allowed; INVALID: a wrong name, or it does not load; INTERNAL: not found).
        """
        self._check_explicit()
        overrides.check_name(name)
        if files and config is None:
            missing = "load parameter 'config' must be given with load parameters 'file:...'"
            raise LoadFailedError(name, {0: missing}, invalid_config=True).error
        overrides.check_files(name, files or {})
        try:
            await self._transitions.run_to_completion(self._load(name, config, files or {}))
        except LoadFailedError as failed:
            raise failed.error from None

    async def unload(self, name: str, *, dependents: bool = False) -> None:
        """Unload a model. Unloading a model that is not loaded is not an error, as in Triton.

        An ensemble that needs it is unloaded until it is back. `dependents`: models that an ensemble needs go with it,
        except those loaded by name or needed by another ensemble, as in Triton.
        Returns: once it is gone; requests it had accepted finish first. Raises: InferError (NOT_READY, INVALID).
        """
        self._check_explicit()
        overrides.check_name(name)
        await self._transitions.run_to_completion(self._unload(name, dependents=dependents))
        self.on_request(name, {"unload": dependents})

    def _check_explicit(self) -> None:
        if not self.is_explicit:
            raise InferError(Code.NOT_READY, NOT_ALLOWED, retry_after_ns=-1)

    async def index(self, ready: bool = False) -> list[dict[str, str]]:
        """List the contents of the repository, with the state of each version."""
        if self.is_explicit:
            self._repository.record_names(await asyncio.to_thread(self._repository.names))
        return self._repository.index(ready)

    async def _load(self, name: str, config: str | None, files: Mapping[str, bytes]) -> None:
        override = None if config is None else await asyncio.to_thread(overrides.read_config, name, config)
        if files:
            entry, fingerprint = await self._read_uploaded(name, override, files), b""
        else:
            override = self._repository.restore_declared(override, self._transitions.serving(name))
            entry, fingerprint = await asyncio.to_thread(self._repository.read, name, override)
        if entry is None:
            raise LoadFailedError(name, {}, invalid_config=True)
        try:
            with self._dependents.pin(entry.dependencies):
                await self._load_needs(entry, (name,))
                retirement = await self._load_entry(entry, fingerprint, override)
        except BaseException:
            if files:
                await self._transitions.remove_folder(entry.path)
            raise
        if retirement is not None:
            await retirement
        await asyncio.to_thread(self._repository.drop_fixed_mistakes)
        self.on_request(name, {"config": config, "files": bool(files)})

    async def _load_needs(self, entry: ModelEntry, ancestors: tuple[str, ...]) -> None:
        """Load the models of an ensemble as they are on disk now. Raises: LoadFailedError if it needs itself.

        A model that cannot be loaded is reported when the ensemble does not find it.
        """
        for name in sorted(entry.dependencies):
            if name in ancestors:
                text = f"circular dependency between ensembles: {name} -> ... -> {entry.name} -> {name}"
                raise LoadFailedError(entry.name, {0: text}, invalid_config=True)
            record = self._repository.records.get(name)
            if record is not None and record.all_ready and not record.fingerprint:
                continue  # it was loaded by a request and differs from what is on disk
            found, fingerprint = await asyncio.to_thread(self._repository.read, name)
            if found is None:
                continue
            with self._dependents.pin(found.dependencies):
                await self._load_needs(found, (*ancestors, name))
                with suppress(LoadFailedError):  # the reason is in the log
                    await self._load_entry(found, fingerprint, for_ensemble=True)

    async def _load_entry(
        self, entry_read: ModelEntry, fingerprint: bytes, override: Any = None, *, for_ensemble: bool = False
    ) -> asyncio.Task[None] | None:
        """Load what was read, with the configuration `override` if given, unless it is already served.

        `for_ensemble`: it is loaded for an ensemble, for which a model sent in a request will do.
        Returns: the task that retires the replaced version, if any.
        """
        retirement, overridden = None, override is not None
        async with self._locks.setdefault(entry_read.name, asyncio.Lock()):
            entry, fingerprint = await self._reread(entry_read, fingerprint, override)
            covers_needs = entry.dependencies <= entry_read.dependencies
            record = self._repository.record(entry.name)
            unchanged = fingerprint and record.fingerprint in {fingerprint, b"" if for_ensemble else fingerprint}
            changed = overridden or not (record.all_ready and unchanged)
            if not changed:
                record.serve(record.ready_versions)  # this also drops versions that have failed since
            if covers_needs and changed:
                log_findings(entry.findings)
                try:
                    retirement = await self._transitions.load(record, entry, atomic=True)
                finally:
                    if retirement is not None or record.ensemble_entry is entry:
                        record.fingerprint = b"" if overridden else fingerprint  # what a request sent is not on disk
            record.requested |= covers_needs and not for_ensemble
        if not covers_needs:
            await self._load_needs(entry, (entry.name,))
            return await self._load_entry(entry, fingerprint, override, for_ensemble=for_ensemble)
        if changed:
            await self._dependents.refresh(entry.name)  # models it needs may have been unloaded since
            await self._dependents.refresh_dependents(entry.name)
        return retirement

    async def _reread(self, entry: ModelEntry, fingerprint: bytes, override: Any = None) -> tuple[ModelEntry, bytes]:
        """Read a model again if the previous holder of the lock may have read newer files. Called with the lock held.

        A model that cannot be served, or is not on disk, is left as it was read.
        """
        name = entry.name
        is_known = entry.specs and fingerprint and name in self._repository.records
        if not is_known or await asyncio.to_thread(self._repository.fingerprint, name) == fingerprint:
            return entry, fingerprint
        reread, fingerprint = await asyncio.to_thread(self._repository.read, name, override)
        return reread or entry, fingerprint

    async def _read_uploaded(self, name: str, override: Any, files: Mapping[str, bytes]) -> ModelEntry | None:
        folder = await self._transitions.write_files(name, files)
        try:
            return await asyncio.to_thread(self._repository.read_folder, folder, override)
        except BaseException:
            await self._transitions.remove_folder(folder)
            raise

    async def _unload(self, name: str, *, dependents: bool) -> None:
        await self._dependents.wait_unpinned(name)
        async with self._locks.setdefault(name, asyncio.Lock()):
            record = self._repository.records.get(name)
            if record is None:
                return
            needs, record.fingerprint = record.dependencies, b""
            record.requested, record.ensemble_entry = False, None
            retirement = self._transitions.unload(record)
        await self._dependents.refresh_dependents(name)
        if dependents:
            idle = filter(self._dependents.is_idle, needs)
            await asyncio.gather(*(self._unload(other, dependents=True) for other in idle))
        await retirement

    # -- as files change ---------------------------------------------------------------------------------------

    async def poll(self) -> None:
        """Poll the disk once: unload models that are gone, and load those that have changed.

        A changed model is loaded once two polls have seen the same files, since it must not be loaded half copied.
        """
        fingerprints = await asyncio.to_thread(self._repository.fingerprints)
        self._repository.record_names(fingerprints)
        await asyncio.to_thread(self._repository.drop_fixed_mistakes)
        records = self._repository.records
        unchanged = self._history.record_poll(fingerprints)
        self._repository.unstable = self._history.unstable
        changed = [name for name in unchanged if name not in records or records[name].fingerprint != fingerprints[name]]
        missing = [name for name in records if name not in fingerprints]
        read = await asyncio.gather(*(asyncio.to_thread(self._repository.read, name) for name in changed))
        # models that changed since, or need others not loaded yet, are left to later polls; b"": unreadable
        found = [(entry, seen) for entry, seen in read if entry is not None and seen in {fingerprints[entry.name], b""}]
        pending = fingerprints.keys() - records.keys() - {entry.name for entry, _ in found}
        while waiting := {entry.name for entry, _ in found if entry.dependencies & pending}:
            found = [pair for pair in found if pair[0].name not in waiting]
            pending |= waiting
        await asyncio.gather(self._load_in_order(found, atomic=True), *map(self._remove, missing))
        await asyncio.gather(*map(self._dependents.refresh_dependents, (*changed, *missing)))

    async def _poll_forever(self) -> None:
        while True:
            # at least 0.05 s, or it would poll without pause
            await asyncio.sleep(max(0.05, self._options.poll_interval_s))
            try:
                await self.poll()
            except Exception:
                logger.exception("polling the model repository failed")

    async def _remove(self, name: str) -> None:
        async with self._locks.setdefault(name, asyncio.Lock()):
            logger.info("model %s: no longer in the repository", name)
            await self._transitions.unload(self._repository.record(name))
            del self._repository.records[name]

    async def stop(self) -> None:
        """Cancel loads in progress, and remove the models that requests sent."""
        await self._transitions.stop()
