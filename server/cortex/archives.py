"""Archives: models in .zip files, of which only the needed files are unpacked. Called by models.py."""

from __future__ import annotations

import stat
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from .saved_models import choose, refusal

MAX_BYTES = 16 << 30
"""The most bytes that one archive may unpack to: a few kilobytes can expand to petabytes."""
MAX_FILES = 100_000
_PIECE = 1 << 20


class ArchiveError(Exception):
    """Why an archive cannot be used."""


def unpack(archive: Path, into: Path, max_bytes: int = MAX_BYTES) -> str:
    """Unpack the SavedModel of an archive into an empty folder.

    Nothing is written outside `into`, and no link is created, whatever the archive contains. Returns: the SavedModel's
    folder in it. Raises: ArchiveError.
    """
    try:
        with zipfile.ZipFile(archive) as opened:
            members = dict(_members(opened))
            folder = choose(members)
            if folder is None:
                raise ArchiveError(refusal(members))
            inside = [name for name in members if not folder or name.startswith(f"{folder}/")]
            left = max_bytes
            for name in inside:
                left -= _write(opened, members[name], into / name, left)
    except ArchiveError:
        raise
    except Exception as error:  # zipfile raises its decoders' exceptions, and IndexError for an entry without a name
        raise ArchiveError(f"{archive.name}: cannot be unpacked: {error}") from error
    return folder


def _members(opened: zipfile.ZipFile) -> Iterator[tuple[str, zipfile.ZipInfo]]:
    """Yield the files of an archive by path. Raises: ArchiveError."""
    entries = opened.infolist()
    if len(entries) > MAX_FILES:
        raise ArchiveError(f"has more than {MAX_FILES} files")
    for entry in entries:
        path = PurePosixPath(entry.filename)
        if entry.is_dir():
            continue
        if path.is_absolute() or ".." in path.parts or "\\" in entry.filename or not path.parts:
            raise ArchiveError(f"holds {entry.filename!a}, which is no path inside it")
        if stat.S_ISLNK(entry.external_attr >> 16):
            raise ArchiveError(f"holds {entry.filename!a}, which is a link")
        yield str(path), entry


def _write(opened: zipfile.ZipFile, entry: zipfile.ZipInfo, to: Path, most: int) -> int:
    """Write one file. Returns: its bytes. Raises: ArchiveError if there are more than `most`."""
    to.parent.mkdir(parents=True, exist_ok=True)
    written = 0
    with opened.open(entry) as source, to.open("wb") as target:
        while piece := source.read(_PIECE):
            written += len(piece)
            if written > most:
                raise ArchiveError("becomes too large: more bytes than a model may have")
            target.write(piece)
    return written
