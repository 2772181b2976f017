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
from .remote_model import RemoteModel
from .saved_models import ModelError

MOUNT = "/mnt/project"
"""Where Cortex made a project's files available to its code. A model's path may begin with it, too."""
_S3 = "s3://"


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
        self._locks: dict[str, threading.Lock] = {}
        self._cache_lock = threading.Lock()
        self._made_folders: dict[tuple[str, str], Path] = {}
        self._stamps: dict[str, str] = {}
        self._cache_folder: Path | None = None
        self._remove_cache: Callable[[], object] = lambda: None

    def close(self) -> None:
        """Remove what was fetched and unpacked."""
        self._remove_cache()

    def find(self, api: Api) -> ModelLocation:
        """Return an API's model, fetched if necessary. Raises: ModelError."""
        try:
            with self._locks.setdefault(str(self.local_path(api) or api.model), threading.Lock()):
                return self._locate(api)
        except RemoteError as error:
            raise ModelError(str(error)) from error
        except OSError as error:
            raise ModelError(f"{api.model}: {error.strerror or error}") from error

    def local_path(self, api: Api) -> Path | None:
        """Return the path of an API's model on this machine, whether it exists or not; None if it is remote.

        Raises: ModelError.
        """
        model = api.model
        if model.startswith(_S3) and self._s3_root is not None:
            parts = PurePosixPath(model.removeprefix(_S3)).parts
            if ".." in parts or not parts or parts[0] == "/":
                raise ModelError(f"{model}: is not the URL of an object in a bucket (s3://bucket/key)")
            return self._s3_root.joinpath(*parts)
        if is_remote(model):
            return None
        if model == MOUNT or model.startswith(f"{MOUNT}/"):
            return api.project / model.removeprefix(MOUNT).lstrip("/")
        return api.project / model

    def stamp(self, api: Api) -> str:
        """Return a value that changes with a remote model, the last known one on failure; "" for a local one."""
        try:
            if self.local_path(api) is not None:
                return ""
            stamp = RemoteModel(api.model).list_files()
        except (ModelError, RemoteError):
            stamp = ""
        if stamp:
            self._stamps[api.model] = stamp
        return stamp or self._stamps.get(api.model, "")

    def _locate(self, api: Api) -> ModelLocation:
        path = self.local_path(api)
        if path is None:
            return self._fetch(api)
        if not path.exists():
            where = " (under --s3-root)" if api.model.startswith(_S3) else ""
            raise ModelError(f"{api.model}: not found or insufficient permissions{where}")
        if api.kind == "onnx":
            if not path.is_file():
                raise ModelError(f"{api.model}: is a folder; for ONNX models, the path should end in .onnx")
            return ModelLocation(path)
        if path.is_dir():
            return _choose_location(path)
        if path.suffix == ".zip":
            status = path.stat()
            return self._unpack(path, str(path), f"{status.st_size} {status.st_mtime_ns} {status.st_ino}")
        raise ModelError(saved_models.EXPECTED_STRUCTURE)

    def _fetch(self, api: Api) -> ModelLocation:
        stored = RemoteModel(api.model)
        stamp = stored.list_files()
        names = stored.names
        if not names:
            raise ModelError(f"{api.model}: not found or insufficient permissions")
        if api.kind == "tensorflow" and names != [""]:
            folder = saved_models.choose_folder(names)
            if folder is None:
                raise ModelError(saved_models.unusable_message(names))
            needed = [name for name in names if not folder or name.startswith(f"{folder}/")]
            top = PurePosixPath(api.model).name
            copied = self._make_once(api.model, stamp, lambda into: stored.copy(needed, into / top))
            return _choose_location(copied / top)
        if names != [""]:
            raise ModelError(f"{api.model}: is a folder; for ONNX models, the path should end in .onnx")
        file = self._make_once(api.model, stamp, lambda into: stored.copy(names, into)) / "model"
        return ModelLocation(file) if api.kind == "onnx" else self._unpack(file, api.model, f"unpacked {stamp}")

    def _unpack(self, archive: Path, name: str, stamp: str) -> ModelLocation:
        folder = self._make_once(name, stamp, lambda into: saved_models.unpack(archive, into))
        return _choose_location(folder)

    def _make_once(self, name: str, stamp: str, make: Callable[[Path], object]) -> Path:
        """Return the folder made for this name and stamp, or make it, completely or not at all."""
        folder = self._made_folders.get((name, stamp))
        if stamp and folder is not None:
            return folder
        with self._cache_lock:
            if self._cache_folder is None:
                self._cache_folder = Path(tempfile.mkdtemp(prefix="penstock-cortex-"))
                # also if a failing start does not call close
                self._remove_cache = weakref.finalize(self, shutil.rmtree, self._cache_folder, ignore_errors=True)
        into = Path(tempfile.mkdtemp(dir=self._cache_folder))
        try:
            make(into)
        except BaseException:
            shutil.rmtree(into, ignore_errors=True)
            raise
        self._made_folders[name, stamp] = into
        return into


def _choose_location(path: Path) -> ModelLocation:
    names = list(_model_files(path))
    folder = saved_models.choose_folder(names)
    if folder is None:
        raise ModelError(saved_models.unusable_message(names))
    path = path / folder
    return ModelLocation(path, saved_models.version_of(path.name) or 1)


def _model_files(path: Path) -> Iterator[str]:
    """Yield the files below that identify SavedModels, by their paths."""
    for folder, _, files in os.walk(path):
        inner = Path(folder).relative_to(path)
        if saved_models.GRAPH_FILE in files or inner.name == "variables":
            yield from (str(inner / file) for file in files)
