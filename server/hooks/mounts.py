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
_PATHS = {
    1: (
        "access", "chdir", "chmod", "chown", "getxattr", "lchown", "listdir", "listxattr", "lstat", "mkdir", "mkfifo",
        "mknod", "open", "pathconf", "readlink", "remove", "removexattr", "rmdir", "scandir", "setxattr", "stat",
        "statvfs", "truncate", "unlink", "utime",
    ),
    2: ("link", "rename", "replace", "symlink"),
}  # fmt: skip
_NAMED = frozenset(("path", "file", "filename", "src", "dst"))
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
            return self._of(path)
        if isinstance(path, bytes):
            text = os.fsdecode(path)
            leads = self._of(text)
            return path if leads is text else os.fsencode(leads)
        if isinstance(path, os.PathLike):
            plain = os.fspath(path)
            leads = self(plain)
            return path if leads is plain else leads
        return path

    def _of(self, path: str) -> str:
        if not path.startswith("/"):
            return path
        plain = os.path.normpath(path) if "//" in path or "/." in path else path
        plain = "/" + plain.lstrip("/")
        for key, value in self._mounts:
            if plain == key or plain.startswith(f"{key}/"):
                return value + plain[len(key) :]
        return path


class _Led:
    """A function with redirected paths; not a descriptor, like the built-in functions that it replaces."""

    def __init__(self, function: Callable[..., Any], lead: Redirect, count: int) -> None:
        self.__wrapped__ = function
        self._function = function
        self._lead = lead
        self._count = count

    def __call__(self, *args: Any, **named: Any) -> Any:
        lead = self._lead
        if named:
            named = {name: lead(value) if name in _NAMED else value for name, value in named.items()}
        return self._function(*map(lead, args[: self._count]), *args[self._count :], **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)

    def __repr__(self) -> str:
        return repr(self._function)


class _LedScandir(_Led):
    """os.scandir whose entries below a mount have the requested paths, so that os.walk and pathlib continue there."""

    def __call__(self, *args: Any, **named: Any) -> Any:
        entries = super().__call__(*args, **named)
        asked: Any = args[0] if args else named.get("path")
        return entries if self._lead(asked) is asked else _Entries(entries, os.fspath(asked))


class _Entries:
    """The result of os.scandir, with each entry's path below the requested folder."""

    def __init__(self, entries: Any, folder: Any) -> None:
        self._entries = entries
        self._folder = folder
        self.close = entries.close

    def __iter__(self) -> Iterator[_Entry]:
        return self

    def __next__(self) -> _Entry:
        entry = next(self._entries)
        return _Entry(entry, os.path.join(self._folder, entry.name))  # noqa: PTH118 - it may be bytes

    def __enter__(self) -> Iterator[_Entry]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Entry:
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
        self._lead = Redirect(mounts)
        self._undo = ExitStack()
        self._led: dict[int, _Led] = {}
        self._originals: list[Any] = []
        if mounts:
            self._install()

    def _install(self) -> None:
        for count, names in _PATHS.items():
            for name in names:
                if (function := getattr(os, name, None)) is not None:
                    self._prepare(function, count)
        self._prepare(io.open, 1)
        self._prepare(io.open_code, 1)
        for module in list(sys.modules.values()):
            # modules that imported one of the functions by name hold it in their own namespace
            if type(module) is type(os) and not str(getattr(module, "__name__", "")).startswith(__name__):
                self._replace_in(vars(module))
        # pathlib's own, since Python 3.13
        self._replace_static(getattr(glob, "_StringGlobber", None))
        openers = getattr(sys.modules.get("numpy.lib._datasource"), "_file_openers", None)
        self._replace_in(getattr(openers, "_file_openers", {}))
        self._support()
        sys.path_hooks.insert(0, self._hook)
        self._undo.callback(self._forget, sys.path_importer_cache)
        self._undo.callback(sys.path_hooks.remove, self._hook)
        self._forget(sys.path_importer_cache)
        fork = getattr(subprocess, "_fork_exec", None)
        if fork is not None:
            self._replace(vars(subprocess), "_fork_exec", self._forked(fork))
            # always use it: since Python 3.13, most programs named by path are spawned instead
            self._replace(vars(subprocess), "_USE_POSIX_SPAWN", False)

    def _prepare(self, function: Any, count: int) -> None:
        self._originals.append(function)  # keeps it alive, so that no other object gets its id
        kind = _LedScandir if function is os.scandir else _Led
        self._led[id(function)] = kind(function, self._lead, count)

    def _replace_in(self, names: dict[Any, Any]) -> None:
        for name, value in list(names.items()):
            led = self._led.get(id(value))
            if led is not None:
                self._replace(names, name, led)

    def _replace(self, names: dict[Any, Any], name: Any, value: object) -> None:
        self._undo.callback(names.__setitem__, name, names[name])
        names[name] = value

    def _replace_static(self, kind: type | None) -> None:
        for name, value in list(vars(kind).items()) if kind else ():
            led = self._led.get(id(getattr(value, "__func__", None)))
            if led is not None:
                self._undo.callback(setattr, kind, name, value)
                setattr(kind, name, staticmethod(led))

    def _support(self) -> None:
        """Add the replacements to os.supports_* sets that contain the originals."""
        for name in _SUPPORTS:
            functions: set[Any] = getattr(os, name)
            for function in list(functions):
                if (led := self._led.get(id(function))) is not None:
                    functions.add(led)
                    self._undo.callback(functions.discard, led)

    def _hook(self, entry: str) -> PathEntryFinder:
        """Find modules in a folder of sys.path that is below a mount (called by the import system)."""
        leads = self._lead(entry)
        if leads is entry:
            raise ImportError("not below a mount")
        finder = pkgutil.get_importer(leads)
        if finder is None:
            raise ImportError(f"{leads} cannot be imported from")
        return finder  # type: ignore[return-value]

    def _forked(self, fork: Callable[..., Any]) -> Callable[..., Any]:
        lead = self._lead

        def start(args: Iterable[Any], programs: Iterable[Any], close: Any, keep: Any, folder: Any, *more: Any) -> Any:
            return fork([*map(lead, args)], tuple(map(lead, programs)), close, keep, lead(folder), *more)

        return start

    def _forget(self, cache: dict[str, Any]) -> None:
        for entry in [entry for entry in cache if self._lead(entry) is not entry]:
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
            raise ValueError(f"mount '{key}': wanted an absolute path below the root")
    return Mounts({key: value for key, value in mounts.items() if not _is_there(key, value)})


def _is_there(key: str, value: str) -> bool:
    try:
        return Path(key).samefile(value)
    except OSError:
        return False
