"""Changes: detects that the files of a model have changed, and what differs.

Used by Repository and Transitions. Functions that touch the disk run on a thread.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from .names import is_single
from .scan import CONFIG_FILE, Entry

_DEPTH = 6
"""Maximum depth to which a model's folder is walked. A link to a parent folder would otherwise never end."""


def contents(entry: Entry) -> bytes:
    """Return a fingerprint of everything in a model's folder except its ModelConfig. Blocks.

    Empty for a model that is not a folder of a repository.
    """
    if is_single(entry.path) or not entry.path.is_dir():
        return b""
    left_out = {CONFIG_FILE, "configs", "__pycache__"}
    places = [place for place in entry.path.iterdir() if place.name not in left_out and place.name[0] != "."]
    return fingerprint(places)


def only_instances(old: Entry, new: Entry) -> bool:
    """Return whether two readings of a model with the same contents differ only in `instance_group`.

    The number of Instances must be configured: where it is measured, so are the threads that go with it.
    """
    counted = all(group.count for each in (old, new) for spec in each.specs for group in spec.instances)
    specs = [[replace(spec, instances=(), declared_config="") for spec in each.specs] for each in (old, new)]
    said = old.config is not None and new.config is not None
    return counted and said and with_groups(old.config, ()) == with_groups(new.config, ()) and specs[0] == specs[1]


def with_groups(config: Any, groups: Iterable[Any]) -> Any:
    """Return a copy of a ModelConfig with other instance groups."""
    copied = type(config).FromString(config.SerializeToString())
    copied.ClearField("instance_group")
    copied.instance_group.extend(groups)
    return copied


def fingerprint(places: Iterable[Path]) -> bytes:
    """Return a hash that changes when a file is written, replaced, added or removed: by name, size, time and inode.

    Hidden files and __pycache__ are ignored. Empty if there are no files.
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
        # deleted during the walk, or not readable: this may change too
        yield f"{name}?"
