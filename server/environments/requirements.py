"""Finds what determines a requirements.txt besides its own text: the files and folders that pip will read.

Source: pip's "Requirements File Format".
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

from .recipe import Digest, Install, Recipe

_COMMENT = re.compile(r"(^|\s)#.*$")
_CONTINUED = re.compile(r"\\\r?\n")
_VARIABLE = re.compile(r"\$\{([A-Z0-9_]+)\}")
_OPTION = re.compile(
    r"(?P<name>-r|-c|-f|-e|--requirement|--constraint|--find-links|--editable)(?:\s*=\s*|\s+|(?<=^-[rcfe]))(?P<value>.+)"
)
_EXTRAS = re.compile(r"\[[^\]]*\]$")
_ARCHIVES = (".whl", ".tar.gz", ".zip", ".tar.bz2")
_INCLUDES = frozenset(("-r", "--requirement", "-c", "--constraint"))
_FOLDERS = frozenset(("-f", "--find-links"))


def read_requirements(path: Path) -> Recipe:
    """Read a requirements.txt. Raises: OSError, ValueError."""
    digest = Digest()
    _add_file(digest, path, path.parent, [])
    return Recipe(path, str(digest), (Install(("-r", str(path))),))


def _add_file(digest: Digest, path: Path, folder: Path, chain: list[Path]) -> None:
    """Add a file, the files it includes, and the local files and folders it names. `folder` is where pip runs."""
    if path in chain:
        raise ValueError(f"{chain[-1]}: includes itself through {path}")
    content = path.read_bytes()
    digest.add(content)
    for number, line in _lines(content):
        match = _OPTION.match(line)
        name, value = (match["name"], match["value"].strip("\"' ")) if match else ("", line)
        if name in _INCLUDES:
            if "://" in value:
                continue  # pip will download it
            included = path.parent / value
            if not included.is_file():
                raise ValueError(f"{path}, line {number}: {name} {value}: no such file")
            _add_file(digest, included.resolve(), folder, [*chain, path])
            continue
        # pip resolves a --find-links folder relative to the file that contains it if it exists there, else to the
        # working folder
        roots = (path.parent, folder) if name in _FOLDERS else (folder,)
        if (local := _local_path(value, roots, require_path_syntax=not name)) is not None:
            digest.add_path(local)


def _lines(content: bytes) -> Iterator[tuple[int, str]]:
    """Yield the non-empty lines with their numbers, without comments and with continuations joined."""
    text = content.decode("utf-8-sig", "replace")
    number = 1
    for raw_line in _joined(text):
        line = _COMMENT.sub("", _CONTINUED.sub("", raw_line)).strip()
        if line:
            yield number, _VARIABLE.sub(lambda found: os.environ.get(found[1], found[0]), line)
        number += raw_line.count("\n") + 1


def _joined(text: str) -> Iterator[str]:
    pending = ""
    for line in text.split("\n"):
        pending += line
        if line.rstrip("\r").endswith("\\") and not line.lstrip().startswith("#"):
            pending += "\n"
        else:
            yield pending
            pending = ""
    if pending:
        yield pending


def _local_path(value: str, roots: tuple[Path, ...], *, require_path_syntax: bool) -> Path | None:
    """Return the file or folder that a requirement names; None if it names none that exists."""
    location = value.partition(" @ ")[2] or value
    location = re.split(r"\s*;|\s+--|#", location, maxsplit=1)[0].strip()
    if location.startswith("file:"):
        location = unquote(location.removeprefix("file:").removeprefix("//"))
    elif "://" in location or (require_path_syntax and not _looks_local(location)):
        return None
    for root in roots:
        for path in (root / location, root / _EXTRAS.sub("", location)):
            if path.exists():
                return path.resolve()
    return None


def _looks_local(location: str) -> bool:
    return location.startswith(".") or "/" in location or location.endswith(_ARCHIVES)
