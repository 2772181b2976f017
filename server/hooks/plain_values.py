"""Plain values: numbers, texts, arrays and containers of them, and how large they are. Used by `nonblocking.py`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

MAX_SMALL_BYTES = 4096
"""The size of a sample as sent, or of a hook's arrays, up to which processing all of it takes microseconds."""
MAX_MEMBERS = 2048
"""The most members of a global that a comprehension may traverse repeatedly: as many as a sample may have."""
_MAX_LOOKUP_MEMBERS = 1 << 18
"""The most members of a container used only for lookups, such as a vocabulary."""
_MAX_DEPTH = 8
PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None))
_SCALARS = frozenset(np.sctypeDict.values())


def is_small(settings: Any) -> bool:
    """Return whether the configuration passed to hooks is plain and small."""
    return count_members(settings) <= MAX_MEMBERS


def are_small_tensors(values: Any) -> bool:
    """Return whether tensors, in a list or by name, are few bytes or few texts. False for anything else."""
    if type(values) not in {list, dict}:
        return False
    remaining_bytes = MAX_SMALL_BYTES
    for value in values.values() if type(values) is dict else values:
        if type(value) is not np.ndarray:
            return False
        remaining_bytes -= value.nbytes * (8 if value.dtype.hasobject else 1)
    return remaining_bytes >= 0


def has_small_members(value: Any) -> bool:
    """Return whether every member of a large container is plain and small."""
    remaining: float = _MAX_LOOKUP_MEMBERS
    for each in (*value, *value.values()) if type(value) is dict else value:
        count = count_members(each)
        remaining -= count
        if count > MAX_MEMBERS or remaining < 0:
            return False
    return True


def count_members(value: Any, depth: int = 0) -> float:
    """Count the members of a value; infinite if it is not made of numbers, texts and containers, or is too large."""
    if type(value) is np.ndarray:
        return math.inf if value.dtype.hasobject else 1 + value.nbytes // 8
    if type(value) in PLAIN_TYPES or (type(value) in _SCALARS and not value.dtype.hasobject):
        return 1 + (len(value) // 64 if isinstance(value, str | bytes) else 0)
    if depth >= _MAX_DEPTH or type(value) not in {list, tuple, dict, set, frozenset} or len(value) > MAX_MEMBERS:
        return math.inf
    count = 1.0
    for each in (*value, *value.values()) if type(value) is dict else value:
        count += count_members(each, depth + 1)
        if count > MAX_MEMBERS:
            return math.inf
    return count
