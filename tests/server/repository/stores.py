"""A remote store for the tests in this folder: fsspec's memory store, with injected failures and counted calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry

URL = "teststore://bucket/models"


class Store(MemoryFileSystem):  # type: ignore[misc] # fsspec has no types
    """One store for a test: `clear` it first."""

    protocol: str | tuple[str, ...] = "teststore"
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


class Guarded(Store):
    """Buckets with a key each, in any cloud, which remember the options they were opened with."""

    protocol = ("s3", "gs", "abfs")
    cachable = True
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    keys: ClassVar[dict[str, str | None]] = {}
    """By bucket, the `key` that opens it, None for anybody."""
    opened_options: ClassVar[list[dict[str, Any]]] = []
    lacks: ClassVar[Exception]
    """What is raised where no key is said."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.opened_options.append(options)
        self._options = options

    @classmethod
    def clear(cls) -> None:
        super().clear()
        cls.clear_instance_cache()
        cls.keys.clear()
        cls.lacks = NoCredentialsError("Unable to locate credentials")
        cls.opened_options.clear()

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        key = self.keys.get(self._strip_protocol(path).split("/")[1])
        if self._options.get("key") is None and not self._options.get("anon"):
            raise self.lacks
        if key is not None and self._options.get("key") != key:
            raise PermissionError("Access Denied")
        return super().ls(path, detail, **kwargs)


class NoCredentialsError(Exception):
    """An error with the name of botocore's."""


class ClientAuthenticationError(Exception):
    """An error with the name of azure.core's."""


def put(files: dict[str, str]) -> None:
    """Write files by their paths in the repository."""
    store = Store()
    for name, text in files.items():
        store.pipe_file(f"{URL}/{name}", text.encode())


@contextmanager
def registered() -> Iterator[type[Store]]:
    """Register the store's protocol with fsspec."""
    Store.clear()
    fsspec.register_implementation("teststore", Store, clobber=True)
    try:
        yield Store
    finally:
        Store.clear()


@contextmanager
def guarded() -> Iterator[type[Guarded]]:
    """Register Guarded with fsspec for the cloud stores, whether their packages are installed or not."""
    before = dict(_registry)  # fsspec has no way to unregister one
    _registry.update(dict.fromkeys(Guarded.protocol, Guarded))
    Guarded.clear()
    try:
        yield Guarded
    finally:
        Guarded.clear()
        _registry.clear()
        _registry.update(before)
