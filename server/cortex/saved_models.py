"""Finds the SavedModel of an API among files in a folder, an archive or a store, and unpacks archives.

Called by models.py. Source of rules and texts: Cortex v0.10, pkg/operator/api/userconfig/apis.go. Of several versions,
Cortex intends to use the highest, but by mistake uses the last by name.
"""

from __future__ import annotations

import re
import stat
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

GRAPH_FILE = "saved_model.pb"
_INDEX = "variables/variables.index"
_DATA = "variables/variables.data-00000-of-"
MAX_BYTES = 16 << 30
"""The most bytes that one archive may unpack to: a few kilobytes can expand to petabytes."""
MAX_FILES = 100_000
_CHUNK_BYTES = 1 << 20
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


class ModelError(Exception):
    """Why an API's model is not available; a text for whoever deploys it."""


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


def unpack(archive: Path, into: Path, max_bytes: int = MAX_BYTES) -> str:
    """Unpack the SavedModel of an archive into an empty folder.

    Nothing is written outside `into`, and no link is created, whatever the archive contains. Returns: the SavedModel's
    folder in it. Raises: ModelError.
    """
    try:
        with zipfile.ZipFile(archive) as archive_file:
            members = dict(_members(archive_file))
            folder = choose_folder(members)
            if folder is None:
                raise ModelError(unusable_message(members))
            needed = [name for name in members if not folder or name.startswith(f"{folder}/")]
            remaining_bytes = max_bytes
            for name in needed:
                remaining_bytes -= _write(archive_file, members[name], into / name, remaining_bytes)
    except ModelError:
        raise
    except Exception as error:  # zipfile raises its decoders' exceptions
        raise ModelError(f"{archive.name}: cannot be unpacked: {error}") from error
    return folder


def _members(archive_file: zipfile.ZipFile) -> Iterator[tuple[str, zipfile.ZipInfo]]:
    """Yield the files of an archive by path. Raises: ModelError."""
    entries = archive_file.infolist()
    if len(entries) > MAX_FILES:
        raise ModelError(f"has more than {MAX_FILES} files")
    for entry in entries:
        path = PurePosixPath(entry.filename)
        if entry.filename.endswith("/"):  # before Python 3.12, `is_dir` fails for an entry without a name
            continue
        if path.is_absolute() or ".." in path.parts or "\\" in entry.filename or not path.parts:
            raise ModelError(f"holds {entry.filename!a}, which is not a path inside it")
        if stat.S_ISLNK(entry.external_attr >> 16):
            raise ModelError(f"holds {entry.filename!a}, which is a link")
        yield str(path), entry


def _write(archive_file: zipfile.ZipFile, entry: zipfile.ZipInfo, target: Path, max_bytes: int) -> int:
    """Write one file. Returns: its bytes. Raises: ModelError if there are more than `max_bytes`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    written = 0
    with archive_file.open(entry) as source, target.open("wb") as output:
        while chunk := source.read(_CHUNK_BYTES):
            written += len(chunk)
            if written > max_bytes:
                raise ModelError("is too large: more bytes than a model may have")
            output.write(chunk)
    return written
