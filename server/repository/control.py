"""ModelControl: loads, swaps and unloads models while the server serves: at start, as asked, or as files change.

Made by the composition root; called by it and by the endpoints of both protocols. Source of codes and texts: Triton
core, model_repository_manager.cc.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.backends.errors import Code, InferError
from penstock.server.settings import Settings

from . import overrides
from .findings import Finding
from .repository import Repository
from .scan import Entry
from .states import State
from .transitions import LoadFailedError, Opens, Transitions

logger = logging.getLogger("penstock.repository")

NOT_ALLOWED = "explicit model load / unload is not allowed if polling is enabled"
EVERY = "*"


@dataclass(frozen=True, slots=True)
class Choices:
    """How models come and go: the settings of that name. `names` are those to load at start in mode explicit."""

    mode: str = "none"
    names: tuple[str, ...] = ()
    threads: int = 4
    retries: int = 0
    poll_s: float = 15.0

    @classmethod
    def of(cls, settings: Settings) -> Choices:
        """Take them from a server's settings."""
        return cls(
            settings.model_control_mode, settings.load_model, settings.model_load_thread_count,
            settings.model_load_retry_count, settings.repository_poll_secs,
        )  # fmt: skip


class ModelControl:
    """Loading and unloading by name.

    Invariants: loads and unloads of one model come one after another, those of different models at once. What serves
    goes on until all that takes its place can; what it had accepted is finished. A load that fails changes nothing
    that is served. Whatever a load has begun it finishes, even if whoever asked for it has gone.
    Threads: the event loop's; the disk is touched on others.
    """

    def __init__(self, repository: Repository, engine: Opens, choices: Choices | None = None) -> None:
        self._repository = repository
        self._choices = choices or Choices()
        self._transitions = Transitions(engine, self._choices.threads, self._choices.retries)
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    @property
    def allowed(self) -> bool:
        """Whether models may be loaded and unloaded by name: --model-control-mode explicit."""
        return self._choices.mode == "explicit"

    # -- at start ----------------------------------------------------------------------------------------------

    async def start(self) -> list[str]:
        """Load what is to be loaded at start, and begin to poll if that was chosen.

        Returns: the reason of each version that is not served, and every mistake about no model; for --exit-on-error.
        """
        if self.allowed and EVERY not in self._choices.names:
            reasons = await self._start_named()
        else:
            reasons = await self._start_all()
        self._repository.loaded = True
        for name, record in self._repository.records.items():
            for held in record.listed():
                if held.state is not State.READY:
                    title = f"model '{name}' version {held.version}" if held.version else f"model '{name}'"
                    reasons.append(f"{title}: {held.reason}")
        if self._choices.mode == "poll":
            self._transitions.own(self._poll_forever())
        return reasons

    async def _start_all(self) -> list[str]:
        entries, stray, prints = await asyncio.to_thread(self._repository.scan)
        self._repository.note(entry.name for entry in entries)
        _log(stray)
        await asyncio.gather(*(self._start_one(entry, prints.get(entry.name, b"")) for entry in entries))
        return [str(finding) for finding in stray if finding.mistake]

    async def _start_named(self) -> list[str]:
        self._repository.note(await asyncio.to_thread(self._repository.names))
        names = dict.fromkeys(self._choices.names)
        read = [await asyncio.to_thread(self._repository.read, name) for name in names]
        await asyncio.gather(*(self._start_one(entry, print_) for entry, print_ in read if entry is not None))
        missing = [name for name, (entry, _) in zip(names, read, strict=True) if entry is None]
        reasons = [str(LoadFailedError(name, {}, unread=True)) for name in missing]
        for reason in reasons:
            logger.error("%s", reason)
        return reasons

    async def _start_one(self, entry: Entry, print_: bytes) -> None:
        _log(entry.findings)
        record = self._repository.record(entry.name)
        record.fingerprint = print_
        await self._transitions.try_up(record, entry, whole=False)

    # -- as asked ----------------------------------------------------------------------------------------------

    async def load(self, name: str, config: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        """Load a model as it is on disk now, or as the request brings it; unchanged, it is left alone.

        `config` is the JSON of a ModelConfig for this load alone. `files` have the names that stand after `file:`
        (`1/model.onnx`); they and `config` are then all there is of the model.
        Returns: when it serves and what it took the place of is gone.
        Raises: InferError (NOT_READY: not allowed; INVALID: a wrong name, or it does not load; INTERNAL: not there).
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
        """Take a model out of service. One that is not loaded is no error, as in Triton.

        `dependents` means the same: there are no models of models.
        Returns: when it is gone; what it had accepted is finished first. Raises: InferError (NOT_READY, INVALID).
        """
        self._refuse_unless_allowed()
        overrides.check_name(name)
        await self._transitions.finish(self._unload(name))

    def _refuse_unless_allowed(self) -> None:
        if not self.allowed:
            raise InferError(Code.NOT_READY, NOT_ALLOWED, retry_after_ns=-1)

    async def index(self, ready: bool = False) -> list[dict[str, str]]:
        """List what the repository holds, with the state of each version."""
        if self.allowed:
            self._repository.note(await asyncio.to_thread(self._repository.names))
        return self._repository.index(ready)

    async def _load(self, name: str, config: str | None, files: Mapping[str, bytes]) -> None:
        async with self._locks.setdefault(name, asyncio.Lock()):
            said = None if config is None else await asyncio.to_thread(overrides.read_config, name, config)
            if files:
                entry, print_ = await self._brought(name, said, files), b""
            else:
                entry, print_ = await asyncio.to_thread(self._repository.read, name, said)
                record = self._repository.records.get(name)
                if said is None and record is not None and record.settled and record.fingerprint == print_:
                    return
            if entry is None:
                raise LoadFailedError(name, {}, unread=True)
            _log(entry.findings)
            record = self._repository.record(name)
            try:
                gone = await self._transitions.bring_up(record, entry, whole=True)
            except BaseException:
                if files:
                    await self._transitions.remove(entry.path)
                raise
            # what a request brought is not what is on disk
            record.fingerprint = print_ if said is None else b""
        await gone

    async def _brought(self, name: str, config: Any, files: Mapping[str, bytes]) -> Entry | None:
        folder = await self._transitions.write(name, files)
        try:
            entry = await asyncio.to_thread(self._repository.read_folder, folder, config)
        except BaseException:
            await self._transitions.remove(folder)
            raise
        return entry

    async def _unload(self, name: str) -> None:
        async with self._locks.setdefault(name, asyncio.Lock()):
            record = self._repository.records.get(name)
            if record is None:
                return
            record.fingerprint = b""
            gone = self._transitions.take_down(record)
        await gone

    # -- as files change ---------------------------------------------------------------------------------------

    async def poll(self) -> None:
        """Look at the disk once, and load and unload what has changed since."""
        prints = await asyncio.to_thread(self._repository.fingerprints)
        self._repository.note(prints)
        records = self._repository.records
        changed = [
            name for name, print_ in prints.items() if name not in records or records[name].fingerprint != print_
        ]
        missing = [name for name in records if name not in prints]
        await asyncio.gather(*map(self._reload, changed), *map(self._forget, missing))

    async def _poll_forever(self) -> None:
        while True:
            await asyncio.sleep(self._choices.poll_s)
            try:
                await self.poll()
            except Exception:
                logger.exception("polling the model repository failed")

    async def _reload(self, name: str) -> None:
        async with self._locks.setdefault(name, asyncio.Lock()):
            entry, print_ = await asyncio.to_thread(self._repository.read, name)
            if entry is None:
                return
            _log(entry.findings)
            record = self._repository.record(name)
            record.fingerprint = print_
            gone = await self._transitions.try_up(record, entry, whole=bool(record.ready))
        if gone is not None:
            await gone

    async def _forget(self, name: str) -> None:
        async with self._locks.setdefault(name, asyncio.Lock()):
            logger.info("model %s: is no longer there", name)
            await self._transitions.take_down(self._repository.record(name))
            del self._repository.records[name]

    async def stop(self) -> None:
        """End what is under way, and remove what requests brought."""
        await self._transitions.stop()


def _log(findings: Iterable[Finding]) -> None:
    for finding in findings:
        logger.log(logging.ERROR if finding.mistake else logging.WARNING, "%s", finding)
