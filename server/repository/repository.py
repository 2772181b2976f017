"""Repository: what is on disk, and the state of each version of it. Made by the composition root."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.batching.model import Model

from .changes import fingerprint, with_groups
from .completed_config import completed, to_json
from .findings import TWICE, Finding
from .names import is_single
from .pbtxt import message_of, model_config_pb2
from .scan import Defaults, Entry, list_names, locate, read_folder, read_model, scan
from .states import ModelRecord, ModelState

logger = logging.getLogger("penstock.repository")

RESTLESS = "its files change at every poll"


class Repository:
    """All models under some paths.

    Invariant: what cannot be served is UNAVAILABLE with its reason, and does not affect other models.
    `loaded`: whether loading at start has ended. `records`: by name, the models that were loaded or should have been.
    `mistakes`: paths that are not repositories. `restless`: models whose files keep changing (looks.py).
    Threads: the event loop's, except for the methods that block, which only touch the disk.
    """

    def __init__(self, paths: Iterable[Path], defaults: Defaults | None = None) -> None:
        self._paths = tuple(paths)
        self._defaults = defaults or Defaults()
        self._names: Counter[str] = Counter()
        self._unread: dict[Path, str] = {}
        self._held: Mapping[Path, list[str]] = {}
        self.records: dict[str, ModelRecord] = {}
        self.mistakes: Sequence[Finding] = ()
        self.restless: Collection[str] = ()
        self.loaded = False

    # -- the disk ----------------------------------------------------------------------------------------------

    def scan(self) -> tuple[list[Entry], list[Finding], dict[str, bytes]]:
        """Read everything on disk. Blocks.

        Returns: an Entry per model, the findings that concern no model, and the fingerprints of all models.
        """
        prints, self._unread = self._looked()
        return *scan(self._paths, self._defaults), prints

    def review(self) -> None:
        """Drop the mistakes that no longer apply. Blocks."""
        if self.mistakes:
            now = {finding.path for finding in self._stray_now() if finding.whole}
            self.mistakes = [finding for finding in self.mistakes if finding.path in now]

    def _stray_now(self) -> list[Finding]:
        return scan(self._paths, self._defaults)[1]

    def fingerprints(self) -> dict[str, bytes]:
        """Return the fingerprint of each model on disk, or the last known one if it cannot be read. Blocks.

        A repository that holds no models now, but did at the previous poll, keeps its fingerprints too: an unmounted
        share may look like an empty folder.
        """
        prints, unread = self._looked()
        for place in unread.keys() - self._unread:
            logger.error("%s: cannot be read: %s; its models stay as they are", place, unread[place])
        self._unread = unread
        return prints

    def _looked(self) -> tuple[dict[str, bytes], dict[Path, str]]:
        unread: dict[Path, str] = {}
        found = {path: list_names([path], unread) for path in self._paths}
        prints = {name: self.fingerprint(name) for names in found.values() for name in names}
        known = {name: record.fingerprint for name, record in list(self.records.items())}
        whole = any(path.absolute() in unread for path in self._paths)
        kept = {*known} if whole else {place.name for place in unread} | self._away(found, unread)
        return {name: known[name] for name in kept & known.keys()} | prints, unread

    def _away(self, found: Mapping[Path, list[str]], unread: Iterable[Path]) -> set[str]:
        """Return the models of the repositories that are empty at this poll but were not at the previous one."""
        unseen = {path for path in found for place in unread if place.is_relative_to(path.absolute())}
        empty = [path for path, names in found.items() if not names and path.is_dir() and path not in unseen]
        away = {name for path in empty for name in self._held.get(path, ())}
        for path in empty:
            if self._held.get(path):
                logger.warning(
                    "%s: contains no models any more; they are unloaded if the next poll finds none either", path
                )
        self._held = {path: self._held.get(path, []) if path in unseen else names for path, names in found.items()}
        return away

    def fingerprint(self, name: str) -> bytes:
        """Return the fingerprint of one model, or of its copy if it is remote. Blocks."""
        places: list[Path] = []
        for place in locate(self._paths, name):
            places.append(place)
            if is_single(place):
                # files beside a model that is not a folder of a repository
                beside = place.parent
                places += [place.with_name(f"{name}.toml"), beside / "penstock.toml", *sorted(beside.glob("*.py"))]
        return fingerprint(place for place in places if place.exists())

    def read(self, name: str, config: Any = None) -> tuple[Entry | None, bytes]:
        """Read one model, with `config` instead of its config.pbtxt if given. Blocks.

        Returns: its Entry (None if it does not exist) and the fingerprint taken before reading. If the model cannot be
        read, the fingerprint is empty, since the next attempt may succeed with the same files.
        """
        try:
            print_ = self.fingerprint(name)
            return read_model(self._paths, name, self._defaults, config), print_
        except OSError as error:
            place = Path(name)
            return Entry(name, place, findings=(Finding(place, f"cannot be read: {error.strerror}", model=name),)), b""

    def read_folder(self, folder: Path, config: Any) -> Entry | None:
        """Read a folder that is a model. Blocks. Raises: OSError."""
        return read_folder(folder, self._defaults, config)

    def names(self) -> list[str]:
        """List the names of the models on disk. A duplicate is listed twice. Blocks."""
        return list_names(self._paths)

    # -- what is known -----------------------------------------------------------------------------------------

    def note(self, names: Iterable[str]) -> None:
        """Record the names that exist, for the index. A duplicate is counted twice."""
        self._names = Counter(iter(names))  # a mapping's values would be taken for counts

    def record(self, name: str) -> ModelRecord:
        """Return a model's ModelRecord, creating it if needed."""
        return self.records.setdefault(name, ModelRecord(name))

    def ready(self, strict: bool = True) -> bool:
        """Return whether all that should be served is and no path is a mistake; not strict: whether loading ended."""
        if not self.loaded:
            return False
        # probes come every second and there may be hundreds of models: no sorting, the usual case first
        return not strict or (
            not self.mistakes
            and all(
                held.state is ModelState.READY or not held.wanted
                for record in self.records.values()
                for held in record.versions.values()
            )
        )

    def index(self, ready: bool = False) -> list[dict[str, str]]:
        """List every version with its state, as `POST /v2/repository/index` does. `ready`: only those that are.

        A model that was never loaded is listed by name, with the reason if it is a duplicate or keeps changing.
        """
        rows: list[dict[str, str]] = []
        for name in sorted({*self._names, *self.records}):
            listed = self.records[name].listed() if name in self.records else []
            if not listed and not ready:
                why = TWICE if self._names[name] > 1 else RESTLESS if name in self.restless else ""
                rows.append({"name": name, **({"state": ModelState.UNAVAILABLE.value, "reason": why} if why else {})})
            for held in listed:
                if ready and held.state is not ModelState.READY:
                    continue
                row = {"name": name}
                if held.version:
                    row["version"] = str(held.version)
                row["state"] = held.state.value
                if held.reason:
                    row["reason"] = held.reason
                rows.append(row)
        return rows

    def readiness(self) -> Iterator[tuple[str, str, bool]]:
        """Yield the name and version of all that should be served, and whether it is. Version "": the whole model."""
        for name in sorted({*self._names, *self.records}):
            listed = self.records[name].listed() if name in self.records else []
            if not listed and self._names[name] > 1:
                yield name, "", False
            for held in listed:
                if held.wanted:
                    yield name, str(held.version or ""), held.state is ModelState.READY

    def config(self, model: Model) -> Any:
        """Return the ModelConfig that a loaded model runs with."""
        record = self.records.get(model.name)
        declared = (
            record.config if record is not None and record.config is not None else model_config_pb2().ModelConfig()
        )
        if model.spec.declared_config:
            # that of a Python model, which may have completed it
            declared = message_of(model.spec.declared_config)
        return completed(declared, model.spec, model.platform)

    def declared(self, said: Any, serving: Iterable[Model]) -> Any:
        """Return the declared ModelConfig with the groups of `said`, if nothing else differs from what is reported.

        Otherwise return `said`. A client that changes groups by a load sends back the reported configuration, which is
        the completed one. Triton's own tests do so.
        """
        for model in serving if said is not None else ():
            record = self.records[model.name]
            if record.config is not None and with_groups(self.config(model), ()) == with_groups(said, ()):
                return with_groups(record.config, said.instance_group)
        return said

    def config_json(self, model: Model) -> Mapping[str, Any]:
        """Return the JSON of `GET /v2/models/{name}/config`."""
        return to_json(self.config(model))
