"""A remote store for the tests of this folder: fsspec's memory, which a test can make fail, and which counts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

URL = "teststore://bucket/models"


class Store(MemoryFileSystem):  # type: ignore[misc] # fsspec has no types
    """One store for a test: `clear` it first."""

    protocol = "teststore"
    cachable = False
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    fails: ClassVar[dict[str, Exception]] = {}
    """What looking at, or fetching, a path raises."""
    fetched: ClassVar[list[str]] = []
    strange: ClassVar[dict[str, list[str]]] = {}
    """Names that a listing has beyond those that are there."""
    tells: ClassVar[bool] = True
    """Whether listings tell what changes with a file."""

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + str(path).rpartition("://")[2].rpartition("@")[2].strip("/")

    @classmethod
    def clear(cls) -> None:
        for each in (cls.store, cls.fails, cls.fetched, cls.strange):
            each.clear()
        cls.pseudo_dirs[:] = [""]
        cls.tells = True

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        place = self._strip_protocol(path)
        if place in self.fails:
            raise self.fails[place]
        listed = [dict(entry) for entry in super().ls(path, detail=True)]
        listed += [{"name": name, "type": "file", "size": 1} for name in self.strange.get(place, ())]
        if not self.tells:
            for entry in listed:
                entry.pop("created", None)
        return listed

    def info(self, path: str, **kwargs: Any) -> Any:
        found = dict(super().info(path, **kwargs))
        if not self.tells:
            found.pop("created", None)
        return found

    def get_file(self, rpath: str, lpath: Any = None, **kwargs: Any) -> None:
        place = self._strip_protocol(rpath)
        self.fetched.append(place)
        if place in self.fails:
            with open(lpath, "wb") as half:  # noqa: PTH123 - what fsspec is given is a text
                half.write(b"half")
            raise self.fails[place]
        super().get_file(rpath, lpath, **kwargs)


def put(files: dict[str, str]) -> None:
    """Write files of the repository by their paths in it."""
    store = Store()
    for name, text in files.items():
        store.pipe_file(f"{URL}/{name}", text.encode())


@contextmanager
def registered() -> Iterator[type[Store]]:
    """Have fsspec know the store by its protocol."""
    Store.clear()
    fsspec.register_implementation("teststore", Store, clobber=True)
    try:
        yield Store
    finally:
        Store.clear()
