"""Which SavedModel of many files an API is served from: in a folder, an archive or a store. Called by models.py.

Source of rules and texts: Cortex v0.10, pkg/operator/api/userconfig/apis.go. Its own choice among several versions is
meant to be the highest and is, by a slip, the last by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

GRAPH = "saved_model.pb"
_INDEX = "variables/variables.index"
_VALUES = "variables/variables.data-00000-of-"
_VERSION = re.compile(r"[0-9]{1,19}")

WANTED = """\
invalid TF export directory.
For TensorFlow models, the path must contain a directory with the following structure:
  1523423423/ (Version prefix, usually a timestamp)
  ├── saved_model.pb
  └── variables/
      ├── variables.index
      ├── variables.data-00000-of-00003
      ├── variables.data-00001-of-00003
      └── variables.data-00002-of-..."""


def choose(names: Iterable[str]) -> str | None:
    """Give the folder, among files by their paths, that is the SavedModel to serve; "" for that which holds them all.

    The one that holds them all goes before what is inside; then the highest version, by the names of the folders.
    """
    known = set(names)
    whole = [folder for folder in _folders(known) if not lacking(known, folder)]
    if "" in whole:
        return ""
    return max(whole, key=lambda folder: (version_of(folder), folder), default=None)


def lacking(names: Iterable[str], folder: str) -> list[str]:
    """Say what a folder with a graph lacks of a SavedModel."""
    known, above = set(names), f"{folder}/" if folder else ""
    lacks = [] if above + _INDEX in known else [_INDEX]
    return lacks if any(name.startswith(above + _VALUES) for name in known) else [*lacks, f"{_VALUES}..."]


def refusal(names: Iterable[str]) -> str:
    """Say why none of the folders will do."""
    known = set(names)
    why = [
        f"{folder or '.'}/{GRAPH} is there without {' and '.join(lacking(known, folder))}" for folder in _folders(known)
    ]
    return "\n".join([WANTED, *sorted(why)[:5]])


def version_of(folder: str) -> int:
    """Give the version that a folder's name says, 0 for none."""
    name = folder.rstrip("/").rpartition("/")[2]
    found = int(name) if _VERSION.fullmatch(name) else 0
    return found if found < 2**63 else 0


def _folders(names: Iterable[str]) -> Iterator[str]:
    for name in names:
        folder, _, last = name.rpartition("/")
        if last == GRAPH:
            yield folder
