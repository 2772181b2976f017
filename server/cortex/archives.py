"""Archives: models in .zip files, of which only the needed files are unpacked. Called by models.py."""

from __future__ import annotations

import stat
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from .saved_models import choose_folder, unusable_message

MAX_BYTES = 16 << 30
"""The most bytes that one archive may unpack to: a few kilobytes can expand to petabytes."""
MAX_FILES = 100_000
_CHUNK_BYTES = 1 << 20


class ArchiveError(Exception):
    """Why an archive cannot be used."""


def unpack(archive: Path, into: Path, max_bytes: int = MAX_BYTES) -> str:
    """Unpack the SavedModel of an archive into an empty folder.

    Nothing is written outside `into`, and no link is created, whatever the archive contains. Returns: the SavedModel's
    folder in it. Raises: ArchiveError.
    """
    try:
        with zipfile.ZipFile(archive) as archive_file:
            members = dict(_members(archive_file))
            folder = choose_folder(members)
            if folder is None:
                raise ArchiveError(unusable_message(members))
            needed = [name for name in members if not folder or name.startswith(f"{folder}/")]
            remaining_bytes = max_bytes
            for name in needed:
                remaining_bytes -= _write(archive_file, members[name], into / name, remaining_bytes)
    except ArchiveError:
        raise
    except Exception as error:  # zipfile raises its decoders' exceptions, and IndexError for an entry without a name
        raise ArchiveError(f"{archive.name}: cannot be unpacked: {error}") from error
    return folder


def _members(archive_file: zipfile.ZipFile) -> Iterator[tuple[str, zipfile.ZipInfo]]:
    """Yield the files of an archive by path. Raises: ArchiveError."""
    entries = archive_file.infolist()
    if len(entries) > MAX_FILES:
        raise ArchiveError(f"has more than {MAX_FILES} files")
    for entry in entries:
        path = PurePosixPath(entry.filename)
        if entry.is_dir():
            continue
        if path.is_absolute() or ".." in path.parts or "\\" in entry.filename or not path.parts:
            raise ArchiveError(f"holds {entry.filename!a}, which is not a path inside it")
        if stat.S_ISLNK(entry.external_attr >> 16):
            raise ArchiveError(f"holds {entry.filename!a}, which is a link")
        yield str(path), entry


def _write(archive_file: zipfile.ZipFile, entry: zipfile.ZipInfo, target: Path, max_bytes: int) -> int:
    """Write one file. Returns: its bytes. Raises: ArchiveError if there are more than `max_bytes`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    written = 0
    with archive_file.open(entry) as source, target.open("wb") as output:
        while chunk := source.read(_CHUNK_BYTES):
            written += len(chunk)
            if written > max_bytes:
                raise ArchiveError("is too large: more bytes than a model may have")
            output.write(chunk)
    return written
