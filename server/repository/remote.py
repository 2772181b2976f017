"""Remote: one remote model repository, copied into a folder of this machine.

Made by Mirrors, one for each URL among the repositories. docs/repository.md says what is copied when.
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
"""How many models are copied at once from a store whose client takes it."""
_TEXT_CHARS = 500
_TELLING = (
    "ETag", "etag", "e_tag", "md5Hash", "content_md5", "Content-MD5", "Digest", "checksum", "sha", "blob_id",
    "generation", "version_id", "VersionId", "LastModified", "last_modified", "Last-Modified", "mtime", "modified",
    "modify", "updated", "created", "ino",
)  # fmt: skip
"""What stores call that which changes with a file's content."""

Entry = Mapping[str, Any]
"""What a store says about one file or folder."""


class RemoteError(Exception):
    """Why a remote repository, or a model in it, cannot be read. Its text holds no credentials."""


@dataclass(slots=True)
class _Found:
    """What a model's remote folder holds, by path beneath the repository."""

    folders: set[str] = field(default_factory=set)
    files: dict[str, Entry] = field(default_factory=dict)


class Remote:
    """One remote repository and its copy.

    Invariants: nobody else may read the copy. A model's files change together, and not at all if one cannot be copied.
    What has not changed is not copied again. Nothing that the store says names a place outside `root`.
    Threads: any; it blocks. Each model is copied by one of them at a time.
    """

    def __init__(self, url: str) -> None:
        self._depot = Depot(url)
        self._home, self._lacking = home_of(url)
        # also where a start that fails closes nothing
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
        """Where it is."""
        return self._depot.address

    def open(self) -> None:
        """Reach the store and see that the repository is there. Raises: RemoteError."""
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
        """Remove the copy. What is being copied meanwhile ends with RemoteError."""
        self._closed.set()
        self._remove_home()

    # -- what is there -----------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """List the names of the models that the store has now; nothing is copied. Raises: RemoteError."""
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
        return False  # gone since it was listed

    def _looks_like_a_model(self, entries: Mapping[str, Entry]) -> bool:
        """Likewise scan.py of a folder."""
        return not {CONFIG_FILE, NATIVE_FILE}.isdisjoint(entries) or any(
            VERSION.fullmatch(name) is not None and self._is_folder(entry) for name, entry in entries.items()
        )

    def _listed(self, inner: str) -> dict[str, Entry]:
        """Give what a folder holds, by name. Names that are not a file's or a folder's in it are left out."""
        self._depot.files.invalidate_cache()
        place = self._place(inner)
        above = place.strip("/")
        found: dict[str, Entry] = {}
        for entry in self._depot.files.ls(place or "/", detail=True):
            name = str(entry["name"]).strip("/")
            if name == above:
                if entry["type"] == "file" and entry.get("size"):
                    raise NotADirectoryError(name)
                continue  # how object stores note an empty folder
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
            return bool(self._depot.files.isdir(entry["name"]))  # a link, to a store that has them
        return bool(entry["type"] == "directory")

    def _walked(self, name: str) -> _Found:
        """Give all that a model's folder holds; nothing within what is no model."""
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
        """Bring the copy of every model up to date, and remove those that are no more.

        Returns: the reasons of those whose copy stays as it was. Raises: RemoteError when nothing could be looked at.
        """
        with self._told():
            self._depot.renew()
            names = self._folders()
            for name in {place.name for place in self.root.iterdir()} - set(names):
                self._remove(name)
            return {name: reason for name, reason in zip(names, self._each(self._tried, names), strict=True) if reason}

    def refresh(self, name: str) -> None:
        """Bring the copy of one model up to date; remove it if it is no more. Raises: RemoteError."""
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
        """Copy what has changed into `made`. Returns: by path, the file, None if it is as before, and its stamp."""
        fetched: dict[str, tuple[Path | None, str]] = {}
        for number, (place, entry) in enumerate(found.files.items()):
            entry = self._complete(entry)
            stamp = stamp_of(entry)
            known, file = self.root / place, made / str(number)
            if stamp and self._stamps.get(place) == stamp and known.is_file():
                fetched[place] = None, stamp
                continue
            self._depot.files.get_file(entry["name"], str(file), callback=self._callback)
            size = entry.get("size")
            if size is not None and file.stat().st_size != size:
                raise RemoteError(f"{place}: {file.stat().st_size} of {size} bytes were received")
            # another time alone is no change: what looks at the copy would load the model anew
            same = known.is_file() and filecmp.cmp(known, file, shallow=False)
            fetched[place] = None if same else file, stamp
        return fetched

    def _complete(self, entry: Entry) -> Entry:
        """Ask for what a listing does not tell."""
        return entry if stamp_of(entry) else {**entry, **self._depot.files.info(entry["name"]), "name": entry["name"]}

    def _place_all(self, name: str, found: _Found, fetched: Mapping[str, tuple[Path | None, str]]) -> None:
        """Put in place what was fetched, and remove what is no more."""
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
        """Do it for all names, several at once where the store's client takes it."""
        if len(names) < 2 or not self._concurrent:
            return [work(name) for name in names]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(pool.map(work, names))

    @property
    def _concurrent(self) -> bool:
        return bool(getattr(self._depot.files, "async_impl", False))

    def _turn(self, name: str) -> threading.Lock:
        """Give what one thread at a time holds: for each model, or for a store whose client takes one call at once."""
        return self._turns.of(name if self._concurrent else "")

    def _refuse_if_closed(self) -> None:
        if self._closed.is_set():
            raise RemoteError(f"{self.address}: the server is stopping")

    @contextlib.contextmanager
    def _told(self, name: str = "") -> Iterator[None]:
        """Turn whatever the store's client raises into RemoteError, without what only the server may know."""
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
    """Give what changes when a file does, nothing if its store does not tell."""
    told = [f"{key}={entry[key]}" for key in _TELLING if entry.get(key) is not None]
    return " ".join([f"size={entry.get('size')}", *told]) if told else ""


def reason_of(error: Exception) -> str:
    """Give what a store's library has raised, on one line."""
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
