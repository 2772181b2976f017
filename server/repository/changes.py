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
from .scan import CONFIG_FILE, ModelEntry

_MAX_DEPTH = 6
"""Maximum depth to which a model's folder is walked. A link to a parent folder would otherwise never end."""


def content_fingerprint(entry: ModelEntry) -> bytes:
    """Return a fingerprint of everything in a model's folder except its ModelConfig. Blocks.

    Empty for a model that is not a folder of a repository.
    """
    if is_single(entry.path) or not entry.path.is_dir():
        return b""
    excluded = {CONFIG_FILE, "configs", "__pycache__"}
    paths = [path for path in entry.path.iterdir() if path.name not in excluded and path.name[0] != "."]
    return fingerprint_files(paths)


def only_instances_differ(old: ModelEntry, new: ModelEntry) -> bool:
    """Return whether two readings of a model with the same contents differ only in `instance_group`.

    The number of Instances must be configured: where it is measured, so are the threads that go with it.
    """
    all_counted = all(group.count for entry in (old, new) for spec in entry.specs for group in spec.instances)
    specs = [[replace(spec, instances=(), declared_config="") for spec in entry.specs] for entry in (old, new)]
    both_configured = old.config is not None and new.config is not None
    return (
        all_counted
        and both_configured
        and with_instance_groups(old.config, ()) == with_instance_groups(new.config, ())
        and specs[0] == specs[1]
    )


def with_instance_groups(config: Any, groups: Iterable[Any]) -> Any:
    """Return a copy of a ModelConfig with other instance groups."""
    copy = type(config).FromString(config.SerializeToString())
    copy.ClearField("instance_group")
    copy.instance_group.extend(groups)
    return copy


def fingerprint_files(paths: Iterable[Path]) -> bytes:
    """Return a hash that changes when a file is written, replaced, added or removed: by name, size, time and inode.

    Hidden files and __pycache__ are ignored. Empty if there are no files.
    """
    lines = sorted(line for path in paths for line in _describe_files(path, str(path), _MAX_DEPTH))
    return (
        hashlib.blake2b("\0".join(lines).encode("utf-8", "surrogateescape"), digest_size=16).digest() if lines else b""
    )


def _describe_files(path: Path, name: str, depth: int) -> Iterator[str]:
    try:
        if not path.is_dir():
            stat = path.stat()
            yield f"{name}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ino}"
            return
        yield f"{name}/"
        if depth:
            with os.scandir(path) as entries:
                names = [entry.name for entry in entries]
            for child in names:
                if not child.startswith(".") and child != "__pycache__":
                    yield from _describe_files(path / child, f"{name}/{child}", depth - 1)
    except OSError:
        # deleted during the walk, or not readable: this may change too
        yield f"{name}?"
