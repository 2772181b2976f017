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
    _add(digest, path, path.parent, [])
    return Recipe(path, str(digest), (Install(("-r", str(path))),))


def _add(digest: Digest, path: Path, folder: Path, chain: list[Path]) -> None:
    """Add a file, the files it includes, and the local files and folders it names. `folder` is where pip runs."""
    if path in chain:
        raise ValueError(f"{chain[-1]}: includes itself through {path}")
    content = path.read_bytes()
    digest.add(content)
    for number, line in _lines(content):
        found = _OPTION.match(line)
        name, value = (found["name"], found["value"].strip("\"' ")) if found else ("", line)
        if name in _INCLUDES:
            if "://" in value:
                continue  # pip will download it
            included = path.parent / value
            if not included.is_file():
                raise ValueError(f"{path}, line {number}: {name} {value}: no such file")
            _add(digest, included.resolve(), folder, [*chain, path])
            continue
        # pip resolves a --find-links folder relative to the file that contains it if it exists there, else to the
        # working folder
        roots = (path.parent, folder) if name in _FOLDERS else (folder,)
        if (local := _local(value, roots, must_look_like_one=not name)) is not None:
            digest.add_path(local)


def _lines(content: bytes) -> Iterator[tuple[int, str]]:
    """Yield the non-empty lines with their numbers, without comments and with continuations joined."""
    text = content.decode("utf-8-sig", "replace")
    number = 1
    for whole in _joined(text):
        line = _COMMENT.sub("", _CONTINUED.sub("", whole)).strip()
        if line:
            yield number, _VARIABLE.sub(lambda found: os.environ.get(found[1], found[0]), line)
        number += whole.count("\n") + 1


def _joined(text: str) -> Iterator[str]:
    held = ""
    for line in text.split("\n"):
        held += line
        if line.rstrip("\r").endswith("\\") and not line.lstrip().startswith("#"):
            held += "\n"
        else:
            yield held
            held = ""
    if held:
        yield held


def _local(value: str, roots: tuple[Path, ...], *, must_look_like_one: bool) -> Path | None:
    """Return the file or folder that a requirement names; None if it names none that exists."""
    word = value.partition(" @ ")[2] or value
    word = re.split(r"\s*;|\s+--|#", word, maxsplit=1)[0].strip()
    if word.startswith("file:"):
        word = unquote(word.removeprefix("file:").removeprefix("//"))
    elif "://" in word or (must_look_like_one and not _looks_local(word)):
        return None
    for root in roots:
        for path in (root / word, root / _EXTRAS.sub("", word)):
            if path.exists():
                return path.resolve()
    return None


def _looks_local(word: str) -> bool:
    return word.startswith(".") or "/" in word or word.endswith(_ARCHIVES)
