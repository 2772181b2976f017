"""Changes: what tells that the files of a model are not what they were. Called by Repository, on a thread."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

_DEPTH = 6
"""How deep a model's folder is walked. A link to a folder further up would have no end."""


def fingerprint(places: Iterable[Path]) -> bytes:
    """Give what changes when a file is written, replaced, added or removed: by name, size, time and inode.

    Hidden files and __pycache__ do not count. Empty when nothing is there.
    """
    lines = sorted(line for place in places for line in _lines(place, str(place), _DEPTH))
    return (
        hashlib.blake2b("\0".join(lines).encode("utf-8", "surrogateescape"), digest_size=16).digest() if lines else b""
    )


def _lines(place: Path, name: str, depth: int) -> Iterator[str]:
    try:
        if not place.is_dir():
            said = place.stat()
            yield f"{name}:{said.st_size}:{said.st_mtime_ns}:{said.st_ino}"
            return
        yield f"{name}/"
        if depth:
            with os.scandir(place) as entries:
                inner = [entry.name for entry in entries]
            for each in inner:
                if not each.startswith(".") and each != "__pycache__":
                    yield from _lines(place / each, f"{name}/{each}", depth - 1)
    except OSError:
        # gone while it was looked at, or not to be read: that it is so may change too
        yield f"{name}?"
