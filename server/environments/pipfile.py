"""Pipfile: what pip must install for a Pipfile, or for the Pipfile.lock beside it. Source: pipenv's documentation."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .recipe import Digest, Install, Recipe

logger = logging.getLogger("penstock.environments")

_PUBLIC = ("https://pypi.org/simple", "https://pypi.python.org/simple")
"""The default source of every Pipfile. With it, the index configured for the machine's pip is used instead."""
_PYPI = {"name": "pypi", "url": _PUBLIC[0], "verify_ssl": True}
# Keys that are markers themselves, such as `sys_platform = "== 'win32'"`.
_MARKERS = (
    "os_name", "sys_platform", "platform_machine", "platform_python_implementation", "platform_release",
    "platform_system", "platform_version", "python_version", "python_full_version", "implementation_name",
    "implementation_version",
)  # fmt: skip
_SYSTEMS = ("git", "hg", "svn", "bzr")
_KNOWN = {
    *_MARKERS, *_SYSTEMS, "version", "extras", "markers", "ref", "subdirectory", "editable", "path", "file", "hashes",
    "index",
}  # fmt: skip
_SECTIONS = ("source", "packages", "dev-packages", "requires", "scripts", "pipfile", "pipenv")


def read_pipfile(path: Path) -> Recipe:
    """Read a Pipfile, or the Pipfile.lock beside it if there is one. Raises: OSError, ValueError with the entry."""
    locked = path.with_name("Pipfile.lock")
    said = _parsed(path) if path.name == "Pipfile" else {}
    if not locked.exists():
        packages, requires, sources = said.get("packages", {}), said.get("requires", {}), said.get("source", [])
        return _recipe(path, packages, requires, sources, complete=False)
    try:
        lock = json.loads(locked.read_text("utf-8"))
        meta = lock["_meta"]
    except (ValueError, KeyError) as error:
        raise ValueError(f"{locked}: {error}: `pipenv lock` makes it anew") from error
    if said and meta.get("hash", {}).get("sha256") != _hash(said):
        logger.warning("%s is older than the Pipfile but takes precedence: run `pipenv lock` to update it", locked)
    return _recipe(locked, lock.get("default", {}), meta.get("requires", {}), meta.get("sources", []), complete=True)


def _parsed(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _recipe(
    path: Path, packages: Mapping[str, Any], requires: Mapping[str, Any], sources: Sequence[Mapping[str, Any]], *,
    complete: bool,
) -> Recipe:  # fmt: skip
    """Make the Recipe. `complete`: the packages' dependencies are listed too."""
    digest = Digest()
    hashed: list[str] = []
    plain: list[str] = []
    for name, entry in sorted(packages.items()):
        said = {"version": entry} if isinstance(entry, str) else entry
        try:
            line = _line(name, said, path.parent)
        except ValueError as error:
            raise ValueError(f"{path}: {name}: {error}") from error
        (hashed if said.get("hashes") else plain).append(line)
        if (local := _local(said, path.parent)) is not None:
            digest.add_path(local)
    options = (*_indices(path, sources), *(("--no-deps",) if complete else ()))
    # separately: pip requires hashes for all requirements of a run or for none, and those from git or a folder cannot
    # have any
    installs = tuple(Install(options, "".join(f"{line}\n" for line in lines)) for lines in (hashed, plain) if lines)
    python = str(requires.get("python_full_version") or requires.get("python_version") or "").removesuffix(".*")
    digest.add(repr((installs, python)))
    return Recipe(path, str(digest), installs, python="" if python == "*" else python)


def _line(name: str, said: Mapping[str, Any], folder: Path) -> str:
    """Write one entry as a line of a requirements.txt."""
    if unknown := sorted(said.keys() - _KNOWN):
        raise ValueError(f"no such key {unknown[0]!r}")
    extras = f"[{','.join(said['extras'])}]" if said.get("extras") else ""
    markers = [f"({said['markers']})"] if said.get("markers") else []
    markers += [f"{key} {said[key]}" for key in _MARKERS if key in said]
    marker = f" ; {' and '.join(markers)}" if markers else ""
    if (place := _place(said, folder)) is not None:
        # editable or not, the environment changes when the content there does
        return f"{_called(name, extras, place, said, folder)}{marker}"
    version = str(said.get("version", "*")).strip()
    hashes = "".join(f" --hash={each}" for each in said.get("hashes", ()))
    if version and version != "*" and version[0] not in "=<>!~":
        raise ValueError(f"version {version!r}: wanted '*' or a comparison, as '==1.2'")
    return f"{name}{extras}{'' if version == '*' else version}{marker}{hashes}"


def _called(name: str, extras: str, place: str, said: Mapping[str, Any], folder: Path) -> str:
    """Write a requirement that comes from a place, with a name where pip requires one.

    pipenv accepts any name for a folder or file, such as `e1839a8`; pip accepts only the project's own, or none.
    """
    if any(system in said for system in _SYSTEMS):
        return f"{name}{extras} @ {place}"
    if not extras:
        return place
    local = _local(said, folder)
    return f"{local}{extras}" if local is not None and "subdirectory" not in said else f"{name}{extras} @ {place}"


def _place(said: Mapping[str, Any], folder: Path) -> str | None:
    """Return the URL of an entry; None if it comes from an index."""
    part = f"#subdirectory={said['subdirectory']}" if said.get("subdirectory") else ""
    for system in _SYSTEMS:
        if system in said:
            url = said[system] if said[system].startswith(f"{system}+") else f"{system}+{said[system]}"
            return f"{url}{'@' + said['ref'] if said.get('ref') else ''}{part}"
    if (local := _local(said, folder)) is not None:
        return local.as_uri() + part
    return str(said["file"]) + part if "file" in said else None


def _local(said: Mapping[str, Any], folder: Path) -> Path | None:
    word = str(said.get("path") or said.get("file") or "")
    if not word or "://" in word:
        return None
    path = (folder / word).resolve()
    if not path.exists():
        raise ValueError(f"path {word!r}: no such file or folder in {folder}")
    return path


def _indices(path: Path, sources: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield pip's options for the sources; none for the public one, for which the machine's own settings apply."""
    option = "--index-url"
    for source in sources:
        if not isinstance(source, dict) or "url" not in source:
            raise ValueError(f"{path}: a source without a url")
        url = os.path.expandvars(source["url"])
        if url.rstrip("/") not in _PUBLIC:
            yield from (option, url)
            if source.get("verify_ssl") is False:
                yield from ("--trusted-host", urlsplit(url).netloc.rpartition("@")[2])
        option = "--extra-index-url"


def _hash(said: Mapping[str, Any]) -> str:
    """Return the Pipfile hash that a Pipfile.lock records. Source: plette's `Pipfile.get_hash`."""
    content = {
        "_meta": {"sources": said.get("source", [_PYPI]), "requires": said.get("requires", {})},
        "default": said.get("packages", {}),
        "develop": said.get("dev-packages", {}),
        **{name: value for name, value in said.items() if name not in _SECTIONS},
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
