"""Transitions: loads the versions of a model in place of those that serve, and takes them down.

Used by ModelControl, which runs one at a time for each model.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

from penstock.backends.errors import Code, InferError
from penstock.batching.loading.resizing import Change
from penstock.batching.model import Model
from penstock.batching.spec import ModelSpec

from . import changes, overrides
from .findings import NO_VERSION, TWICE, Finding
from .scan import Entry
from .states import UNLOADED, ModelRecord, VersionState

logger = logging.getLogger("penstock.repository")
T = TypeVar("T")


class Opens(Protocol):
    """The methods of the Engine that are needed."""

    async def open(self, spec: ModelSpec) -> Model: ...
    def publish(self, name: str, models: Iterable[Model], absent: Iterable[str] = ()) -> asyncio.Task[None]: ...
    def retire(self, models: Iterable[Model]) -> asyncio.Task[None]: ...
    async def change(self, model: Model, spec: ModelSpec) -> Change | None: ...


class LoadFailedError(Exception):
    """A model was not loaded. `unread`: because of its files or configuration; otherwise because a version failed."""

    def __init__(self, name: str, failures: Mapping[int, str], *, unread: bool) -> None:
        if unread:
            said = "; ".join(failures.values())
            text = f"failed to load '{name}', failed to poll from model repository{': ' if said else ''}{said}"
        else:
            states = sorted(failures.items())
            each = [f"version {number} is at UNAVAILABLE state: {why};" if number else why for number, why in states]
            text = f"load failed for model '{name}': {' '.join(each)}"
        super().__init__(text)
        self.failures = failures
        # Triton's codes for the two cases
        self.error = InferError(Code.INTERNAL if unread else Code.INVALID, text)


class Transitions:
    """The loads and unloads in progress, and the folders of files that requests sent.

    Invariant: an operation that has begun finishes, even if its caller is cancelled; only `stop` ends it.
    Threads: the event loop's; models are opened and files removed on other threads.
    """

    def __init__(self, engine: Opens, threads: int, retries: int) -> None:
        self._engine = engine
        self._turn = asyncio.Semaphore(threads)
        self._retries = retries
        self._tasks: set[asyncio.Task[Any]] = set()
        self._folders: set[Path] = set()
        self._serving: dict[str, list[Model]] = {}

    # -- coming and going --------------------------------------------------------------------------------------

    async def bring_up(self, record: ModelRecord, entry: Entry, *, whole: bool) -> asyncio.Task[None]:
        """Open the versions of an Entry and publish them. `whole`: if any fails, publish none.

        If only the instance groups changed, the versions that serve are kept and get other Instances.
        Returns: the retirement of what was replaced. Raises: LoadFailedError if nothing is published.
        """
        contents = await asyncio.to_thread(changes.contents, entry)
        gone = await self._resize(record, entry, contents)
        if gone is not None:
            return gone
        record.begin(spec.version for spec in entry.specs)
        failures = _mistakes(entry)
        unread = any(map(_keeps_unread, entry.findings))
        opened: list[Model] = []
        try:
            if not (whole and failures):
                failures |= await self._open_all(entry, opened)
        except BaseException:
            self._engine.retire(opened)
            record.give_up()
            raise
        for version, reason in failures.items():
            record.fail(version, reason)
        absent = [str(version) for version in failures if version]
        if (whole and failures) or not opened:
            self._engine.retire(opened)
            record.give_up()
            if not record.ready:
                record.ensemble = entry if entry.needs and not unread else None
            if not unread and not record.ready:
                # nothing is unloaded: clients learn that there should be a model
                self._engine.publish(record.name, (), absent)
            raise LoadFailedError(record.name, failures, unread=unread)
        folder, record.folder = record.folder, entry.path if entry.path in self._folders else None
        record.config, record.served, record.contents = entry.config, entry, contents
        record.ensemble = entry if entry.needs else None
        self._serving[record.name] = opened
        leaving = record.serve(int(model.version) for model in opened)
        for model in opened:
            about = {"model": model.name, "version": model.version}
            logger.info("model %s version %s: ready", model.name, model.version, extra=about)
        return self.own(self._leave(record, leaving, self._engine.publish(record.name, opened, absent), folder))

    async def try_up(self, record: ModelRecord, entry: Entry, *, whole: bool) -> asyncio.Task[None] | None:
        """Do the same as `bring_up`, but return None if it fails. The reasons are logged for each version."""
        with suppress(LoadFailedError):
            return await self.bring_up(record, entry, whole=whole)
        return None

    async def _resize(self, record: ModelRecord, entry: Entry, contents: bytes) -> asyncio.Task[None] | None:
        """Give the versions that serve other Instances, if nothing else has changed and all versions support it.

        Returns: the end of the Instances that were removed. Raises: LoadFailedError.
        """
        same = contents and contents == record.contents and record.settled and not _mistakes(entry)
        if not same or record.served is None or not changes.only_instances(record.served, entry):
            return None
        models = {int(model.version): model for model in self._serving[record.name]}
        try:
            made = await self._changes(entry, models)
        except LoadFailedError as failed:
            for version, reason in failed.failures.items():
                record.fail(version, reason)
            raise
        if made is None:
            return None
        record.serve(record.ready)  # this also drops earlier failures
        record.config, record.served = entry.config, entry
        return self.own(_all([task for change in made for task in change.commit()]))

    async def _changes(self, entry: Entry, models: Mapping[int, Model]) -> list[Change] | None:
        """Make the new Instances of all versions, or return None with nothing left behind. Raises: LoadFailedError."""
        made: list[Change] = []
        whole = False
        try:
            for spec in entry.specs:
                async with self._turn:
                    change = await self._engine.change(models[spec.version], spec)
                if change is None:
                    return None
                made.append(change)
            whole = True
        except Exception as error:
            reason = _words(error)
            _log_failed(spec, reason)
            raise LoadFailedError(entry.name, {spec.version: hidden(reason, entry)}, unread=False) from error
        finally:
            if not whole:
                await asyncio.gather(*(change.abandon() for change in made))
        return made

    async def _open_all(self, entry: Entry, opened: list[Model]) -> dict[int, str]:
        """Open all versions into `opened`. Returns: the reasons of those that failed."""
        failures: dict[int, str] = {}

        async def open_one(spec: ModelSpec) -> None:
            async with self._turn:
                for left in range(self._retries, -1, -1):
                    try:
                        model = await self._engine.open(spec)
                    except Exception as error:  # noqa: BLE001 - of what is unknown the traceback is logged
                        unknown = None if isinstance(error, InferError) else error
                        reason = _words(error)
                        again = f"; trying again, at most {left} times" if left else ""
                        _log_failed(spec, f"{reason}{again}", unknown)
                    else:
                        opened.append(model)
                        return
            failures[spec.version] = hidden(reason, entry)

        await asyncio.gather(*map(open_one, entry.specs))
        return failures

    def take_down(self, record: ModelRecord, reason: str = UNLOADED) -> asyncio.Task[None]:
        """Stop serving a model. Returns: the retirement of what served."""
        leaving = record.unload()
        folder, record.folder = record.folder, None
        self._serving.pop(record.name, None)
        return self.own(self._leave(record, leaving, self._engine.publish(record.name, ()), folder, reason))

    def serving(self, name: str) -> Sequence[Model]:
        """Return the versions of a model that serve."""
        return self._serving.get(name, ())

    def misfit(self, record: ModelRecord) -> str:
        """Say why an ensemble cannot continue with the models that serve now; "" if it can, or is not one."""
        for model in self.serving(record.name):
            try:
                if model.ensemble is not None:
                    model.ensemble.check()
            except InferError as error:
                return error.message
        return ""

    async def _leave(
        self, record: ModelRecord, leaving: list[VersionState], retirement: asyncio.Task[None], folder: Path | None,
        reason: str = UNLOADED,
    ) -> None:  # fmt: skip
        await asyncio.shield(retirement)
        record.gone(leaving, reason)
        for held in leaving:
            logger.info("model %s version %d: unloaded", record.name, held.version)
        if folder is not None:
            await self.remove(folder)

    async def write(self, name: str, files: Mapping[str, bytes]) -> Path:
        """Write the files of a request. Returns: a model's folder, removed once its contents are no longer served.

        Raises: LoadFailedError, for example if the disk is full.
        """
        try:
            folder = await asyncio.to_thread(overrides.write, name, files)
        except OSError as error:
            reason = f"the files could not be written: {error.strerror}"
            logger.error("model %s: %s", name, reason)  # noqa: TRY400 - that is all
            raise LoadFailedError(name, {0: reason}, unread=True) from None
        self._folders.add(folder)
        return folder

    async def remove(self, folder: Path) -> None:
        """Remove a folder returned by `write`."""
        await asyncio.to_thread(overrides.remove, folder)
        self._folders.discard(folder)

    # -- tasks -------------------------------------------------------------------------------------------------

    def own(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Make a task that `stop` cancels."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` to the end, even if the caller is cancelled."""
        return await asyncio.shield(self.own(work))

    async def stop(self) -> None:
        """Cancel what is in progress, and remove the files that requests sent."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for folder in list(self._folders):
            await self.remove(folder)


async def _all(ends: Iterable[asyncio.Task[None]]) -> None:
    await asyncio.gather(*ends)


def _words(error: Exception) -> str:
    return error.message if isinstance(error, InferError) else f"{type(error).__name__}: {error}"


def _log_failed(spec: ModelSpec, reason: str, unknown: Exception | None = None) -> None:
    """Log why a version cannot be loaded, with the traceback if the error was unexpected."""
    about = {"model": spec.name, "version": str(spec.version)}
    text = "failed to load '%s' version %d: %s"
    logger.error(text, spec.name, spec.version, reason, exc_info=unknown, extra=about)


def _mistakes(entry: Entry) -> dict[int, str]:
    """Return what keeps versions of an Entry from being served; 0 stands for all of them."""
    reasons: dict[int, list[str]] = {}
    for finding in entry.findings:
        if finding.mistake:
            # the locations of duplicates are only logged
            text = TWICE if finding.message == TWICE else hidden(str(finding), entry)
            found = reasons.setdefault(finding.version, [])
            if text not in found:
                found.append(text)
    return {version: "; ".join(texts) for version, texts in reasons.items()}


def _keeps_unread(finding: Finding) -> bool:
    """Return whether Triton would not have found the model because of this finding. Mistakes in versions come later."""
    return finding.mistake and not finding.version and not finding.message.startswith(NO_VERSION)


def hidden(text: str, entry: Entry) -> str:
    """Remove the location of a model from a text, since reasons are sent to clients. The log has the whole path."""
    place = re.escape(str(entry.path))
    text = re.sub(rf"{place}(?![\w.-])", lambda _: entry.name, re.sub(rf"{place}/", "", text))
    # a model that is one file has its configuration and hooks beside it
    return re.sub(rf"{re.escape(str(entry.path.parent))}/(?=[^/:\n]+\.(?:toml|py)\b)", "", text)
