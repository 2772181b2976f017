"""Selects the SavedModel of an API among files in a folder, an archive or a store. Called by models.py.

Source of rules and texts: Cortex v0.10, pkg/operator/api/userconfig/apis.go. Of several versions, Cortex intends to use
the highest, but by mistake uses the last by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

GRAPH_FILE = "saved_model.pb"
_INDEX = "variables/variables.index"
_DATA = "variables/variables.data-00000-of-"
_VERSION = re.compile(r"[0-9]{1,19}")

EXPECTED_STRUCTURE = """\
invalid TF export directory.
For TensorFlow models, the path must contain a directory with the following structure:
  1523423423/ (Version prefix, usually a timestamp)
  ├── saved_model.pb
  └── variables/
      ├── variables.index
      ├── variables.data-00000-of-00003
      ├── variables.data-00001-of-00003
      └── variables.data-00002-of-..."""


def choose_folder(names: Iterable[str]) -> str | None:
    """Return the folder, among files by their paths, of the SavedModel to serve; "" for the top folder.

    The top folder takes precedence over those inside it; then the highest version counts, by the folders' names.
    """
    paths = set(names)
    complete = [folder for folder in _folders(paths) if not missing_files(paths, folder)]
    if "" in complete:
        return ""
    return max(complete, key=lambda folder: (version_of(folder), folder), default=None)


def missing_files(names: Iterable[str], folder: str) -> list[str]:
    """Return what a folder with a graph lacks of a SavedModel."""
    paths, prefix = set(names), f"{folder}/" if folder else ""
    missing = [] if prefix + _INDEX in paths else [_INDEX]
    return missing if any(name.startswith(prefix + _DATA) for name in paths) else [*missing, f"{_DATA}..."]


def unusable_message(names: Iterable[str]) -> str:
    """Return why none of the folders is usable."""
    paths = set(names)
    reasons = [
        f"{folder or '.'}/{GRAPH_FILE} exists without {' and '.join(missing_files(paths, folder))}"
        for folder in _folders(paths)
    ]
    return "\n".join([EXPECTED_STRUCTURE, *sorted(reasons)[:5]])


def version_of(folder: str) -> int:
    """Return the version in a folder's name, 0 if there is none."""
    name = folder.rstrip("/").rpartition("/")[2]
    version = int(name) if _VERSION.fullmatch(name) else 0
    return version if version < 2**63 else 0


def _folders(names: Iterable[str]) -> Iterator[str]:
    for name in names:
        folder, _, last = name.rpartition("/")
        if last == GRAPH_FILE:
            yield folder
