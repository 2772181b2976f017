"""Mounts: redirects paths of user code to other folders, within the process that runs it.

Installed in a worker process before user code is loaded. If the system allows it, the process already has a mount
namespace (server/workers/child.py), which applies to all code, and nothing is done here. Otherwise Python's own access
to files is redirected: `open`, `os`, and everything built on them (pathlib, shutil, glob, tempfile, zipfile, numpy,
PIL, ...), the import system, and the arguments and working folder of started programs. Not redirected are C libraries
that open files themselves (sqlite3, cv2.imread, h5py, a runtime that is given a model's path), `io.FileIO`, shell
command lines, and the listing of the parent folder.
"""

from __future__ import annotations

import glob
import io
import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from importlib.abc import PathEntryFinder
from pathlib import Path
from typing import Any

# Functions of os, by the number of leading path arguments.
_PATH_FUNCTIONS = {
    1: (
        "access", "chdir", "chmod", "chown", "getxattr", "lchown", "listdir", "listxattr", "lstat", "mkdir", "mkfifo",
        "mknod", "open", "pathconf", "readlink", "remove", "removexattr", "rmdir", "scandir", "setxattr", "stat",
        "statvfs", "truncate", "unlink", "utime",
    ),
    2: ("link", "rename", "replace", "symlink"),
}  # fmt: skip
_PATH_KEYWORDS = frozenset(("path", "file", "filename", "src", "dst"))
_SUPPORTS = ("supports_dir_fd", "supports_effective_ids", "supports_fd", "supports_follow_symlinks")


class Redirect:
    """The path mapping: below a key of `mounts` to the same path below its value; other paths are unchanged."""

    def __init__(self, mounts: Mapping[str, str]) -> None:
        # innermost first
        self._mounts = sorted(
            ((os.path.normpath(key), os.path.normpath(value)) for key, value in mounts.items()), reverse=True
        )

    def __call__(self, path: Any) -> Any:
        """Return the path to use: the argument itself unless it is below a mount. Descriptors are unchanged."""
        if isinstance(path, str):
            return self._resolve(path)
        if isinstance(path, bytes):
            text = os.fsdecode(path)
            target = self._resolve(text)
            return path if target is text else os.fsencode(target)
        if isinstance(path, os.PathLike):
            plain_path = os.fspath(path)
            target = self(plain_path)
            return path if target is plain_path else target
        return path

    def _resolve(self, path: str) -> str:
        if not path.startswith("/"):
            return path
        normalized = os.path.normpath(path) if "//" in path or "/." in path else path
        normalized = "/" + normalized.lstrip("/")
        for key, value in self._mounts:
            if normalized == key or normalized.startswith(f"{key}/"):
                return value + normalized[len(key) :]
        return path


class _RedirectedFunction:
    """A function with redirected paths; not a descriptor, like the built-in functions that it replaces."""

    def __init__(self, function: Callable[..., Any], redirect: Redirect, count: int) -> None:
        self.__wrapped__ = function
        self._function = function
        self._redirect = redirect
        self._count = count

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        redirect = self._redirect
        if keywords:
            keywords = {name: redirect(value) if name in _PATH_KEYWORDS else value for name, value in keywords.items()}
        return self._function(*map(redirect, args[: self._count]), *args[self._count :], **keywords)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)

    def __repr__(self) -> str:
        return repr(self._function)


class _RedirectedScandir(_RedirectedFunction):
    """os.scandir whose entries below a mount have the requested paths, so that os.walk and pathlib continue there."""

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        entries = super().__call__(*args, **keywords)
        requested: Any = args[0] if args else keywords.get("path")
        return entries if self._redirect(requested) is requested else _RedirectedEntries(entries, os.fspath(requested))


class _RedirectedEntries:
    """The result of os.scandir, with each entry's path below the requested folder."""

    def __init__(self, entries: Any, folder: Any) -> None:
        self._entries = entries
        self._folder = folder
        self.close = entries.close

    def __iter__(self) -> Iterator[_RedirectedEntry]:
        return self

    def __next__(self) -> _RedirectedEntry:
        entry = next(self._entries)
        return _RedirectedEntry(entry, os.path.join(self._folder, entry.name))  # noqa: PTH118 - it may be bytes

    def __enter__(self) -> Iterator[_RedirectedEntry]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _RedirectedEntry:
    """An os.DirEntry with another path."""

    def __init__(self, entry: os.DirEntry[Any], path: Any) -> None:
        self._entry = entry
        self.path = path

    def __fspath__(self) -> Any:
        return self.path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._entry, name)

    def __repr__(self) -> str:
        return repr(self._entry)


class Mounts:
    """The installed redirections, until `close`. In a worker they stay until the process ends."""

    def __init__(self, mounts: Mapping[str, str]) -> None:
        self._redirect = Redirect(mounts)
        self._undo = ExitStack()
        self._replacements: dict[int, _RedirectedFunction] = {}
        self._originals: list[Any] = []
        if mounts:
            self._install()

    def _install(self) -> None:
        for count, names in _PATH_FUNCTIONS.items():
            for name in names:
                if (function := getattr(os, name, None)) is not None:
                    self._add_replacement(function, count)
        self._add_replacement(io.open, 1)
        self._add_replacement(io.open_code, 1)
        for module in list(sys.modules.values()):
            # modules that imported one of the functions by name hold it in their own namespace
            if type(module) is type(os) and not str(getattr(module, "__name__", "")).startswith(__name__):
                self._replace_in(vars(module))
        # pathlib's own, since Python 3.13
        self._replace_static(getattr(glob, "_StringGlobber", None))
        openers = getattr(sys.modules.get("numpy.lib._datasource"), "_file_openers", None)
        self._replace_in(getattr(openers, "_file_openers", {}))
        self._extend_support_sets()
        sys.path_hooks.insert(0, self._path_hook)
        self._undo.callback(self._evict_importers, sys.path_importer_cache)
        self._undo.callback(sys.path_hooks.remove, self._path_hook)
        self._evict_importers(sys.path_importer_cache)
        fork = getattr(subprocess, "_fork_exec", None)
        if fork is not None:
            self._replace(vars(subprocess), "_fork_exec", self._redirected_fork(fork))
            # always use it: since Python 3.13, most programs named by path are spawned instead
            self._replace(vars(subprocess), "_USE_POSIX_SPAWN", False)

    def _add_replacement(self, function: Any, count: int) -> None:
        self._originals.append(function)  # keeps it alive, so that no other object gets its id
        kind = _RedirectedScandir if function is os.scandir else _RedirectedFunction
        self._replacements[id(function)] = kind(function, self._redirect, count)

    def _replace_in(self, names: dict[Any, Any]) -> None:
        for name, value in list(names.items()):
            replacement = self._replacements.get(id(value))
            if replacement is not None:
                self._replace(names, name, replacement)

    def _replace(self, names: dict[Any, Any], name: Any, value: object) -> None:
        self._undo.callback(names.__setitem__, name, names[name])
        names[name] = value

    def _replace_static(self, kind: type | None) -> None:
        for name, value in list(vars(kind).items()) if kind else ():
            replacement = self._replacements.get(id(getattr(value, "__func__", None)))
            if replacement is not None:
                self._undo.callback(setattr, kind, name, value)
                setattr(kind, name, staticmethod(replacement))

    def _extend_support_sets(self) -> None:
        """Add the replacements to os.supports_* sets that contain the originals."""
        for name in _SUPPORTS:
            functions: set[Any] = getattr(os, name)
            for function in list(functions):
                if (replacement := self._replacements.get(id(function))) is not None:
                    functions.add(replacement)
                    self._undo.callback(functions.discard, replacement)

    def _path_hook(self, entry: str) -> PathEntryFinder:
        """Find modules in a folder of sys.path that is below a mount (called by the import system)."""
        target = self._redirect(entry)
        if target is entry:
            raise ImportError("not below a mount")
        finder = pkgutil.get_importer(target)
        if finder is None:
            raise ImportError(f"{target} cannot be imported from")
        return finder  # type: ignore[return-value]

    def _redirected_fork(self, fork: Callable[..., Any]) -> Callable[..., Any]:
        redirect = self._redirect

        def start(args: Iterable[Any], programs: Iterable[Any], close: Any, keep: Any, folder: Any, *more: Any) -> Any:
            return fork([*map(redirect, args)], tuple(map(redirect, programs)), close, keep, redirect(folder), *more)

        return start

    def _evict_importers(self, cache: dict[str, Any]) -> None:
        for entry in [entry for entry in cache if self._redirect(entry) is not entry]:
            del cache[entry]

    def close(self) -> None:
        """Undo everything."""
        self._undo.close()


def install(mounts: Mapping[str, str]) -> Mounts:
    """Make the value of each mount visible at its key in this process; does nothing if the system already does.

    Raises: ValueError for a key that is not an absolute path, or is the root.
    """
    for key in mounts:
        if not key.startswith("/") or not os.path.normpath(key).strip("/"):
            raise ValueError(f"mount '{key}': expected an absolute path below the root")
    return Mounts({key: value for key, value in mounts.items() if not _is_mounted(key, value)})


def _is_mounted(key: str, value: str) -> bool:
    try:
        return Path(key).samefile(value)
    except OSError:
        return False
