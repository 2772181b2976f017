"""Remote: one remote model repository, copied to a local folder.

Made by Mirrors, one per repository URL. docs/repository.md describes what is copied and when.
"""

from __future__ import annotations

import contextlib
import filecmp
import logging
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.server.threads import StripedLocks

from .address import Address
from .credentials import CredentialError
from .depot import Depot, make_copy_folder
from .overrides import PATH_PARTS, is_component
from .penstock_toml import NATIVE_FILE
from .scan import CONFIG_FILE
from .versions import VERSION

logger = logging.getLogger("penstock.repository")

INSTALL = "pip install 'penstock[remote]'"
_MAX_CONCURRENT = 8
"""How many models, and how many files of each, are copied concurrently if the store's client supports it."""
_TEXT_CHARS = 500
_CHANGE_KEYS = (
    "ETag", "etag", "e_tag", "md5Hash", "content_md5", "Content-MD5", "Digest", "checksum", "sha", "blob_id",
    "generation", "version_id", "VersionId", "LastModified", "last_modified", "Last-Modified", "mtime", "modified",
    "modify", "updated", "created", "ino",
)  # fmt: skip
"""The names by which stores report what changes with a file's content."""

RemoteEntry = Mapping[str, Any]
"""What a store reports about one file or folder."""


class RemoteError(Exception):
    """A remote repository, or a model in it, cannot be read. The text holds no credentials."""


@dataclass(slots=True)
class _FolderContents:
    """The contents of a model's remote folder, by path relative to the repository."""

    folders: set[str] = field(default_factory=set)
    files: dict[str, RemoteEntry] = field(default_factory=dict)


class Remote:
    """One remote repository and its copy.

    Invariants: the copy is private to this user. A model's files change together, or not at all if one cannot be
    copied.
    Unchanged files are not copied again. Nothing that the store reports names a place outside `root`.
    Threads: any. Blocks. Each model is copied by one thread at a time.
    """

    def __init__(self, url: str) -> None:
        self._depot = Depot(url)
        self._copy_folder, self._folder_problem = make_copy_folder(url)
        # also removes it if a failed start never calls close
        self._remove_folder = weakref.finalize(self, shutil.rmtree, self._copy_folder, ignore_errors=True)
        name = self.address.redacted.rpartition("/")[2]
        self.root = self._copy_folder / (name if is_component(name) and not name.startswith(".") else "models")
        self.root.mkdir()
        self._callback: Any = None
        self._stamps: dict[str, str] = {}
        self._ignored_names: set[str] = set()
        self._locks = StripedLocks()
        self._closed = threading.Event()

    @property
    def address(self) -> Address:
        """The repository's Address."""
        return self._depot.address

    def open(self) -> None:
        """Connect to the store and check that the repository exists. Raises: RemoteError."""
        with self._as_remote_error():
            try:
                from fsspec.callbacks import Callback
            except ModuleNotFoundError as error:
                if (error.name or "").partition(".")[0] != "fsspec":
                    raise
                raise RemoteError(f"{self.address}: remote repositories require fsspec: {INSTALL}") from None
            if self.address.url.startswith("http") and "?" in self.address.url:
                raise RemoteError(f"{self.address}: a URL with a query names one file, not the folder of a repository")
            if self._folder_problem:
                raise RemoteError(f"{self.address}: {self._folder_problem}")
            self._depot.connect()
            self._callback = Callback(hooks={"closed": lambda *_, **__: self._check_open()})
            if CONFIG_FILE in self._depot.call(lambda: self._list_folder("")):
                raise RemoteError(f"{self.address}: is the folder of one model; pass the folder that contains it")
        logger.info("%s was copied to %s", self.address, self.root)

    def close(self) -> None:
        """Remove the copy. Copying that is in progress ends with RemoteError."""
        self._closed.set()
        self._remove_folder()

    # -- what is there -----------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """List the names of the models now in the store, without copying. Raises: RemoteError."""
        with self._as_remote_error():
            self._depot.reconnect()
            folders = self._folders()
            models = self._for_each(self._is_model, folders)
            return [name for name, is_model in zip(folders, models, strict=True) if is_model]

    def _folders(self) -> list[str]:
        with self._lock_for(""):
            return sorted(name for name, entry in self._list_folder("").items() if self._is_folder(entry))

    def _is_model(self, name: str) -> bool:
        with self._lock_for(name), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return self._looks_like_a_model(self._list_folder(name))
        return False  # deleted since it was listed

    def _looks_like_a_model(self, entries: Mapping[str, RemoteEntry]) -> bool:
        """Apply the rule that scan.py has for a folder."""
        return not {CONFIG_FILE, NATIVE_FILE}.isdisjoint(entries) or any(
            VERSION.fullmatch(name) is not None and self._is_folder(entry) for name, entry in entries.items()
        )

    def _list_folder(self, inner: str) -> dict[str, RemoteEntry]:
        """Return the contents of a folder by name. Names that do not belong to an entry of the folder are left out."""
        self._depot.filesystem.invalidate_cache()
        path = self._remote_path(inner)
        folder = path.strip("/")
        found: dict[str, RemoteEntry] = {}
        for entry in self._depot.filesystem.ls(path or "/", detail=True):
            name = str(entry["name"]).strip("/")
            if name == folder:
                if entry["type"] == "file" and entry.get("size"):
                    raise NotADirectoryError(name)
                continue  # object stores list an empty folder this way
            child = name.removeprefix(f"{folder}/") if folder else name
            if (folder and child == name) or not is_component(child) or child == ".." or {"?", "#", "\\"} & set(child):
                self._warn_ignored(name, inner)
            elif (
                not child.startswith(".") and child != "__pycache__" and (child not in found or self._is_folder(entry))
            ):
                found[child] = entry
        return found

    def _warn_ignored(self, name: str, inner: str) -> None:
        if name not in self._ignored_names:
            self._ignored_names.add(name)
            folder = f"{self.address}/{inner}".rstrip("/")
            logger.warning("%s: ignoring %s: not a valid file name", folder, self.address.redact(ascii(name)))

    def _is_folder(self, entry: RemoteEntry) -> bool:
        if entry["type"] not in {"file", "directory"}:
            return bool(self._depot.filesystem.isdir(entry["name"]))  # a link, in a store that has links
        return bool(entry["type"] == "directory")

    def _walk_model(self, name: str) -> _FolderContents:
        """Return everything in a model's folder. A folder that is not a model is not walked."""
        found = _FolderContents({name})
        entries = self._list_folder(name)
        if self._looks_like_a_model(entries):
            self._walk(name, entries, found)
        return found

    def _walk(self, folder: str, entries: Mapping[str, RemoteEntry], found: _FolderContents) -> None:
        for name, entry in entries.items():
            path = f"{folder}/{name}"
            if not self._is_folder(entry):
                found.files[path] = entry
            elif path.count("/") < PATH_PARTS:
                found.folders.add(path)
                self._walk(path, self._list_folder(path), found)

    # -- the copy ----------------------------------------------------------------------------------------------

    def refresh_all(self) -> dict[str, str]:
        """Bring the copy of every model up to date, and remove those that no longer exist.

        Returns: the reasons for models whose copy was left as it was. Raises: RemoteError if the store cannot be
        listed.
        """
        with self._as_remote_error():
            self._depot.reconnect()
            names = self._folders()
            for name in {folder.name for folder in self.root.iterdir()} - set(names):
                self._remove(name)
            return {
                name: reason
                for name, reason in zip(names, self._for_each(self._try_refresh, names), strict=True)
                if reason
            }

    def refresh(self, name: str) -> None:
        """Bring the copy of one model up to date, or remove it if the model is gone. Raises: RemoteError."""
        with self._as_remote_error(name):
            self._depot.reconnect()
            self._refresh(name)

    def _refresh(self, name: str) -> None:
        with self._as_remote_error(name), self._lock_for(name):
            self._check_open()
            try:
                found = self._walk_model(name)
            except (FileNotFoundError, NotADirectoryError):
                self._remove(name)
                return
            with tempfile.TemporaryDirectory(dir=self._copy_folder) as staging:
                self._install(name, found, self._fetch(found, Path(staging)))

    def _try_refresh(self, name: str) -> str:
        try:
            self._refresh(name)
        except RemoteError as error:
            return str(error)
        return ""

    def _fetch(self, found: _FolderContents, staging: Path) -> dict[str, tuple[Path | None, str]]:
        """Copy changed files into `staging`. Returns: for each path, the new file (None if unchanged) and its stamp."""
        files = {path: staging / str(number) for number, path in enumerate(found.files)}
        results = self._for_each(lambda path: self._fetch_file(path, found.files[path], files[path]), list(files))
        return dict(zip(files, results, strict=True))

    def _fetch_file(self, path: str, entry: RemoteEntry, file: Path) -> tuple[Path | None, str]:
        """Copy one file to `file` if it has changed."""
        self._check_open()
        entry = self._with_details(entry)
        stamp, current = stamp_of(entry), self.root / path
        if stamp and self._stamps.get(path) == stamp and current.is_file():
            return None, stamp
        self._depot.filesystem.get_file(entry["name"], str(file), callback=self._callback)
        size = entry.get("size")
        if size is not None and file.stat().st_size != size:
            raise RemoteError(f"{path}: {file.stat().st_size} of {size} bytes were received")
        # a new modification time alone would cause a reload of the model
        unchanged = current.is_file() and filecmp.cmp(current, file, shallow=False)
        return None if unchanged else file, stamp

    def _with_details(self, entry: RemoteEntry) -> RemoteEntry:
        """Query what a listing does not report."""
        return (
            entry if stamp_of(entry) else {**entry, **self._depot.filesystem.info(entry["name"]), "name": entry["name"]}
        )

    def _install(self, name: str, found: _FolderContents, fetched: Mapping[str, tuple[Path | None, str]]) -> None:
        """Move fetched files into place, and remove files that no longer exist."""
        self._check_open()
        for folder, _, _ in os.walk(self.root / name, topdown=False):
            relative = Path(folder).relative_to(self.root).as_posix()
            with os.scandir(folder) as entries:
                removed = [
                    child.name for child in entries if child.is_file() and f"{relative}/{child.name}" not in fetched
                ]
            for child in removed:
                (Path(folder) / child).unlink()
            if relative not in found.folders:
                Path(folder).rmdir()
        for folder in sorted(found.folders):
            (self.root / folder).mkdir(exist_ok=True)
        for path, (file, _) in fetched.items():
            if file is not None:
                file.replace(self.root / path)
        self._discard_stamps(name)
        self._stamps.update({path: stamp for path, (_, stamp) in fetched.items()})

    def _remove(self, name: str) -> None:
        shutil.rmtree(self.root / name, ignore_errors=True)
        self._discard_stamps(name)

    def _discard_stamps(self, name: str) -> None:
        for path in [path for path in list(self._stamps) if path.startswith(f"{name}/")]:
            del self._stamps[path]

    # -- the store ---------------------------------------------------------------------------------------------

    def _remote_path(self, inner: str) -> str:
        return f"{self._depot.root_path}/{inner}" if inner else self._depot.root_path

    def _for_each(self, function: Callable[[str], Any], names: list[str]) -> list[Any]:
        """Call `function` for all names, concurrently if the store's client supports it.

        Raises: the first exception of any, once no call is running.
        """
        if len(names) < 2 or not self._concurrent:
            return [function(name) for name in names]
        with ThreadPoolExecutor(_MAX_CONCURRENT) as pool:
            return list(pool.map(function, names))

    @property
    def _concurrent(self) -> bool:
        return bool(getattr(self._depot.filesystem, "async_impl", False))

    def _lock_for(self, name: str) -> threading.Lock:
        """Return the lock for a model, or the lock for the whole store if its client takes one call at a time."""
        return self._locks.lock_for(name if self._concurrent else "")

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise RemoteError(f"{self.address}: the server is stopping")

    @contextlib.contextmanager
    def _as_remote_error(self, name: str = "") -> Iterator[None]:
        """Convert any exception of the store's client into RemoteError, without credentials."""
        try:
            yield
        except RemoteError:
            raise
        except CredentialError as error:
            raise RemoteError(f"{self.address}: {error}") from None
        except Exception as error:  # noqa: BLE001 - every store raises errors of its own
            location = f"{self.address}/{name}".rstrip("/")
            raise RemoteError(f"{location}: {self.address.redact(error_reason(error))}") from None


def stamp_of(entry: RemoteEntry) -> str:
    """Return a text that changes when a file changes; empty if the store does not report any."""
    fields = [f"{key}={entry[key]}" for key in _CHANGE_KEYS if entry.get(key) is not None]
    return " ".join([f"size={entry.get('size')}", *fields]) if fields else ""


def error_reason(error: Exception) -> str:
    """Return the message of a store library's exception, on one line."""
    message = " ".join(str(error).split())[:_TEXT_CHARS]
    if isinstance(error, FileNotFoundError):
        return "no such file or folder"
    if isinstance(error, NotADirectoryError):
        return "is not a folder"
    if isinstance(error, PermissionError):
        return f"permission denied: {message}" if message else "permission denied"
    if isinstance(error, TimeoutError):
        return "timed out"
    return message if isinstance(error, ImportError) and message else f"{type(error).__name__}: {message}"
