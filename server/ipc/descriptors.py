"""Duplicates and closes descriptors that are sent with messages. Used by `wire.py`."""

from __future__ import annotations

import os
from collections.abc import Sequence


def duplicate_descriptors(descriptors: Sequence[int]) -> list[int]:
    """Duplicate descriptors, all or none. Raises: OSError."""
    duplicates: list[int] = []
    try:
        for descriptor in descriptors:
            duplicates.append(os.dup(descriptor))  # noqa: PERF401 - what was made is closed if one fails
    except OSError:
        close_descriptors(duplicates)
        raise
    return duplicates


def close_descriptors(descriptors: Sequence[int]) -> None:
    """Close descriptors."""
    for descriptor in descriptors:
        os.close(descriptor)
