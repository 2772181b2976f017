"""ModelFinder: locates the models of APIs on this machine, and fetches or unpacks them. Called by repository.py.

Source of the texts: Cortex v0.10, pkg/operator/api/userconfig/errors.go.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from penstock.server.repository.address import is_remote
from penstock.server.repository.remote import RemoteError

from . import saved_models
from .api import Api
from .archives import ArchiveError, unpack
from .stored_model import StoredModel

MOUNT = "/mnt/project"
"""Where Cortex made a project's files available to its code. A model's path may begin with it, too."""
_S3 = "s3://"


class ModelError(Exception):
    """Why an API's model is not available; a text for whoever deploys it."""


@dataclass(frozen=True, slots=True)
class ModelLocation:
    """A model's file, or its SavedModel's folder, and its version: 1 unless the folder's name is another."""

    path: Path
    version: int = 1


class ModelFinder:
    """Locates models; those fetched or unpacked are in a folder that it owns.

    Invariants: an unchanged model is not fetched or unpacked again. A model that was returned remains until `close`,
    since it may be loaded from there again. Threads: any; it blocks, one at a time for each address.
    """

    def __init__(self, s3_root: str = "") -> None:
        self._s3_root = Path(s3_root).absolute() if s3_root else None
        self._turns: dict[str, threading.Lock] = {}
        self._making = threading.Lock()
        self._made: dict[tuple[str, str], Path] = {}
        self._stamps: dict[str, str] = {}
        self._home: Path | None = None
        self._remove_home: Callable[[], object] = lambda: None

    def close(self) -> None:
        """Remove what was fetched and unpacked."""
        self._remove_home()

    def find(self, api: Api) -> ModelLocation:
        """Return an API's model, fetched if necessary. Raises: ModelError."""
        try:
            with self._turns.setdefault(str(self.local(api) or api.model), threading.Lock()):
                return self._found(api)
        except (ArchiveError, RemoteError) as error:
            raise ModelError(str(error)) from error
        except OSError as error:
            raise ModelError(f"{api.model}: {error.strerror or error}") from error

    def local(self, api: Api) -> Path | None:
        """Return the path of an API's model on this machine, whether it exists or not; None if it is remote.

        Raises: ModelError.
        """
        model = api.model
        if model.startswith(_S3) and self._s3_root is not None:
            parts = PurePosixPath(model.removeprefix(_S3)).parts
            if ".." in parts or not parts or parts[0] == "/":
                raise ModelError(f"{model}: is no address of an object in a bucket (s3://bucket/key)")
            return self._s3_root.joinpath(*parts)
        if is_remote(model):
            return None
        if model == MOUNT or model.startswith(f"{MOUNT}/"):
            return api.project / model.removeprefix(MOUNT).lstrip("/")
        return api.project / model

    def stamp(self, api: Api) -> str:
        """Return a value that changes with a remote model, the last known one on failure; "" for a local one."""
        try:
            if self.local(api) is not None:
                return ""
            told = StoredModel(api.model).look()
        except (ModelError, RemoteError):
            told = ""
        if told:
            self._stamps[api.model] = told
        return told or self._stamps.get(api.model, "")

    def _found(self, api: Api) -> ModelLocation:
        place = self.local(api)
        if place is None:
            return self._fetched(api)
        if not place.exists():
            where = " (under --s3-root)" if api.model.startswith(_S3) else ""
            raise ModelError(f"{api.model}: not found or insufficient permissions{where}")
        if api.kind == "onnx":
            if not place.is_file():
                raise ModelError(f"{api.model}: is a folder; for ONNX models, the path should end in .onnx")
            return ModelLocation(place)
        if place.is_dir():
            return _chosen(place, list(_files(place)))
        if place.suffix == ".zip":
            said = place.stat()
            return self._unpacked(place, str(place), f"{said.st_size} {said.st_mtime_ns} {said.st_ino}")
        raise ModelError(saved_models.WANTED)

    def _fetched(self, api: Api) -> ModelLocation:
        stored = StoredModel(api.model)
        stamp = stored.look()
        names = stored.names
        if not names:
            raise ModelError(f"{api.model}: not found or insufficient permissions")
        if api.kind == "tensorflow" and names != [""]:
            folder = saved_models.choose(names)
            if folder is None:
                raise ModelError(saved_models.refusal(names))
            wanted = [name for name in names if not folder or name.startswith(f"{folder}/")]
            top = PurePosixPath(api.model).name
            copied = self._once(api.model, stamp, lambda into: stored.copy(wanted, into / top))
            return _chosen(copied / top, list(_files(copied / top)))
        if names != [""]:
            raise ModelError(f"{api.model}: is a folder; for ONNX models, the path should end in .onnx")
        file = self._once(api.model, stamp, lambda into: stored.copy(names, into)) / "model"
        return ModelLocation(file) if api.kind == "onnx" else self._unpacked(file, api.model, f"unpacked {stamp}")

    def _unpacked(self, archive: Path, name: str, stamp: str) -> ModelLocation:
        made = self._once(name, stamp, lambda into: unpack(archive, into))
        return _chosen(made, list(_files(made)))

    def _once(self, name: str, stamp: str, make: Callable[[Path], object]) -> Path:
        """Return the folder made for this name and stamp, or make it, completely or not at all."""
        known = self._made.get((name, stamp))
        if stamp and known is not None:
            return known
        with self._making:
            if self._home is None:
                self._home = Path(tempfile.mkdtemp(prefix="penstock-cortex-"))
                # also if a failing start does not call close
                self._remove_home = weakref.finalize(self, shutil.rmtree, self._home, ignore_errors=True)
        into = Path(tempfile.mkdtemp(dir=self._home))
        try:
            make(into)
        except BaseException:
            shutil.rmtree(into, ignore_errors=True)
            raise
        self._made[name, stamp] = into
        return into


def _chosen(place: Path, names: list[str]) -> ModelLocation:
    folder = saved_models.choose(names)
    if folder is None:
        raise ModelError(saved_models.refusal(names))
    path = place / folder
    return ModelLocation(path, saved_models.version_of(path.name) or 1)


def _files(place: Path) -> Iterator[str]:
    """Yield the files below that identify SavedModels, by their paths."""
    for folder, _, files in os.walk(place):
        inner = Path(folder).relative_to(place)
        if saved_models.GRAPH in files or inner.name == "variables":
            yield from (str(inner / file) for file in files)
