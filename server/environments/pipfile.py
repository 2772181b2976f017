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

_PUBLIC_INDEXES = ("https://pypi.org/simple", "https://pypi.python.org/simple")
"""The default source of every Pipfile. With it, the index configured for the machine's pip is used instead."""
_PYPI = {"name": "pypi", "url": _PUBLIC_INDEXES[0], "verify_ssl": True}
# Keys that are markers themselves, such as `sys_platform = "== 'win32'"`.
_MARKERS = (
    "os_name", "sys_platform", "platform_machine", "platform_python_implementation", "platform_release",
    "platform_system", "platform_version", "python_version", "python_full_version", "implementation_name",
    "implementation_version",
)  # fmt: skip
_VCS = ("git", "hg", "svn", "bzr")
_KNOWN_KEYS = {
    *_MARKERS, *_VCS, "version", "extras", "markers", "ref", "subdirectory", "editable", "path", "file", "hashes",
    "index",
}  # fmt: skip
_SECTIONS = ("source", "packages", "dev-packages", "requires", "scripts", "pipfile", "pipenv")


def read_pipfile(path: Path) -> Recipe:
    """Read a Pipfile, or the Pipfile.lock beside it if there is one. Raises: OSError, ValueError with the entry."""
    lock_path = path.with_name("Pipfile.lock")
    pipfile = _parse_toml(path) if path.name == "Pipfile" else {}
    if not lock_path.exists():
        packages, requires, sources = (
            pipfile.get("packages", {}),
            pipfile.get("requires", {}),
            pipfile.get("source", []),
        )
        return _make_recipe(path, packages, requires, sources, complete=False)
    try:
        lock = json.loads(lock_path.read_text("utf-8"))
        meta = lock["_meta"]
    except (ValueError, KeyError) as error:
        raise ValueError(f"{lock_path}: {error}: run `pipenv lock` to recreate it") from error
    if pipfile and meta.get("hash", {}).get("sha256") != _hash(pipfile):
        logger.warning("%s is older than the Pipfile but takes precedence: run `pipenv lock` to update it", lock_path)
    return _make_recipe(
        lock_path, lock.get("default", {}), meta.get("requires", {}), meta.get("sources", []), complete=True
    )


def _parse_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _make_recipe(
    path: Path, packages: Mapping[str, Any], requires: Mapping[str, Any], sources: Sequence[Mapping[str, Any]], *,
    complete: bool,
) -> Recipe:  # fmt: skip
    """Make the Recipe. `complete`: the packages' dependencies are listed too."""
    digest = Digest()
    hashed: list[str] = []
    unhashed: list[str] = []
    for name, entry in sorted(packages.items()):
        fields = {"version": entry} if isinstance(entry, str) else entry
        try:
            line = _line(name, fields, path.parent)
        except ValueError as error:
            raise ValueError(f"{path}: {name}: {error}") from error
        (hashed if fields.get("hashes") else unhashed).append(line)
        if (local := _local_path(fields, path.parent)) is not None:
            digest.add_path(local)
    pip_options = (*_index_options(path, sources), *(("--no-deps",) if complete else ()))
    # separately: pip requires hashes for all requirements of a run or for none, and those from git or a folder cannot
    # have any
    installs = tuple(
        Install(pip_options, "".join(f"{line}\n" for line in lines)) for lines in (hashed, unhashed) if lines
    )
    python = str(requires.get("python_full_version") or requires.get("python_version") or "").removesuffix(".*")
    digest.add(repr((installs, python)))
    return Recipe(path, str(digest), installs, python="" if python == "*" else python)


def _line(name: str, entry: Mapping[str, Any], folder: Path) -> str:
    """Write one entry as a line of a requirements.txt."""
    if unknown := sorted(entry.keys() - _KNOWN_KEYS):
        raise ValueError(f"no such key {unknown[0]!r}")
    extras = f"[{','.join(entry['extras'])}]" if entry.get("extras") else ""
    markers = [f"({entry['markers']})"] if entry.get("markers") else []
    markers += [f"{key} {entry[key]}" for key in _MARKERS if key in entry]
    marker = f" ; {' and '.join(markers)}" if markers else ""
    if (url := _source_url(entry, folder)) is not None:
        # editable or not, the environment changes when the content there does
        return f"{_named_requirement(name, extras, url, entry, folder)}{marker}"
    version = str(entry.get("version", "*")).strip()
    hashes = "".join(f" --hash={digest}" for digest in entry.get("hashes", ()))
    if version and version != "*" and version[0] not in "=<>!~":
        raise ValueError(f"version {version!r}: expected '*' or a comparison such as '==1.2'")
    return f"{name}{extras}{'' if version == '*' else version}{marker}{hashes}"


def _named_requirement(name: str, extras: str, url: str, entry: Mapping[str, Any], folder: Path) -> str:
    """Write a requirement that comes from a place, with a name where pip requires one.

    pipenv accepts any name for a folder or file, such as `e1839a8`; pip accepts only the project's own, or none.
    """
    if any(system in entry for system in _VCS):
        return f"{name}{extras} @ {url}"
    if not extras:
        return url
    local = _local_path(entry, folder)
    return f"{local}{extras}" if local is not None and "subdirectory" not in entry else f"{name}{extras} @ {url}"


def _source_url(entry: Mapping[str, Any], folder: Path) -> str | None:
    """Return the URL of an entry; None if it comes from an index."""
    fragment = f"#subdirectory={entry['subdirectory']}" if entry.get("subdirectory") else ""
    for system in _VCS:
        if system in entry:
            url = entry[system] if entry[system].startswith(f"{system}+") else f"{system}+{entry[system]}"
            return f"{url}{'@' + entry['ref'] if entry.get('ref') else ''}{fragment}"
    if (local := _local_path(entry, folder)) is not None:
        return local.as_uri() + fragment
    return str(entry["file"]) + fragment if "file" in entry else None


def _local_path(entry: Mapping[str, Any], folder: Path) -> Path | None:
    location = str(entry.get("path") or entry.get("file") or "")
    if not location or "://" in location:
        return None
    path = (folder / location).resolve()
    if not path.exists():
        raise ValueError(f"path {location!r}: no such file or folder in {folder}")
    return path


def _index_options(path: Path, sources: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield pip's options for the sources; none for the public one, for which the machine's own settings apply."""
    option = "--index-url"
    for source in sources:
        if not isinstance(source, dict) or "url" not in source:
            raise ValueError(f"{path}: a source without a url")
        url = os.path.expandvars(source["url"])
        if url.rstrip("/") not in _PUBLIC_INDEXES:
            yield from (option, url)
            if source.get("verify_ssl") is False:
                yield from ("--trusted-host", urlsplit(url).netloc.rpartition("@")[2])
        option = "--extra-index-url"


def _hash(pipfile: Mapping[str, Any]) -> str:
    """Return the Pipfile hash that a Pipfile.lock records. Source: plette's `Pipfile.get_hash`."""
    content = {
        "_meta": {"sources": pipfile.get("source", [_PYPI]), "requires": pipfile.get("requires", {})},
        "default": pipfile.get("packages", {}),
        "develop": pipfile.get("dev-packages", {}),
        **{name: value for name, value in pipfile.items() if name not in _SECTIONS},
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
