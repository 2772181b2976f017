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
from .findings import DUPLICATE, NO_VERSION, Finding
from .scan import ModelEntry
from .states import UNLOADED, ModelRecord, VersionStatus

logger = logging.getLogger("penstock.repository")
T = TypeVar("T")


class OpensModels(Protocol):
    """The methods of the Engine that are needed."""

    async def open(self, spec: ModelSpec) -> Model: ...
    def publish(self, name: str, models: Iterable[Model], absent: Iterable[str] = ()) -> asyncio.Task[None]: ...
    def retire(self, models: Iterable[Model]) -> asyncio.Task[None]: ...
    async def change(self, model: Model, spec: ModelSpec) -> Change | None: ...


class LoadFailedError(Exception):
    """A model was not loaded. `invalid_config`: its files or configuration are at fault; otherwise a version failed."""

    def __init__(self, name: str, failures: Mapping[int, str], *, invalid_config: bool) -> None:
        if invalid_config:
            reasons = "; ".join(failures.values())
            text = f"failed to load '{name}', failed to poll from model repository{': ' if reasons else ''}{reasons}"
        else:
            states = sorted(failures.items())
            texts = [f"version {number} is at UNAVAILABLE state: {why};" if number else why for number, why in states]
            text = f"load failed for model '{name}': {' '.join(texts)}"
        super().__init__(text)
        self.failures = failures
        # Triton's codes for the two cases
        self.error = InferError(Code.INTERNAL if invalid_config else Code.INVALID, text)


class Transitions:
    """The loads and unloads in progress, and the folders of files that requests sent.

    Invariant: an operation that has begun finishes, even if its caller is cancelled; only `stop` ends it.
    Threads: the event loop's; models are opened and files removed on other threads.
    """

    def __init__(self, engine: OpensModels, threads: int, retries: int) -> None:
        self._engine = engine
        self._load_slots = asyncio.Semaphore(threads)
        self._retries = retries
        self._tasks: set[asyncio.Task[Any]] = set()
        self._upload_folders: set[Path] = set()
        self._serving: dict[str, list[Model]] = {}

    # -- coming and going --------------------------------------------------------------------------------------

    async def load(self, record: ModelRecord, entry: ModelEntry, *, atomic: bool) -> asyncio.Task[None]:
        """Open the versions of a ModelEntry and publish them. `atomic`: if any fails, publish none.

        If only the instance groups changed, the versions that serve are kept and get other Instances.
        Returns: the retirement of what was replaced. Raises: LoadFailedError if nothing is published.
        """
        contents = await asyncio.to_thread(changes.content_fingerprint, entry)
        retirement = await self._resize(record, entry, contents)
        if retirement is not None:
            return retirement
        record.begin_load(spec.version for spec in entry.specs)
        failures = _failure_reasons(entry)
        invalid_config = any(map(_is_config_mistake, entry.findings))
        opened: list[Model] = []
        try:
            if not (atomic and failures):
                failures |= await self._open_all(entry, opened)
        except BaseException:
            self._engine.retire(opened)
            record.abort_load()
            raise
        for version, reason in failures.items():
            record.record_failure(version, reason)
        absent = [str(version) for version in failures if version]
        if (atomic and failures) or not opened:
            self._engine.retire(opened)
            record.abort_load()
            if not record.ready_versions:
                record.ensemble_entry = entry if entry.dependencies and not invalid_config else None
            if not invalid_config and not record.ready_versions:
                # nothing is unloaded: clients learn that there should be a model
                self._engine.publish(record.name, (), absent)
            raise LoadFailedError(record.name, failures, invalid_config=invalid_config)
        folder, record.upload_folder = record.upload_folder, entry.path if entry.path in self._upload_folders else None
        record.config, record.served_entry, record.content_fingerprint = entry.config, entry, contents
        record.ensemble_entry = entry if entry.dependencies else None
        self._serving[record.name] = opened
        unloading = record.serve(int(model.version) for model in opened)
        for model in opened:
            extra = {"model": model.name, "version": model.version}
            logger.info("model %s version %s: ready", model.name, model.version, extra=extra)
        return self.start_task(
            self._finish_unload(record, unloading, self._engine.publish(record.name, opened, absent), folder)
        )

    async def try_load(self, record: ModelRecord, entry: ModelEntry, *, atomic: bool) -> asyncio.Task[None] | None:
        """Do the same as `load`, but return None if it fails. The reasons are logged for each version."""
        with suppress(LoadFailedError):
            return await self.load(record, entry, atomic=atomic)
        return None

    async def _resize(self, record: ModelRecord, entry: ModelEntry, contents: bytes) -> asyncio.Task[None] | None:
        """Give the versions that serve other Instances, if nothing else has changed and all versions support it.

        Returns: the end of the Instances that were removed. Raises: LoadFailedError.
        """
        unchanged = (
            contents and contents == record.content_fingerprint and record.all_ready and not _failure_reasons(entry)
        )
        if (
            not unchanged
            or record.served_entry is None
            or not changes.only_instances_differ(record.served_entry, entry)
        ):
            return None
        models = {int(model.version): model for model in self._serving[record.name]}
        try:
            changes_made = await self._prepare_changes(entry, models)
        except LoadFailedError as failed:
            for version, reason in failed.failures.items():
                record.record_failure(version, reason)
            raise
        if changes_made is None:
            return None
        record.serve(record.ready_versions)  # this also drops earlier failures
        record.config, record.served_entry = entry.config, entry
        return self.start_task(_wait_all([task for change in changes_made for task in change.commit()]))

    async def _prepare_changes(self, entry: ModelEntry, models: Mapping[int, Model]) -> list[Change] | None:
        """Make the new Instances of all versions, or return None with nothing left behind. Raises: LoadFailedError."""
        prepared: list[Change] = []
        complete = False
        try:
            for spec in entry.specs:
                async with self._load_slots:
                    change = await self._engine.change(models[spec.version], spec)
                if change is None:
                    return None
                prepared.append(change)
            complete = True
        except Exception as error:
            reason = _error_message(error)
            _log_failure(spec, reason)
            raise LoadFailedError(
                entry.name, {spec.version: without_location(reason, entry)}, invalid_config=False
            ) from error
        finally:
            if not complete:
                await asyncio.gather(*(change.abandon() for change in prepared))
        return prepared

    async def _open_all(self, entry: ModelEntry, opened: list[Model]) -> dict[int, str]:
        """Open all versions into `opened`. Returns: the reasons of those that failed."""
        failures: dict[int, str] = {}

        async def open_one(spec: ModelSpec) -> None:
            async with self._load_slots:
                for attempts_left in range(self._retries, -1, -1):
                    try:
                        model = await self._engine.open(spec)
                    except Exception as error:  # noqa: BLE001 - of what is unknown the traceback is logged
                        unexpected = None if isinstance(error, InferError) else error
                        reason = _error_message(error)
                        retry_note = f"; trying again, at most {attempts_left} times" if attempts_left else ""
                        _log_failure(spec, f"{reason}{retry_note}", unexpected)
                    else:
                        opened.append(model)
                        return
            failures[spec.version] = without_location(reason, entry)

        await asyncio.gather(*map(open_one, entry.specs))
        return failures

    def unload(self, record: ModelRecord, reason: str = UNLOADED) -> asyncio.Task[None]:
        """Stop serving a model. Returns: the retirement of what served."""
        unloading = record.unload()
        folder, record.upload_folder = record.upload_folder, None
        self._serving.pop(record.name, None)
        return self.start_task(
            self._finish_unload(record, unloading, self._engine.publish(record.name, ()), folder, reason)
        )

    def serving(self, name: str) -> Sequence[Model]:
        """Return the versions of a model that serve."""
        return self._serving.get(name, ())

    def ensemble_problem(self, record: ModelRecord) -> str:
        """Say why an ensemble cannot continue with the models that serve now; "" if it can, or is not one."""
        for model in self.serving(record.name):
            try:
                if model.ensemble is not None:
                    model.ensemble.check()
            except InferError as error:
                return error.message
        return ""

    async def _finish_unload(
        self, record: ModelRecord, unloading: list[VersionStatus], retirement: asyncio.Task[None], folder: Path | None,
        reason: str = UNLOADED,
    ) -> None:  # fmt: skip
        await asyncio.shield(retirement)
        record.mark_unloaded(unloading, reason)
        for status in unloading:
            logger.info("model %s version %d: unloaded", record.name, status.version)
        if folder is not None:
            await self.remove_folder(folder)

    async def write_files(self, name: str, files: Mapping[str, bytes]) -> Path:
        """Write the files of a request. Returns: a model's folder, removed once its contents are no longer served.

        Raises: LoadFailedError, for example if the disk is full.
        """
        try:
            folder = await asyncio.to_thread(overrides.write_files, name, files)
        except OSError as error:
            reason = f"the files could not be written: {error.strerror}"
            logger.error("model %s: %s", name, reason)  # noqa: TRY400 - that is all
            raise LoadFailedError(name, {0: reason}, invalid_config=True) from None
        self._upload_folders.add(folder)
        return folder

    async def remove_folder(self, folder: Path) -> None:
        """Remove a folder returned by `write_files`."""
        await asyncio.to_thread(overrides.remove_folder, folder)
        self._upload_folders.discard(folder)

    # -- tasks -------------------------------------------------------------------------------------------------

    def start_task(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Make a task that `stop` cancels."""
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def run_to_completion(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run `coroutine` to the end, even if the caller is cancelled. Raises: InferError (NOT_READY) if stopped."""
        task = self.start_task(coroutine)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise InferError(Code.NOT_READY, "Server is stopping") from None
            raise

    async def stop(self) -> None:
        """Cancel what is in progress, and remove the files that requests sent."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for folder in list(self._upload_folders):
            await self.remove_folder(folder)


async def _wait_all(tasks: Iterable[asyncio.Task[None]]) -> None:
    await asyncio.gather(*tasks)


def _error_message(error: Exception) -> str:
    return error.message if isinstance(error, InferError) else f"{type(error).__name__}: {error}"


def _log_failure(spec: ModelSpec, reason: str, unexpected: Exception | None = None) -> None:
    """Log why a version cannot be loaded, with the traceback if the error was unexpected."""
    extra = {"model": spec.name, "version": str(spec.version)}
    text = "failed to load '%s' version %d: %s"
    logger.error(text, spec.name, spec.version, reason, exc_info=unexpected, extra=extra)


def _failure_reasons(entry: ModelEntry) -> dict[int, str]:
    """Return what keeps versions of a ModelEntry from being served; 0 stands for all of them."""
    reasons: dict[int, list[str]] = {}
    for finding in entry.findings:
        if finding.is_mistake:
            # the locations of duplicates are only logged
            text = DUPLICATE if finding.message == DUPLICATE else without_location(str(finding), entry)
            texts = reasons.setdefault(finding.version, [])
            if text not in texts:
                texts.append(text)
    return {version: "; ".join(texts) for version, texts in reasons.items()}


def _is_config_mistake(finding: Finding) -> bool:
    """Return whether Triton would not have found the model because of this finding. Mistakes in versions come later."""
    return finding.is_mistake and not finding.version and not finding.message.startswith(NO_VERSION)


def without_location(text: str, entry: ModelEntry) -> str:
    """Remove the location of a model from a text, since reasons are sent to clients. The log has the whole path."""
    path = re.escape(str(entry.path))
    text = re.sub(rf"{path}(?![\w.-])", lambda _: entry.name, re.sub(rf"{path}/", "", text))
    # a model that is one file has its configuration and hooks beside it
    return re.sub(rf"{re.escape(str(entry.path.parent))}/(?=[^/:\n]+\.(?:toml|py)\b)", "", text)
