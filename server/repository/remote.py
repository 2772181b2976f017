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
from .depot import Depot, home_of
from .misfits import NATIVE_FILE
from .overrides import PATH_PARTS, is_component
from .scan import CONFIG_FILE
from .versions import VERSION

logger = logging.getLogger("penstock.repository")

INSTALL = "pip install 'penstock[remote]'"
_AT_ONCE = 8
"""How many models, and how many files of each, are copied concurrently if the store's client supports it."""
_TEXT_CHARS = 500
_TELLING = (
    "ETag", "etag", "e_tag", "md5Hash", "content_md5", "Content-MD5", "Digest", "checksum", "sha", "blob_id",
    "generation", "version_id", "VersionId", "LastModified", "last_modified", "Last-Modified", "mtime", "modified",
    "modify", "updated", "created", "ino",
)  # fmt: skip
"""The names by which stores report what changes with a file's content."""

Entry = Mapping[str, Any]
"""What a store reports about one file or folder."""


class RemoteError(Exception):
    """A remote repository, or a model in it, cannot be read. The text holds no credentials."""


@dataclass(slots=True)
class _Found:
    """The contents of a model's remote folder, by path relative to the repository."""

    folders: set[str] = field(default_factory=set)
    files: dict[str, Entry] = field(default_factory=dict)


class Remote:
    """One remote repository and its copy.

    Invariants: the copy is private to this user. A model's files change together, or not at all if one cannot be
    copied.
    Unchanged files are not copied again. Nothing that the store reports names a place outside `root`.
    Threads: any. Blocks. Each model is copied by one thread at a time.
    """

    def __init__(self, url: str) -> None:
        self._depot = Depot(url)
        self._home, self._lacking = home_of(url)
        # also removes it if a failed start never calls close
        self._remove_home = weakref.finalize(self, shutil.rmtree, self._home, ignore_errors=True)
        name = self.address.shown.rpartition("/")[2]
        self.root = self._home / (name if is_component(name) and not name.startswith(".") else "models")
        self.root.mkdir()
        self._callback: Any = None
        self._stamps: dict[str, str] = {}
        self._refused: set[str] = set()
        self._turns = StripedLocks()
        self._closed = threading.Event()

    @property
    def address(self) -> Address:
        """The repository's Address."""
        return self._depot.address

    def open(self) -> None:
        """Connect to the store and check that the repository exists. Raises: RemoteError."""
        with self._told():
            try:
                from fsspec.callbacks import Callback
            except ModuleNotFoundError as error:
                if (error.name or "").partition(".")[0] != "fsspec":
                    raise
                raise RemoteError(f"{self.address}: remote repositories require fsspec: {INSTALL}") from None
            if self.address.url.startswith("http") and "?" in self.address.url:
                raise RemoteError(f"{self.address}: a URL with a query names one file, not the folder of a repository")
            if self._lacking:
                raise RemoteError(f"{self.address}: {self._lacking}")
            self._depot.reach()
            self._callback = Callback(hooks={"closed": lambda *_, **__: self._refuse_if_closed()})
            if CONFIG_FILE in self._depot.asked(lambda: self._listed("")):
                raise RemoteError(f"{self.address}: is the folder of one model; pass the folder that contains it")
        logger.info("%s was copied to %s", self.address, self.root)

    def close(self) -> None:
        """Remove the copy. Copying that is in progress ends with RemoteError."""
        self._closed.set()
        self._remove_home()

    # -- what is there -----------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """List the names of the models now in the store, without copying. Raises: RemoteError."""
        with self._told():
            self._depot.renew()
            folders = self._folders()
            models = self._each(self._is_model, folders)
            return [name for name, is_model in zip(folders, models, strict=True) if is_model]

    def _folders(self) -> list[str]:
        with self._turn(""):
            return sorted(name for name, entry in self._listed("").items() if self._is_folder(entry))

    def _is_model(self, name: str) -> bool:
        with self._turn(name), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return self._looks_like_a_model(self._listed(name))
        return False  # deleted since it was listed

    def _looks_like_a_model(self, entries: Mapping[str, Entry]) -> bool:
        """Apply the rule that scan.py has for a folder."""
        return not {CONFIG_FILE, NATIVE_FILE}.isdisjoint(entries) or any(
            VERSION.fullmatch(name) is not None and self._is_folder(entry) for name, entry in entries.items()
        )

    def _listed(self, inner: str) -> dict[str, Entry]:
        """Return the contents of a folder by name. Names that do not belong to an entry of the folder are left out."""
        self._depot.files.invalidate_cache()
        place = self._place(inner)
        above = place.strip("/")
        found: dict[str, Entry] = {}
        for entry in self._depot.files.ls(place or "/", detail=True):
            name = str(entry["name"]).strip("/")
            if name == above:
                if entry["type"] == "file" and entry.get("size"):
                    raise NotADirectoryError(name)
                continue  # object stores list an empty folder this way
            rest = name.removeprefix(f"{above}/") if above else name
            if (above and rest == name) or not is_component(rest) or rest == ".." or {"?", "#", "\\"} & set(rest):
                self._refuse(name, inner)
            elif not rest.startswith(".") and rest != "__pycache__" and (rest not in found or self._is_folder(entry)):
                found[rest] = entry
        return found

    def _refuse(self, name: str, inner: str) -> None:
        if name not in self._refused:
            self._refused.add(name)
            place = f"{self.address}/{inner}".rstrip("/")
            logger.warning("%s: ignoring %s: not a valid file name", place, self.address.clean(ascii(name)))

    def _is_folder(self, entry: Entry) -> bool:
        if entry["type"] not in {"file", "directory"}:
            return bool(self._depot.files.isdir(entry["name"]))  # a link, in a store that has links
        return bool(entry["type"] == "directory")

    def _walked(self, name: str) -> _Found:
        """Return everything in a model's folder. A folder that is not a model is not walked."""
        found = _Found({name})
        entries = self._listed(name)
        if self._looks_like_a_model(entries):
            self._walk(name, entries, found)
        return found

    def _walk(self, folder: str, entries: Mapping[str, Entry], found: _Found) -> None:
        for name, entry in entries.items():
            place = f"{folder}/{name}"
            if not self._is_folder(entry):
                found.files[place] = entry
            elif place.count("/") < PATH_PARTS:
                found.folders.add(place)
                self._walk(place, self._listed(place), found)

    # -- the copy ----------------------------------------------------------------------------------------------

    def refresh_all(self) -> dict[str, str]:
        """Bring the copy of every model up to date, and remove those that no longer exist.

        Returns: the reasons for models whose copy was left as it was. Raises: RemoteError if the store cannot be
        listed.
        """
        with self._told():
            self._depot.renew()
            names = self._folders()
            for name in {place.name for place in self.root.iterdir()} - set(names):
                self._remove(name)
            return {name: reason for name, reason in zip(names, self._each(self._tried, names), strict=True) if reason}

    def refresh(self, name: str) -> None:
        """Bring the copy of one model up to date, or remove it if the model is gone. Raises: RemoteError."""
        with self._told(name):
            self._depot.renew()
            self._refresh(name)

    def _refresh(self, name: str) -> None:
        with self._told(name), self._turn(name):
            self._refuse_if_closed()
            try:
                found = self._walked(name)
            except (FileNotFoundError, NotADirectoryError):
                self._remove(name)
                return
            with tempfile.TemporaryDirectory(dir=self._home) as made:
                self._place_all(name, found, self._fetched(found, Path(made)))

    def _tried(self, name: str) -> str:
        try:
            self._refresh(name)
        except RemoteError as error:
            return str(error)
        return ""

    def _fetched(self, found: _Found, made: Path) -> dict[str, tuple[Path | None, str]]:
        """Copy changed files into `made`. Returns: for each path, the new file (None if unchanged) and its stamp."""
        files = {place: made / str(number) for number, place in enumerate(found.files)}
        results = self._each(lambda place: self._fetched_file(place, found.files[place], files[place]), list(files))
        return dict(zip(files, results, strict=True))

    def _fetched_file(self, place: str, entry: Entry, file: Path) -> tuple[Path | None, str]:
        """Copy one file to `file` if it has changed."""
        self._refuse_if_closed()
        entry = self._complete(entry)
        stamp, known = stamp_of(entry), self.root / place
        if stamp and self._stamps.get(place) == stamp and known.is_file():
            return None, stamp
        self._depot.files.get_file(entry["name"], str(file), callback=self._callback)
        size = entry.get("size")
        if size is not None and file.stat().st_size != size:
            raise RemoteError(f"{place}: {file.stat().st_size} of {size} bytes were received")
        # a new modification time alone would cause a reload of the model
        same = known.is_file() and filecmp.cmp(known, file, shallow=False)
        return None if same else file, stamp

    def _complete(self, entry: Entry) -> Entry:
        """Query what a listing does not report."""
        return entry if stamp_of(entry) else {**entry, **self._depot.files.info(entry["name"]), "name": entry["name"]}

    def _place_all(self, name: str, found: _Found, fetched: Mapping[str, tuple[Path | None, str]]) -> None:
        """Move fetched files into place, and remove files that no longer exist."""
        self._refuse_if_closed()
        for place, _, _ in os.walk(self.root / name, topdown=False):
            inner = Path(place).relative_to(self.root).as_posix()
            with os.scandir(place) as entries:
                gone = [each.name for each in entries if each.is_file() and f"{inner}/{each.name}" not in fetched]
            for each in gone:
                (Path(place) / each).unlink()
            if inner not in found.folders:
                Path(place).rmdir()
        for folder in sorted(found.folders):
            (self.root / folder).mkdir(exist_ok=True)
        for place, (file, _) in fetched.items():
            if file is not None:
                file.replace(self.root / place)
        self._forget(name)
        self._stamps.update({place: stamp for place, (_, stamp) in fetched.items()})

    def _remove(self, name: str) -> None:
        shutil.rmtree(self.root / name, ignore_errors=True)
        self._forget(name)

    def _forget(self, name: str) -> None:
        for place in [place for place in list(self._stamps) if place.startswith(f"{name}/")]:
            del self._stamps[place]

    # -- the store ---------------------------------------------------------------------------------------------

    def _place(self, inner: str) -> str:
        return f"{self._depot.top}/{inner}" if inner else self._depot.top

    def _each(self, work: Callable[[str], Any], names: list[str]) -> list[Any]:
        """Call `work` for all names, concurrently if the store's client supports it.

        Raises: the first exception of any, once no call is running.
        """
        if len(names) < 2 or not self._concurrent:
            return [work(name) for name in names]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(pool.map(work, names))

    @property
    def _concurrent(self) -> bool:
        return bool(getattr(self._depot.files, "async_impl", False))

    def _turn(self, name: str) -> threading.Lock:
        """Return the lock for a model, or the lock for the whole store if its client takes one call at a time."""
        return self._turns.of(name if self._concurrent else "")

    def _refuse_if_closed(self) -> None:
        if self._closed.is_set():
            raise RemoteError(f"{self.address}: the server is stopping")

    @contextlib.contextmanager
    def _told(self, name: str = "") -> Iterator[None]:
        """Convert any exception of the store's client into RemoteError, without credentials."""
        try:
            yield
        except RemoteError:
            raise
        except CredentialError as error:
            raise RemoteError(f"{self.address}: {error}") from None
        except Exception as error:  # noqa: BLE001 - every store raises errors of its own
            place = f"{self.address}/{name}".rstrip("/")
            raise RemoteError(f"{place}: {self.address.clean(reason_of(error))}") from None


def stamp_of(entry: Entry) -> str:
    """Return a text that changes when a file changes; empty if the store does not report any."""
    told = [f"{key}={entry[key]}" for key in _TELLING if entry.get(key) is not None]
    return " ".join([f"size={entry.get('size')}", *told]) if told else ""


def reason_of(error: Exception) -> str:
    """Return the message of a store library's exception, on one line."""
    said = " ".join(str(error).split())[:_TEXT_CHARS]
    if isinstance(error, FileNotFoundError):
        return "no such file or folder"
    if isinstance(error, NotADirectoryError):
        return "is not a folder"
    if isinstance(error, PermissionError):
        return f"permission denied: {said}" if said else "permission denied"
    if isinstance(error, TimeoutError):
        return "timed out"
    return said if isinstance(error, ImportError) and said else f"{type(error).__name__}: {said}"
