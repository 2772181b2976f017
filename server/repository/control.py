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
from .choices import Choices
from .dependents import Dependents, Locks
from .findings import Finding, log_all
from .looks import Looks
from .order import put_in_order
from .repository import Repository
from .scan import Entry
from .states import ModelState
from .transitions import LoadFailedError, Opens, Transitions

logger = logging.getLogger("penstock.repository")

NOT_ALLOWED = "explicit model load / unload is not allowed if polling is enabled"
EVERY = "*"


class ModelControl:
    """Loads and unloads models by name.

    Invariants: loads and unloads of one model run one after another, those of different models concurrently. What is
    being served continues until its complete replacement is ready; requests it had accepted are finished. A failed load
    changes nothing that is served. A load that has begun finishes, even if its caller has disconnected.
    Threads: the event loop's; the disk is touched on other threads.
    """

    def __init__(self, repository: Repository, engine: Opens, choices: Choices | None = None) -> None:
        self._repository = repository
        self._choices = choices or Choices()
        self._transitions = Transitions(engine, self._choices.threads, self._choices.retries)
        self._locks: Locks = weakref.WeakValueDictionary()
        self._dependents = Dependents(repository, self._transitions, self._locks)
        self._looks = Looks()
        self.asked: Callable[[str, dict[str, Any]], None] = lambda _name, _how: None
        """Called after each load or unload that was requested."""

    @property
    def allowed(self) -> bool:
        """Whether models may be loaded and unloaded by name: --model-control-mode explicit."""
        return self._choices.mode == "explicit"

    # -- at start ----------------------------------------------------------------------------------------------

    async def start(self) -> list[str]:
        """Load the models configured for start, and start polling if that is the mode.

        Returns: why each unserved version is not served, and the mistakes that concern no model, for --exit-on-error.
        """
        if self.allowed and EVERY not in self._choices.names:
            reasons = await self._start_named()
        else:
            reasons = await self._start_all()
        self._repository.loaded = True
        for name, record in self._repository.records.items():
            for held in record.listed():
                if held.state is not ModelState.READY:
                    title = f"model '{name}' version {held.version}" if held.version else f"model '{name}'"
                    reasons.append(f"{title}: {held.reason}")
        if self._choices.mode == "poll" and self._choices.poll_s:
            self._transitions.own(self._poll_forever())
        return reasons

    async def _start_all(self) -> list[str]:
        entries, stray, prints = await asyncio.to_thread(self._repository.scan)
        self._repository.note(entry.name for entry in entries)
        self._looks.first(prints)
        mistakes = self._tell(stray)
        await self._bring_in_order([(entry, prints.get(entry.name, b"")) for entry in entries], whole=False)
        for record in self._repository.records.values():
            record.asked = True
        return mistakes

    async def _start_named(self) -> list[str]:
        there = await asyncio.to_thread(self._repository.names)
        self._repository.note(there)
        wrong = [] if there else self._tell((await asyncio.to_thread(self._repository.scan))[1])
        names = list(dict.fromkeys(self._choices.names))
        asked, missing = set(names), []
        found: list[tuple[Entry, bytes]] = []
        # `names` grows: models that an ensemble needs are loaded with it
        for name in names:
            entry, print_ = await asyncio.to_thread(self._repository.read, name)
            if entry is not None:
                found.append((entry, print_))
                names += sorted(entry.needs.difference(names))
            elif name in asked:
                missing.append(name)
        await self._bring_in_order(found, whole=False)
        for name in asked.intersection(self._repository.records):
            self._repository.records[name].asked = True
        reasons = [str(LoadFailedError(name, {}, unread=True)) for name in missing]
        for reason in reasons:
            logger.error("%s", reason)
        return wrong + reasons

    def _tell(self, stray: list[Finding]) -> list[str]:
        """Log what concerns no model. Returns: the mistakes. Those of whole paths keep the server from being ready."""
        log_all(stray)
        self._repository.mistakes = [finding for finding in stray if finding.whole]
        return [str(finding) for finding in stray if finding.mistake]

    async def _bring_in_order(self, read: Iterable[tuple[Entry, bytes]], *, whole: bool) -> None:
        """Bring up what was read, in order of need. `whole`: replace a serving model only if all its versions load."""
        found = {entry.name: (entry, print_) for entry, print_ in read}
        known = {name: record.needs for name, record in self._repository.records.items()}
        order, circles = put_in_order(known | {name: entry.needs for name, (entry, _) in found.items()})
        begun: dict[str, asyncio.Task[None]] = {}
        for name in order:
            if name not in found:
                continue
            entry, print_ = found[name]
            before = [] if name in circles else [begun[other] for other in entry.needs if other in begun]
            if name in circles:
                entry = replace(entry, specs=(), findings=(*entry.findings, Finding(entry.path, circles[name])))
            begun[name] = asyncio.create_task(self._bring_one(entry, print_, before, whole=whole))
        await asyncio.gather(*begun.values())

    async def _bring_one(self, entry: Entry, print_: bytes, before: list[asyncio.Task[None]], *, whole: bool) -> None:
        if before:
            await asyncio.wait(before)
        async with self._locks.setdefault(entry.name, asyncio.Lock()):
            entry, now = await self._as_it_is_now(entry, print_)
            if whole and now != print_:
                return  # it is being copied: wait until two polls see the same
            log_all(entry.findings)
            record = self._repository.record(entry.name)
            record.fingerprint = now
            gone = await self._transitions.try_up(record, entry, whole=whole and bool(record.ready))
            if gone is None and record.ready and entry.needs:
                # the models it needs may arrive later, which is not a change of its own files
                record.fingerprint = b""
        if whole and gone is not None:
            await gone

    # -- as asked ----------------------------------------------------------------------------------------------

    async def load(self, name: str, config: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        """Load a model from disk, or as given in the request. An unchanged model is not reloaded.

        `config` is the JSON of a ModelConfig for this load only. `files` are keyed by what follows `file:`
        (`1/model.onnx`); if given, they and `config` are the whole model.
        Returns: once the model serves and what it replaced is gone.
        Raises: InferError (NOT_READY: not allowed; INVALID: a wrong name, or it does not load; INTERNAL: not found).
        """
        self._refuse_unless_allowed()
        overrides.check_name(name)
        if files and config is None:
            missing = "load parameter 'config' must be given with load parameters 'file:...'"
            raise LoadFailedError(name, {0: missing}, unread=True).error
        overrides.check_files(name, files or {})
        try:
            await self._transitions.finish(self._load(name, config, files or {}))
        except LoadFailedError as failed:
            raise failed.error from None

    async def unload(self, name: str, *, dependents: bool = False) -> None:
        """Unload a model. Unloading a model that is not loaded is not an error, as in Triton.

        An ensemble that needs it is unloaded until it is back. `dependents`: models that an ensemble needs go with it,
        except those loaded by name or needed by another ensemble, as in Triton.
        Returns: once it is gone; requests it had accepted finish first. Raises: InferError (NOT_READY, INVALID).
        """
        self._refuse_unless_allowed()
        overrides.check_name(name)
        await self._transitions.finish(self._unload(name, dependents=dependents))
        self.asked(name, {"unload": dependents})

    def _refuse_unless_allowed(self) -> None:
        if not self.allowed:
            raise InferError(Code.NOT_READY, NOT_ALLOWED, retry_after_ns=-1)

    async def index(self, ready: bool = False) -> list[dict[str, str]]:
        """List the contents of the repository, with the state of each version."""
        if self.allowed:
            self._repository.note(await asyncio.to_thread(self._repository.names))
        return self._repository.index(ready)

    async def _load(self, name: str, config: str | None, files: Mapping[str, bytes]) -> None:
        said = None if config is None else await asyncio.to_thread(overrides.read_config, name, config)
        if files:
            entry, print_ = await self._brought(name, said, files), b""
        else:
            said = self._repository.declared(said, self._transitions.serving(name))
            entry, print_ = await asyncio.to_thread(self._repository.read, name, said)
        if entry is None:
            raise LoadFailedError(name, {}, unread=True)
        try:
            with self._dependents.kept(entry.needs):
                await self._load_needs(entry, (name,))
                gone = await self._load_entry(entry, print_, said)
        except BaseException:
            if files:
                await self._transitions.remove(entry.path)
            raise
        if gone is not None:
            await gone
        await asyncio.to_thread(self._repository.review)
        self.asked(name, {"config": config, "files": bool(files)})

    async def _load_needs(self, entry: Entry, above: tuple[str, ...]) -> None:
        """Load the models of an ensemble as they are on disk now. Raises: LoadFailedError if it needs itself.

        A model that cannot be loaded is reported when the ensemble does not find it.
        """
        for name in sorted(entry.needs):
            if name in above:
                text = f"circular dependency between ensembles: {name} -> ... -> {entry.name} -> {name}"
                raise LoadFailedError(entry.name, {0: text}, unread=True)
            record = self._repository.records.get(name)
            if record is not None and record.settled and not record.fingerprint:
                # it was loaded by a request and differs from what is on disk
                continue
            found, print_ = await asyncio.to_thread(self._repository.read, name)
            if found is None:
                continue
            with self._dependents.kept(found.needs):
                await self._load_needs(found, (*above, name))
                with suppress(LoadFailedError):  # the reason is in the log
                    await self._load_entry(found, print_, needed=True)

    async def _load_entry(
        self, read: Entry, print_: bytes, said: Any = None, *, needed: bool = False
    ) -> asyncio.Task[None] | None:
        """Bring up what was read, with the configuration `said` if given, unless it is already served.

        `needed`: it is loaded for an ensemble, for which a model sent in a request will do.
        Returns: the task that retires the replaced version, if any.
        """
        gone, brought = None, said is not None
        async with self._locks.setdefault(read.name, asyncio.Lock()):
            entry, print_ = await self._as_it_is_now(read, print_, said)
            complete = entry.needs <= read.needs
            record = self._repository.record(entry.name)
            same = print_ and record.fingerprint in {print_, b"" if needed else print_}
            new = brought or not (record.settled and same)
            if not new:
                record.serve(record.ready)  # this also drops versions that have failed since
            if complete and new:
                log_all(entry.findings)
                try:
                    gone = await self._transitions.bring_up(record, entry, whole=True)
                finally:
                    if gone is not None or record.ensemble is entry:
                        record.fingerprint = b"" if brought else print_  # what a request sent is not on disk
            record.asked |= complete and not needed
        if not complete:
            await self._load_needs(entry, (entry.name,))
            return await self._load_entry(entry, print_, said, needed=needed)
        if new:
            await self._dependents.revise_one(entry.name)  # models it needs may have been unloaded since
            await self._dependents.revise(entry.name)
        return gone

    async def _as_it_is_now(self, entry: Entry, print_: bytes, said: Any = None) -> tuple[Entry, bytes]:
        """Read a model again if the previous holder of the lock may have read newer files. Called with the lock held.

        A model that cannot be served, or is not on disk, is left as it was read.
        """
        name = entry.name
        known = entry.specs and print_ and name in self._repository.records
        if not known or await asyncio.to_thread(self._repository.fingerprint, name) == print_:
            return entry, print_
        again, print_ = await asyncio.to_thread(self._repository.read, name, said)
        return again or entry, print_

    async def _brought(self, name: str, config: Any, files: Mapping[str, bytes]) -> Entry | None:
        folder = await self._transitions.write(name, files)
        try:
            entry = await asyncio.to_thread(self._repository.read_folder, folder, config)
        except BaseException:
            await self._transitions.remove(folder)
            raise
        return entry

    async def _unload(self, name: str, *, dependents: bool) -> None:
        await self._dependents.released(name)
        async with self._locks.setdefault(name, asyncio.Lock()):
            record = self._repository.records.get(name)
            if record is None:
                return
            needs, record.fingerprint = record.needs, b""
            record.asked, record.ensemble = False, None
            gone = self._transitions.take_down(record)
        await self._dependents.revise(name)
        if dependents:
            await asyncio.gather(
                *(self._unload(other, dependents=True) for other in needs if self._dependents.idle(other))
            )
        await gone

    # -- as files change ---------------------------------------------------------------------------------------

    async def poll(self) -> None:
        """Poll the disk once: unload models that are gone, and load those that have changed.

        A changed model is loaded once two polls have seen the same files, since it must not be loaded half copied.
        """
        prints = await asyncio.to_thread(self._repository.fingerprints)
        self._repository.note(prints)
        await asyncio.to_thread(self._repository.review)
        records = self._repository.records
        same = self._looks.same(prints)
        self._repository.restless = self._looks.restless
        changed = [name for name in same if name not in records or records[name].fingerprint != prints[name]]
        missing = [name for name in records if name not in prints]
        read = await asyncio.gather(*(asyncio.to_thread(self._repository.read, name) for name in changed))
        # models that changed since, or need others not loaded yet, are left to later polls; b"": unreadable
        found = [(entry, print_) for entry, print_ in read if entry is not None and print_ in {prints[entry.name], b""}]
        later = prints.keys() - records.keys() - {entry.name for entry, _ in found}
        while waiting := {entry.name for entry, _ in found if entry.needs & later}:
            found = [each for each in found if each[0].name not in waiting]
            later |= waiting
        await asyncio.gather(self._bring_in_order(found, whole=True), *map(self._forget, missing))
        await asyncio.gather(*map(self._dependents.revise, (*changed, *missing)))

    async def _poll_forever(self) -> None:
        while True:
            await asyncio.sleep(max(0.05, self._choices.poll_s))  # at least 0.05 s, or it would poll without pause
            try:
                await self.poll()
            except Exception:
                logger.exception("polling the model repository failed")

    async def _forget(self, name: str) -> None:
        async with self._locks.setdefault(name, asyncio.Lock()):
            logger.info("model %s: no longer in the repository", name)
            await self._transitions.take_down(self._repository.record(name))
            del self._repository.records[name]

    async def stop(self) -> None:
        """Cancel loads in progress, and remove the models that requests sent."""
        await self._transitions.stop()
