"""Selects the SavedModel of an API among files in a folder, an archive or a store. Called by models.py.

Source of rules and texts: Cortex v0.10, pkg/operator/api/userconfig/apis.go. Of several versions, Cortex intends to use
the highest, but by mistake uses the last by name.
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
    """Return the folder, among files by their paths, of the SavedModel to serve; "" for the top folder.

    The top folder takes precedence over those inside it; then the highest version counts, by the folders' names.
    """
    known = set(names)
    whole = [folder for folder in _folders(known) if not lacking(known, folder)]
    if "" in whole:
        return ""
    return max(whole, key=lambda folder: (version_of(folder), folder), default=None)


def lacking(names: Iterable[str], folder: str) -> list[str]:
    """Return what a folder with a graph lacks of a SavedModel."""
    known, above = set(names), f"{folder}/" if folder else ""
    lacks = [] if above + _INDEX in known else [_INDEX]
    return lacks if any(name.startswith(above + _VALUES) for name in known) else [*lacks, f"{_VALUES}..."]


def refusal(names: Iterable[str]) -> str:
    """Return why none of the folders is usable."""
    known = set(names)
    why = [
        f"{folder or '.'}/{GRAPH} is there without {' and '.join(lacking(known, folder))}" for folder in _folders(known)
    ]
    return "\n".join([WANTED, *sorted(why)[:5]])


def version_of(folder: str) -> int:
    """Return the version in a folder's name, 0 if there is none."""
    name = folder.rstrip("/").rpartition("/")[2]
    found = int(name) if _VERSION.fullmatch(name) else 0
    return found if found < 2**63 else 0


def _folders(names: Iterable[str]) -> Iterator[str]:
    for name in names:
        folder, _, last = name.rpartition("/")
        if last == GRAPH:
            yield folder
