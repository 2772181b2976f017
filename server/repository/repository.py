"""Repository: what is on disk, and the state of each version of it. Made by the composition root."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.batching.model import Model
from penstock.server.protobuf import model_config_pb2

from .changes import fingerprint_files, with_instance_groups
from .completed_config import complete_config, to_json
from .defaults import Defaults
from .findings import DUPLICATE, Finding
from .names import is_single
from .pbtxt import parse_json
from .scan import ModelEntry, list_names, locate, read_folder, read_model, scan
from .states import ModelRecord, ModelState

logger = logging.getLogger("penstock.repository")

UNSTABLE = "its files change at every poll"


class Repository:
    """All models under some paths.

    Invariant: what cannot be served is UNAVAILABLE with its reason, and does not affect other models.
    `startup_finished`: whether loading at start has ended. `records`: by name, the models that were loaded or should
    have been. `path_mistakes`: paths that are not repositories. `unstable`: models whose files keep changing
    (poll_history.py).
    Threads: the event loop's, except for the methods that block, which only touch the disk.
    """

    def __init__(self, paths: Iterable[Path], defaults: Defaults | None = None) -> None:
        self._paths = tuple(paths)
        self._defaults = defaults or Defaults()
        self._names: Counter[str] = Counter()
        self._unreadable: dict[Path, str] = {}
        self._last_names: Mapping[Path, list[str]] = {}
        self.records: dict[str, ModelRecord] = {}
        self.path_mistakes: Sequence[Finding] = ()
        self.unstable: Collection[str] = ()
        self.startup_finished = False

    # -- the disk ----------------------------------------------------------------------------------------------

    def scan(self) -> tuple[list[ModelEntry], list[Finding], dict[str, bytes]]:
        """Read everything on disk. Blocks.

        Returns: a ModelEntry per model, the findings that concern no model, and the fingerprints of all models.
        """
        fingerprints, self._unreadable = self._read_fingerprints()
        return *scan(self._paths, self._defaults), fingerprints

    def drop_fixed_mistakes(self) -> None:
        """Drop the mistakes that no longer apply. Blocks."""
        if self.path_mistakes:
            current = {finding.path for finding in self._current_findings() if finding.unusable_path}
            self.path_mistakes = [finding for finding in self.path_mistakes if finding.path in current]

    def _current_findings(self) -> list[Finding]:
        return scan(self._paths, self._defaults)[1]

    def fingerprints(self) -> dict[str, bytes]:
        """Return the fingerprint of each model on disk, or the last known one if it cannot be read. Blocks.

        A repository that holds no models now, but did at the previous poll, keeps its fingerprints too: an unmounted
        share may look like an empty folder.
        """
        fingerprints, unreadable = self._read_fingerprints()
        for path in unreadable.keys() - self._unreadable:
            logger.error("%s: cannot be read: %s; its models stay as they are", path, unreadable[path])
        self._unreadable = unreadable
        return fingerprints

    def _read_fingerprints(self) -> tuple[dict[str, bytes], dict[Path, str]]:
        unreadable: dict[Path, str] = {}
        names_by_path = {path: list_names([path], unreadable) for path in self._paths}
        fingerprints = {name: self.fingerprint(name) for names in names_by_path.values() for name in names}
        previous = {name: record.fingerprint for name, record in list(self.records.items())}
        any_path_unreadable = any(path.absolute() in unreadable for path in self._paths)
        retained = (
            {*previous}
            if any_path_unreadable
            else {path.name for path in unreadable} | self._missing_models(names_by_path, unreadable)
        )
        return {name: previous[name] for name in retained & previous.keys()} | fingerprints, unreadable

    def _missing_models(self, names_by_path: Mapping[Path, list[str]], unreadable: Iterable[Path]) -> set[str]:
        """Return the models of the repositories that are empty at this poll but were not at the previous one."""
        unreadable_paths = {
            path for path in names_by_path for folder in unreadable if folder.is_relative_to(path.absolute())
        }
        empty = [
            path
            for path, names in names_by_path.items()
            if not names and path.is_dir() and path not in unreadable_paths
        ]
        missing = {name for path in empty for name in self._last_names.get(path, ())}
        for path in empty:
            if self._last_names.get(path):
                logger.warning(
                    "%s: contains no models any more; they are unloaded if the next poll finds none either", path
                )
        self._last_names = {
            path: self._last_names.get(path, []) if path in unreadable_paths else names
            for path, names in names_by_path.items()
        }
        return missing

    def fingerprint(self, name: str) -> bytes:
        """Return the fingerprint of one model, or of its copy if it is remote. Blocks."""
        paths: list[Path] = []
        for path in locate(self._paths, name):
            paths.append(path)
            if is_single(path):
                # files beside a model that is not a folder of a repository
                folder = path.parent
                paths += [path.with_name(f"{name}.toml"), folder / "penstock.toml", *sorted(folder.glob("*.py"))]
        return fingerprint_files(path for path in paths if path.exists())

    def read(self, name: str, config: Any = None) -> tuple[ModelEntry | None, bytes]:
        """Read one model, with `config` instead of its config.pbtxt if given. Blocks.

        Returns: its ModelEntry (None if it does not exist) and the fingerprint taken before reading. If the model
        cannot be read, the fingerprint is empty, since the next attempt may succeed with the same files.
        """
        try:
            fingerprint = self.fingerprint(name)
            return read_model(self._paths, name, self._defaults, config), fingerprint
        except OSError as error:
            path = Path(name)
            return ModelEntry(
                name, path, findings=(Finding(path, f"cannot be read: {error.strerror}", model=name),)
            ), b""

    def read_folder(self, folder: Path, config: Any) -> ModelEntry | None:
        """Read a folder that is a model. Blocks. Raises: OSError."""
        return read_folder(folder, self._defaults, config)

    def names(self) -> list[str]:
        """List the names of the models on disk. A duplicate is listed twice. Blocks."""
        return list_names(self._paths)

    # -- what is known -----------------------------------------------------------------------------------------

    def record_names(self, names: Iterable[str]) -> None:
        """Record the names that exist, for the index. A duplicate is counted twice."""
        self._names = Counter(iter(names))  # a mapping's values would be taken for counts

    def record(self, name: str) -> ModelRecord:
        """Return a model's ModelRecord, creating it if needed."""
        return self.records.setdefault(name, ModelRecord(name))

    def ready(self, strict: bool = True) -> bool:
        """Return whether all that should be served is and no path is a mistake; not strict: whether loading ended."""
        if not self.startup_finished:
            return False
        # probes come every second and there may be hundreds of models: no sorting, the usual case first
        return not strict or (
            not self.path_mistakes
            and all(
                status.state is ModelState.READY or not status.should_serve
                for record in self.records.values()
                for status in record.versions.values()
            )
        )

    def index(self, ready: bool = False) -> list[dict[str, str]]:
        """List every version with its state, as `POST /v2/repository/index` does. `ready`: only those that are.

        A model that was never loaded is listed by name, with the reason if it is a duplicate or keeps changing.
        """
        rows: list[dict[str, str]] = []
        for name in sorted({*self._names, *self.records}):
            statuses = self.records[name].statuses() if name in self.records else []
            if not statuses and not ready:
                reason = DUPLICATE if self._names[name] > 1 else UNSTABLE if name in self.unstable else ""
                rows.append(
                    {"name": name, **({"state": ModelState.UNAVAILABLE.value, "reason": reason} if reason else {})}
                )
            for status in statuses:
                if ready and status.state is not ModelState.READY:
                    continue
                row = {"name": name}
                if status.version:
                    row["version"] = str(status.version)
                row["state"] = status.state.value
                if status.reason:
                    row["reason"] = status.reason
                rows.append(row)
        return rows

    def readiness(self) -> Iterator[tuple[str, str, bool]]:
        """Yield the name and version of all that should be served, and whether it is. Version "": the whole model."""
        for name in sorted({*self._names, *self.records}):
            statuses = self.records[name].statuses() if name in self.records else []
            if not statuses and self._names[name] > 1:
                yield name, "", False
            for status in statuses:
                if status.should_serve:
                    yield name, str(status.version or ""), status.state is ModelState.READY

    def config(self, model: Model) -> Any:
        """Return the ModelConfig that a loaded model runs with."""
        record = self.records.get(model.name)
        declared = (
            record.config if record is not None and record.config is not None else model_config_pb2().ModelConfig()
        )
        if model.spec.declared_config:
            # that of a Python model, which may have completed it
            declared = parse_json(model.spec.declared_config)
        return complete_config(declared, model.spec, model.platform)

    def restore_declared(self, override: Any, serving: Iterable[Model]) -> Any:
        """Return the declared ModelConfig with the groups of `override`, if nothing else differs from what is reported.

        Otherwise return `override`. A client that changes groups by a load sends back the reported configuration, which
        is the completed one. Triton's own tests do so.
        """
        for model in serving if override is not None else ():
            record = self.records[model.name]
            if record.config is not None and with_instance_groups(self.config(model), ()) == with_instance_groups(
                override, ()
            ):
                return with_instance_groups(record.config, override.instance_group)
        return override

    def config_json(self, model: Model) -> Mapping[str, Any]:
        """Return the JSON of `GET /v2/models/{name}/config`."""
        return to_json(self.config(model))
